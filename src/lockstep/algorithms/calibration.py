"""Clip bounds for a ratio that carries noise: the bounds move so that they clip what they would clip without it.

PPO stops a token's update when the ratio of current over old policy leaves [1 - low, 1 + high]. A ratio computed in low precision
is the true one times noise, and noise alone carries tokens over a bound: those of negative advantage at the lower one above
all, so that bad outputs are no longer punished. "Towards Full Pipeline FP8 Reinforcement Learning for LLMs" (arXiv 2609.22870)
therefore calibrates the bounds on a reference, the ratios of the same tokens in BF16: the lower bound clips as large a share of
the negative tokens as the reference does, the upper one then restores the reference's balance of positive to negative updates.

The formulas are our reading of it. With r~ the ratio of the loss and r the reference ratio, over tokens of negative (-) and
positive (+) advantage A:

    k = number of - tokens with r < 1 - low
    L = the bound nearest to 1 - low under which exactly k of the - tokens have r~ < L
    balance = sum over unclipped + of A r / sum over unclipped - of |A| r     (under r and the nominal bounds)
    U = the bound nearest to 1 + high under which the balance of r~ with L and U comes closest to that

L and U are taken nearest to the nominal bounds among all that do the same, so without noise (r~ = r) they are the nominal
ones exactly. The noise may also be the mismatch: where the ratio of the loss is current over rollout and the reference is
current over old, the clip is no longer spent on the difference of rollout and old.

Shapes: N tokens. Next: `losses.py`, which clips; `../trainer/clip_calibration.py`, which measures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.numerics.segments import segment_sum

ROUNDING = 1e-12
"""Sums that differ by this share of what is wanted count as equal; the bound nearest to the nominal one is taken."""


@dataclass(frozen=True)
class ClipBounds:
    """The ratio is bounded to [lower, upper]; 0 and infinity are no bounds."""

    lower: float
    upper: float

    def towards(self, other: ClipBounds, share: float) -> ClipBounds:
        """This far on the way to `other`: 0 is here, 1 is there. Infinities stay."""
        return ClipBounds(_between(self.lower, other.lower, share), _between(self.upper, other.upper, share))


def calibrated_bounds(
    ratio_N: Tensor, reference_N: Tensor, advantage_N: Tensor, nominal: ClipBounds
) -> ClipBounds:
    """The bounds for `ratio_N` that do what `nominal` does to `reference_N`. All [N], of the same tokens.

    ValueError when shapes differ or a ratio is not positive and finite. Without negative tokens the lower bound stays, without
    tokens of either sign the upper one does.
    """
    if not ratio_N.shape == reference_N.shape == advantage_N.shape or ratio_N.dim() != 1:
        raise ValueError(
            f"{tuple(ratio_N.shape)} ratios, {tuple(reference_N.shape)} references, {tuple(advantage_N.shape)} advantages"
        )
    ratio_N, reference_N = ratio_N.detach().double(), reference_N.detach().double()
    for name, value in (("ratio", ratio_N), ("reference", reference_N)):
        if not bool((torch.isfinite(value) & (value > 0)).all()):
            raise ValueError(f"a {name} is not positive and finite")
    advantage_N = advantage_N.detach().double()
    negative_N, positive_N = advantage_N < 0, advantage_N > 0
    lower = _same_count(ratio_N[negative_N], reference_N[negative_N], nominal.lower)
    wanted = _balance(reference_N, advantage_N, nominal)
    if wanted is None:
        return ClipBounds(lower, nominal.upper)
    negative = float((-advantage_N * ratio_N)[negative_N & (ratio_N >= lower)].sum())
    upper = _same_sum(ratio_N[positive_N], advantage_N[positive_N], wanted * negative, nominal.upper)
    return ClipBounds(lower, upper)


def _same_count(ratio: Tensor, reference: Tensor, nominal: float) -> float:
    """The bound nearest to `nominal`, at most 1, below which there are as many ratios as references below `nominal`."""
    clipped, order = int((reference < nominal).sum()), ratio.sort().values
    highest = float(order[clipped]) if clipped < len(order) else math.inf
    lowest = math.nextafter(float(order[clipped - 1]), math.inf) if clipped else 0.0
    return min(max(min(nominal, highest), lowest), 1.0)


def _same_sum(ratio: Tensor, advantage: Tensor, wanted: float, nominal: float) -> float:
    """The bound nearest to `nominal`, at least 1, up to which the sum of A r comes closest to `wanted`; infinity stays."""
    if math.isinf(nominal):
        return nominal
    value, place = torch.unique(ratio, return_inverse=True)
    sums = segment_sum(advantage * ratio, place, len(value))
    total = torch.cat([sums.new_zeros(1), sums.cumsum(0)])
    miss = (total - wanted).abs()
    best = torch.nonzero(miss <= miss.min() + ROUNDING * wanted)[:, 0]
    kept = int(best[(best - int((value <= nominal).sum())).abs().argmin()])
    lowest = float(value[kept - 1]) if kept else 0.0
    highest = math.nextafter(float(value[kept]), 0.0) if kept < len(value) else math.inf
    return max(min(max(nominal, lowest), highest), 1.0)


def _balance(ratio_N: Tensor, advantage_N: Tensor, bounds: ClipBounds) -> float | None:
    """Sum of positive over sum of negative updates that the bounds let through; None where either is nothing."""
    weight_N = (advantage_N * ratio_N).abs()
    positive = float(weight_N[(advantage_N > 0) & (ratio_N <= bounds.upper)].sum())
    negative = float(weight_N[(advantage_N < 0) & (ratio_N >= bounds.lower)].sum())
    return positive / negative if positive > 0 and negative > 0 else None


def _between(here: float, there: float, share: float) -> float:
    return here if math.isinf(here) or math.isinf(there) else here + share * (there - here)
