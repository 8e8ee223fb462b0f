"""What the mismatch costs a token: its weight, or its place in the batch.

The samples come from the rollout's policy q, the gradient is wanted under the trainer's old policy p. For any function f of a
sample, E_p[f] = E_q[p/q f]: a weight of p/q makes the expectation right whatever q is, as long as q reaches where p does. That is
all an importance weight is; everything here is about its price, the variance.

**Which ratio.** A sequence's ratio is the product of its tokens'. It is the unbiased one, and it is a random walk: with honest
noise of 0.02 nats a token, 8,000 tokens give a logarithm of standard deviation 1.8, so a third of the sequences weigh more
than twice too much and as many less than half (the *length trap*: nothing is wrong with any token). A token's own ratio has no
such growth; it corrects the choice of the token, and leaves what stands before and after it as the rollout had it: a bias,
small when few tokens differ, that no token weight can remove. The geometric mean is the ratio of a sequence's average token:
no probability of anything, and a good judge of how far off a sequence is.

**Which price.** An estimator of finite variance is bought with bias in one of four ways, and they can be combined:

    truncation (TIS)   w = min(r, C). What is cut off is E_q[(r - C)+ f], at most max|f| times the mass above C
    masking (MIS)      r outside [low, high] leaves the batch: tokens (IcePop), or whole sequences by either sequence ratio
    veto               one catastrophic token (r < 1e-4) throws out its sequence: the prefix after it belongs to nobody
    adaptation (AIS)   w = 1 + s (r - 1) with the largest strength s <= 1 under which the effective sample size
                       (sum w)^2 / (n sum w^2) reaches a target. With mean m and variance v of the truncated weights and t
                       the target, s = min(1, 1 / (1 - m + sqrt(v t / (1 - t)))): no search, one pass

Normalisation by the batch's mean then takes out what all weights have in common.

**Who pays.** A rejected sequence must not have moved anybody: it is removed before baselines, advantages and denominator are
taken (field failures 41, 42). A masked token leaves the denominator too, or stays in it with weight 0 where
`count_masked_tokens` says so. Weights are constants: a gradient through them would optimise the mismatch (field failure 39).

**What it does not do.** Equal policies have weights of exactly 1 and lose nothing: the unified flow never comes here. And no
weight brings back what the rollout would never have drawn.

Everything is float64, one order of summation, and a function of whole sequences; so neither the order of the batch nor its
cut into micro-batches changes a token's mask, or anybody's weight by more than the last bit.

Shapes: N tokens, S sequences. Next: `length_trap.py`, `../trainer/corrector.py` for when this happens in a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.correction.length_trap import length_trap, trap_warning
from lockstep.correction.policies import OldLogp, RolloutLogp
from lockstep.correction.presets import Correction
from lockstep.correction.ratios import LogRatios, bounded_exp, log_ratios
from lockstep.numerics.segments import segment_sum


@dataclass(frozen=True, eq=False)
class Rejection:
    """Who stays. keep_S: sequences with something to train on. keep_N: tokens that are in sums and denominators.
    masked_N: tokens of weight 0 (they may still be counted). metrics: under verl's names."""

    keep_S: Tensor
    keep_N: Tensor
    masked_N: Tensor
    metrics: dict[str, float]


@dataclass(frozen=True, eq=False)
class Weights:
    """weight_N: FP32 factor of every token's policy term, a constant; 0 where a token is masked or rejected."""

    weight_N: Tensor
    metrics: dict[str, float]


@dataclass(frozen=True, eq=False)
class Corrected:
    """Everything the correction says about a batch. length_trap: the factor by which a sequence's ratio is expected to stray
    from 1; warning: what to do about it, or nothing."""

    weight_N: Tensor
    keep_S: Tensor
    keep_N: Tensor
    metrics: dict[str, float]
    length_trap: float
    warning: str


