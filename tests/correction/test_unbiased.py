"""Do the weights do what they are for? On a policy small enough to write down, with the loss that training uses.

Sequences of three tokens over three words, autoregressive, a table of logits for every prefix: 27 sequences, so expectations
under the rollout policy q and the gradient under the trainer's policy p are finite sums.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from lockstep.algorithms import AlgorithmSpec, LossInput, policy_loss, resolve
from lockstep.correction.policies import OldLogp, RolloutLogp
from lockstep.correction.presets import NONE, SEQUENCE_TIS, TOKEN_TIS, Correction
from lockstep.correction.weights import correct

WORDS, LENGTH = 3, 3
SEQUENCES = list(itertools.product(range(WORDS), repeat=LENGTH))
PREFIXES = [p for n in range(LENGTH) for p in itertools.product(range(WORDS), repeat=n)]
REINFORCE = resolve(AlgorithmSpec("rloo"))
TOKEN_IS = dataclasses.replace(TOKEN_TIS, rollout_is_threshold=float("inf"))
SEQUENCE_IS = dataclasses.replace(SEQUENCE_TIS, rollout_is_threshold=float("inf"))


def log_probs(theta: Tensor, length: int = LENGTH) -> Tensor:
    """[sequences of this length, tokens] under the table of logits [prefixes, words]."""
    table = theta.log_softmax(-1)
    sequences = itertools.product(range(WORDS), repeat=length)
    return torch.stack(
        [torch.stack([table[PREFIXES.index(s[:t]), s[t]] for t in range(length)]) for s in sequences]
    )


def policies(mismatch: float) -> tuple[Tensor, Tensor, Tensor]:
    """(theta of p with gradient, theta of q, advantage of every sequence)."""
    generator = torch.Generator().manual_seed(5)
    shape = (len(PREFIXES), WORDS)
    theta = torch.randn(shape, generator=generator, dtype=torch.float64)
    other = theta + mismatch * torch.randn(shape, generator=generator, dtype=torch.float64)
    advantage = torch.randn(len(SEQUENCES), generator=generator, dtype=torch.float64)
    return theta.requires_grad_(), other, advantage


def on_policy_gradient(theta: Tensor, advantage: Tensor) -> Tensor:
    """Of the expected advantage under p itself, by autograd through the sum over all sequences."""
    value = (log_probs(theta).sum(-1).exp() * advantage).sum()
    return torch.autograd.grad(value, theta)[0]


def estimate(
    theta: Tensor, q: Tensor, advantage: Tensor, chance: Tensor, correction: Correction, length: int = LENGTH
) -> Tensor:
    """Minus the gradient of the training loss over all sequences, each with coefficient `chance`: its probability under q for
    the exact expectation, or how often it was drawn."""
    logp = log_probs(theta, length)
    count = len(logp)
    sample = torch.arange(count).repeat_interleave(length)
    old, rollout = OldLogp(logp.detach().flatten()), RolloutLogp(q.flatten())
    weight = correct(old, rollout, sample, count, correction).weight_N
    inputs = LossInput(
        logp.flatten(), old.values_N, advantage[sample], sample, chance[sample], weight_N=weight.double()
    )
    return -torch.autograd.grad(policy_loss(inputs, REINFORCE).loss, theta)[0]


@pytest.mark.parametrize("mismatch", [0.1, 1.0])
def test_sequence_weights_recover_the_on_policy_gradient(mismatch: float) -> None:
    theta, other, advantage = policies(mismatch)
    q = log_probs(other)
    truth = on_policy_gradient(theta, advantage)
    corrected = estimate(theta, q, advantage, q.sum(-1).exp(), SEQUENCE_IS)
    torch.testing.assert_close(corrected, truth, rtol=1e-5, atol=1e-7)
    plain = estimate(theta, q, advantage, q.sum(-1).exp(), NONE)
    assert float((plain - truth).norm() / truth.norm()) > 0.1 * mismatch, (
        "without them it is another gradient"
    )


def test_token_weights_recover_it_for_one_token() -> None:
    theta, other, advantage = policies(1.0)
    q = log_probs(other, 1)
    chance, advantage = q.exp()[:, 0], advantage[:WORDS]
    value = (log_probs(theta, 1).sum(-1).exp() * advantage).sum()
    truth = torch.autograd.grad(value, theta)[0]
    torch.testing.assert_close(
        estimate(theta, q, advantage, chance, TOKEN_IS, 1), truth, rtol=1e-5, atol=1e-7
    )


def test_token_weights_leave_prefix_and_suffix_as_they_were() -> None:
    """The expectation is exactly that of p choosing the token, q everything around it; nearer to the truth than no weights."""
    theta, other, advantage = policies(0.3)
    q, p = log_probs(other), log_probs(theta)
    mixed = torch.zeros((), dtype=torch.float64)
    for t in range(LENGTH):
        around = (q.sum(-1) - q[:, t]).exp() * p[:, t].exp().detach()
        mixed = mixed + (around * advantage * p[:, t]).sum()
    expected = torch.autograd.grad(mixed, theta)[0]
    found = estimate(theta, q, advantage, q.sum(-1).exp(), TOKEN_IS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    truth = on_policy_gradient(theta, advantage)
    plain = estimate(theta, q, advantage, q.sum(-1).exp(), NONE)
    assert 0 < float((found - truth).norm()) < float((plain - truth).norm())


@pytest.mark.parametrize("threshold", [1.1, 2.0, 4.0])
def test_the_bias_of_truncation_is_within_its_bound(threshold: float) -> None:
    """|E_q[(r - C)+ f]| <= max|f| E_q[(r - C)+], f a sample's gradient, coordinate by coordinate; and it is not nothing."""
    theta, other, advantage = policies(1.0)
    q, p = log_probs(other), log_probs(theta)
    chance, ratio = q.sum(-1).exp(), (p - q).sum(-1).exp().detach()
    truncated = dataclasses.replace(SEQUENCE_TIS, rollout_is_threshold=threshold)
    bias = estimate(theta, q, advantage, chance, truncated) - on_policy_gradient(theta, advantage)
    cut = float((chance * (ratio - threshold).clamp(min=0)).sum())
    scores = [
        torch.autograd.grad(p[i].sum(), theta, retain_graph=True)[0] * advantage[i] for i in range(len(p))
    ]
    largest = torch.stack(scores).abs().amax(0)
    assert cut > 0.01 and bool((bias.abs() <= largest * cut + 1e-6).all()) and float(bias.norm()) > 1e-3


