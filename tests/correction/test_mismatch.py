"""The mismatch measures against an independent float64 reimplementation, and the correction weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.correction.mismatch import (
    ALIASES,
    POSITION_EDGES,
    POSITION_NAMES,
    Mismatch,
    nearest_rank,
)

LOGP = st.floats(-20, 0, width=32)
Pairs = list[tuple[float, float]]
SEQUENCES = st.lists(st.lists(st.tuples(LOGP, LOGP), min_size=1, max_size=9), min_size=1, max_size=6)


def seen(sequences: Sequence[Pairs], order: Sequence[int] | None = None, **options: float) -> Mismatch:
    """One call of `see` over these sequences; `order` permutes the tokens, each sequence keeping its own order."""
    tokens = [(t, r, s) for s, pairs in enumerate(sequences) for t, r in pairs]
    tokens = [tokens[i] for i in order] if order is not None else tokens
    mismatch = Mismatch(**options)
    mismatch.see(
        *(torch.tensor([t[i] for t in tokens]) for i in range(2)), torch.tensor([t[2] for t in tokens])
    )
    return mismatch


def same(a: dict[str, float], b: dict[str, float], digits: float = 1e-9) -> None:
    """Equal names, and values to rounding."""
    assert a.keys() == b.keys()
    wrong = {k: (a[k], b[k]) for k in a if not math.isclose(a[k], b[k], rel_tol=digits, abs_tol=digits)}
    assert not wrong


def expected(sequences: Sequence[Pairs], extreme: float) -> dict[str, float]:
    """Every metric from its definition, one token after the other in Python floats."""
    tokens = [(t, r) for pairs in sequences for t, r in pairs]
    n, s = len(tokens), len(sequences)
    d = [t - r for t, r in tokens]
    r = [math.exp(min(max(x, -20.0), 20.0)) for x in d]
    ascending = sorted(map(abs, d))
    mixture = [math.log(0.5 * math.exp(t) + 0.5 * math.exp(q)) for t, q in tokens]
    js = [
        0.5 * (math.exp(t - m) - (t - m) - 1) + 0.5 * (math.exp(q - m) - (q - m) - 1)
        for (t, q), m in zip(tokens, mixture)
    ]
    log_ppl = [[-math.fsum(x[i] for x in pairs) / len(pairs) for pairs in sequences] for i in (0, 1)]
    gap = [a - b for a, b in zip(*log_ppl)]
    products = [math.exp(min(max(math.fsum(t - q for t, q in pairs), -20), 20)) for pairs in sequences]
    found = {
        "mismatch/max_abs_dlogp": ascending[-1],
        "mismatch/mean_abs_dlogp": math.fsum(ascending) / n,
        "mismatch/p99_abs_dlogp": next(x for i, x in enumerate(ascending, 1) if 100 * i >= 99 * n),
        "mismatch/kl_k1": -math.fsum(d) / n,
        "mismatch/kl_k3": math.fsum(math.exp(x) - 1 - x for x in d) / n,
        "mismatch/chi2_token": math.fsum(x * x for x in r) / n - 1,
        "mismatch/chi2_seq": math.fsum(x * x for x in products) / s - 1,
        "mismatch/ess": math.fsum(r) ** 2 / (n * math.fsum(x * x for x in r)),
        "mismatch/exact_tokens": sum(x == 0 for x in d) / n,
        "mismatch/extreme_tokens": sum(abs(x) > extreme for x in d) / n,
        "mismatch/tokens": float(n),
        "mismatch/trainer_ppl": math.fsum(map(math.exp, log_ppl[0])) / s,
        "mismatch/rollout_ppl": math.fsum(map(math.exp, log_ppl[1])) / s,
        "mismatch/ppl_ratio": math.fsum(map(math.exp, gap)) / s,
        "mismatch/log_ppl_diff": math.fsum(gap) / s,
        "rollout_corr/training_log_ppl": math.fsum(log_ppl[0]) / s,
        "rollout_corr/rollout_log_ppl": math.fsum(log_ppl[1]) / s,
        "rollout_corr/log_ppl_abs_diff": math.fsum(map(abs, gap)) / s,
        "rollout_corr/log_ppl_diff_max": max(gap),
        "rollout_corr/log_ppl_diff_min": min(gap),
        "token_mult_prob_error": math.fsum(math.exp(abs(x)) for x in d) / n,
        "policy_kl_error": math.fsum(math.exp(-x) - 1 + x for x in d) / n,
        "js_divergence_error": math.fsum(js) / n,
        "sampling_importance_ratio": math.fsum(r) / n,
    }
    bounds = [0, *POSITION_EDGES, 10**9]
    for name, low, high in zip(POSITION_NAMES, bounds, bounds[1:]):
        there = [abs(t - q) for pairs in sequences for i, (t, q) in enumerate(pairs) if low <= i < high]
        if there:
            found[f"mismatch/position_{name}"] = math.fsum(there) / len(there)
    return found | {theirs: found[ours] for theirs, ours in ALIASES.items()}


def test_nothing_seen_claims_nothing() -> None:
    assert Mismatch().metrics() == {"mismatch/tokens": 0.0}
    empty = Mismatch()
    empty.see(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int64))
    assert empty.metrics() == {"mismatch/tokens": 0.0} and empty.max_abs == 0.0


def test_equal_log_probabilities_are_exact_in_every_measure() -> None:
    """Zero is +0 and one is 1, to the bit: a unified flow's log must not show rounding of its own."""
    logp = torch.tensor([-1.0, -0.0, -3.25, -17.3, -0.1, -1e-6])
    mismatch = Mismatch()
    mismatch.see(logp, logp.abs().neg(), torch.tensor([0, 0, 1, 1, 1, 1]))
    metrics = mismatch.metrics()
    ones = {"ess", "exact_tokens", "ppl_ratio", "token_mult_prob_error", "sampling_importance_ratio"}
    described = {
        "tokens",
        "trainer_ppl",
        "rollout_ppl",
        "training_ppl",
        "training_log_ppl",
        "rollout_log_ppl",
    }
    for name, value in metrics.items():
        short = name.rpartition("/")[2]
        if short in described:
            continue
        assert value == (1.0 if short in ones else 0.0) and math.copysign(1, value) == 1, name
    assert metrics["mismatch/trainer_ppl"] == metrics["mismatch/rollout_ppl"] > 1


