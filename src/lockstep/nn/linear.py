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

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.kernels.table import Kernels
from lockstep.nn.working import Working
from lockstep.numerics.flow import Flow
from lockstep.numerics.formats import BF16
from lockstep.numerics.quantize import Quantized, quantize


class Linear(Working):
    """A linear layer with FP32 master weight [N, K] (and bias [N]), quantized as the flow says for its decoder layer."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, flow: Flow, layer: int, kernels: Kernels) -> None:
        self.fp8 = flow.fp8_layer(layer)
        super().__init__(kernels, flow.fprop.rhs if self.fp8 else BF16, flow.activation)
        self.flow = flow
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x_TK: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        return project(x_TK, self)[0]


def project(x_TK: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
    """The outputs of several linears for one input; all must have the same flow."""
    assert len({linear.fp8 for linear in linears}) == 1, "linears that share an input share its format"
    parameters = [p for linear in linears for p in (linear.weight, linear.bias)]
    return _Project.apply(x_TK, linears, *parameters)  # type: ignore[no-any-return]


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, linears: tuple[Linear, ...], *parameters: Tensor | None) -> Any:
        first = linears[0]
        kernels, flow = first.kernels, first.flow
        stored: Quantized | Tensor = kernels.quantize_rows(x_TK, flow.fprop.lhs) if first.fp8 else x_TK
        dense = kernels.dense_input(stored)
        outputs = []
        for linear in linears:
            y = kernels.linear(dense, linear.working).to(x_TK.dtype)
            if linear.bias is not None:
                y = y + linear.bias.detach().to(linear.activation)
            outputs.append(y)
        ctx.linears, ctx.dtype = linears, x_TK.dtype
        ctx.fp8_saved = isinstance(stored, Quantized)
        ctx.save_for_backward(*((stored.codes, stored.scale) if isinstance(stored, Quantized) else (stored,)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        linears: tuple[Linear, ...] = ctx.linears
        kernels, flow = linears[0].kernels, linears[0].flow
        saved: Quantized | Tensor = ctx.saved_tensors[0]
        if ctx.fp8_saved:
            saved = Quantized(*ctx.saved_tensors, group=flow.fprop.lhs.group)
        wgrad_fp8 = linears[0].fp8 and flow.wgrad.is_fp8
        x: Quantized | Tensor = saved.dequantize() if isinstance(saved, Quantized) else saved
        if wgrad_fp8:
            assert isinstance(x, Tensor)
            x = quantize(x, flow.wgrad.rhs)
        dx: Tensor | None = None
        parameter_grads: list[Tensor | None] = []
        for linear, dy in zip(linears, grads, strict=True):
            if ctx.needs_input_grad[0]:
                rows = kernels.quantize_rows(dy, flow.dgrad.lhs) if linear.fp8 and flow.dgrad.is_fp8 else dy
                part = kernels.linear_dgrad(rows, linear.working)
                dx = part if dx is None else dx.add_(part)
            dy_columns = quantize(dy, flow.wgrad.lhs) if wgrad_fp8 else dy
            parameter_grads.append(kernels.linear_wgrad(dy_columns, x) if linear.weight.requires_grad else None)
            parameter_grads.append(dy.float().sum(0) if linear.bias is not None else None)
        return (None if dx is None else dx.to(ctx.dtype), None, *parameter_grads)