@pytest.mark.parametrize("correction", [SEQUENCE_IS, NONE], ids=["weighted", "plain"])
def test_from_samples_within_sampling_error(correction: Correction) -> None:
    """20,000 sequences drawn from q: the weighted estimate is within five standard errors of the truth in every coordinate,
    the plain one is not."""
    theta, other, advantage = policies(0.5)
    q, p = log_probs(other), log_probs(theta)
    chance = q.sum(-1).exp()
    draws = 20_000
    drawn = torch.multinomial(chance, draws, replacement=True, generator=torch.Generator().manual_seed(1))
    counts = torch.bincount(drawn, minlength=len(SEQUENCES)).double()
    found = estimate(theta, q, advantage, counts / draws, correction)
    truth = on_policy_gradient(theta, advantage)
    ratio = (
        (p - q).sum(-1).exp().detach() if correction is SEQUENCE_IS else torch.ones(len(SEQUENCES)).double()
    )
    scores = [torch.autograd.grad(p[i].sum(), theta, retain_graph=True)[0] for i in range(len(p))]
    parts = torch.stack(scores) * (ratio * advantage)[:, None, None]
    mean = (chance[:, None, None] * parts).sum(0)
    error = ((chance[:, None, None] * (parts - mean) ** 2).sum(0) / draws).sqrt()
    within = bool(((found - truth).abs() <= 5 * error + 1e-9).all())
    assert within is (correction is SEQUENCE_IS)
