"""The door that every sample has to pass (field failure 44): what breaks the contract is dropped and counted, never filled in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lockstep.errors import DataError
from lockstep.rollout.types import Completion, Request, SamplingParams, VersionSpan
from lockstep.trainer.sample import admit, defect
from lockstep.trainer.spec import RunSpec

GOOD = Completion((1, 2), 0, 0, (3, 4), (-0.5, -0.0), "stop", (VersionSpan(7, 0, 2),), 2, SamplingParams(4))
BAD = {
    "no_tokens": replace(GOOD, token_ids=(), logprobs=()),
    "logprob_count": replace(GOOD, logprobs=(-0.5,)),
    "logprob_nonfinite": replace(GOOD, logprobs=(-0.5, float("nan"))),
    "logprob_positive": replace(GOOD, logprobs=(1e-9, -0.5)),
    "wrong_version": replace(GOOD, spans=(VersionSpan(7, 0, 1), VersionSpan(6, 1, 2))),
}


def test_a_good_sample_passes() -> None:
    assert defect(GOOD, 7, 2) is None
    assert admit([GOOD, GOOD], 7, 2) == ([GOOD, GOOD], {})


@pytest.mark.parametrize("reason", BAD)
def test_case_44_each_defect_has_its_name(reason: str) -> None:
    assert defect(BAD[reason], 7, 2) == reason


def test_minus_infinity_and_other_scales_are_defects_too() -> None:
    assert defect(replace(GOOD, logprobs=(-math.inf, -1.0)), 7, 2) == "logprob_nonfinite"
    assert defect(GOOD, 7, 1) == "wrong_version" == defect(GOOD, 8, 2)


def test_case_44_dropped_and_counted() -> None:
    kept, counts = admit([GOOD, *BAD.values(), BAD["no_tokens"]], 7, 2)
    assert kept == [GOOD]
    assert counts == {f"data/dropped_{r}": 2.0 if r == "no_tokens" else 1.0 for r in BAD}


def spoil(engine: Any, change: Callable[[int, Completion], Completion]) -> None:
    """Makes an engine return other completions than it drew."""
    honest = engine.generate

    def generate(requests: Sequence[Request], **options: Any) -> list[Completion]:
        return [change(i, c) for i, c in enumerate(honest(requests, **options))]

    engine.generate = generate


def test_case_44_a_step_goes_on_without_the_broken_ones(
    make_spec: Callable[..., RunSpec], open_trainer: Callable[[RunSpec], Any]
) -> None:
    def change(i: int, c: Completion) -> Completion:
        if i == 1:
            return replace(c, logprobs=(float("nan"), *c.logprobs[1:]))
        return replace(c, logprobs=c.logprobs[:-1]) if i in (4, 5, 6) else c

    with open_trainer(make_spec()) as trainer:
        trainer.begin()
        spoil(trainer.parts.engine, change)
        metrics = trainer.step()
    assert metrics["data/dropped_logprob_nonfinite"] == 1 and metrics["data/dropped_logprob_count"] == 3
    assert metrics["data/kept_groups"] == 2, "a group left with one sample has no baseline"
    assert metrics["mismatch/max_abs_dlogp"] == 0.0 and math.isfinite(metrics["optim/grad_norm"])


def test_a_step_without_any_good_sample_is_refused(
    make_spec: Callable[..., RunSpec], open_trainer: Callable[[RunSpec], Any]
) -> None:
    with open_trainer(make_spec()) as trainer:
        trainer.begin()
        spoil(trainer.parts.engine, lambda _, c: replace(c, logprobs=()))
        with pytest.raises(DataError, match="no completion of this step kept the sample contract"):
            trainer.step()
