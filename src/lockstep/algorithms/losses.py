"""The policy loss of one micro-batch.

From a small record of per-token tensors to a scalar and its metrics. Every kind of loss is a function that
gives a loss to each token; `policy_loss` multiplies by the correction weight, adds the terms for the
reference policy and the entropy, multiplies by the coefficient from `denominator.py` and sums. Because only
sums are taken, the losses and gradients of micro-batches add up to those of the mini-batch.

Three policies appear and must not be confused. `logp_N` is the policy being trained, the only one with a
gradient.
`old_logp_N` is the policy before the update, in the trainer's arithmetic: the ratio is against this one. The
rollout policy appears only inside `weight_N`, which the caller computed; whatever it is, it is detached here.
In a unified flow the old and the rollout policy are the same numbers and the weight is 1.

Tokens with coefficient 0 (rejected samples that share a micro-batch, padding) are in no sum and no metric,
and their old and reference log-probabilities may be anything, NaN included.

Shapes: N tokens of the micro-batch, S samples in it. Formulas: docs/algorithms.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.algorithms.reduced import Reduced, max_over, mean_over, share_of
from lockstep.algorithms.spec import LossKind, Recipe
from lockstep.numerics.segments import segment_sum

MAX_LOG_RATIO = 20.0
"""Log ratios are bounded by this on both sides, so that exp and its gradient stay finite in FP32. A token
beyond it (a ratio of half a billion) has no gradient through its ratio; `policy/ratio_max` shows that it
happened."""


@dataclass(frozen=True, eq=False)
class LossInput:
    """What the loss of a micro-batch is made from; every `_N` is a vector over its N >= 1 trained tokens."""

    logp_N: Tensor
    """Log-probabilities under the policy being trained, FP32 or float64, differentiable."""

    old_logp_N: Tensor
    """Log-probabilities before the update; in its first pass this may be `logp_N` itself (it is detached)."""

    advantage_N: Tensor
    """The advantage of the token's sample."""

    sample_N: Tensor
    """int64 index of the token's sample within this micro-batch."""

    coef_N: Tensor
    """The coefficient of the token's sample, from `token_coefficients` over the whole mini-batch."""

    weight_N: Tensor | None = None
    """Correction weight of the token; None is 1 everywhere. Scales the policy term only; 0 leaves a token in
    the denominator."""

    entropy_N: Tensor | None = None
    """Entropy of the policy at the token, differentiable if the recipe has an entropy coefficient."""

    ref_logp_N: Tensor | None = None
    """Log-probabilities under the reference policy."""

    length_S: Tensor | None = None
    """Optional: trained tokens of each sample, so that a loss that needs whole samples can verify them."""


@dataclass(frozen=True, eq=False)
class LossOutput:
    """The loss (scalar, differentiable, additive over micro-batches) and its metrics by name."""

    loss: Tensor
    metrics: dict[str, Reduced]


@dataclass(frozen=True, eq=False)
class _TokenTerms:
    """What a kind of loss says about every token: its loss, the ratio used, and where a bound took effect."""

    loss_N: Tensor
    ratio_N: Tensor
    high_N: Tensor | None = None
    low_N: Tensor | None = None


def policy_loss(inputs: LossInput, recipe: Recipe) -> LossOutput:
    """Loss and metrics of one micro-batch under `recipe`.

    loss = sum over tokens of coef * (weight * policy term + kl_coef * k3 - entropy_coef * entropy).

    Metrics, each over the tokens with a coefficient: `policy/ratio_mean`, `policy/ratio_max` (the ratio that
    the loss uses), `policy/approx_kl` (old against new policy, k3), `policy/clip_fraction_high` and `_low`
    (losses that clip; also under TRL's `clip_ratio/*`, and by sign of the advantage), `policy/kl_to_reference` and
    `policy/entropy` (where the inputs have them).

    Raises ValueError on shapes that differ, no tokens, log-probabilities below FP32, a missing reference or
    entropy that the recipe needs, or an incomplete sample where `length_S` shows one.
    """
    _check(inputs, recipe)
    counted_N = inputs.coef_N.detach() != 0
    inputs = _settled(inputs, counted_N)
    terms = _LOSSES[recipe.loss](inputs, recipe)
    loss_N = terms.loss_N if inputs.weight_N is None else inputs.weight_N * terms.loss_N

    metrics = _metrics(inputs, terms, counted_N)
    if inputs.ref_logp_N is not None:
        kl_N = _k3(inputs.ref_logp_N - inputs.logp_N)
        metrics["policy/kl_to_reference"] = mean_over(kl_N, counted_N)
        if recipe.needs_reference:
            loss_N = loss_N + recipe.kl_coef * kl_N
    if inputs.entropy_N is not None:
        metrics["policy/entropy"] = mean_over(inputs.entropy_N, counted_N)
        if recipe.needs_entropy:
            loss_N = loss_N - recipe.entropy_coef * inputs.entropy_N
    return LossOutput((inputs.coef_N * loss_N).sum(), metrics)


