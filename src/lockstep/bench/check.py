"""One comparison of a kernel with what it should give, and the bounds that are stated for each.

Two measures. *same bits*: the share of elements equal in every bit, which has to be all of them. *SQNR*: 10 log10 of the
reference's energy over that of the difference, in dB, against the reference rounded to the kernel's output type. A BF16 result
that differs from the reference in its last bit everywhere has about 45 dB, one that differs in one element of 15 about 57.

Kernels run with poisoned memory: what `torch.empty` returns is NaN before they write to it, so an element that isn't
written shows.

Next: `checks_rows.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lockstep.numerics.measures import sqnr_db

Measure = Literal["same bits", "SQNR dB"]

BOUNDS_DB = {
    "rms_norm": 70.0,
    "swiglu": 65.0,
    "rope": 60.0,
    "fp8_matmul": 50.0,
    "bf16_matmul": 80.0,
    "attention": 50.0,
    "log_sum_exp": 70.0,
    "log_normalizer": 110.0,
    "target_log_prob": 100.0,
}
"""Least SQNR of each kernel. Norms, SwiGLU and rotations compute in FP32 as the reference does: a few results in a hundred
thousand round to the neighbour. The FP8 instruction adds with fewer bits than FP32: one BF16 result of 15 is the neighbour.
BF16 products are compared before their rounding. Attention beyond one chunk of keys rounds its probabilities relative to another
maximum than the reference."""
LARGEST_DB = 999.0
MANY = 1_000_000
"""Elements beyond which a comparison is left to the GPU."""


@dataclass(frozen=True)
class Size:
    """small: every kernel, in sizes that compute-sanitizer gets through in minutes and with no product of a library beside ours.
    home: where the reference of large products is computed."""

    small: bool

    @property
    def home(self) -> torch.device:
        """The CPU, or for large products the GPU's float64, which gives the same bytes."""
        return torch.device("cpu" if self.small else "cuda")


@dataclass(frozen=True)
class Check:
    """value: share of equal elements, or dB. It has to be at least `bound`; NaN never is."""

    kernel: str
    case: str
    measure: Measure
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the bound is kept."""
        return self.value >= self.bound

    def line(self) -> str:
        """For a terminal."""
        found = f"{self.value:.6g}" if self.measure == "same bits" else f"{min(self.value, LARGEST_DB):.1f}"
        word = "ok" if self.passed else "FAILED"
        return (
            f"{self.kernel:16} {self.case:44} {self.measure:9} {found:>9} (at least {self.bound:g})  {word}"
        )


def same(kernel: str, case: str, expected: Tensor, found: Tensor) -> Check:
    """Equality of every bit: of codes, of BF16 and of FP32 values."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return Check(kernel, case, "same bits", math.nan, 1.0)
    equal = int((_bits(expected) == _bits(found)).sum())
    return Check(kernel, case, "same bits", equal / found.numel() if found.numel() else 1.0, 1.0)


def near(kernel: str, case: str, expected: Tensor, found: Tensor, bound: float | None = None) -> Check:
    """SQNR against the kernel's bound of BOUNDS_DB, or another one."""
    bound = BOUNDS_DB[kernel] if bound is None else bound
    expected, found = expected.detach().cpu(), found.detach().cpu()
    ok = expected.shape == found.shape and bool(torch.isfinite(found).all())
    value = min(sqnr_db(expected, found), LARGEST_DB) if ok else math.nan
    return Check(kernel, case, "SQNR dB", value, bound)


@contextmanager
def poisoned() -> Iterator[None]:
    """Within it, memory that `torch.empty` returns holds NaN (or the largest integer)."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch fills what is not initialised then
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def _bits(x: Tensor) -> Tensor:
    """The same storage as integers; on the CPU unless there are many."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.detach().contiguous().view(integer)
    return bits.cuda() if torch.cuda.is_available() and x.numel() > MANY else bits.cpu()
