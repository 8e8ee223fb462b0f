"""The honest BF16 trainer: what FP8 has to be faster than.

    h, x = h + delta, norm(h);   qkv = x W;   q, k = rope(norm(q, k));   delta = attention(q, k, v) W
    h, x = h + delta, norm(h);   y = swiglu(x W);   delta = y W

All products are cuBLAS BF16, q, k, v in one and gate and up in one. Around them stand fused kernels (`baseline_ops.py`), in the
backward pass too, which is written by hand: one autograd function a layer, as on the FP8 side, so neither side pays more for
autograd than the other. Nothing is computed twice: what the backward pass reads is kept, norm outputs and rotated heads
included. `lean` keeps less, as the FP8 side does: norm and SwiGLU outputs are made again. Masters, gradients and optimizer are
the FP8 side's own, weight gradients are FP32; embedding, head and loss are the decoder's, the same code on both sides.

It multiplies with cuBLAS, whose bits depend on the batch: a log-probability of this trainer is not its engine's, so it needs the
pass that recomputes old log-probabilities.

Legend: T rows, K hidden, N outputs. Next: `training.py`, which times it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.bench.baseline_ops import Operations, Packing
from lockstep.errors import ConfigError
from lockstep.models.decoder import Decoder, DecoderLayer
from lockstep.models.spec import ModelSpec
from lockstep.nn.linear import Projection
from lockstep.nn.mlp import MLP
from lockstep.nn.rows import take_rows
from lockstep.trainer.microbatch import MicroBatch

Copies = list[tuple[Tensor, Tensor]]
"""Working copies, each with the master that it follows."""


class Baseline:
    """Trains the masters of a decoder that has a BF16 flow; reads and refreshes that decoder's working copies in place."""

    def __init__(self, decoder: Decoder, operations: Operations, *, lean: bool = False) -> None:
        if decoder.flow.is_fp8:
            raise ConfigError("the BF16 baseline needs a decoder with a BF16 flow", where="bench")
        self.decoder, self.operations, self.lean = decoder, operations, lean
        layers = [layer for layer in decoder.model.layers if isinstance(layer, DecoderLayer)]
        self.layers = [BaselineLayer(layer, operations, lean=lean) for layer in layers]
        self.copies: Copies = [pair for layer in self.layers for pair in layer.copies]
        for module in {decoder.model.norm, decoder.model.embed_tokens, decoder.head}:
            self.copies.append((_plain(module), module.weight.detach()))

    def refresh(self) -> None:
        """BF16 working copies from the masters."""
        torch._foreach_copy_([copy for copy, _ in self.copies], [master for _, master in self.copies])

    def hidden(self, ids_T: Tensor, positions_T: Tensor, packing: Packing) -> Tensor:
        """Final normed hidden states [T, K], differentiable."""
        model = self.decoder.model
        model.rope.reserve(packing.longest, ids_T.device)
        h_TK: Tensor = model.embed_tokens(ids_T)
        delta_TK: Tensor | None = None
        for layer in self.layers:
            h_TK, delta_TK = layer(h_TK, delta_TK, positions_T, packing)
        norm = model.norm
        out: Tensor = _FinalNorm.apply(h_TK, delta_TK, norm.weight, _plain(norm), norm.eps, self.operations)
        return out

    def log_probs(self, micro: MicroBatch, packing: Packing) -> Tensor:
        """Log-probability [N] of every trained token, differentiable."""
        hidden = self.hidden(micro.ids_T, micro.positions_T, packing)
        logp_N, _ = self.decoder.head.log_probs(
            take_rows(hidden, micro.rows_N), micro.targets_N, micro.temperature_N
        )
        return logp_N


