"""Calibrated clip bounds in a run: measured when they are due, in force from the next step on, and part of the run's state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.algorithms.spec import AlgorithmSpec
from lockstep.correction.spec import CorrectionSpec
from lockstep.rollout.spec import RolloutSpec
from lockstep.trainer.loop import RunResult
from lockstep.trainer.spec import CheckpointSpec, OptimSpec, RunSpec, UpdateSpec

MakeSpec = Callable[..., RunSpec]
Train = Callable[..., tuple[RunResult, list[dict[str, float]]]]


def test_calibrated_clipping_moves_the_bounds_and_survives_a_resume(
    make_spec: MakeSpec, train: Train, outcome: Callable[[Path], dict[str, Any]]
) -> None:
    common = {
        "algorithm": AlgorithmSpec("grpo", clip_low=0.005, clip_high=0.005, clip_calibration_every=2),
        "checkpoint": CheckpointSpec(every=2, keep=9),
        "optim": OptimSpec(lr=5e-3),
        "rollout": RolloutSpec(6, 8, 6),
    }
    whole = make_spec("fp8", name="whole", update=UpdateSpec(3, mini_batches=3), **common)
    result, metrics = train(whole)
    low, high = ([m[f"policy/clip_bound_{side}"] for m in metrics] for side in ("low", "high"))
    assert (low[0], high[0]) == pytest.approx((0.995, 1.005)), "nominal before the first measurement"
    assert (low[1], high[1]) == (low[2], high[2]) != (low[0], high[0]), "measured every second step"
    assert all(0 < x <= 1 for x in low) and all(x >= 1 for x in high)
    cut = make_spec("fp8", name="cut", update=UpdateSpec(2, mini_batches=3), **common)
    train(cut)
    resumed, _ = train(replace(cut, update=UpdateSpec(3, mini_batches=3)))
    assert resumed.digest == result.digest
    assert outcome(Path(cut.run_dir)) == outcome(Path(whole.run_dir))


def test_calibrated_clipping_of_a_bypassed_ratio(make_spec: MakeSpec, train: Train) -> None:
    """With one optimizer step everything beyond the clip is mismatch: from the second step on, fewer tokens are clipped."""
    rollout = RolloutSpec(4, 8, 6)
    common: dict[str, Any] = {
        "rollout": rollout,
        "correction": CorrectionSpec("bypass"),
        "optim": OptimSpec(lr=1e-5),
    }
    shares = {}
    for every in (0, 1):
        algorithm = AlgorithmSpec("grpo", clip_low=0.01, clip_high=0.01, clip_calibration_every=every)
        spec = make_spec(
            "fp8-rollout", name=f"every{every}", algorithm=algorithm, update=UpdateSpec(4), **common
        )
        _, metrics = train(spec)
        shares[every] = [m["policy/clip_fraction_low"] + m["policy/clip_fraction_high"] for m in metrics]
    assert shares[0][0] == shares[1][0] > 0.05
    assert all(a < 0.5 * b for a, b in zip(shares[1][2:], shares[0][2:]))