def correct(
    old: OldLogp, rollout: RolloutLogp, sample_N: Tensor, count: int, correction: Correction
) -> Corrected:
    """Masks, then weights over what is left, of a batch of `count` whole sequences (`sample_N` int64 [N]: whose token).

    TypeError when a policy is not what it should be, ValueError for tokens that don't fit together.
    """
    ratios = log_ratios(old, rollout, sample_N, count)
    rejection = reject(ratios, correction)
    weights = weigh(ratios, rejection, correction)
    trap = length_trap(ratios)
    metrics = rejection.metrics | weights.metrics | {"rollout_corr/length_trap": trap}
    warning = trap_warning(correction, ratios, trap)
    return Corrected(weights.weight_N, rejection.keep_S, rejection.keep_N, metrics, trap, warning)


def reject(ratios: LogRatios, correction: Correction) -> Rejection:
    """Veto, then rejection at the level of `rollout_rs`. A sequence of which no token is left is rejected as well."""
    count = len(ratios.length_S)
    catastrophic_N = ratios.token_N < _log(correction.rollout_token_veto_threshold)
    vetoed_S = _any(catastrophic_N, ratios.sample_N, count)
    inside_N = torch.ones_like(catastrophic_N)
    if correction.rollout_rs != "none":
        log_ratio_N = ratios.per_token(correction.rollout_rs)
        low, high = _log(correction.rollout_rs_threshold_lower), _log(correction.rollout_rs_threshold)
        inside_N = (log_ratio_N >= low) & (log_ratio_N <= high)
    counts_N = inside_N | (correction.rollout_rs == "token" and correction.count_masked_tokens)
    keep_S = ~vetoed_S & _any(counts_N, ratios.sample_N, count)
    keep_N = counts_N & keep_S[ratios.sample_N]
    metrics = {}
    if correction.rollout_token_veto_threshold > 0:
        metrics["rollout_corr/rollout_is_veto_fraction"] = _share(vetoed_S)
        metrics["rollout_corr/rollout_is_catastrophic_token_fraction"] = _share(catastrophic_N)
    if correction.rollout_rs != "none":
        masked_S = _any(~inside_N, ratios.sample_N, count)
        metrics["rollout_corr/rollout_rs_masked_fraction"] = _share(~inside_N)
        metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = _share(masked_S)
    if correction.rejects:
        metrics["rollout_corr/rejected_fraction"] = _share(~keep_S)
    return Rejection(keep_S, keep_N, ~inside_N | ~keep_N, metrics)


def weigh(ratios: LogRatios, rejection: Rejection, correction: Correction) -> Weights:
    """Ratio, truncation, adaptation, normalisation; statistics over what is kept. Without `rollout_is` weights are 1 or 0.

    One weight for each item: a token, or a sequence whose tokens share it.
    """
    level = correction.rollout_is
    if level == "none" or not bool(rejection.keep_S.any()):
        return Weights(torch.where(rejection.masked_N, 0.0, torch.ones_like(ratios.token_N)).float(), {})
    by_token = level == "token"
    log_ratio_I = ratios.token_N if level == "token" else ratios.per_sequence(level)
    keep_I = rejection.keep_N if by_token else rejection.keep_S
    raw_I = bounded_exp(log_ratio_I)
    applied_I = raw_I.clamp(correction.rollout_is_threshold_lower, correction.rollout_is_threshold)
    metrics: dict[str, float] = {}
    if correction.ess_target > 0:
        strength = ais_strength(applied_I[keep_I], correction.ess_target)
        applied_I = applied_I if strength == 1.0 else 1.0 + strength * (applied_I - 1.0)
        metrics["rollout_corr/rollout_is_strength"] = strength
    if by_token:
        applied_I = torch.where(rejection.masked_N, 0.0, applied_I)
    if correction.rollout_is_batch_normalize:
        mean = float(applied_I[keep_I].mean())
        applied_I = applied_I / mean if mean > 0 else applied_I
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = mean
    metrics |= _statistics(raw_I[keep_I], applied_I[keep_I], correction)
    raw_N, applied_N = (x if by_token else x[ratios.sample_N] for x in (raw_I, applied_I))
    applied_N = torch.where(rejection.masked_N, 0.0, applied_N)
    metrics |= _sequence_statistics(raw_N, applied_N, ratios, rejection, correction)
    return Weights(applied_N.float(), metrics)