@dataclass
class Product:
    """One product of a layer: its working copy [N, K], biases [N] where the model has them, and the masters."""

    weight_NK: Tensor
    bias_N: Tensor | None
    masters: tuple[nn.Parameter, ...]
    bias_masters: tuple[nn.Parameter, ...]

    @classmethod
    def of(cls, projection: Projection) -> Product:
        """Of linears that share an input; their working copies are shared where they are stacked already."""
        linears, stack = projection.linears, projection.stacked()
        if stack is not None and stack.plain is not None:
            weight = stack.plain
        elif len(linears) == 1:
            weight = _plain(linears[0])
        else:
            weight = torch.cat([_plain(linear) for linear in linears])
        biases = tuple(linear.bias for linear in linears if linear.bias is not None)
        bias = torch.cat([b.detach().to(weight.dtype) for b in biases]) if biases else None
        return cls(weight, bias, tuple(linear.weight for linear in linears), biases)

    @property
    def copies(self) -> Copies:
        """See `Copies`."""
        parts = [(self.weight_NK, self.masters)]
        if self.bias_N is not None:
            parts.append((self.bias_N, self.bias_masters))
        return [
            (copy, master.detach())
            for whole, masters in parts
            for copy, master in zip(whole.split([len(m) for m in masters]), masters, strict=True)
        ]

    def forward(self, x_TK: Tensor) -> Tensor:
        """[T, N]."""
        if self.bias_N is None:
            return torch.mm(x_TK, self.weight_NK.t())
        return torch.addmm(self.bias_N, x_TK, self.weight_NK.t())

    def backward(self, grad_TN: Tensor, x_TK: Tensor, operations: Operations) -> tuple[Tensor, list[Tensor]]:
        """(gradient of x, FP32 gradients of weights and then biases)."""
        dw = operations.weight_grad(grad_TN, x_TK).split([len(m) for m in self.masters])
        grads = list(dw)
        if self.bias_N is not None:
            grads += grad_TN.float().sum(0).split([len(m) for m in self.bias_masters])
        return torch.mm(grad_TN, self.weight_NK), grads

    @property
    def parameters(self) -> list[nn.Parameter]:
        """In the order of the gradients."""
        return [*self.masters, *self.bias_masters]


