"""Which algorithm, and what it consists of.

A name in this field stands for four independent choices: how a reward becomes an advantage, which ratio is
clipped and where, what the loss is divided by, and which groups are trained on. `AlgorithmSpec` is what a
user writes (a name and perhaps some deviations); `resolve` turns it into a `Recipe` in which every choice is
made, so that the loop never asks for the name. `docs/algorithms.md` has the same as a table.

`advantages.py` comes next.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lockstep.algorithms.advantages import ADVANTAGE_EPS, AdvantageKind
from lockstep.algorithms.denominator import DenominatorKind

AlgorithmName = Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo"]
LossKind = Literal["clip", "sequence_clip", "cispo", "reinforce"]


@dataclass(frozen=True)
class AlgorithmSpec:
    """A named algorithm and deviations from it; a deviation left at None is what the algorithm prescribes."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    name: AlgorithmName = "grpo"
    """Where the prescription comes from: `grpo`, `dr_grpo`, `dapo`, `rloo`, `reinforce_pp` (with the
    group baseline), `gspo` or `cispo`. The table is in docs/algorithms.md."""

    clip_low: float | None = None
    """The importance ratio is bounded below by 1 - clip_low; 1 means no bound. Between 0 and 1."""

    clip_high: float | None = None
    """The importance ratio is bounded above by 1 + clip_high. Positive; infinity means no bound."""

    advantage: AdvantageKind | None = None
    """How rewards become advantages."""

    denominator: DenominatorKind | None = None
    """What the summed loss of a mini-batch is divided by."""

    dynamic_sampling: bool | None = None
    """Train only on groups whose rewards differ (DAPO)."""

    overlong_buffer: int = 0
    """Completions that reach into the last so many tokens before the limit lose reward (DAPO). 0: off."""

    overlong_penalty: float = 1.0
    """The reward lost at the limit. Has an effect only with overlong_buffer."""

    kl_coef: float = 0.0
    """Weight of the k3 estimate of the divergence from the reference policy, added to the loss. 0: no
    reference policy is needed. (The GRPO paper used 0.04; most later recipes use none.)"""

    entropy_coef: float = 0.0
    """Weight of the token entropy, subtracted from the loss. 0: entropy is not differentiated."""

    advantage_eps: float = ADVANTAGE_EPS
    """Added to the standard deviation where the advantage divides by one."""

    clip_calibration_every: int = 0
    """Every so many training steps the clip bounds are calibrated so that they clip what they would clip in a BF16 forward (arXiv
    2609.22870, where it is 20): two extra forwards of one mini-batch. 0: off. For losses that clip the token's ratio."""

    def __post_init__(self) -> None:
        if self.name not in _BASE:
            raise ValueError(f"unknown algorithm {self.name!r}; known: {', '.join(_BASE)}")
        if self.clip_low is not None and not 0 < self.clip_low <= 1:
            raise ValueError(f"clip_low must be above 0 and at most 1 (no lower bound), not {self.clip_low}")
        if self.clip_high is not None and not self.clip_high > 0:
            raise ValueError(f"clip_high must be positive, not {self.clip_high}")
        if _BASE[self.name].loss == "reinforce" and not (self.clip_low is None and self.clip_high is None):
            raise ValueError(
                f"{self.name} has no importance ratio, so clip_low and clip_high would have no effect: "
                "remove them, or take grpo with advantage=leave_one_out for a clipped loss with its baseline"
            )
        if self.overlong_buffer < 0:
            raise ValueError(f"overlong_buffer must not be negative, not {self.overlong_buffer}")
        for field in ("overlong_penalty", "kl_coef", "entropy_coef"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field} must be finite and not negative, not {value}")
        if not (math.isfinite(self.advantage_eps) and self.advantage_eps > 0):
            raise ValueError(f"advantage_eps must be finite and positive, not {self.advantage_eps}")
        if self.clip_calibration_every < 0:
            raise ValueError(
                f"clip_calibration_every must not be negative, not {self.clip_calibration_every}"
            )
        if self.clip_calibration_every and _BASE[self.name].loss != "clip":
            raise ValueError(
                f"{self.name} doesn't clip the token's ratio, so clip_calibration_every would have no effect: set it to 0"
            )


