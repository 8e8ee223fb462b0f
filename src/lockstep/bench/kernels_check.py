"""Every Triton kernel against the reference: what `lockstep bench check`, `lockstep doctor` and the tests run.

Next: `check.py` for the bounds, `sanitize.py` for the same under compute-sanitizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from lockstep.bench.check import Check, Size
from lockstep.bench.checks_attention import attention_checks
from lockstep.bench.checks_products import bf16_checks, fp8_checks, head_checks, narrow_checks
from lockstep.bench.checks_rows import norm_checks, quantize_checks, rope_checks, swiglu_checks
from lockstep.bench.checks_steps import step_checks
from lockstep.bench.goals import Goal, passed

CHECKS: dict[str, Callable[[Size], Iterator[Check]]] = {
    "quantize": quantize_checks,
    "norm": norm_checks,
    "swiglu": swiglu_checks,
    "rope": rope_checks,
    "fp8_matmul": fp8_checks,
    "narrow_matmul": narrow_checks,
    "bf16_matmul": bf16_checks,
    "attention": attention_checks,
    "head": head_checks,
    "steps": step_checks,
}
"""By kernel file, in the order in which a forward pass meets them."""
GOAL = "C2a"
Say = Callable[[str], None]


def run_checks(size: Size, names: Sequence[str] = tuple(CHECKS), *, say: Say | None = None) -> list[Check]:
    """Runs them all, whatever fails, so that one report names every kernel that is wrong."""
    found = []
    for name in names:
        for check in CHECKS[name](size):
            found.append(check)
            if say is not None:
                say(check.line())
        torch.cuda.empty_cache()
    return found


def verdict(checks: Sequence[Check]) -> str:
    """One line."""
    failed = [check for check in checks if not check.passed]
    if not failed:
        return f"all {len(checks)} comparisons within their bounds"
    kernels = ", ".join(dict.fromkeys(check.kernel for check in failed))
    return f"{len(failed)} of {len(checks)} comparisons FAILED: {kernels}"


def summary(checks: Sequence[Check]) -> list[str]:
    """One line a kernel: how many comparisons, the worst SQNR, what failed."""
    lines = []
    for kernel in dict.fromkeys(check.kernel for check in checks):
        own = [check for check in checks if check.kernel == kernel]
        decibels = [check for check in own if check.measure == "SQNR dB"]
        worst = min(decibels, key=lambda check: check.value - check.bound, default=None)
        near = f", SQNR {worst.value:.1f} dB (at least {worst.bound:g})" if worst is not None else ""
        equal = sum(check.measure == "same bits" for check in own)
        failed = [check.case for check in own if not check.passed]
        word = "ok" if not failed else f"FAILED: {failed[0]}"
        lines.append(f"{kernel:16} {equal} times the same bits{near}  {word}")
    return lines


def records(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """For a result file; NaN, which JSON has no word for, becomes null."""
    return [
        {**asdict(c), "value": c.value if c.value == c.value else None, "passed": c.passed} for c in checks
    ]


def goals(checks: Sequence[Check]) -> list[Goal]:
    """C2a: every kernel within its stated tolerance."""
    return [passed(GOAL, all(check.passed for check in checks))]
