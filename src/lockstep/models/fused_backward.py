"""A decoder layer's gradient on a backend that fuses, written out: the plain modules' mathematics in fewer passes.

    d(delta)              -> down:     dw, dy        -> SwiGLU: d(gate, up)  -> gate_up: dw, dx2
    norm2(h2): dh += dx2'    (h2 = h + o W: dh is the gradient of both)
    dh                    -> o:        dw, d(out)    -> attention: dq, dk, dv -> rope, q/k norm: dqkv -> qkv: dw, dx
    norm1(h):  dh += dx'

A gradient that reaches a linear layer is quantized once, in both of the forms that its two products take (`kernels/fused.py`);
the layer's input is regrouped along tokens from the values of the forward's codes. Where a kernel writes a gradient it
writes these forms at once. Linears that share an input get their gradient side by side, in groups of 128 along the whole row.

A saved tensor is dropped as soon as it was read: at that point the next ones are about to be made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.kernels.fused import FusedKernels, Rows
from lockstep.models.fused import fused_kernels, gated, normed, operand, weight_of
from lockstep.nn.linear import Projection
from lockstep.nn.mlp import MLP
from lockstep.nn.norm import RMSNorm
from lockstep.numerics.quantize import Quantized

if TYPE_CHECKING:
    from lockstep.models.fused_layer import Step


@dataclass
class Saved:
    """What a layer's backward pass reads; see `fused_layer.py` for the sizes. y: None where it is made again, in BF16."""

    h_TK: Tensor
    inverse_T: Tensor | None
    qkv_TN: Tensor | None
    out_THD: Tensor | None
    lse_TH: Tensor | None
    h2_TK: Tensor
    inverse2_T: Tensor | None
    gate_up: Rows | None
    y: Quantized | None


@dataclass(frozen=True)
class Totals:
    """What gradients are added to, FP32. parts: by the id of the parameter. stacks: by the ids of a projection's weights, one
    tensor whose rows are theirs."""

    parts: dict[int, Tensor]
    stacks: dict[tuple[int, ...], Tensor]

    def add(self, grads: Mapping[int, Tensor]) -> None:
        """Adds gradients to the totals of the same parameters."""
        if grads:
            torch._foreach_add_([self.parts[key] for key in grads], list(grads.values()))

    def stack(self, projection: Projection, wanted: set[int]) -> Tensor | None:
        """Of all weights of a projection, if all are wanted."""
        key = weights_key(projection)
        return self.stacks.get(key) if wanted.issuperset(key) else None


def weights_key(projection: Projection) -> tuple[int, ...]:
    """Ids of a projection's weights."""
    return tuple(id(linear.weight) for linear in projection.linears)