def _clip(inputs: LossInput, recipe: Recipe) -> _TokenTerms:
    """PPO: -min(r A, clip(r) A), r the token's ratio, with its own bound on each side (DAPO, eq. 10)."""
    return _clipped(_log_ratio(inputs).exp(), inputs.advantage_N, recipe)


def _sequence_clip(inputs: LossInput, recipe: Recipe) -> _TokenTerms:
    """GSPO: -min(s A, clip(s) A), s = exp(mean log ratio of the sample) (arXiv 2507.18071, eq. 5 and 7).

    Written as in GSPO-token (eq. 13 and 14): the token's ratio is sg[s] * p / sg[p], which has the value of s
    and the gradient s * grad log p. With coefficients 1 / (S n) their sum is the gradient of eq. 5.
    Tokens with coefficient 0 (masked by the correction) are not in the mean: their log ratio is 0 here.
    """
    count = int(inputs.sample_N.max()) + 1
    length_S = torch.bincount(inputs.sample_N, minlength=count)
    if inputs.length_S is not None and not torch.equal(length_S, inputs.length_S.to(length_S)):
        raise ValueError(
            "a sequence ratio needs every sample whole: the micro-batch holds "
            f"{length_S.tolist()} tokens of samples with {inputs.length_S.tolist()}"
        )
    log_ratio_N = (inputs.logp_N - inputs.old_logp_N).detach()
    counted_S = segment_sum(inputs.coef_N != 0, inputs.sample_N, count).clamp(min=1)
    mean_S = segment_sum(log_ratio_N, inputs.sample_N, count) / counted_S
    ratio_S = mean_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().to(inputs.logp_N.dtype)
    ratio_N = ratio_S[inputs.sample_N] * (inputs.logp_N - inputs.logp_N.detach()).exp()
    return _clipped(ratio_N, inputs.advantage_N, recipe)


def _clipped(ratio_N: Tensor, advantage_N: Tensor, recipe: Recipe) -> _TokenTerms:
    bounded_N = ratio_N.clamp(1.0 - recipe.clip_low, 1.0 + recipe.clip_high)
    loss_N = -torch.minimum(ratio_N * advantage_N, bounded_N * advantage_N)
    high_N = (ratio_N > bounded_N) & (advantage_N > 0)
    low_N = (ratio_N < bounded_N) & (advantage_N < 0)
    return _TokenTerms(loss_N, ratio_N.detach(), high_N, low_N)


def _cispo(inputs: LossInput, recipe: Recipe) -> _TokenTerms:
    """CISPO: -sg[clip(r)] A log p (arXiv 2506.13585, eq. 4 and 5); every token keeps its gradient."""
    ratio_N = _log_ratio(inputs).detach().exp()
    bounded_N = ratio_N.clamp(1.0 - recipe.clip_low, 1.0 + recipe.clip_high)
    loss_N = -bounded_N * inputs.advantage_N * inputs.logp_N
    return _TokenTerms(loss_N, ratio_N, ratio_N > bounded_N, ratio_N < bounded_N)


def _reinforce(inputs: LossInput, recipe: Recipe) -> _TokenTerms:
    """REINFORCE: -A log p. The ratio is measured, not used."""
    return _TokenTerms(-inputs.advantage_N * inputs.logp_N, _log_ratio(inputs).detach().exp())


_LOSSES: dict[LossKind, Callable[[LossInput, Recipe], _TokenTerms]] = {
    "clip": _clip,
    "sequence_clip": _sequence_clip,
    "cispo": _cispo,
    "reinforce": _reinforce,
}


