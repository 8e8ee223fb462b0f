"""Log ratios of the old over the rollout policy, of a token, of a sequence and of a sequence's average token.

    token       d_t = log p_old - log p_rollout
    sequence    sum of d_t over the sequence: the logarithm of the product of its token ratios
    geometric   mean of d_t over the sequence: the logarithm of their geometric mean

All arithmetic is float64 and sums are taken in one order (`numerics/segments.py`), so that the same tokens have the same
ratio in every run and in every cut into micro-batches. Equal log-probabilities give exactly 0. A ratio that is exponentiated
is bounded to [exp(-20), exp(20)], as in verl; comparisons with thresholds are made on the unbounded logarithms.

Shapes: N tokens, S sequences. Next: `weights.py`, what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lockstep.correction.policies import OldLogp, RolloutLogp, expect
from lockstep.numerics.segments import segment_sum

Level = Literal["token", "sequence", "geometric"]

MAX_LOG_RATIO = 20.0
"""Bound of a log ratio on both sides before it is exponentiated: a weight of half a billion."""


@dataclass(frozen=True, eq=False)
class LogRatios:
    """Float64 log ratios of a batch, unbounded; `length_S` counts the tokens of each sequence, at least 1."""

    token_N: Tensor
    sequence_S: Tensor
    length_S: Tensor
    sample_N: Tensor

    @property
    def geometric_S(self) -> Tensor:
        """Mean over the tokens of each sequence."""
        return self.sequence_S / self.length_S

    def per_token(self, level: Level) -> Tensor:
        """[N]: every token's ratio at this level; the tokens of a sequence share those of the sequence."""
        if level == "token":
            return self.token_N
        return (self.sequence_S if level == "sequence" else self.geometric_S)[self.sample_N]

    def per_sequence(self, level: Literal["sequence", "geometric"]) -> Tensor:
        """[S]."""
        return self.sequence_S if level == "sequence" else self.geometric_S


def log_ratios(old: OldLogp, rollout: RolloutLogp, sample_N: Tensor, count: int) -> LogRatios:
    """Ratios of N tokens in `count` sequences; `sample_N` (int64 [N], in any order) tells whose token each is.

    TypeError when the policies are not an `OldLogp` and a `RolloutLogp`; ValueError when their tokens differ in number, or a
    sequence has none.
    """
    old_N, rollout_N = expect(old, OldLogp).values_N, expect(rollout, RolloutLogp).values_N
    if old_N.shape != rollout_N.shape or sample_N.shape != old_N.shape:
        raise ValueError(
            f"{old_N.numel()} old and {rollout_N.numel()} rollout log-probabilities for {sample_N.numel()} tokens"
        )
    if sample_N.dtype != torch.int64:
        raise ValueError(f"sample_N must be int64, not {sample_N.dtype}")
    length_S = torch.bincount(sample_N, minlength=count)
    if len(length_S) != count or (count and int(length_S.min()) < 1):
        raise ValueError(f"{count} sequences, but their tokens are {length_S.tolist()[:8]}...")
    token_N = old_N.double() - rollout_N.double()
    return LogRatios(token_N, segment_sum(token_N, sample_N, count), length_S, sample_N)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, bounded so that it is finite and positive; exactly 1 at 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
