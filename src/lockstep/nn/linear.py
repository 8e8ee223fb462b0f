"""The linear layer of the flow: one autograd function in which each of the three GEMMs carries its equation.

    FProp   y_TN  = x_TK  w_NK^T     x 1x128 along K,   w 128x128
    DGrad   dx_TK = dy_TN w_NK       dy 1x128 along N,  w the same codes, transposed
    WGrad   dw_NK = dy_TN^T x_TK     both regrouped 128x1, along tokens

This is Jet-RL's assignment (arXiv 2601.14243) after DeepSeek-V3 (arXiv 2412.19437, section 3.3): a token's forward result
depends on its own row only, and the transposed weight needs no second quantization. What is saved for the backward pass are
the FP8 codes of x, a byte an element; WGrad regroups their values. Results are FP32 sums rounded once to BF16; a bias is
added after that rounding, as a separate operation, since block-scaled GEMMs have no bias epilogue.

Several linears that read the same input (q, k, v; gate, up) are projected together: x is quantized once, and the three
parts of dx are added in FP32 before their one rounding. Each weight keeps its own 128x128 blocks, as a checkpoint has them.

Next: `../kernels/reference.py` for the products, `working.py` for the codes.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.kernels.reference import PackedWeight
from lockstep.kernels.table import Kernels
from lockstep.nn.working import Refreshed, Working
from lockstep.numerics.flow import Flow
from lockstep.numerics.formats import BF16
from lockstep.numerics.quantize import Quantized, quantize, values_of


class Linear(Working):
    """A linear layer with FP32 master weight [N, K] (and bias [N]), quantized as the flow says for its decoder layer."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, flow: Flow, layer: int, kernels: Kernels
    ) -> None:
        self.fp8 = flow.fp8_layer(layer) and flow.fprop.lhs.is_fp8
        super().__init__(kernels, flow.fprop.rhs if flow.fp8_layer(layer) else BF16, flow.activation)
        self.flow = flow
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

        self.alone = Projection(self)

        self.working_bias: Tensor | None = None

    def refresh(self, name: str) -> Refreshed:
        """Remakes the working copies of weight and bias; both are one record."""
        record = super().refresh(name)
        if self.bias is None:
            return record
        bias, old = self.bias.detach().to(self.activation), self.working_bias
        if not bool(torch.isfinite(bias).all()):
            raise ValueError(f"{name.removesuffix('weight')}bias: non-finite value in a bias")
        self.working_bias = bias
        return replace(
            record,
            nbytes=record.nbytes + bias.nbytes,
            numel=record.numel + bias.numel(),
            changed=record.changed + (bias.numel() if old is None else int((old != bias).sum())),
        )

    def update_digest(self, h: hashlib._Hash) -> None:
        """See `Working.update_digest`; the bias follows the weight."""
        super().update_digest(h)
        if self.working_bias is not None:
            h.update(self.working_bias.view(torch.uint8).cpu().numpy().data)

    def forward(self, x_TK: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        return self.alone(x_TK)[0]


class Projection:
    """Linears that share an input, applied together. It owns no parameters; it stacks working copies where a backend can
    multiply them at once."""

    def __init__(self, *linears: Linear) -> None:
        assert len({linear.fp8 for linear in linears}) == 1, "linears that share an input share its format"
        self.linears = linears
        self.sizes = [linear.weight.shape[0] for linear in linears]
        self._stacked: PackedWeight | None = None
        self._seen: tuple[PackedWeight | None, ...] = ()

    def __call__(self, x_TK: Tensor) -> tuple[Tensor, ...]:
        """The outputs [T, N] of every linear for one input."""
        parameters = [p for linear in self.linears for p in (linear.weight, linear.bias)]
        first = self.linears[0]
        if first.fp8 != first.operand.is_fp8 and torch.is_grad_enabled():
            raise ValueError(
                f"{first.flow.fprop.lhs} inputs against {first.operand} weights are for probes without gradient: "
                "training needs both operands in FP8, or none"
            )
        return _Project.apply(x_TK, self, *parameters)  # type: ignore[no-any-return]

    def stacked(self) -> PackedWeight | None:
        """The working copies as one weight, remade when one of them was; their dense values then live in the stack."""
        if len(self.linears) == 1:
            return self.linears[0].working if self.linears[0].working.dense is not None else None
        if any(a is not b.packed for a, b in zip(self._seen, self.linears, strict=False)) or not self._seen:
            self._stacked = self.linears[0].kernels.fuse([linear.working for linear in self.linears])
            if self._stacked is not None:
                working = [linear.working for linear in self.linears]
                parts = self.linears[0].kernels.parts_of(self._stacked, working)
                for linear, part in zip(self.linears, parts, strict=True):
                    linear.packed = part
            self._seen = tuple(linear.packed for linear in self.linears)
        return self._stacked


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, projection: Projection, *parameters: Tensor | None) -> Any:
        linears, first = projection.linears, projection.linears[0]
        kernels, flow = first.kernels, first.flow
        stored: Quantized | Tensor = kernels.quantize_rows(x_TK, flow.fprop.lhs) if first.fp8 else x_TK
        dense = kernels.dense_input(stored)
        stack = projection.stacked()
        if stack is not None:
            products = kernels.linear(dense, stack).split(projection.sizes, 1)
        else:
            products = tuple(kernels.linear(dense, linear.working) for linear in linears)
        outputs = []
        for linear, product in zip(linears, products, strict=True):
            y = product.to(x_TK.dtype, memory_format=torch.contiguous_format)
            outputs.append(y if linear.working_bias is None else y + linear.working_bias)
        ctx.projection, ctx.dtype = projection, x_TK.dtype
        ctx.fp8_saved = isinstance(stored, Quantized)
        ctx.save_for_backward(*((stored.codes, stored.scale) if isinstance(stored, Quantized) else (stored,)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        projection: Projection = ctx.projection
        linears, first = projection.linears, projection.linears[0]
        saved: Quantized | Tensor = ctx.saved_tensors[0]
        if ctx.fp8_saved:
            codes, scale = ctx.saved_tensors
            assert first.flow.fprop.lhs.group is not None
            saved = Quantized(codes, scale, first.flow.fprop.lhs.group)
        dx = _input_gradient(projection, grads) if ctx.needs_input_grad[0] else None
        weight_grads: list[Tensor] | list[None] = [None] * len(linears)
        if first.weight.requires_grad:
            weight_grads = _weight_gradients(projection, grads, saved)
        bias_grads = [
            None if linear.bias is None else g.float().sum(0)
            for linear, g in zip(linears, grads, strict=True)
        ]
        pairs = [g for pair in zip(weight_grads, bias_grads, strict=True) for g in pair]
        return (None if dx is None else dx.to(ctx.dtype), None, *pairs)


def _input_gradient(projection: Projection, grads: tuple[Tensor, ...]) -> Tensor:
    """dx [T, K] FP32: the sum over the linears."""
    first = projection.linears[0]
    kernels, operand = first.kernels, first.flow.dgrad.lhs
    rows = [kernels.quantize_rows(g, operand) if first.fp8 and operand.is_fp8 else g for g in grads]
    stack = projection.stacked()
    if stack is not None:
        dense = [values_of(r) for r in rows]
        return kernels.linear_dgrad(torch.cat(dense, 1), stack)
    parts = [
        kernels.linear_dgrad(r, linear.working) for r, linear in zip(rows, projection.linears, strict=True)
    ]
    return torch.stack(parts).sum(0)


def _weight_gradients(
    projection: Projection, grads: tuple[Tensor, ...], saved: Quantized | Tensor
) -> list[Tensor]:
    """dw [N, K] FP32 of every linear."""
    first = projection.linears[0]
    kernels, gemm = first.kernels, first.flow.wgrad
    x: Quantized | Tensor = saved.dequantize() if isinstance(saved, Quantized) else saved
    columns: list[Quantized | Tensor] = list(grads)
    if first.fp8 and gemm.is_fp8:
        assert isinstance(x, Tensor)
        x = quantize(x, gemm.rhs)
        columns = [quantize(g, gemm.lhs) for g in grads]
    if projection.stacked() is None:
        return [kernels.linear_wgrad(c, x) for c in columns]
    dense = torch.cat([values_of(c) for c in columns], 1)
    return list(kernels.linear_wgrad(dense, values_of(x)).split(projection.sizes))
