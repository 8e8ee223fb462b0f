"""Clip fractions by the sign of the advantage, and TRL's names, against a count by hand."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.algorithms import AlgorithmName, AlgorithmSpec, LossInput, merge_metrics, policy_loss, resolve
from lockstep.algorithms.reduced import Reduced

RATIOS = [1.5, 1.5, 0.5, 0.5, 1.0, 1.5, 0.5, 1.5]
ADVANTAGES = [1.0, -1.0, 1.0, -2.0, 3.0, 2.0, -1.0, 0.0]


def metrics(
    ratios: list[float], advantages: list[float], coefs: list[float], name: AlgorithmName = "grpo"
) -> dict[str, Reduced]:
    """Metrics of tokens at these ratios, each its own sample."""
    n = len(ratios)
    logp = torch.full((n,), -1.0, dtype=torch.float64, requires_grad=True)
    old = logp.detach() - torch.tensor(ratios, dtype=torch.float64).log()
    inputs = LossInput(logp, old, torch.tensor(advantages), torch.arange(n), torch.tensor(coefs))
    return policy_loss(inputs, resolve(AlgorithmSpec(name))).metrics


def results(found: dict[str, Reduced]) -> dict[str, float]:
    """What is logged of clipping."""
    return {k: v.result() for k, v in found.items() if "clip" in k}


def test_fractions_by_sign_of_the_advantage() -> None:
    """GRPO's bounds stop 1.5 where the advantage is positive and 0.5 where it is negative."""
    assert results(metrics(RATIOS, ADVANTAGES, [1.0] * 8)) == {
        "policy/clip_fraction_high": 2 / 8,
        "policy/clip_fraction_low": 2 / 8,
        "policy/clip_fraction_positive_advantage": 2 / 4,
        "policy/clip_fraction_negative_advantage": 2 / 3,
        "clip_ratio/high_mean": 2 / 8,
        "clip_ratio/low_mean": 2 / 8,
        "clip_ratio/region_mean": 4 / 8,
    }


def test_cispo_bounds_both_signs() -> None:
    found = results(metrics([6.0, 6.0, 1.0, 6.0], [1.0, -1.0, -1.0, -1.0], [1.0] * 4, "cispo"))
    assert found["policy/clip_fraction_positive_advantage"] == 1.0
    assert found["policy/clip_fraction_negative_advantage"] == 2 / 3
    assert found["clip_ratio/region_mean"] == found["clip_ratio/high_mean"] == 3 / 4


def test_rejected_tokens_are_in_no_fraction() -> None:
    coefs = [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    kept = [i for i, c in enumerate(coefs) if c]
    alone = metrics([RATIOS[i] for i in kept], [ADVANTAGES[i] for i in kept], [1.0] * 6)
    assert results(metrics(RATIOS, ADVANTAGES, coefs)) == results(alone)


@pytest.mark.parametrize("cut", [1, 3, 5, 7])
def test_micro_batches_add_up(cut: int) -> None:
    """Also where a micro-batch has no token of one sign."""
    parts = [
        metrics(RATIOS[s], ADVANTAGES[s], [1.0] * len(RATIOS[s])) for s in (slice(cut), slice(cut, None))
    ]
    assert results(merge_metrics(parts)) == results(metrics(RATIOS, ADVANTAGES, [1.0] * 8))


def test_no_token_of_a_sign_is_no_nan() -> None:
    found = results(metrics([1.5, 0.5], [1.0, 0.0], [1.0, 1.0]))
    assert found["policy/clip_fraction_negative_advantage"] == 0.0
    assert all(math.isfinite(v) for v in found.values())
