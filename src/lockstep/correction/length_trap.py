"""The length trap: a sequence's ratio strays from 1 though every token's is fine.

The logarithm of the product is a sum over tokens. With mean m and standard deviation s of the token's log ratio, L tokens give
L m of drift and sqrt(L) s of spread, a root mean square of sqrt((L m)^2 + L s^2): so much is a sequence's ratio off by.
At 8,000 tokens of honest noise 0.02 that is 6; a threshold of 2 then throws out, or truncates, a third of the samples for
their length. (TRL 5814: sequence ratios of 0.4 to 0.7 while tokens agree.)
"""

from __future__ import annotations

import math

from lockstep.correction.presets import Correction
from lockstep.correction.ratios import MAX_LOG_RATIO, LogRatios

TOLERATED = 2.0
"""A warning is due when sequence ratios are expected to stray by more than this factor."""


def length_trap(ratios: LogRatios) -> float:
    """exp(sqrt((L m)^2 + L s^2)) of a batch, L its mean length; 1 without mismatch, and without tokens."""
    if not ratios.token_N.numel():
        return 1.0
    length, drift, noise = _moments(ratios)
    return math.exp(min(math.hypot(length * drift, math.sqrt(length) * noise), MAX_LOG_RATIO))


def trap_warning(correction: Correction, ratios: LogRatios, trap: float) -> str:
    """One line when the correction uses the sequence ratio and the batch is in the trap, else nothing."""
    if not correction.uses_sequence_ratio or trap <= TOLERATED:
        return ""
    length, drift, noise = _moments(ratios)
    option = "rollout_is" if correction.rollout_is == "sequence" else "rollout_rs"
    return (
        f"length trap: correction.{option} is sequence, and over {length:.0f} tokens a mismatch of {drift:.2g} +- {noise:.2g} "
        f"nats a token takes the ratio of a sequence off by a factor of {trap:.3g}: set rollout_is to token, rollout_rs to "
        "token or geometric"
    )


def _moments(ratios: LogRatios) -> tuple[float, float, float]:
    """Mean length, |mean| and standard deviation of the token's log ratio."""
    d = ratios.token_N
    return float(ratios.length_S.double().mean()), abs(float(d.mean())), float(d.std(correction=0))
