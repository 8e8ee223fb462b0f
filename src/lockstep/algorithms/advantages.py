"""From rewards to advantages, and the masks that decide which samples take part.

A sample's advantage is its reward against a baseline made from the samples of the same prompt (its group), so
a sample that is rejected later has already moved its siblings. Therefore rejection comes first: every
function takes a keep mask, and what is not kept is in no mean, no standard deviation and no count. Groups may
differ in size.

All arithmetic is float64 over the FP32 rewards, so that a group of equal rewards gives advantages of exactly
zero (in FP32 the mean of three times 0.1 is not 0.1), and the result is FP32.

The functions see only what they are given: with several ranks, gather rewards and group ids first.

Shapes: S samples, K kept samples, G groups. `denominator.py` comes next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from lockstep.errors import RewardError
from lockstep.numerics.segments import segment_sum

AdvantageKind = Literal["group_norm", "group_mean", "leave_one_out", "global_norm"]

ADVANTAGE_EPS = 1e-6
"""Added to a standard deviation before dividing by it."""


def advantages(
    rewards_S: Tensor,
    group_S: Tensor,
    kind: AdvantageKind,
    *,
    eps: float = ADVANTAGE_EPS,
    keep_S: Tensor | None = None,
) -> Tensor:
    """FP32 advantages [S] of `rewards_S` [S] with int64 group ids `group_S` [S] (any values, any order).

    With r the kept rewards of a group of n members and m their mean:
    `group_norm` (r - m) / (std + eps), sample standard deviation (GRPO, arXiv 2402.03300, section 4.1.2);
    `group_mean` r - m (Dr. GRPO, arXiv 2503.20783);
    `leave_one_out` r minus the mean of the other n - 1 (RLOO, arXiv 2402.14740);
    `global_norm` (r - m) / (std of r - m over the batch + eps) (REINFORCE++ with baseline, arXiv 2501.03262).
    `eps` matters to the two kinds with a standard deviation only.

    Samples outside `keep_S` (bool [S]) get 0 and influence nothing, and their rewards may be anything. Raises
    ValueError if a kept group has fewer than two members (see `drop_small_groups`), RewardError if a kept
    reward is not finite.
    """
    if kind not in _KINDS:
        raise ValueError(f"unknown advantage kind {kind!r}; known: {', '.join(_KINDS)}")
    if not eps > 0:
        raise ValueError(
            f"eps must be positive, not {eps}: a group of equal rewards has standard deviation 0"
        )
    keep_S = _keep_mask(group_S, keep_S)
    rewards_K = _finite_rewards(rewards_S, group_S, keep_S)
    advantage_S = torch.zeros(group_S.shape, dtype=torch.float32, device=rewards_S.device)
    if rewards_K.numel() == 0:
        return advantage_S
    ids_G, member_K, size_G = torch.unique(group_S[keep_S], return_inverse=True, return_counts=True)
    if int(size_G.min()) < 2:
        small = ids_G[size_G < 2].tolist()
        raise ValueError(
            f"groups with a single kept sample have no baseline: {small[:8]}; "
            "remove them with drop_small_groups"
        )
    advantage_S[keep_S] = _KINDS[kind](rewards_K, member_K, size_G, eps).float()
    return advantage_S


def _centred(rewards_K: Tensor, member_K: Tensor, size_G: Tensor) -> Tensor:
    mean_G = segment_sum(rewards_K, member_K, size_G.numel()) / size_G
    return rewards_K - mean_G[member_K]


def _group_norm(rewards_K: Tensor, member_K: Tensor, size_G: Tensor, eps: float) -> Tensor:
    centred_K = _centred(rewards_K, member_K, size_G)
    variance_G = segment_sum(centred_K.square(), member_K, size_G.numel()) / (size_G - 1)
    return centred_K / (variance_G.sqrt()[member_K] + eps)


def _group_mean(rewards_K: Tensor, member_K: Tensor, size_G: Tensor, eps: float) -> Tensor:
    return _centred(rewards_K, member_K, size_G)


def _leave_one_out(rewards_K: Tensor, member_K: Tensor, size_G: Tensor, eps: float) -> Tensor:
    total_G = segment_sum(rewards_K, member_K, size_G.numel())
    return rewards_K - (total_G[member_K] - rewards_K) / (size_G - 1)[member_K]


def _global_norm(rewards_K: Tensor, member_K: Tensor, size_G: Tensor, eps: float) -> Tensor:
    centred_K = _centred(rewards_K, member_K, size_G)
    return centred_K / (centred_K.std(correction=1) + eps)


_KINDS: dict[AdvantageKind, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "group_norm": _group_norm,
    "group_mean": _group_mean,
    "leave_one_out": _leave_one_out,
    "global_norm": _global_norm,
}


def drop_small_groups(group_S: Tensor, keep_S: Tensor | None = None) -> Tensor:
    """Keep mask (bool [S]): `keep_S` without groups of which fewer than two samples are kept."""
    keep_S = _keep_mask(group_S, keep_S)
    ids_G, member_S = torch.unique(group_S, return_inverse=True)
    size_G = torch.bincount(member_S[keep_S], minlength=ids_G.numel())
    return keep_S & (size_G >= 2)[member_S]


def dynamic_sampling_mask(rewards_S: Tensor, group_S: Tensor, keep_S: Tensor | None = None) -> Tensor:
    """Keep mask (bool [S]) of groups whose kept rewards are not all equal (DAPO, arXiv 2503.14476, eq. 11).

    A group of equal rewards has advantages of zero: it costs a training pass and teaches nothing. The paper's
    condition is about correctness, so pass the task's reward, before `overlong_penalty` is added to it.
    Raises RewardError if a kept reward is not finite.
    """
    keep_S = _keep_mask(group_S, keep_S)
    rewards_K = _finite_rewards(rewards_S, group_S, keep_S)
    ids_G, member_S = torch.unique(group_S, return_inverse=True)
    top_G = rewards_K.new_full((ids_G.numel(),), -torch.inf)
    top_G = top_G.scatter_reduce(0, member_S[keep_S], rewards_K, "amax")
    bottom_G = rewards_K.new_full((ids_G.numel(),), torch.inf)
    bottom_G = bottom_G.scatter_reduce(0, member_S[keep_S], rewards_K, "amin")
    return keep_S & (top_G > bottom_G)[member_S]


def overlong_penalty(lengths_S: Tensor, max_tokens: int, buffer: int, penalty: float) -> Tensor:
    """FP32 amounts [S], at most 0, to add to the rewards (DAPO, arXiv 2503.14476, eq. 13).

    `lengths_S` are completion lengths in tokens. Nothing up to `max_tokens - buffer`, then linearly down to
    `-penalty` at `max_tokens` and beyond. `buffer = 0` switches it off. Raises ValueError if the buffer is
    negative or longer than `max_tokens`."""
    if not 0 <= buffer <= max_tokens:
        raise ValueError(
            f"the overlong buffer ({buffer} tokens) must lie between 0 and max_tokens ({max_tokens})"
        )
    if buffer == 0:
        return torch.zeros(lengths_S.shape, dtype=torch.float32, device=lengths_S.device)
    slope_S = (max_tokens - buffer - lengths_S.double()) / buffer
    return (penalty * slope_S.clamp(-1.0, 0.0)).float()


def _keep_mask(group_S: Tensor, keep_S: Tensor | None) -> Tensor:
    if group_S.dim() != 1 or group_S.dtype != torch.int64:
        raise ValueError(f"group ids must be an int64 vector, not {group_S.dtype} {tuple(group_S.shape)}")
    if keep_S is None:
        return torch.ones(group_S.shape, dtype=torch.bool, device=group_S.device)
    if keep_S.shape != group_S.shape or keep_S.dtype != torch.bool:
        raise ValueError(
            f"the keep mask must be bool {tuple(group_S.shape)}, not {keep_S.dtype} {tuple(keep_S.shape)}"
        )
    return keep_S


def _finite_rewards(rewards_S: Tensor, group_S: Tensor, keep_S: Tensor) -> Tensor:
    if rewards_S.shape != group_S.shape:
        raise ValueError(f"{tuple(rewards_S.shape)} rewards for {tuple(group_S.shape)} group ids")
    rewards_K = rewards_S[keep_S].float()
    finite_K = torch.isfinite(rewards_K)
    if not bool(finite_K.all()):
        bad = torch.nonzero(keep_S)[:, 0][~finite_K].tolist()
        raise RewardError(
            f"{len(bad)} kept rewards are not finite",
            where=f"samples {bad[:8]}",
            why="one of them would make the advantages of its whole group meaningless",
            fix="return a number, or None to have the sample dropped before advantages are taken",
        )
    return rewards_K.double()
