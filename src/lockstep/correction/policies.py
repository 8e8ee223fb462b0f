"""The three policies of an update, each with a type of its own, so that they can't be mistaken for one another.

    RolloutLogp   what the engine said when it drew the token: the policy the samples come from
    OldLogp       what the trainer says about the same token before its first optimizer step
    CurrentLogp   what the trainer says now; the only one with a gradient

Rollout and old differ by precision and kernels (the mismatch, which a correction is for); old and current by what was learnt
(which the importance ratio of the loss is for). A correction that takes the current policy for the old one corrects for the
learning (field failure 39): the ratios here take the types and nothing else, and refuse the rest with a TypeError.

Next: `ratios.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class _Policy:
    """Log-probabilities [N] of N tokens under one policy, FP32 or float64.

    ValueError for another shape or type: BF16 would make every ratio noise of its own size.
    """

    values_N: Tensor

    def __post_init__(self) -> None:
        name, values = type(self).__name__, self.values_N
        if not isinstance(values, Tensor):
            raise TypeError(f"{name} holds a tensor of log-probabilities, not {type(values).__name__}")
        if values.dim() != 1:
            raise ValueError(f"{name} holds a vector over tokens, not {tuple(values.shape)}")
        if values.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} is {values.dtype}: log-probabilities are kept in FP32, or ratios are noise"
            )


@dataclass(frozen=True, eq=False)
class _Constant(_Policy):
    """A policy of the past. ValueError when it carries a gradient or is not finite."""

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.values_N.requires_grad:
            raise ValueError(f"{name} carries a gradient: a policy of the past is a constant, detach it")
        if not bool(torch.isfinite(self.values_N).all()):
            raise ValueError(f"{name} is not finite: such a token can be neither weighed nor judged")


@dataclass(frozen=True, eq=False)
class RolloutLogp(_Constant):
    """Under the policy that drew the tokens, as the engine reported them."""


@dataclass(frozen=True, eq=False)
class OldLogp(_Constant):
    """Under the trainer's weights before the update, in the trainer's arithmetic."""


@dataclass(frozen=True, eq=False)
class CurrentLogp(_Policy):
    """Under the trainer's weights now. May carry a gradient."""

    def before_update(self) -> OldLogp:
        """The old policy, as long as no optimizer step was taken since the rollout: the same numbers as constants."""
        return OldLogp(self.values_N.detach())


Policy = TypeVar("Policy", bound=_Policy)


def expect(value: Any, kind: type[Policy]) -> Policy:
    """`value`, when it is exactly this policy. TypeError otherwise, with the two names."""
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} is needed here, not {type(value).__name__}")
    return value
