"""Weights and masks against an independent reimplementation in plain Python, and the properties they owe."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.correction.policies import OldLogp, RolloutLogp
from lockstep.correction.presets import PRESETS, Correction, PresetName
from lockstep.correction.weights import Corrected, ais_strength, correct, effective_share

Batch = list[list[tuple[float, float]]]
LOGP = st.floats(-8, 0, width=32)
BATCHES = st.lists(st.lists(st.tuples(LOGP, LOGP), min_size=1, max_size=6), min_size=1, max_size=6)
LEVELS = ("none", "token", "sequence", "geometric")


@st.composite
def corrections(draw: st.DrawFn) -> Correction:
    """Any correction that means something, thresholds near enough to bite."""
    rollout_is, rollout_rs = draw(st.sampled_from(LEVELS)), draw(st.sampled_from(LEVELS))
    weighs = rollout_is != "none"
    return Correction(
        rollout_is=rollout_is,  # type: ignore[arg-type]
        rollout_is_threshold=draw(st.sampled_from([1.1, 2.0, 5.0, math.inf])) if weighs else math.inf,
        rollout_is_threshold_lower=draw(st.sampled_from([0.0, 0.3])) if weighs else 0.0,
        rollout_is_batch_normalize=weighs and draw(st.booleans()),
        ess_target=draw(st.sampled_from([0.0, 0.5, 0.95])) if weighs else 0.0,
        rollout_rs=rollout_rs,  # type: ignore[arg-type]
        rollout_rs_threshold=draw(st.sampled_from([1.3, 5.0])) if rollout_rs != "none" else math.inf,
        rollout_rs_threshold_lower=draw(st.sampled_from([0.0, 0.4])) if rollout_rs != "none" else 0.0,
        rollout_token_veto_threshold=draw(st.sampled_from([0.0, 1e-2])),
        count_masked_tokens=rollout_rs == "token" and draw(st.booleans()),
    )


def run(batch: Batch, correction: Correction, order: list[int] | None = None) -> Corrected:
    """`correct` on a batch, its sequences in this order."""
    order = list(range(len(batch))) if order is None else order
    old = torch.tensor([p for i in order for p, _ in batch[i]])
    rollout = torch.tensor([q for i in order for _, q in batch[i]])
    sample = torch.tensor([k for k, i in enumerate(order) for _ in batch[i]])
    return correct(OldLogp(old), RolloutLogp(rollout), sample, len(batch), correction)


def by_hand(batch: Batch, c: Correction) -> dict[str, Any]:
    """Every sequence: [(kept, weight)] of its tokens, and whether it stays."""
    d = [[p - q for p, q in sequence] for sequence in batch]
    ratio = {
        "token": [list(x) for x in d],
        "sequence": [[math.fsum(x)] * len(x) for x in d],
        "geometric": [[math.fsum(x) / len(x)] * len(x) for x in d],
    }

    def inside(x: float) -> bool:
        low = math.log(c.rollout_rs_threshold_lower) if c.rollout_rs_threshold_lower else -math.inf
        return low <= x <= math.log(c.rollout_rs_threshold)

    ok = (
        [[True] * len(x) for x in d]
        if c.rollout_rs == "none"
        else [[inside(x) for x in s] for s in ratio[c.rollout_rs]]
    )
    vetoed = [
        c.rollout_token_veto_threshold > 0 and min(x) < math.log(c.rollout_token_veto_threshold) for x in d
    ]
    counted = [[True] * len(x) if c.count_masked_tokens else x for x in ok]
    stays = [not v and any(k) for v, k in zip(vetoed, counted)]
    kept = [[k and s for k in tokens] for tokens, s in zip(counted, stays)]

    raw = [[1.0] * len(x) for x in d]
    if c.rollout_is != "none":
        raw = [[math.exp(min(max(x, -20.0), 20.0)) for x in s] for s in ratio[c.rollout_is]]
        raw = [[min(max(w, c.rollout_is_threshold_lower), c.rollout_is_threshold) for w in s] for s in raw]

    def items(weights: list[list[float]]) -> list[float]:
        if c.rollout_is == "token":
            return [w for s, k in zip(weights, kept) for w, keep in zip(s, k) if keep]
        return [s[0] for s, keep in zip(weights, stays) if keep]

    if c.ess_target and any(stays):
        low, high = 0.0, 1.0
        for _ in range(200):  # bisection, where the code has a formula
            middle = (low + high) / 2
            mixed = [1 + middle * (w - 1) for w in items(raw)]
            share = math.fsum(mixed) ** 2 / (len(mixed) * math.fsum(w * w for w in mixed))
            low, high = (middle, high) if share >= c.ess_target else (low, middle)
        raw = [[1 + high * (w - 1) for w in s] for s in raw]
    masked = [[0.0 if not o else w for w, o in zip(s, k)] for s, k in zip(raw, ok)]
    if c.rollout_is_batch_normalize and any(stays):
        values = items(masked if c.rollout_is == "token" else raw)
        mean = math.fsum(values) / len(values)
        masked = [[w / mean if mean > 0 else w for w in s] for s in masked]
    weight = [[w if k else 0.0 for w, k in zip(s, keep)] for s, keep in zip(masked, kept)]
    return {"stays": stays, "kept": kept, "weight": weight, "vetoed": vetoed, "inside": ok, "raw": raw}


def flat(nested: list[list[Any]]) -> list[Any]:
    return [x for row in nested for x in row]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(BATCHES, corrections())
def test_against_plain_python(batch: Batch, correction: Correction) -> None:
    found, expected = run(batch, correction), by_hand(batch, correction)
    assert found.keep_S.tolist() == expected["stays"] and found.keep_N.tolist() == flat(expected["kept"])
    assert found.weight_N.dtype == torch.float32 and not found.weight_N.requires_grad
    torch.testing.assert_close(
        found.weight_N.double(), torch.tensor(flat(expected["weight"])).double(), rtol=2e-6, atol=1e-7
    )
    metrics = {k.removeprefix("rollout_corr/"): v for k, v in found.metrics.items()}
    assert all(math.isfinite(v) for v in metrics.values())
    if correction.rollout_token_veto_threshold:
        assert metrics["rollout_is_veto_fraction"] == pytest.approx(sum(expected["vetoed"]) / len(batch))
    if correction.rollout_rs != "none":
        outside = [not x for x in flat(expected["inside"])]
        assert metrics["rollout_rs_masked_fraction"] == pytest.approx(sum(outside) / len(outside))
        some = [not all(x) for x in expected["inside"]]
        assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(sum(some) / len(some))
    if correction.rejects:
        assert metrics["rejected_fraction"] == pytest.approx(1 - sum(expected["stays"]) / len(batch))
    assert ("rollout_is_mean" in metrics) == (correction.rollout_is != "none" and any(expected["stays"]))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(BATCHES, corrections(), st.randoms(use_true_random=False))
def test_the_order_of_sequences_changes_no_mask_and_no_weight(
    batch: Batch, correction: Correction, rng: Any
) -> None:
    order = list(range(len(batch)))
    rng.shuffle(order)
    lengths = [len(s) for s in batch]
    one, two = run(batch, correction), run(batch, correction, order)
    assert [bool(one.keep_S[i]) for i in order] == two.keep_S.tolist()
    for name, rtol in (("keep_N", 0.0), ("weight_N", 3e-7)):
        parts = getattr(one, name).split(lengths)
        expected = torch.cat([parts[i] for i in order]).double()
        torch.testing.assert_close(getattr(two, name).double(), expected, rtol=rtol, atol=0)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(BATCHES, corrections(), st.integers(1, 5))
def test_a_cut_into_micro_batches_changes_no_bit(batch: Batch, correction: Correction, cut: int) -> None:
    correction = dataclasses.replace(correction, rollout_is_batch_normalize=False, ess_target=0.0)
    batch, cut = batch * 2, 1 + cut % len(batch)
    whole, parts = run(batch, correction), (run(batch[:cut], correction), run(batch[cut:], correction))
    for name in ("weight_N", "keep_N", "keep_S"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(p, name) for p in parts]))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(BATCHES, corrections())
def test_masks_and_denominators_are_consistent_case_42(batch: Batch, correction: Correction) -> None:
    """A token that doesn't count has weight 0; a rejected sequence has no counted token, a kept one has some; and a masked
    token counts only where that is asked for."""
    found = run(batch, correction)
    kept_tokens = [int(k.sum()) for k in found.keep_N.split([len(s) for s in batch])]
    assert [n > 0 for n in kept_tokens] == found.keep_S.tolist()
    assert torch.equal(found.weight_N[~found.keep_N], torch.zeros(int((~found.keep_N).sum())))
    if correction.count_masked_tokens:
        assert kept_tokens == [len(s) if k else 0 for s, k in zip(batch, found.keep_S.tolist())]
    elif correction.rollout_is_threshold_lower == 0 and not correction.ess_target:
        assert bool((found.weight_N[found.keep_N] > 0).all())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(BATCHES, corrections())
def test_equal_policies_are_left_alone(batch: Batch, correction: Correction) -> None:
    """In a unified flow every correction does exactly nothing."""
    found = run([[(p, p) for p, _ in s] for s in batch], correction)
    assert bool(found.keep_S.all()) and bool(found.keep_N.all())
    assert torch.equal(found.weight_N, torch.ones_like(found.weight_N)) and found.length_trap == 1.0


@settings(max_examples=150, deadline=None, derandomize=True)
@given(BATCHES)
def test_a_sequence_weight_is_the_product_of_its_token_weights(batch: Batch) -> None:
    plain = Correction(rollout_is="token")
    tokens = run(batch, plain).weight_N.double().split([len(s) for s in batch])
    sequences = run(batch, dataclasses.replace(plain, rollout_is="sequence")).weight_N.split(
        [len(s) for s in batch]
    )
    for token, sequence in zip(tokens, sequences):
        product = float(token.log().sum().clamp(-20, 20).exp())
        assert torch.equal(sequence, sequence[0].expand_as(sequence))
        assert math.isclose(float(sequence[0]), product, rel_tol=1e-5)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.floats(0.01, 20), min_size=2, max_size=30), st.floats(0.05, 0.99))
def test_the_strength_is_the_largest_that_reaches_the_target(weights: list[float], target: float) -> None:
    w = torch.tensor(weights, dtype=torch.float64)
    strength = ais_strength(w, target)
    assert 0 < strength <= 1
    assert effective_share(1 + strength * (w - 1)) >= target - 1e-9
    if strength < 1:
        assert effective_share(1 + min(1.0, 1.001 * strength) * (w - 1)) < target
    else:
        assert effective_share(w) >= target - 1e-9


def batch_of(d: list[list[float]]) -> Batch:
    return [[(-1.0 + x, -1.0) for x in s] for s in d]


def weights_of(name: PresetName, d: list[list[float]], **changes: Any) -> list[float]:
    return run(batch_of(d), dataclasses.replace(PRESETS[name], **changes)).weight_N.tolist()


def test_presets_on_a_batch_written_out() -> None:
    """Log ratios of -0.9 (0.41), 0.9 (2.46), 1.8 (6.05) and none at all."""
    d = [[0.0, 0.9], [-0.9, 0.0], [0.0, 0.0], [1.8, 0.0]]
    e = math.exp
    close = {"rel": 1e-6}
    assert weights_of("none", d) == [1.0] * 8
    assert weights_of("token_tis", d) == pytest.approx([1, 2, e(-0.9), 1, 1, 1, 2, 1], **close)
    assert weights_of("sequence_tis", d) == pytest.approx([2, 2, e(-0.9), e(-0.9), 1, 1, 2, 2], **close)
    assert weights_of("sequence_mis", d) == pytest.approx([0, 0, e(-0.9), e(-0.9), 1, 1, 0, 0], **close)
    assert weights_of("icepop", d) == pytest.approx([1, e(0.9), 0, 1, 1, 1, 0, 1], **close)
    assert weights_of("geometric_mis", d) == [0, 0, 0, 0, 1, 1, 0, 0]
    wide = {"rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 0.5}
    assert weights_of("geometric_token_tis", d, **wide) == pytest.approx(
        [1, 2, e(-0.9), 1, 1, 1, 0, 0], **close
    )
    assert weights_of("veto", d, rollout_token_veto_threshold=0.5) == [1, 1, 0, 0, 1, 1, 1, 1]
    assert weights_of("bypass", d) == [1.0] * 8


def test_a_threshold_itself_is_kept() -> None:
    d = [[math.log(5.0)], [math.log(0.5)], [math.log(5.0) + 1e-6], [math.log(0.5) - 1e-6]]
    assert run(batch_of(d), PRESETS["icepop"]).keep_S.tolist()[2:] == [False, False]
    exact = Correction(rollout_rs="token", rollout_rs_threshold=1.0, rollout_rs_threshold_lower=1.0)
    assert run(batch_of([[0.0, 0.1], [0.0]]), exact).keep_N.tolist() == [True, False, True]


def test_the_length_trap_warns_where_the_sequence_ratio_is_used_case_38() -> None:
    """Honest noise of 0.02: harmless over 100 tokens, a factor of 6 over 8,192 (FACTS: a third of sequences exceed 2)."""
    generator = torch.Generator().manual_seed(0)

    def batch(length: int) -> tuple[OldLogp, RolloutLogp, Tensor]:
        q = -torch.rand(8 * length, generator=generator) * 3 - 1
        p = q + 0.02 * torch.randn(8 * length, generator=generator)
        return OldLogp(p), RolloutLogp(q), torch.arange(8).repeat_interleave(length)

    for name, correction in PRESETS.items():
        short, long = (correct(*batch(n), 8, correction) for n in (100, 8192))
        assert 1.0 < short.length_trap < 1.5 and short.warning == ""
        assert 5.0 < long.length_trap < 8.0
        assert bool(long.warning) is (name in ("sequence_tis", "sequence_mis")), name
        if long.warning:
            assert "set rollout_is to token, rollout_rs to token or geometric" in long.warning
            assert "8192 tokens" in long.warning and "length trap" in long.warning
            assert long.metrics["rollout_corr/length_trap"] == long.length_trap
    drift = correct(
        OldLogp(torch.full((100,), -1.0)),
        RolloutLogp(torch.full((100,), -1.02)),
        torch.zeros(100, dtype=torch.int64),
        1,
        PRESETS["sequence_tis"],
    )
    assert drift.length_trap == pytest.approx(math.exp(2.0), rel=1e-4), (
        "a bias of the same sign adds up without noise"
    )
    only_rejects = Correction(rollout_rs="sequence", rollout_rs_threshold=2.0)
    assert "correction.rollout_rs is sequence" in correct(*batch(8192), 8, only_rejects).warning


def test_statistics_under_verls_names() -> None:
    d = [[0.0, 0.9], [-0.9, 0.0]]
    found = {
        k.removeprefix("rollout_corr/"): v for k, v in run(batch_of(d), PRESETS["token_tis"]).metrics.items()
    }
    raw, applied = [1, math.exp(0.9), math.exp(-0.9), 1], [1, 2.0, math.exp(-0.9), 1]
    mean = sum(applied) / 4
    expected = {
        "rollout_is_mean": mean,
        "rollout_is_std": math.sqrt(sum((w - mean) ** 2 for w in applied) / 4),
        "rollout_is_min": min(raw),
        "rollout_is_max": max(raw),
        "rollout_is_eff_sample_size": sum(applied) ** 2 / (4 * sum(w * w for w in applied)),
        "rollout_is_ratio_fraction_high": 0.25,
        "rollout_is_ratio_fraction_low": 0.25,
        "rollout_is_seq_mean": mean,
        "rollout_is_seq_min": (1 + math.exp(-0.9)) / 2,
        "rollout_is_seq_max": 1.5,
        "rollout_is_seq_max_deviation": 0.5,
        "rollout_is_seq_fraction_high": 0.0,
        "rollout_is_seq_fraction_low": 0.0,
    }
    assert {k: found[k] for k in expected} == pytest.approx(expected, rel=1e-6)
    sequence = {
        k.removeprefix("rollout_corr/"): v
        for k, v in run(batch_of(d), PRESETS["sequence_tis"]).metrics.items()
    }
    assert sequence["rollout_is_mean"] == pytest.approx((2 + math.exp(-0.9)) / 2)
    assert sequence["rollout_is_ratio_fraction_high"] == 0.5


def test_a_batch_that_is_rejected_as_a_whole() -> None:
    found = run(batch_of([[3.0], [-3.0, -3.0]]), PRESETS["geometric_token_tis"])
    assert not bool(found.keep_S.any()) and not bool(found.keep_N.any())
    assert torch.equal(found.weight_N, torch.zeros(3))
    assert found.metrics["rollout_corr/rejected_fraction"] == 1.0
    assert "rollout_corr/rollout_is_mean" not in found.metrics


def test_huge_ratios_stay_finite() -> None:
    batch = [[(-0.5, -3e4)], [(-3e4, -0.5)], [(-1.0, -1.0)]]
    for correction in PRESETS.values():
        found = run(batch, correction)
        assert bool(torch.isfinite(found.weight_N).all()) and all(map(math.isfinite, found.metrics.values()))
    untruncated = run(batch, Correction(rollout_is="token")).weight_N
    assert untruncated.tolist() == pytest.approx([math.exp(20), math.exp(-20), 1.0])
