"""Where each loss bounds its ratio, what that does to value and gradient, and that nothing overflows."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from lockstep.algorithms import AlgorithmName, AlgorithmSpec, LossInput, LossOutput, policy_loss, resolve


def gradient(loss: Tensor, inputs: LossInput) -> Tensor:
    return torch.autograd.grad(loss, inputs.logp_N, retain_graph=True)[0]


def one_token(name: AlgorithmName, ratio: float, advantage: float) -> tuple[LossOutput, float, float]:
    """Output, loss and gradient of a single token of coefficient 1 at the given ratio (logp = -1)."""
    logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    inputs = LossInput(
        logp_N=logp,
        old_logp_N=logp.detach() - math.log(ratio),
        advantage_N=torch.tensor([advantage]),
        sample_N=torch.zeros(1, dtype=torch.int64),
        coef_N=torch.ones(1),
    )
    output = policy_loss(inputs, resolve(AlgorithmSpec(name=name)))
    return output, float(output.loss.detach()), float(gradient(output.loss, inputs))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "high", "low"),
    [
        (1.25, 1.0, -1.25, -1.25, 0, 0),  # inside DAPO's upper bound, outside GRPO's
        (1.30, 1.0, -1.28, 0.0, 1, 0),
        (1.30, -1.0, 1.30, 1.30, 0, 0),  # too high, but going down: not stopped
        (0.85, -1.0, 0.85, 0.85, 0, 0),
        (0.75, -1.0, 0.80, 0.0, 0, 1),
        (0.75, 1.0, -0.75, -0.75, 0, 0),  # too low, but going up: not stopped
    ],
)
def test_dapo_clips_each_side_at_its_own_bound(
    ratio: float, advantage: float, loss: float, slope: float, high: int, low: int
) -> None:
    output, value, grad = one_token("dapo", ratio, advantage)
    assert value == pytest.approx(loss, rel=1e-9)
    assert grad == pytest.approx(slope, rel=1e-9)
    assert output.metrics["policy/clip_fraction_high"].result() == high
    assert output.metrics["policy/clip_fraction_low"].result() == low


def test_dapo_keeps_a_gradient_that_grpo_stops() -> None:
    assert one_token("grpo", 1.25, 1.0)[2] == 0
    assert one_token("dapo", 1.25, 1.0)[2] == pytest.approx(-1.25)


@pytest.mark.parametrize(("ratio", "weight"), [(0.01, 0.01), (1.0, 1.0), (3.0, 3.0), (50.0, 5.0)])
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_cispo_bounds_the_weight_and_keeps_the_gradient(
    ratio: float, weight: float, advantage: float
) -> None:
    output, value, grad = one_token("cispo", ratio, advantage)
    assert grad == pytest.approx(-weight * advantage, rel=1e-9)
    assert value == pytest.approx(weight * advantage, rel=1e-9)  # log p is -1
    assert output.metrics["policy/clip_fraction_high"].result() == (ratio > 5)
    assert output.metrics["policy/clip_fraction_low"].result() == 0


@pytest.mark.parametrize("name", get_args(AlgorithmName))
@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_absurd_ratios_stay_finite_in_fp32(name: AlgorithmName, gap: float) -> None:
    recipe = resolve(AlgorithmSpec(name=name, kl_coef=0.1, entropy_coef=0.02))
    logp = torch.full((2,), -1.0, requires_grad=True)
    inputs = LossInput(
        logp_N=logp,
        old_logp_N=logp.detach() - gap,
        advantage_N=torch.tensor([1.0, -1.0]),
        sample_N=torch.tensor([0, 1]),
        coef_N=torch.ones(2),
        entropy_N=torch.ones(2),
        ref_logp_N=logp.detach() + gap,
    )
    output = policy_loss(inputs, recipe)
    assert torch.isfinite(output.loss) and torch.isfinite(gradient(output.loss, inputs)).all()
    assert all(math.isfinite(metric.result()) for metric in output.metrics.values())