def ais_strength(weight_I: Tensor, target: float) -> float:
    """The largest s in (0, 1] for which the weights 1 + s (w - 1) have an effective sample size of `target` of their number.

    From (sum)^2 / (n sum of squares) = m^2 / (m^2 + v), m and v mean and variance of the mixed weights: s * sqrt(v t / (1 - t))
    <= 1 + s (m - 1), linear in s.
    """
    mean, variance = float(weight_I.mean()), float(weight_I.var(correction=0))
    slope = 1.0 - mean + math.sqrt(variance * target / (1.0 - target))
    return min(1.0, 1.0 / slope) if slope > 0 else 1.0


def _statistics(raw_I: Tensor, applied_I: Tensor, correction: Correction) -> dict[str, float]:
    """Of tokens, or of sequences where the weights are theirs. Extremes and fractions are of the ratio before truncation."""
    high, low = _bounds(correction)
    return {
        "rollout_corr/rollout_is_mean": float(applied_I.mean()),
        "rollout_corr/rollout_is_std": float(applied_I.std(correction=0)),
        "rollout_corr/rollout_is_min": float(raw_I.min()),
        "rollout_corr/rollout_is_max": float(raw_I.max()),
        "rollout_corr/rollout_is_eff_sample_size": effective_share(applied_I),
        "rollout_corr/rollout_is_ratio_fraction_high": _share(raw_I > high),
        "rollout_corr/rollout_is_ratio_fraction_low": _share(raw_I < low),
    }


def _sequence_statistics(
    raw_N: Tensor, applied_N: Tensor, ratios: LogRatios, rejection: Rejection, correction: Correction
) -> dict[str, float]:
    """Of the mean weight of each kept sequence's kept tokens."""
    keep_N, count = rejection.keep_N, len(ratios.length_S)
    kept_S = segment_sum(keep_N, ratios.sample_N, count)[rejection.keep_S]
    raw_S, applied_S = (
        segment_sum(torch.where(keep_N, x, 0.0), ratios.sample_N, count)[rejection.keep_S] / kept_S
        for x in (raw_N, applied_N)
    )
    high, low = _bounds(correction)
    return {
        "rollout_corr/rollout_is_seq_mean": float(applied_S.mean()),
        "rollout_corr/rollout_is_seq_std": float(applied_S.std(correction=0)),
        "rollout_corr/rollout_is_seq_min": float(applied_S.min()),
        "rollout_corr/rollout_is_seq_max": float(applied_S.max()),
        "rollout_corr/rollout_is_seq_max_deviation": float((applied_S - 1.0).abs().max()),
        "rollout_corr/rollout_is_seq_fraction_high": _share(raw_S > high),
        "rollout_corr/rollout_is_seq_fraction_low": _share(raw_S < low),
    }


def _bounds(correction: Correction) -> tuple[float, float]:
    """The truncation, and below which a weight counts as low: the lower bound, or the reciprocal of the upper one (verl)."""
    high, low = correction.rollout_is_threshold, correction.rollout_is_threshold_lower
    return high, low or 1.0 / high


def effective_share(weight_I: Tensor) -> float:
    """(sum w)^2 / (n sum w^2): 1 when all are equal, 0 when nothing has weight."""
    squares = float(weight_I.square().sum())
    return float(weight_I.sum()) ** 2 / (weight_I.numel() * squares) if squares else 0.0


def _any(holds_N: Tensor, sample_N: Tensor, count: int) -> Tensor:
    """[S]: whether it holds for any token of the sequence."""
    return segment_sum(holds_N, sample_N, count) > 0


def _share(holds: Tensor) -> float:
    return float(holds.double().mean()) if holds.numel() else 0.0


def _log(threshold: float) -> float:
    return math.log(threshold) if threshold > 0 else -math.inf