@dataclass
class Grads:
    """The parameter gradients of a layer so far, FP32, by the id of the parameter; only `wanted` ones are computed. totals: see
    `layer_backward`."""

    kernels: FusedKernels
    wanted: set[int]
    found: dict[int, Tensor]
    totals: Totals | None = None

    def want_weights(self, projection: Projection) -> bool:
        """Whether some weight of this projection has a gradient."""
        return any(id(linear.weight) in self.wanted for linear in projection.linears)

    def quantize(self, projection: Projection, grad_TN: Tensor) -> tuple[Rows, Rows]:
        """(what DGrad takes, what WGrad takes) of the gradient of a projection's output."""
        first = projection.linears[0]
        rows8 = first.fp8 and first.flow.dgrad.lhs.is_fp8
        columns8 = first.fp8 and first.flow.wgrad.is_fp8 and self.want_weights(projection)
        if not rows8 and not columns8:
            return grad_TN, grad_TN
        wanted = first.flow.dgrad.lhs if rows8 else first.flow.wgrad.lhs
        rows, columns = self.kernels.quantize_both(grad_TN, wanted, rows=rows8, columns=columns8)
        return (grad_TN if rows is None else rows), (grad_TN if columns is None else columns)

    def biases(self, projection: Projection, grad_TN: Tensor) -> None:
        """Sums over tokens."""
        if any(linear.bias is not None and id(linear.bias) in self.wanted for linear in projection.linears):
            parts = grad_TN.sum(0, dtype=torch.float32).split(projection.sizes)
            for linear, part in zip(projection.linears, parts, strict=True):
                if linear.bias is not None:
                    self.found[id(linear.bias)] = part

    def weights(self, projection: Projection, columns: Rows, x: Rows) -> None:
        """grad^T x; `columns` from `quantize`, x as the forward's product took it."""
        if not self.want_weights(projection):
            return
        if isinstance(columns, Quantized):
            assert isinstance(x, Quantized)
            x = self.kernels.regroup(x, projection.linears[0].flow.wgrad.rhs)
        elif isinstance(x, Quantized):
            x = x.dequantize()
        self._product(projection, columns, x)

    def plain_weights(self, projection: Projection, columns: Rows, x_TK: Tensor) -> None:
        """grad^T x of an input that the forward's product quantized itself."""
        rows = operand(projection)
        if not self.want_weights(projection):
            return
        if isinstance(columns, Quantized) and rows is not None:
            wanted = projection.linears[0].flow.wgrad.rhs
            self._product(projection, columns, self.kernels.columns_of(x_TK, rows, wanted))
        else:
            self.weights(
                projection, columns, x_TK if rows is None else self.kernels.quantize_rows(x_TK, rows)
            )

    def normed_weights(
        self, projection: Projection, columns: Rows, norm: RMSNorm, h_TK: Tensor, inverse_T: Tensor | None
    ) -> None:
        """grad^T x of h's norm, which is made again. inverse_T: what the forward multiplied rows by."""
        rows = operand(projection)
        if not self.want_weights(projection):
            return
        if isinstance(columns, Quantized) and rows is not None and inverse_T is not None:
            wanted, weight_K = projection.linears[0].flow.wgrad.rhs, norm.working.plain
            x = self.kernels.columns_of(h_TK, rows, wanted, inverse_T=inverse_T, weight_K=weight_K)
            self._product(projection, columns, x)
        else:
            self.weights(projection, columns, normed(norm, h_TK, None, rows)[1])

    def _product(self, projection: Projection, columns: Rows, x: Rows) -> None:
        """grad^T x of two columns, or of two plain matrices, to where it belongs."""
        total = None if self.totals is None else self.totals.stack(projection, self.wanted)
        if total is not None and isinstance(columns, Quantized):
            self.kernels.add_wgrad(total, columns, x)
            return
        dw = self.kernels.linear_wgrad(columns, x)
        parts = dw.split(projection.sizes) if len(projection.sizes) > 1 else (dw,)
        kinds = zip(projection.linears, parts, strict=True)
        found = {id(linear.weight): part for linear, part in kinds if id(linear.weight) in self.wanted}
        if self.totals is None:
            self.found.update(found)
        else:
            self.totals.add(found)

    def norm(self, norm: RMSNorm, grad_TK: Tensor, h_TK: Tensor, dh_TK: Tensor) -> Tensor:
        """dh plus the gradient of the norm's input."""
        assert norm.working.plain is not None
        total, dw = self.kernels.norm_grad(grad_TK, h_TK, norm.working.plain, norm.eps, dh_TK)
        self.keep(norm, dw)
        return total

    def keep(self, norm: RMSNorm | None, dw: Tensor | None) -> None:
        """A norm's weight gradient, where it is wanted."""
        if norm is not None and dw is not None and id(norm.weight) in self.wanted:
            self.found[id(norm.weight)] = dw