@dataclass
class Saved:
    """What one layer keeps for its backward pass. x, x2, y are None in a lean one."""

    h: Tensor
    x: Tensor | None
    qkv: Tensor
    out: Tensor
    h2: Tensor
    x2: Tensor | None
    gate_up: Tensor
    y: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of the fields."""
        return (self.h, self.x, self.qkv, self.out, self.h2, self.x2, self.gate_up, self.y)


class BaselineLayer:
    """One decoder layer: forward, and backward by hand."""

    def __init__(self, layer: DecoderLayer, operations: Operations, *, lean: bool = False) -> None:
        if not isinstance(layer.mlp, MLP):
            raise ConfigError("the BF16 baseline has no experts", where="bench", fix="choose a dense model")
        self.operations, self.lean, self.attention = operations, lean, layer.self_attn
        self.norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self.head_norms = [
            norm for norm in (self.attention.q_norm, self.attention.k_norm) if norm is not None
        ]
        self.qkv, self.o = Product.of(self.attention.qkv), Product.of(self.attention.o_proj.alone)
        self.gate_up, self.down = Product.of(layer.mlp.gate_up), Product.of(layer.mlp.down_proj.alone)
        self.products = (self.qkv, self.o, self.gate_up, self.down)
        norms = [*self.norms, *self.head_norms]
        self.copies: Copies = [(_plain(norm), norm.weight.detach()) for norm in norms]
        self.copies += [pair for product in self.products for pair in product.copies]
        self.parameters = [norm.weight for norm in norms]
        self.parameters += [p for product in self.products for p in product.parameters]

    def __call__(
        self, h_TK: Tensor, delta_TK: Tensor | None, positions_T: Tensor, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        """(residual stream, what is to be added to it), differentiable."""
        if not torch.is_grad_enabled():
            return self.forward(h_TK, delta_TK, positions_T, packing, keep=False)[:2]
        return _Layer.apply(h_TK, delta_TK, positions_T, packing, self, *self.parameters)  # type: ignore[no-any-return]

    def forward(
        self, h: Tensor, delta: Tensor | None, positions_T: Tensor, packing: Packing, *, keep: bool
    ) -> tuple[Tensor, Tensor, Saved | None, Any]:
        """(stream, what is to be added, what backward reads, what attention's backward reads)."""
        ops = self.operations
        h, x = self._normed(0, h, delta)
        qkv = self.qkv.forward(x)
        heads, kv_heads, norms, eps = self._heads()
        q, k = ops.rope(qkv, *self._rotation(positions_T), heads, kv_heads, norms, eps)
        out, state = ops.attention.forward(q, k, self._values(qkv), packing, keep)
        h2, x2 = self._normed(1, h, self.o.forward(out.flatten(1)))
        gate_up = self.gate_up.forward(x2)
        y = ops.swiglu(gate_up)
        delta = self.down.forward(y)
        if not keep:
            return h2, delta, None, None
        kept = Saved(h, x, qkv, out, h2, x2, gate_up, y)
        if self.lean:
            kept.x = kept.x2 = kept.y = None
        return h2, delta, kept, state

    def backward(
        self, dh2: Tensor, ddelta: Tensor, kept: Saved, state: Any, positions_T: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """(gradient of the stream, which is that of what was added too; gradients in the order of `parameters`)."""
        ops = self.operations
        y = ops.swiglu(kept.gate_up) if kept.y is None else kept.y
        dy, grads_down = self.down.backward(ddelta, y, ops)
        d_gate_up = ops.swiglu_grad(dy, kept.gate_up)
        x2 = self._normed(1, kept.h2, None)[1] if kept.x2 is None else kept.x2
        dx2, grads_gate_up = self.gate_up.backward(d_gate_up, x2, ops)
        dh, dw2 = self._norm_grad(1, dx2, kept.h2, dh2)
        d_out, grads_o = self.o.backward(dh, kept.out.flatten(1), ops)
        heads = ops.attention.backward(d_out.view_as(kept.out), state)
        table, positions = self._rotation(positions_T)
        _, _, norms, eps = self._heads()
        dqkv, *dw_heads = ops.rope_grad(heads, kept.qkv, table, positions, norms, eps)
        x = self._normed(0, kept.h, None)[1] if kept.x is None else kept.x
        dx, grads_qkv = self.qkv.backward(dqkv, x, ops)
        dh, dw1 = self._norm_grad(0, dx, kept.h, dh)
        norm_grads = [dw1, dw2, *(dw for dw in dw_heads if dw is not None)]
        return dh, [*norm_grads, *grads_qkv, *grads_o, *grads_gate_up, *grads_down]

    def _normed(self, which: int, h: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        norm = self.norms[which]
        return self.operations.norm(h, delta, _plain(norm), norm.eps)

    def _norm_grad(self, which: int, grad: Tensor, h: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
        norm = self.norms[which]
        return self.operations.norm_grad(grad, h, _plain(norm), norm.eps, dh)

    def _rotation(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention.rope.table_PD, positions_T

    def _heads(self) -> tuple[int, int, tuple[Tensor, Tensor] | None, float]:
        """Query heads, key heads, weights of their norms, epsilon."""
        heads, kv_heads = self.attention.heads, self.attention.kv_heads
        if not self.head_norms:
            return heads, kv_heads, None, 0.0
        q, k = self.head_norms
        return heads, kv_heads, (_plain(q), _plain(k)), q.eps

    def _values(self, qkv_TN: Tensor) -> Tensor:
        """v [T, G, D], where it lies."""
        attention = self.attention
        start = (attention.heads + attention.kv_heads) * attention.head_dim
        values: Tensor = qkv_TN[:, start:].unflatten(1, (attention.kv_heads, attention.head_dim))
        return values


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_TK: Tensor,
        delta_TK: Tensor | None,
        positions_T: Tensor,
        packing: Packing,
        layer: BaselineLayer,
        *parameters: Tensor,
    ) -> Any:
        h2, delta, kept, state = layer.forward(h_TK, delta_TK, positions_T, packing, keep=True)
        assert kept is not None
        ctx.save_for_backward(*kept.tensors)
        ctx.layer, ctx.state, ctx.positions_T, ctx.first = layer, state, positions_T, delta_TK is None
        return h2, delta

    @staticmethod
    def backward(ctx: Any, dh_TK: Tensor, ddelta_TK: Tensor) -> Any:
        state, ctx.state = ctx.state, None
        dh, grads = ctx.layer.backward(dh_TK, ddelta_TK, Saved(*ctx.saved_tensors), state, ctx.positions_T)
        return dh, None if ctx.first else dh, None, None, None, *grads


class _FinalNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_TK: Tensor,
        delta_TK: Tensor,
        master_K: Tensor,
        weight_K: Tensor,
        eps: float,
        operations: Operations,
    ) -> Tensor:
        total, out = operations.norm(h_TK, delta_TK, weight_K, eps)
        ctx.save_for_backward(total, weight_K)
        ctx.eps, ctx.operations = eps, operations
        return out

    @staticmethod
    def backward(ctx: Any, grad_TK: Tensor) -> Any:
        total, weight_K = ctx.saved_tensors
        dh, dw = ctx.operations.norm_grad(grad_TK, total, weight_K, ctx.eps, None)
        return dh, dh, dw, None, None, None


def saved_bytes_a_token(spec: ModelSpec, *, lean: bool = False) -> int:
    """What one layer keeps for one row, in BF16 and for attention's log-sum-exp in FP32."""
    qkv = spec.q_size + 2 * spec.kv_size
    kept = (
        2 * spec.hidden_size + qkv + (spec.q_size + spec.kv_size) + spec.q_size + 2 * spec.intermediate_size
    )
    kept += 0 if lean else 2 * spec.hidden_size + spec.intermediate_size
    return 2 * kept + 4 * spec.num_heads


def _plain(module: Any) -> Tensor:
    plain: Tensor | None = module.working.plain
    assert plain is not None
    return plain
