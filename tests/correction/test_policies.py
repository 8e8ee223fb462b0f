"""The three policies can't be mistaken for one another (case 39), and hold what ratios may be made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.correction.policies import CurrentLogp, OldLogp, RolloutLogp, expect
from lockstep.correction.presets import TOKEN_TIS
from lockstep.correction.ratios import log_ratios
from lockstep.correction.weights import correct

LOGP = torch.tensor([-1.0, -2.0, -0.5])
SAMPLE = torch.tensor([0, 0, 1])


@pytest.mark.parametrize("old", [CurrentLogp(LOGP), RolloutLogp(LOGP), LOGP, None])
@pytest.mark.parametrize("rollout", [OldLogp(LOGP), CurrentLogp(LOGP), LOGP])
def test_the_wrong_policy_is_a_type_error_case_39(old: Any, rollout: Any) -> None:
    with pytest.raises(TypeError, match="OldLogp is needed here, not "):
        log_ratios(old, RolloutLogp(LOGP), SAMPLE, 2)
    with pytest.raises(TypeError, match="RolloutLogp is needed here, not "):
        log_ratios(OldLogp(LOGP), rollout, SAMPLE, 2)
    with pytest.raises(TypeError):
        correct(old, rollout, SAMPLE, 2, TOKEN_TIS)


def test_the_past_has_no_gradient_case_39() -> None:
    live = LOGP.clone().requires_grad_()
    for kind in (OldLogp, RolloutLogp):
        with pytest.raises(ValueError, match=f"{kind.__name__} carries a gradient"):
            kind(live)
    current = CurrentLogp(live)
    old = current.before_update()
    assert type(old) is OldLogp and not old.values_N.requires_grad and torch.equal(old.values_N, LOGP)
    weight_N = correct(old, RolloutLogp(LOGP - 0.1), SAMPLE, 2, TOKEN_TIS).weight_N
    assert not weight_N.requires_grad and weight_N.grad_fn is None


def test_a_subclass_is_no_substitute() -> None:
    class Other(OldLogp):
        pass

    with pytest.raises(TypeError, match="OldLogp is needed here, not Other"):
        expect(Other(LOGP), OldLogp)
    assert expect(OldLogp(LOGP), OldLogp).values_N is LOGP


@pytest.mark.parametrize("kind", [OldLogp, RolloutLogp, CurrentLogp])
def test_what_is_no_log_probability_is_refused(kind: Any) -> None:
    for wrong in (LOGP.bfloat16(), LOGP.half(), SAMPLE, LOGP[None], torch.tensor(-1.0)):
        with pytest.raises(ValueError, match=kind.__name__):
            kind(wrong)
    with pytest.raises(TypeError, match="not list"):
        kind([-1.0])
    assert kind(LOGP.double()).values_N.dtype == torch.float64


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_refused_case_44(bad: float) -> None:
    for kind in (OldLogp, RolloutLogp):
        with pytest.raises(ValueError, match=f"{kind.__name__} is not finite"):
            kind(torch.tensor([-1.0, bad]))


def test_tokens_that_do_not_fit_together_are_refused() -> None:
    old, rollout = OldLogp(LOGP), RolloutLogp(LOGP)
    with pytest.raises(ValueError, match="3 old and 2 rollout log-probabilities for 3 tokens"):
        log_ratios(old, RolloutLogp(LOGP[:2]), SAMPLE, 2)
    with pytest.raises(ValueError, match="for 2 tokens"):
        log_ratios(old, rollout, SAMPLE[:2], 2)
    with pytest.raises(ValueError, match="int64"):
        log_ratios(old, rollout, SAMPLE.int(), 2)
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"{count} sequences, but their tokens are"):
            log_ratios(old, rollout, SAMPLE, count)
