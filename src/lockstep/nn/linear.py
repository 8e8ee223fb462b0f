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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.kernels.reference import PackedWeight
from lockstep.kernels.renew import Renewed, Source
from lockstep.kernels.table import Kernels
from lockstep.nn.working import Held, Refreshed, Working
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
        self.described_bias: Held | None = None

    @property
    def parts(self) -> int:
        """See `Working.parts`; the bias follows the weight."""
        return 1 if self.bias is None else 2

    def sources(self, name: str, reserved: PackedWeight | None = None) -> list[Source]:
        """See `Working.sources`."""
        weight = super().sources(name, reserved)
        if self.bias is None:
            return weight
        old = self.working_bias
        held = None if old is None else PackedWeight(None, old, None)
        name = f"{name.removesuffix('weight')}bias"
        return [*weight, Source(name, self.bias.detach(), BF16, self.activation, held, bias=True)]

    def take(self, name: str, renewed: Sequence[Renewed]) -> Refreshed:
        """See `Working.take`."""
        if self.bias is not None and self.working_bias is not renewed[1].packed.plain:
            self.working_bias = renewed[1].packed.plain
        return super().take(name, renewed)

    def told(self, name: str) -> str:
        """See `Working.told`."""
        if self.working_bias is None:
            return super().told(name)
        held, known = self.held(), self.known
        return known.text if known.name == name and known.of(held) is not None else ""

    def held(self) -> list[Held]:
        """See `Working.held`."""
        weight, bias = super().held(), self.working_bias
        if bias is None:
            return weight
        if self.described_bias is None or self.described_bias.value is not bias:
            self.described_bias = Held(bias, None)
        return [*weight, self.described_bias]

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
        """The working copies as one weight, of which each is a view; made when they aren't yet. None where the backend
        multiplies them singly."""
        first = self.linears[0].working
        if len(self.linears) == 1:
            return first if first.dense is not None else None
        if first.stack is None or any(linear.working.stack is not first.stack for linear in self.linears):
            parts = self.linears[0].kernels.fuse([linear.working for linear in self.linears])
            if parts is None:
                return None
            for linear, part in zip(self.linears, parts, strict=True):
                linear.install(part)
            return parts[0].stack
        return first.stack

    def reserve(self) -> dict[Working, PackedWeight]:
        """Storage for first working copies that are views of a stack from the start, where the backend has such."""
        if len(self.linears) == 1 or any(linear.packed is not None for linear in self.linears):
            return {}
        places = self.linears[0].kernels.reserve([linear.sources("")[0] for linear in self.linears])
        return {} if places is None else dict(zip(self.linears, places, strict=True))


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
