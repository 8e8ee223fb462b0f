"""Number formats of the forward and backward pass: what a code is and how many of them share one scale.

Next: `flow.py` says which tensor gets which of these, `quantize.py` makes the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

ScaleKind = Literal["fp32", "pow2"]

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = 128
"""Length of a quantization block along the contracted dimension, and the GEMM's accumulation step."""

AMAX_FLOOR = 1e-12
"""Smallest absolute maximum a group's scale is made from: an all-zero group gets this and zero codes, never NaN."""


@dataclass(frozen=True)
class Operand:
    """How one operand of a GEMM is stored.

    `group` is (rows, columns) that share one scale; None means the values stay in BF16, without scales.
    """

    group: tuple[int, int] | None
    scale: ScaleKind = "fp32"

    @property
    def is_fp8(self) -> bool:
        return self.group is not None

    def __str__(self) -> str:
        return "bf16" if self.group is None else f"e4m3[{self.group[0]}x{self.group[1]},{self.scale}]"


BF16 = Operand(None)


def row_groups(scale: ScaleKind) -> Operand:
    """1x128: each row has its own scale for every 128 columns, so that a row never depends on its batch."""
    return Operand((1, BLOCK), scale)


def column_groups(scale: ScaleKind) -> Operand:
    """128x1: every 128 rows share a scale, a column each (the weight gradient contracts over rows)."""
    return Operand((BLOCK, 1), scale)


def square_blocks(scale: ScaleKind) -> Operand:
    """128x128: weights; transposing the matrix transposes codes and scales, nothing is requantized."""
    return Operand((BLOCK, BLOCK), scale)
