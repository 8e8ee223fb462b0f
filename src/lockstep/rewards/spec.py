"""What a user writes to ask for a reward: which function, its weight, its options, its time limit.

A list of these is all that `evaluate.Rewards` needs. Next: `contract.py` (what a reward function gets and returns).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class RewardSpec:
    """One reward function and how it counts."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    use: str
    """A built-in name (`last_number`), a function in a file (`rewards.py:my_reward`) or in a package
    (`my_package.rewards:my_reward`)."""

    weight: float = 1.0
    """Factor in the weighted sum. 0 measures the reward without training on it."""

    args: dict[str, Any] = field(default_factory=dict)
    """Options, passed to the function by keyword. Must be plain JSON values where the function runs in a worker."""

    timeout_s: float = 10.0
    """Seconds for one sample. Enforced by killing the process where the function runs in a worker (`math_verify`,
    `reasoning_gym`, or `isolate: true`); an async function gets this many seconds times the samples of the batch for its
    whole call; a plain function in the trainer's process can't be interrupted, so there it has no effect."""

    isolate: bool = False
    """Run the function in worker processes, one sample a call, under `timeout_s`. Built-ins decide for themselves."""

    timeout_score: float = 0.0
    """Score of a sample that ran out of time or took its worker process down with it."""

    def __post_init__(self) -> None:
        if not self.use.strip():
            raise ValueError("use is empty; give a built-in name or path.py:function")
        if not math.isfinite(self.weight):
            raise ValueError(f"weight must be a finite number, not {self.weight}")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ValueError(f"timeout_s must be a positive number of seconds, not {self.timeout_s}")
        if not math.isfinite(self.timeout_score):
            raise ValueError(f"timeout_score must be a finite number, not {self.timeout_score}")