def layer_backward(
    step: Step,
    saved: Saved,
    dh_TK: Tensor,
    ddelta_TK: Tensor,
    wanted: set[int],
    totals: Totals | None = None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """(gradient of h and of delta alike, FP32 gradients of the `wanted` parameters by id). Empties `saved`.

    totals: what weights' gradients are added to, in FP8 by the product itself, else as soon as they are there; then only those
    of biases and norms are returned.
    """
    grads = Grads(fused_kernels(step.layer.self_attn.o_proj.kernels), wanted, {}, totals)
    dh_TK = _mlp(step, saved, dh_TK.contiguous(), ddelta_TK.contiguous(), grads)
    dh_TK = _attention(step, saved, dh_TK, grads)
    return dh_TK, grads.found


def _mlp(step: Step, saved: Saved, dh_TK: Tensor, ddelta_TK: Tensor, grads: Grads) -> Tensor:
    """Gradient of the residual stream before the MLP."""
    layer, kernels, mlp = step.layer, grads.kernels, step.layer.mlp
    assert isinstance(mlp, MLP) and saved.gate_up is not None
    down, gate_up = mlp.down_proj.alone, mlp.gate_up
    rows, columns = grads.quantize(down, ddelta_TK)
    if grads.want_weights(down):
        grads.weights(down, columns, saved.y if saved.y is not None else _gated(mlp, saved.gate_up))
    saved.y = None
    dy_TN = kernels.linear_dgrad(rows, weight_of(down))
    rows, columns = _swiglu(gate_up, dy_TN, saved.gate_up, grads)
    saved.gate_up = None
    del dy_TN, ddelta_TK
    grads.normed_weights(gate_up, columns, layer.post_attention_layernorm, saved.h2_TK, saved.inverse2_T)
    dx_TK = kernels.linear_dgrad(rows, weight_of(gate_up))
    return grads.norm(layer.post_attention_layernorm, dx_TK, saved.h2_TK, dh_TK)


def _gated(mlp: MLP, gate_up: Rows) -> Rows:
    assert isinstance(gate_up, Tensor), "gate and up are kept in FP8 beside the codes of y only"
    return gated(mlp, gate_up)


def _swiglu(gate_up: Projection, dy_TN: Tensor, saved: Rows, grads: Grads) -> tuple[Rows, Rows]:
    """Gradient of gate and up as the two products take it; codes in one pass where both want them."""
    first = gate_up.linears[0]
    both = first.fp8 and first.flow.dgrad.lhs.is_fp8 and first.flow.wgrad.is_fp8
    if not both:
        found = grads.kernels.swiglu_grad(dy_TN, saved, None)
        assert isinstance(found, Tensor)
        return grads.quantize(gate_up, found)
    codes = grads.kernels.swiglu_grad(dy_TN, saved, first.flow.dgrad.lhs)
    assert not isinstance(codes, Tensor)
    return codes


def _attention(step: Step, saved: Saved, dh_TK: Tensor, grads: Grads) -> Tensor:
    """Gradient of the layer's input."""
    layer, kernels, attention = step.layer, grads.kernels, step.layer.self_attn
    out_THD, lse_TH, qkv_TN = saved.out_THD, saved.lse_TH, saved.qkv_TN
    assert out_THD is not None and lse_TH is not None and qkv_TN is not None
    o, qkv = attention.o_proj.alone, attention.qkv
    rows, columns = grads.quantize(o, dh_TK)
    grads.biases(o, dh_TK)
    grads.plain_weights(o, columns, out_THD.flatten(1))
    dout_THD = kernels.linear_dgrad(rows, weight_of(o)).view(out_THD.shape)
    saved.out_THD = saved.lse_TH = saved.qkv_TN = None
    dqkv_TN, dq_weight, dk_weight = step.context.gradient(
        step.number, dout_THD, qkv_TN, out_THD, lse_TH, attention, deterministic=step.deterministic
    )
    grads.keep(attention.q_norm, dq_weight)
    grads.keep(attention.k_norm, dk_weight)
    del out_THD, lse_TH, qkv_TN, dout_THD
    rows, columns = grads.quantize(qkv, dqkv_TN)
    grads.biases(qkv, dqkv_TN)
    grads.normed_weights(qkv, columns, layer.input_layernorm, saved.h_TK, saved.inverse_T)
    dx_TK = kernels.linear_dgrad(rows, weight_of(qkv))
    return grads.norm(layer.input_layernorm, dx_TK, saved.h_TK, dh_TK)
