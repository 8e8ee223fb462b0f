"""The mismatch measures against closed forms, and the correction weight."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.correction.mismatch import Mismatch, truncated_weight

LOGP = st.floats(-20, 0, width=32)


def test_nothing_seen_claims_nothing() -> None:
    assert Mismatch().metrics() == {"mismatch/tokens": 0.0}


def test_equal_log_probabilities() -> None:
    mismatch = Mismatch()
    mismatch.see(torch.tensor([-1.0, -0.0, -3.25]), torch.tensor([-1.0, 0.0, -3.25]))
    metrics = mismatch.metrics()
    assert metrics["mismatch/exact_tokens"] == metrics["token_mult_prob_error"] == 1.0
    for name in ("max_abs_dlogp", "mean_abs_dlogp", "kl_k1", "kl_k3"):
        assert metrics[f"mismatch/{name}"] == 0.0
        assert math.copysign(1, metrics[f"mismatch/{name}"]) == 1


def test_one_ulp_is_not_exact() -> None:
    rollout = torch.tensor([-1.0, -2.0])
    mismatch = Mismatch()
    mismatch.see(torch.nextafter(rollout, torch.zeros(2)), rollout)
    assert mismatch.exact == 0 and 0 < mismatch.max_abs < 1e-6


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(LOGP, LOGP), min_size=1, max_size=20), st.integers(0, 20))
def test_measures_and_their_additivity(pairs: list[tuple[float, float]], cut: int) -> None:
    trainer, rollout = (torch.tensor(x) for x in zip(*pairs))
    whole, parts = Mismatch(), Mismatch()
    whole.see(trainer, rollout)
    parts.see(trainer[:cut], rollout[:cut])
    parts.see(trainer[cut:], rollout[cut:])
    a, b = whole.metrics(), parts.metrics()
    assert a.keys() == b.keys() and all(math.isclose(a[k], b[k], rel_tol=1e-12, abs_tol=1e-12) for k in a)
    d = [float(t) - float(r) for t, r in zip(trainer, rollout)]
    n = len(d)
    expected = {
        "mismatch/max_abs_dlogp": max(map(abs, d)),
        "mismatch/mean_abs_dlogp": math.fsum(map(abs, d)) / n,
        "mismatch/kl_k1": -math.fsum(d) / n,
        "mismatch/kl_k3": math.fsum(math.expm1(x) - x for x in d) / n,
        "mismatch/exact_tokens": sum(x == 0 for x in d) / n,
        "token_mult_prob_error": math.fsum(math.exp(abs(x)) for x in d) / n,
    }
    for name, value in expected.items():
        assert math.isclose(a[name], value, rel_tol=1e-9, abs_tol=1e-12), name
    assert a["rollout_corr/kl"] == a["mismatch/kl_k1"] and a["rollout_corr/k3_kl"] == a["mismatch/kl_k3"]
    assert a["mismatch/kl_k3"] >= 0 and a["token_mult_prob_error"] >= 1


@pytest.mark.parametrize("place", [0, 1])
def test_case_44_nan_is_never_swallowed(place: int) -> None:
    mismatch = Mismatch()
    chunks = [torch.tensor([-1.0, -1.5]), torch.tensor([float("nan"), -1.5])]
    for chunk in (chunks[place], chunks[1 - place]):
        mismatch.see(chunk, torch.tensor([-1.0, -1.0]))
    assert math.isnan(mismatch.max_abs) and math.isnan(mismatch.metrics()["mismatch/kl_k3"])


def test_the_weight_is_truncated_and_detached() -> None:
    trainer = torch.tensor([-1.0, -1.0, -5.0, -0.5], requires_grad=True)
    rollout = torch.tensor([-1.0, -3.0, -1.0, -0.7])
    weight = truncated_weight(trainer, rollout, 2.0)
    assert not weight.requires_grad, "field failure 39: the weight carries no gradient"
    expected = [1.0, 2.0, math.exp(-4.0), math.exp(0.2)]
    assert torch.allclose(weight, torch.tensor(expected))
    assert weight[0] == 1.0 and weight[1] == 2.0
