"""The gated MLP (SwiGLU, arXiv 2002.05202): down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.kernels.table import Kernels
from lockstep.nn.linear import Linear, Projection
from lockstep.numerics.flow import Flow


class MLP(nn.Module):
    """[T, K] to [T, K] through an intermediate width."""

    def __init__(self, hidden: int, intermediate: int, *, flow: Flow, layer: int, kernels: Kernels) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, bias=False, flow=flow, layer=layer, kernels=kernels)

        self.gate_proj, self.up_proj = linear(hidden, intermediate), linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden)
        self.gate_up = Projection(self.gate_proj, self.up_proj)
        self.kernels = kernels

    def forward(self, x_TK: Tensor) -> Tensor:
        """[T, K] to [T, K]."""
        gate, up = self.gate_up(x_TK)
        return self.down_proj(_SwiGLU.apply(gate, up, self.kernels))  # type: ignore[no-any-return]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_TN: Tensor, up_TN: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(gate_TN, up_TN)
        return kernels.swiglu(gate_TN, up_TN)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> Any:
        gate_TN, up_TN = ctx.saved_tensors
        gate, up, dy = gate_TN.float(), up_TN.float(), grad_TN.float()
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        d_gate = dy * up * (sigmoid + silu * (1 - sigmoid))
        return d_gate.to(gate_TN.dtype), (dy * silu).to(up_TN.dtype), None
