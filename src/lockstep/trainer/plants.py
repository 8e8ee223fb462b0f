"""Violations of the row law to plant in an audit, so that it can be seen to notice.

Next: `audit.py`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.kernels.reference import PackedWeight, ReferenceKernels
from lockstep.kernels.rowwise import row_matmul
from lockstep.kernels.table import Kernels
from lockstep.numerics.formats import Operand
from lockstep.numerics.quantize import Quantized, quantize

FEW_ROWS = 16
"""Below this many rows `split-k` sums in another order."""


class PerTensorActivation(ReferenceKernels):
    """A planted violation: one scale for a whole activation tensor, so a row depends on its batch (field failure 51)."""

    def quantize_rows(self, x_TK: Tensor, operand: Operand) -> Quantized:
        """1x128 codes under the scale of the largest group."""
        row = quantize(x_TK, operand)
        scale = row.scale.max().expand_as(row.scale).contiguous()
        codes = quantize(row.dequantize() / scale.max(), operand).dequantize().clamp(-448, 448)
        return Quantized(codes.to(row.codes.dtype), scale, row.group)


class SplitK(ReferenceKernels):
    """A planted violation: few rows are summed in two halves of K, as libraries do to fill a chip (cuBLASLt at M <= 32)."""

    def linear(self, x_TK: Quantized | Tensor, weight: PackedWeight) -> Tensor:
        """A product whose order of summation changes with the number of rows."""
        x = x_TK.dequantize() if isinstance(x_TK, Quantized) else x_TK
        if len(x) >= FEW_ROWS or weight.dense is None:
            return super().linear(x_TK, weight)
        half = x.shape[1] // 2
        parts = [
            row_matmul(x[:, s], weight.dense[:, s].contiguous()) for s in (slice(half), slice(half, None))
        ]
        return (parts[0] + parts[1]).float()


PLANTS: dict[str, type[ReferenceKernels]] = {
    "per-tensor-activation": PerTensorActivation,
    "split-k": SplitK,
}


def planted(name: str, *, exact: bool, hopper: bool) -> Kernels:
    """Kernels with this violation. Raises ConfigError for one that is unknown, or that has no form on a GPU."""
    if name not in PLANTS:
        raise ConfigError(f"unknown violation {name!r}", where="--plant", fix=f"one of {', '.join(PLANTS)}")
    if not hopper:
        return PLANTS[name](exact=exact)
    if name != "split-k":
        raise ConfigError(
            f"{name} can't be planted in the Hopper kernels",
            where="--plant",
            why="they quantize inside the norm",
            fix="plant split-k, or set kernels to reference",
        )
    return _hopper_split_k()


def _hopper_split_k() -> Kernels:
    from lockstep.kernels.hopper import HopperKernels  # needs Triton

    class HopperSplitK(HopperKernels):
        """`SplitK` on a GPU."""

        def linear(self, x_TK: Any, weight: PackedWeight) -> Tensor:
            """Few rows of an FP8 product in two halves of K."""
            if not isinstance(x_TK, Quantized) or len(x_TK.codes) >= FEW_ROWS or weight.codes is None:
                return super().linear(x_TK, weight)
            x, w = x_TK.dequantize(), weight.codes.dequantize()
            half = x.shape[1] // 2
            return (x[:, :half] @ w[:, :half].t() + x[:, half:] @ w[:, half:].t()).bfloat16()

    return HopperSplitK()