@dataclass(frozen=True)
class Recipe:
    """Every choice of a step's algorithm, made. Built by `resolve`; read by the loop and `policy_loss`."""

    loss: LossKind
    """`clip`: PPO's clipped token ratio; `sequence_clip`: GSPO's clipped sequence ratio; `cispo`: clipped,
    detached ratio times the log-probability; `reinforce`: the log-probability alone."""

    advantage: AdvantageKind
    """Argument of `advantages`."""

    denominator: DenominatorKind
    """Argument of `token_coefficients`."""

    clip_low: float
    """The ratio is bounded below by 1 - clip_low."""

    clip_high: float
    """The ratio is bounded above by 1 + clip_high."""

    dynamic_sampling: bool = False
    """Apply `dynamic_sampling_mask` before advantages."""

    overlong_buffer: int = 0
    """Argument of `overlong_penalty`, in tokens."""

    overlong_penalty: float = 1.0
    """Argument of `overlong_penalty`."""

    kl_coef: float = 0.0
    """Weight of the divergence from the reference policy."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    advantage_eps: float = ADVANTAGE_EPS
    """Argument of `advantages`."""

    clip_calibration_every: int = 0
    """Training steps between two calibrations of the clip bounds; 0: none (`calibration.py`)."""

    @property
    def needs_reference(self) -> bool:
        """The loss needs log-probabilities of a reference policy."""
        return self.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """The loss needs a differentiable entropy."""
        return self.entropy_coef > 0

    @property
    def needs_whole_samples(self) -> bool:
        """A sample must not be cut over two micro-batches."""
        return self.loss == "sequence_clip"


GRPO = Recipe(loss="clip", advantage="group_norm", denominator="sequence", clip_low=0.2, clip_high=0.2)
"""DeepSeekMath, arXiv 2402.03300, eq. 3: the clipped token ratio of PPO, the reward standardised within its
group, the mean over a sample's tokens and then over samples. 0.2 is PPO's customary bound."""

DR_GRPO = dataclasses.replace(GRPO, advantage="group_mean", denominator="constant")
"""Understanding R1-Zero-Like Training, arXiv 2503.20783: GRPO without the two divisions that bias it, one by
the sample's length and one by the group's standard deviation; divided by a constant, the token limit."""

DAPO = dataclasses.replace(GRPO, denominator="token", clip_high=0.28, dynamic_sampling=True)
"""arXiv 2503.14476: a higher upper bound (eq. 10), groups of equal rewards left out (eq. 11), the mean over
all tokens (eq. 12). The soft overlong punishment (eq. 13) depends on the generation budget: set
`overlong_buffer` for it."""

RLOO = Recipe(
    loss="reinforce", advantage="leave_one_out", denominator="constant", clip_low=1.0, clip_high=math.inf
)
"""Back to Basics, arXiv 2402.14740: the log-probability of the whole completion times its reward against the
mean of the others, no ratio. The paper sums over a completion's tokens; a constant denominator is that sum,
scaled. Without a ratio it is right for one update to each rollout."""

REINFORCE_PP = dataclasses.replace(GRPO, advantage="global_norm", denominator="token")
"""REINFORCE++ in its form with the group baseline, arXiv 2501.03262: rewards minus their group's mean,
standardised over the batch, in PPO's clipped loss; averaged over tokens, as the authors' OpenRLHF does."""

GSPO = dataclasses.replace(GRPO, loss="sequence_clip", clip_low=3e-4, clip_high=4e-4)
"""arXiv 2507.18071, eq. 5 to 7: one ratio a sample, the geometric mean of its token ratios, clipped (section
5.1 gives the bounds), in a mean over samples. The gradient is GSPO-token's with equal advantages."""

CISPO = dataclasses.replace(GRPO, loss="cispo", denominator="token", clip_low=1.0, clip_high=4.0)
"""MiniMax-M1, arXiv 2506.13585, eq. 4 and 5: the ratio is a bounded, detached weight, so no token loses its
gradient. The paper sets no lower bound and tunes the upper one; a weight of at most 5 is our choice."""

_BASE: dict[AlgorithmName, Recipe] = {
    "grpo": GRPO,
    "dr_grpo": DR_GRPO,
    "dapo": DAPO,
    "rloo": RLOO,
    "reinforce_pp": REINFORCE_PP,
    "gspo": GSPO,
    "cispo": CISPO,
}


def resolve(spec: AlgorithmSpec) -> Recipe:
    """The named algorithm's recipe with the deviations of `spec` applied."""
    given = {
        field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.name != "name"
    }
    return dataclasses.replace(
        _BASE[spec.name], **{key: value for key, value in given.items() if value is not None}
    )
