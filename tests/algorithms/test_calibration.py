"""Calibrated clip bounds: they clip what the nominal bounds clip without the noise."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.algorithms import AlgorithmSpec, ClipBounds, calibrated_bounds, resolve

NOMINAL = ClipBounds(0.8, 1.28)
TOKENS = st.lists(
    st.tuples(st.floats(0.3, 3.0), st.floats(0.5, 2.0), st.floats(-2, 2)), min_size=1, max_size=40
)


def vectors(tokens: list[tuple[float, float, float]]) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.tensor(x, dtype=torch.float64) for x in zip(*tokens))  # type: ignore[return-value]


def balance(ratio: list[float], advantage: list[float], bounds: ClipBounds) -> float:
    positive = math.fsum(a * r for a, r in zip(advantage, ratio) if a > 0 and r <= bounds.upper)
    negative = math.fsum(-a * r for a, r in zip(advantage, ratio) if a < 0 and r >= bounds.lower)
    return positive / negative if positive and negative else math.nan


@settings(max_examples=200, deadline=None, derandomize=True)
@given(TOKENS)
def test_without_noise_the_bounds_are_the_nominal_ones(tokens: list[tuple[float, float, float]]) -> None:
    _, reference, advantage = vectors(tokens)
    assert calibrated_bounds(reference, reference, advantage, NOMINAL) == NOMINAL


@settings(max_examples=300, deadline=None, derandomize=True)
@given(TOKENS)
def test_as_many_negative_tokens_are_clipped_as_in_the_reference(
    tokens: list[tuple[float, float, float]],
) -> None:
    ratio, reference, advantage = vectors(tokens)
    found = calibrated_bounds(ratio, reference, advantage, NOMINAL)
    assert 0 < found.lower <= 1 <= found.upper
    noisy = [r for r, a in zip(ratio.tolist(), advantage.tolist()) if a < 0]
    wanted = sum(r < NOMINAL.lower for r, a in zip(reference.tolist(), advantage.tolist()) if a < 0)
    clipped = sum(r < found.lower for r in noisy)
    ties = len(noisy) - len(set(noisy))
    if found.lower < 1:
        assert abs(clipped - wanted) <= ties
    else:
        assert clipped <= wanted + ties, "a bound above 1 would stop tokens that haven't moved"
    if len(noisy) == 0:
        assert found.lower == NOMINAL.lower


@settings(max_examples=300, deadline=None, derandomize=True)
@given(TOKENS)
def test_no_upper_bound_restores_the_balance_better(tokens: list[tuple[float, float, float]]) -> None:
    ratio, reference, advantage = vectors(tokens)
    found = calibrated_bounds(ratio, reference, advantage, NOMINAL)
    wanted = balance(reference.tolist(), advantage.tolist(), NOMINAL)
    if math.isnan(wanted):
        assert found.upper == NOMINAL.upper
        return
    negative = math.fsum(
        -a * r for a, r in zip(advantage.tolist(), ratio.tolist()) if a < 0 and r >= found.lower
    )

    def miss(upper: float) -> float:
        kept = math.fsum(a * r for a, r in zip(advantage.tolist(), ratio.tolist()) if a > 0 and r <= upper)
        return abs(kept - wanted * negative)

    others = [r for r, a in zip(ratio.tolist(), advantage.tolist()) if a > 0 and r >= 1] + [1.0, 4.0]
    assert miss(found.upper) <= min(map(miss, others)) + 1e-9


def test_noise_that_pushes_negative_tokens_out_widens_the_bounds() -> None:
    """The failure of arXiv 2609.22870: noise of 0.1 clips many times the negative tokens that moved; calibrated, it doesn't."""
    generator = torch.Generator().manual_seed(0)
    n = 20_000
    true = (0.08 * torch.randn(n, generator=generator, dtype=torch.float64)).exp()
    noisy = true * (0.1 * torch.randn(n, generator=generator, dtype=torch.float64)).exp()
    advantage = torch.randn(n, generator=generator, dtype=torch.float64)
    negative = advantage < 0
    bounds = ClipBounds(0.8, 1.2)
    found = calibrated_bounds(noisy, true, advantage, bounds)
    share = [
        float((r[negative] < b.lower).double().mean())
        for r, b in ((true, bounds), (noisy, bounds), (noisy, found))
    ]
    assert share[1] > 5 * share[0] and share[2] == share[0]
    assert found.lower < 0.8 and found.upper > 1.2
    before, naive, after = (
        balance(r.tolist(), advantage.tolist(), b)
        for r, b in ((true, bounds), (noisy, bounds), (noisy, found))
    )
    assert abs(after - before) < 1e-3 < abs(naive - before)


def test_the_mismatch_in_a_bypassed_ratio_is_not_clipped() -> None:
    """One optimizer step: current is old, so the reference ratio is 1 and only the mismatch could be clipped: nothing is."""
    mismatch = torch.tensor([0.5, 0.9, 1.0, 1.1, 1.9], dtype=torch.float64)
    advantage = torch.tensor([-1.0, 1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    found = calibrated_bounds(mismatch, torch.ones(5, dtype=torch.float64), advantage, ClipBounds(0.8, 1.2))
    assert found.lower == 0.5 and not bool((mismatch[advantage < 0] < found.lower).any())


def test_absent_bounds_stay_absent() -> None:
    ratio = torch.tensor([0.1, 5.0, 0.2, 3.0])
    found = calibrated_bounds(
        ratio, torch.ones(4), torch.tensor([-1.0, 1.0, -1.0, 1.0]), ClipBounds(0.0, math.inf)
    )
    assert found == ClipBounds(0.0, math.inf)
    assert ClipBounds(0.8, math.inf).towards(ClipBounds(0.6, math.inf), 0.5) == ClipBounds(
        pytest.approx(0.7),
        math.inf,  # type: ignore[arg-type]
    )
    assert ClipBounds(0.8, 1.2).towards(ClipBounds(0.6, 1.6), 0.25) == ClipBounds(
        pytest.approx(0.75),
        pytest.approx(1.3),  # type: ignore[arg-type]
    )


def test_what_is_no_ratio_is_refused() -> None:
    one = torch.ones(3)
    for bad in (0.0, -1.0, math.nan, math.inf):
        wrong = torch.tensor([1.0, bad, 1.0])
        for ratio, reference in ((wrong, one), (one, wrong)):
            with pytest.raises(ValueError, match="not positive and finite"):
                calibrated_bounds(ratio, reference, one, NOMINAL)
    with pytest.raises(ValueError, match=re.escape("(2,) references")):
        calibrated_bounds(one, torch.ones(2), one, NOMINAL)


def test_the_option_belongs_to_losses_that_clip_the_token() -> None:
    assert resolve(AlgorithmSpec("dapo", clip_calibration_every=20)).clip_calibration_every == 20
    for name in ("gspo", "cispo", "rloo"):
        with pytest.raises(ValueError, match="doesn't clip the token's ratio"):
            AlgorithmSpec(name, clip_calibration_every=20)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must not be negative"):
        AlgorithmSpec(clip_calibration_every=-1)
