"""Rotary position embedding (arXiv 2104.09864): FP32 tables, made in float64 so that every machine has the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.table import Kernels


class Rope:
    """cos and sin by position, grown on demand: entry p depends on p only, never on the table's length."""

    def __init__(self, inverse_frequencies_D: Tensor, kernels: Kernels) -> None:
        self.inverse = inverse_frequencies_D.double()
        self.kernels = kernels
        self.table_PD = torch.empty(0, 2, len(self.inverse))

    def reserve(self, positions: int, device: torch.device) -> None:
        """Makes sure the table has entries for that many positions on this device."""
        if positions > len(self.table_PD) or self.table_PD.device != device:
            length = max(positions, 2 * len(self.table_PD), 256)
            angle = torch.arange(length, dtype=torch.float64)[:, None] * self.inverse.cpu()
            self.table_PD = torch.stack([angle.cos(), angle.sin()], 1).float().to(device)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [T, D / 2] FP32 at these positions."""
        self.reserve(int(positions_T.max()) + 1 if len(positions_T) else 0, positions_T.device)
        both = self.table_PD[positions_T]
        return both[:, 0], both[:, 1]

    def rotate(self, x_THD: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """Rotates every head of x."""
        return _Rotate.apply(x_THD, *cos_sin, self.kernels)  # type: ignore[no-any-return]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos: Tensor, sin: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        return kernels.rope(x_THD, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return ctx.kernels.rope(grad, cos, -sin), None, None, None
