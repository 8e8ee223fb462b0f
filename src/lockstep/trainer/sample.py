"""A completion on its way through rewards and advantages, and the door it has to pass.

Sample contract: token ids and FP32 log-probabilities of exactly those tokens, finite and not positive, drawn under the
version the step expects. What breaks it is dropped and counted by reason, never repaired (TRL 6166, NeMo-RL 4218).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.data.example import Example
from lockstep.rollout.types import Completion


@dataclass
class Sample:
    """One completion with what has been learnt about it. `group` numbers the prompts of a step from 0."""

    completion: Completion
    example: Example
    group: int
    text: str
    reward: float | None = None
    parts: dict[str, float | None] = field(default_factory=dict)
    advantage: float = 0.0
    max_abs_dlogp: float | None = None


def defect(completion: Completion, version: int, scale_version: int) -> str | None:
    """Why a completion can't be trained on, or None."""
    if not completion.token_ids:
        return "no_tokens"
    if len(completion.logprobs) != len(completion.token_ids):
        return "logprob_count"
    if not all(math.isfinite(p) for p in completion.logprobs):
        return "logprob_nonfinite"
    if any(p > 0 for p in completion.logprobs):
        return "logprob_positive"
    if any(span.version != version for span in completion.spans) or completion.scale_version != scale_version:
        return "wrong_version"
    return None


def admit(
    completions: Sequence[Completion], version: int, scale_version: int
) -> tuple[list[Completion], dict[str, float]]:
    """The completions that keep the sample contract, and `data/dropped_<reason>` counts of the others."""
    reasons: Counter[str] = Counter()
    kept = []
    for completion in completions:
        reason = defect(completion, version, scale_version)
        if reason is None:
            kept.append(completion)
        else:
            reasons[reason] += 1
    return kept, {f"data/dropped_{reason}": float(count) for reason, count in sorted(reasons.items())}
