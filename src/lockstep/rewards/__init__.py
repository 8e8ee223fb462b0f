"""Reward functions: TRL's contract, built-ins, and worker processes with a hard time limit.

`Rewards(specs).score(...)` is the one call the training loop makes. This package imports the standard library only, so
that a worker process starts in a blink and never loads torch. Read `spec.py`, then `contract.py`.
"""

from lockstep.rewards.contract import Completion, Prompt, RewardFunction, as_completion, text_of
from lockstep.rewards.evaluate import RewardBatch, Rewards
from lockstep.rewards.spec import RewardSpec

__all__ = [
    "Completion",
    "Prompt",
    "RewardBatch",
    "RewardFunction",
    "RewardSpec",
    "Rewards",
    "as_completion",
    "text_of",
]
