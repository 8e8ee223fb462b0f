"""A correction with every choice made, and the published ones by name.

The record has verl's option names (`rollout_corr`), so that a recipe written for verl can be carried over line by line; the
values are those of the papers, or of verl where a paper leaves them open.

Next: `spec.py`, what a user writes; `weights.py`, what is done with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Weighting = Literal["none", "token", "sequence", "geometric"]
PresetName = Literal[
    "none",
    "token_tis",
    "sequence_tis",
    "sequence_mis",
    "geometric_mis",
    "geometric_token_tis",
    "icepop",
    "veto",
    "ais",
    "bypass",
]


@dataclass(frozen=True)
class Correction:
    """What is done about the mismatch in an update. Built by `spec.resolve`; plain values, so that it can be stored.

    With r the ratio of old over rollout policy at a level: a weight is min(max(r, rollout_is_threshold_lower),
    rollout_is_threshold), a token or sequence is kept where rollout_rs_threshold_lower <= r <= rollout_rs_threshold.
    ValueError for values that mean nothing.
    """

    rollout_is: Weighting = "none"
    rollout_is_threshold: float = math.inf
    rollout_is_threshold_lower: float = 0.0
    rollout_is_batch_normalize: bool = False
    ess_target: float = 0.0
    rollout_rs: Weighting = "none"
    rollout_rs_threshold: float = math.inf
    rollout_rs_threshold_lower: float = 0.0
    rollout_token_veto_threshold: float = 0.0
    count_masked_tokens: bool = False
    bypass_mode: bool = False

    def __post_init__(self) -> None:
        for kind in ("rollout_is_threshold", "rollout_rs_threshold"):
            upper, lower = getattr(self, kind), getattr(self, f"{kind}_lower")
            if not upper >= 1:
                raise ValueError(f"{kind} is an upper bound of ratios around 1: at least 1, not {upper}")
            if not 0 <= lower <= 1:
                raise ValueError(f"{kind}_lower is a lower bound of ratios around 1: in 0..1, not {lower}")
        if not 0 <= self.rollout_token_veto_threshold < 1:
            raise ValueError(
                "rollout_token_veto_threshold is the token ratio below which a whole sequence goes: in 0..1 (0: off), "
                f"not {self.rollout_token_veto_threshold}"
            )
        if not 0 <= self.ess_target < 1:
            raise ValueError(
                "ess_target is a share of the samples: at least 0 (off) and below 1 (1 would leave no weights), "
                f"not {self.ess_target}"
            )
        if self.bypass_mode and self.rollout_is != "none":
            raise ValueError(
                "bypass_mode takes the importance ratio of the loss against the rollout policy, so it contains the correction; "
                f"with rollout_is {self.rollout_is} it would be counted twice: set rollout_is to none, or bypass_mode to false"
            )

    @property
    def active(self) -> bool:
        """Anything is corrected at all."""
        return self != NONE

    @property
    def rejects(self) -> bool:
        """Tokens or sequences may leave the batch: to be known before baselines and denominators are taken."""
        masks = self.rollout_rs != "none" and not (self.rollout_rs == "token" and self.count_masked_tokens)
        return masks or self.rollout_token_veto_threshold > 0

    @property
    def needs_batch(self) -> bool:
        """A weight depends on the other samples of the step."""
        return self.rollout_is_batch_normalize or self.ess_target > 0

    @property
    def uses_sequence_ratio(self) -> bool:
        """The product of a sequence's token ratios appears, which grows with length."""
        return "sequence" in (self.rollout_is, self.rollout_rs)


NONE = Correction()
"""No correction. The importance ratio of the loss is against the trainer's own old policy, as if it had drawn the samples."""

TOKEN_TIS = Correction(rollout_is="token", rollout_is_threshold=2.0)
"""Truncated importance sampling by token: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training" (flash-rl), with C = 2; verl's `decoupled_token_is`; what FP8-RL (arXiv 2601.18150) uses. Low variance, a little
biased: it neither corrects the distribution of prefixes nor the tail beyond C."""

SEQUENCE_TIS = Correction(rollout_is="sequence", rollout_is_threshold=2.0)
"""The same with the product of a sequence's token ratios: unbiased up to the truncation, of a variance that grows with
length. Liu, Li et al. 2025, "When Speed Kills Stability"; verl's `decoupled_seq_is`."""

SEQUENCE_MIS = Correction(
    rollout_is="sequence", rollout_is_threshold=2.0, rollout_rs="sequence", rollout_rs_threshold=2.0
)
"""Masked importance sampling: sequences whose ratio exceeds C = 2 are thrown out, the others weighed by it. Liu, Li et al.
2025, "When Speed Kills Stability"; verl's `seq_mis`, without a lower bound as there."""

GEOMETRIC_MIS = Correction(
    rollout_rs="geometric",
    rollout_rs_threshold=1.001,
    rollout_rs_threshold_lower=0.999,
    rollout_token_veto_threshold=1e-4,
)
"""Sequences whose average token ratio (geometric mean) leaves 0.999..1.001 are thrown out, with a veto at 1e-4; no weights.
Liu, Li et al. 2025; verl's `geo_rs`. The bounds are for completions of thousands of tokens: a mean over T tokens of noise s
strays by s / sqrt(T), so short completions need wider ones."""

GEOMETRIC_TOKEN_TIS = Correction(
    rollout_is="token",
    rollout_is_threshold=2.0,
    rollout_rs="geometric",
    rollout_rs_threshold=1.001,
    rollout_rs_threshold_lower=0.999,
)
"""Geometric rejection, and truncated token weights on what is left: verl's `decoupled_geo_rs_token_tis`."""

ICEPOP = Correction(
    rollout_is="token", rollout_rs="token", rollout_rs_threshold=5.0, rollout_rs_threshold_lower=0.5
)
"""IcePop: tokens whose ratio leaves 0.5..5 are masked on both sides, the others weighed by it, untruncated. Ling team 2025,
"Small Leak Can Sink a Great Ship" (Ring-1T, arXiv 2510.18855), bounds as in verl's `decoupled_token_icepop`. There a masked
token stays in the denominator: `count_masked_tokens`."""

VETO = Correction(rollout_token_veto_threshold=1e-4)
"""A sequence with one token that the trainer finds 10,000 times less likely than the rollout did is thrown out: verl's
`rollout_token_veto_threshold`, at the upper end of the recommended 1e-6..1e-4."""

AIS = Correction(rollout_is="token", rollout_is_threshold=2.0, ess_target=0.95)
"""Adaptive importance sampling: weights are drawn towards 1 by one strength for the step, the largest under which the
effective sample size is the target. After AIS (arXiv 2605.13907), which interpolates between the plain and the weighted gradient
by a coefficient of three diagnostics; ours has one, the effective sample size, with the value 0.95 that the paper reports for
healthy runs."""

BYPASS = Correction(bypass_mode=True)
"""Two policies instead of three: the importance ratio of the loss is current over rollout, clipped as usual, so the mismatch
is part of it and no pass for the old policy is needed. verl's `bypass_ppo_clip`."""

PRESETS: dict[PresetName, Correction] = {
    "none": NONE,
    "token_tis": TOKEN_TIS,
    "sequence_tis": SEQUENCE_TIS,
    "sequence_mis": SEQUENCE_MIS,
    "geometric_mis": GEOMETRIC_MIS,
    "geometric_token_tis": GEOMETRIC_TOKEN_TIS,
    "icepop": ICEPOP,
    "veto": VETO,
    "ais": AIS,
    "bypass": BYPASS,
}