def _log_ratio(inputs: LossInput) -> Tensor:
    """Bounded log ratio of each token; exactly 0 where the two log-probabilities are equal."""
    return (inputs.logp_N - inputs.old_logp_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _k3(log_ratio_N: Tensor) -> Tensor:
    """exp(x) - 1 - x (Schulman's k3): with x = log q/p on samples of p it estimates KL(p, q), never negative.

    The KL term of GRPO (arXiv 2402.03300, eq. 4). `expm1` keeps the digits that exp(x) - 1 would lose near 0.
    """
    log_ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio_N) - log_ratio_N


def _metrics(inputs: LossInput, terms: _TokenTerms, counted_N: Tensor) -> dict[str, Reduced]:
    old_to_new_N = (inputs.logp_N - inputs.old_logp_N).detach()
    metrics = {
        "policy/ratio_mean": mean_over(terms.ratio_N, counted_N),
        "policy/ratio_max": max_over(terms.ratio_N, counted_N),
        "policy/approx_kl": mean_over(_k3(old_to_new_N), counted_N),
    }
    if terms.high_N is not None:
        metrics["policy/clip_fraction_high"] = mean_over(terms.high_N, counted_N)
    if terms.low_N is not None:
        metrics["policy/clip_fraction_low"] = mean_over(terms.low_N, counted_N)
    if terms.high_N is not None and terms.low_N is not None:
        metrics |= _clip_ratios(terms.high_N, terms.low_N, inputs.advantage_N, counted_N)
    return metrics


def _clip_ratios(high_N: Tensor, low_N: Tensor, advantage_N: Tensor, counted_N: Tensor) -> dict[str, Reduced]:
    """Clipped tokens among those whose advantage has one sign, and TRL's names for the fractions of all tokens."""
    either_N = high_N | low_N
    return {
        "policy/clip_fraction_positive_advantage": share_of(either_N, counted_N & (advantage_N > 0)),
        "policy/clip_fraction_negative_advantage": share_of(either_N, counted_N & (advantage_N < 0)),
        "clip_ratio/high_mean": mean_over(high_N, counted_N),
        "clip_ratio/low_mean": mean_over(low_N, counted_N),
        "clip_ratio/region_mean": mean_over(either_N, counted_N),
    }


def _settled(inputs: LossInput, counted_N: Tensor) -> LossInput:
    """Everything but the trained policy and its entropy detached; tokens that don't count made harmless."""
    logp_N = inputs.logp_N.detach()
    weight_N, ref_logp_N = inputs.weight_N, inputs.ref_logp_N
    return dataclasses.replace(
        inputs,
        old_logp_N=torch.where(counted_N, inputs.old_logp_N.detach(), logp_N),
        advantage_N=torch.where(counted_N, inputs.advantage_N.detach(), 0.0),
        coef_N=inputs.coef_N.detach(),
        weight_N=None if weight_N is None else torch.where(counted_N, weight_N.detach(), 0.0),
        ref_logp_N=None if ref_logp_N is None else torch.where(counted_N, ref_logp_N.detach(), logp_N),
    )


def _check(inputs: LossInput, recipe: Recipe) -> None:
    shape = inputs.logp_N.shape
    if len(shape) != 1 or shape[0] == 0:
        raise ValueError(f"logp_N must be a vector of at least one token, not {tuple(shape)}")
    for field in dataclasses.fields(inputs):
        tensor = getattr(inputs, field.name)
        if field.name.endswith("_N") and tensor is not None and tensor.shape != shape:
            raise ValueError(f"{field.name} has shape {tuple(tensor.shape)}, logp_N has {tuple(shape)}")
    for name in ("logp_N", "old_logp_N", "ref_logp_N"):
        tensor = getattr(inputs, name)
        if tensor is not None and tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} is {tensor.dtype}: log-probabilities are kept in FP32, or ratios are noise"
            )
    if inputs.sample_N.dtype != torch.int64:
        raise ValueError(f"sample_N must be int64, not {inputs.sample_N.dtype}")
    if recipe.needs_reference and inputs.ref_logp_N is None:
        raise ValueError(
            f"kl_coef is {recipe.kl_coef}, but there are no log-probabilities of a reference policy"
        )
    if recipe.needs_entropy and inputs.entropy_N is None:
        raise ValueError(f"entropy_coef is {recipe.entropy_coef}, but there is no entropy")
