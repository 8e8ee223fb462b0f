"""Which backends there are, and the one function that picks one. Trainer and engine are given the same object.

| operation | reference | exact |
|---|---|---|
| linear, FP8 block-scaled | FP32 sums, fixed order | float64 block sums |
| linear, BF16; output head | FP32 sums, fixed order | float64 sums |
| attention over slots | FP32 products | float64 products |
| RMSNorm, RoPE, SwiGLU, log-sum-exp | FP32 | FP32 |
"""

from __future__ import annotations

from typing import Literal

from lockstep.kernels.reference import ReferenceKernels

Kernels = ReferenceKernels
"""The operations a model calls. Device backends subclass it and override what they have."""


def select(name: Literal["auto", "reference", "exact"]) -> Kernels:
    """The backend of this name; `auto` is the fastest that obeys the row law here."""
    return ReferenceKernels(exact=name == "exact")
