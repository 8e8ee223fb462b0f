"""A token without a coefficient (masked by the correction) is as good as not there, whatever the loss."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
import torch

from lockstep.algorithms import (
    AlgorithmName,
    AlgorithmSpec,
    LossInput,
    policy_loss,
    resolve,
    token_coefficients,
)

LENGTHS = torch.tensor([4, 6, 3])
SAMPLE = torch.repeat_interleave(torch.arange(3), LENGTHS)
KEEP = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)


@pytest.mark.parametrize("name", get_args(AlgorithmName))
def test_a_masked_token_leaves_no_trace_case_42(name: AlgorithmName) -> None:
    """Loss, gradient and metrics are those of the batch without it; in GSPO the sequence ratio is of the kept tokens."""
    generator = torch.Generator().manual_seed(0)
    recipe = resolve(
        AlgorithmSpec(name, clip_low=0.1, clip_high=0.1) if name == "gspo" else AlgorithmSpec(name)
    )
    recipe = dataclasses.replace(recipe, kl_coef=0.1, entropy_coef=0.02)
    logp, noise, ref, entropy, weight = torch.randn(5, 13, generator=generator, dtype=torch.float64)
    logp = (-logp.abs() - 0.1).requires_grad_()
    kept = torch.bincount(SAMPLE[KEEP], minlength=3)
    coef = token_coefficients(kept, recipe.denominator, max_tokens=8).double()[SAMPLE]
    whole = LossInput(
        logp,
        logp.detach() + 0.3 * noise,
        torch.tensor([1.0, -0.5, 0.3]).double()[SAMPLE],
        SAMPLE,
        torch.where(KEEP, coef, 0.0),
        weight.abs(),
        entropy.abs(),
        logp.detach() + 0.3 * ref,
        LENGTHS,
    )
    cut = LossInput(
        **{
            f.name: value[KEEP] if f.name.endswith("_N") else kept
            for f in dataclasses.fields(whole)
            if (value := getattr(whole, f.name)) is not None
        }
    )
    one, two = policy_loss(whole, recipe), policy_loss(cut, recipe)
    torch.testing.assert_close(one.loss, two.loss, rtol=1e-13, atol=1e-15)
    gradients = [torch.autograd.grad(o.loss, logp, retain_graph=True)[0] for o in (one, two)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-15)
    assert torch.equal(gradients[0][~KEEP], torch.zeros(int((~KEEP).sum()), dtype=torch.float64))
    assert one.metrics.keys() == two.metrics.keys()
    for key in one.metrics:
        assert one.metrics[key].result() == pytest.approx(two.metrics[key].result(), rel=1e-12), key
