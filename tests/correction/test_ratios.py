"""Ratios against the product and the mean of their tokens, written out in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.correction.policies import OldLogp, RolloutLogp
from lockstep.correction.ratios import bounded_exp, log_ratios

LOGP = st.floats(-30, 0, width=32)
BATCHES = st.lists(st.lists(st.tuples(LOGP, LOGP), min_size=1, max_size=6), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(BATCHES, st.randoms(use_true_random=False))
def test_a_sequence_is_the_product_of_its_tokens(batch: list[list[tuple[float, float]]], rng: Any) -> None:
    tokens = [(i, p, q) for i, sequence in enumerate(batch) for p, q in sequence]
    rng.shuffle(tokens)
    sample, p, q = (list(x) for x in zip(*tokens))
    ratios = log_ratios(
        OldLogp(torch.tensor(p)), RolloutLogp(torch.tensor(q)), torch.tensor(sample), len(batch)
    )
    assert ratios.token_N.tolist() == [a - b for a, b in zip(p, q)]
    for i, sequence in enumerate(batch):
        product = math.fsum(a - b for a, b in sequence)
        assert math.isclose(float(ratios.sequence_S[i]), product, rel_tol=1e-12, abs_tol=1e-12)
        mean = product / len(sequence)
        assert math.isclose(float(ratios.geometric_S[i]), mean, rel_tol=1e-12, abs_tol=1e-12)
    for level, per_sequence in (("sequence", ratios.sequence_S), ("geometric", ratios.geometric_S)):
        assert ratios.per_token(level).tolist() == [float(per_sequence[i]) for i in sample]  # type: ignore[arg-type]
        assert torch.equal(ratios.per_sequence(level), per_sequence)  # type: ignore[arg-type]
    assert torch.equal(ratios.per_token("token"), ratios.token_N)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(BATCHES)
def test_equal_policies_have_a_ratio_of_exactly_one(batch: list[list[tuple[float, float]]]) -> None:
    p = torch.tensor([p for sequence in batch for p, _ in sequence])
    sample = torch.tensor([i for i, sequence in enumerate(batch) for _ in sequence])
    ratios = log_ratios(OldLogp(p), RolloutLogp(p.clone()), sample, len(batch))
    for x in (ratios.token_N, ratios.sequence_S, ratios.geometric_S):
        assert torch.equal(x, torch.zeros_like(x)) and torch.equal(bounded_exp(x), torch.ones_like(x))


def test_the_exponential_is_finite_and_positive() -> None:
    x = bounded_exp(torch.tensor([-1e9, -20.0, 0.0, 20.0, 1e9], dtype=torch.float64))
    assert x.tolist() == [math.exp(-20), math.exp(-20), 1.0, math.exp(20), math.exp(20)]
    assert bool((x.float() > 0).all()) and bool(torch.isfinite(x.float()).all())
