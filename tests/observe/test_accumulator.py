"""Reductions over micro-batches, the phase timer, memory."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.observe.metrics import Accumulator, PhaseTimer, exact_sum, peak_memory, reproducible

finite = st.floats(-1e6, 1e6)


def test_each_reduction() -> None:
    acc = Accumulator()
    for value, weight in ((1.0, 1.0), (4.0, 3.0)):
        acc.add("mean", value, weight)
        for how in ("sum", "max", "min", "last"):
            acc.add(how, value, how=how)
    assert acc.result() == {"mean": 3.25, "sum": 5.0, "max": 4.0, "min": 1.0, "last": 4.0}


@given(st.lists(st.tuples(finite, st.integers(1, 1000)), min_size=1, max_size=30), st.randoms())
def test_order_and_ranks_do_not_matter(pairs: list[tuple[float, int]], rng: random.Random) -> None:
    whole, left, right = Accumulator(), Accumulator(), Accumulator()
    shuffled = list(pairs)
    rng.shuffle(shuffled)
    for value, weight in pairs:
        whole.add("m", value, weight)
        whole.add("s", value, how="sum")
    for index, (value, weight) in enumerate(shuffled):
        part = left if index % 2 else right
        part.add("m", value, weight)
        part.add("s", value, how="sum")
    left.merge(right)
    assert left.result() == whole.result()


@pytest.mark.parametrize("how", ["mean", "sum", "max", "min"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_is_never_lost(how: str, place: int) -> None:
    values = [1.0, 2.0]
    values.insert(place, math.nan)
    acc = Accumulator()
    for value in values:
        acc.add("m", value, how=how)  # type: ignore[arg-type]
    assert math.isnan(acc.result()["m"])


def test_infinities() -> None:
    assert exact_sum([1.0, math.inf]) == math.inf
    assert math.isnan(exact_sum([math.inf, -math.inf]))
    assert exact_sum([1e308, 1e308]) == math.inf
    acc = Accumulator()
    acc.add("m", math.inf, how="max")
    acc.add("m", 1.0, how="max")
    assert acc.result()["m"] == math.inf


def test_empty_micro_batch_carries_nothing() -> None:
    acc = Accumulator()
    acc.add("m", math.nan, weight=0)
    acc.add("m", 2.0, weight=5)
    acc.add("none", math.nan, weight=0)
    assert acc.result()["m"] == 2.0
    assert math.isnan(acc.result()["none"])


def test_misuse_is_refused() -> None:
    acc = Accumulator()
    acc.add("m", 1.0)
    with pytest.raises(ValueError, match="reduced by mean"):
        acc.add("m", 1.0, how="max")
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="weight"):
            acc.add("m", 1.0, weight)


def test_phases_do_not_overlap() -> None:
    now = [0.0]
    waits = []
    timer = PhaseTimer(clock=lambda: now[0], wait=lambda: waits.append(now[0]))
    with timer.phase("rollout"):
        now[0] += 2
        with timer.phase("reward"):
            now[0] += 3
        now[0] += 1
    now[0] += 4
    with timer.phase("rollout"):
        now[0] += 1
    assert timer.result() == {"time/rollout_s": 4.0, "time/reward_s": 3.0, "time/step_s": 11.0}
    assert len(waits) == 7
    now[0] += 5
    assert timer.result() == {"time/step_s": 5.0}


def test_phase_ends_with_an_exception() -> None:
    timer = PhaseTimer()
    with pytest.raises(KeyError), timer.phase("train"):
        raise KeyError
    assert set(timer.result()) == {"time/train_s", "time/step_s"}


def test_memory_and_reproducible_part() -> None:
    memory = peak_memory()
    assert 0.01 < memory["memory/rss_gb"] < 1000
    metrics = {"reward": 1.0, "time": 5.0, "time/step_s": 2.0, "data/epoch": 0.0, **memory}
    assert reproducible(metrics) == {"reward": 1.0, "data/epoch": 0.0}