def test_one_ulp_is_not_exact() -> None:
    rollout = torch.tensor([-1.0, -2.0])
    mismatch = Mismatch()
    mismatch.see(torch.nextafter(rollout, torch.zeros(2)), rollout)
    assert mismatch.exact == 0 and 0 < mismatch.max_abs < 1e-6


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SEQUENCES, st.floats(0.1, 3))
def test_measures_follow_their_definitions(sequences: list[Pairs], extreme: float) -> None:
    found = seen(sequences, extreme=extreme).metrics()
    same(found, expected(sequences, extreme))
    assert found["mismatch/kl_k3"] >= 0 and found["token_mult_prob_error"] >= 1
    assert 0 < found["mismatch/ess"] <= 1 + 1e-12


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SEQUENCES, st.data())
def test_micro_batches_and_ranks_add_up(sequences: list[Pairs], data: st.DataObject) -> None:
    """Cut anywhere between sequences, seen by one process or by two that merge, and in any order of tokens."""
    whole = seen(sequences).metrics()
    cut = data.draw(st.integers(0, len(sequences)))
    one, two = seen(sequences[:cut]) if cut else Mismatch(), Mismatch()
    for pairs in sequences[cut:]:
        two.see(torch.tensor([t for t, _ in pairs]), torch.tensor([r for _, r in pairs]))
    for merged in (one.merge(two).metrics(), two.merge(one).metrics()):
        same(merged, whole, 1e-12)
        for name in ("max_abs_dlogp", "p99_abs_dlogp", "exact_tokens", "extreme_tokens", "tokens"):
            assert merged[f"mismatch/{name}"] == whole[f"mismatch/{name}"], name
    assert one.merge(two).tokens == sum(map(len, sequences)), "merging leaves both as they were"
    owners = data.draw(st.permutations([s for s, pairs in enumerate(sequences) for _ in pairs]))
    starts = [sum(map(len, sequences[:s])) for s in range(len(sequences))]
    order = []
    for s in owners:
        order.append(starts[s])
        starts[s] += 1
    same(seen(sequences, order).metrics(), whole, 1e-12)


def test_merging_different_thresholds_is_refused() -> None:
    with pytest.raises(ValueError, match="extreme tokens"):
        Mismatch(0.5).merge(Mismatch(0.7))


@pytest.mark.parametrize(("n", "rank"), [(1, 1), (99, 99), (100, 99), (101, 100), (250, 248), (1000, 990)])
def test_the_percentile_is_a_value_of_a_token(n: int, rank: int) -> None:
    value = torch.arange(1.0, n + 1, dtype=torch.float64)[torch.randperm(n)]
    assert nearest_rank(value, 0.99) == rank


def test_positions_count_within_a_sequence() -> None:
    """One token of 20 differs; only its group of positions shows it."""
    rollout = torch.full((40,), -2.0)
    trainer = rollout.clone()
    trainer[20 + 17] += 1.0
    mismatch = Mismatch()
    mismatch.see(trainer, rollout, torch.arange(2).repeat_interleave(20))
    found = {k: v for k, v in mismatch.metrics().items() if "/position_" in k}
    assert found == {
        "mismatch/position_0-3": 0.0,
        "mismatch/position_4-15": 0.0,
        "mismatch/position_16-63": 1.0 / 8,
    }


def test_a_broken_token_is_bounded_where_weights_are_squared() -> None:
    mismatch = Mismatch()
    mismatch.see(torch.tensor([-1.0, 0.0]), torch.tensor([-1.0, -3e4]))
    metrics = mismatch.metrics()
    assert metrics["mismatch/chi2_token"] == pytest.approx(math.exp(40) / 2)
    assert metrics["mismatch/ess"] == pytest.approx(0.5) and metrics["mismatch/max_abs_dlogp"] == 3e4


@pytest.mark.parametrize("place", [0, 1])
def test_case_44_nan_is_never_swallowed(place: int) -> None:
    mismatch = Mismatch()
    chunks = [torch.tensor([-1.0, -1.5]), torch.tensor([float("nan"), -1.5])]
    for chunk in (chunks[place], chunks[1 - place]):
        mismatch.see(chunk, torch.tensor([-1.0, -1.0]))
    assert math.isnan(mismatch.max_abs)
    blind = {"exact_tokens", "extreme_tokens", "tokens", "rollout_ppl", "rollout_log_ppl"}
    for name, value in mismatch.metrics().items():
        assert math.isnan(value) or name.rpartition("/")[2] in blind, name
