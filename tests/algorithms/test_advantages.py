"""Advantages against hand-written values, their invariants, and rejection before the baseline."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms import (
    AdvantageKind,
    advantages,
    drop_small_groups,
    dynamic_sampling_mask,
    overlong_penalty,
)
from lockstep.errors import RewardError
from lockstep.numerics.segments import segment_sum

KINDS = get_args(AdvantageKind)
EPS = 1e-6

# Two groups of different size, their members interleaved; ids are neither dense nor ordered.
REWARDS = torch.tensor([1.0, 0.0, 0.0, 2.0, 1.0])
GROUPS = torch.tensor([7, -3, 7, -3, 7])


def by_hand(kind: AdvantageKind) -> np.ndarray:
    seven, three = np.array([1.0, 0.0, 1.0]), np.array([0.0, 2.0])
    centred = np.array([1 - 2 / 3, 0 - 1, 0 - 2 / 3, 2 - 1, 1 - 2 / 3])
    if kind == "group_mean":
        return centred
    if kind == "group_norm":
        a, b = np.std(seven, ddof=1) + EPS, np.std(three, ddof=1) + EPS
        return centred / np.array([a, b, a, b, a])
    if kind == "leave_one_out":
        return np.array([1 - (0 + 1) / 2, 0 - 2, 0 - (1 + 1) / 2, 2 - 0, 1 - (1 + 0) / 2])
    return centred / (np.std(centred, ddof=1) + EPS)


@pytest.mark.parametrize("kind", KINDS)
def test_against_hand_written_values(kind: AdvantageKind) -> None:
    result = advantages(REWARDS, GROUPS, kind, eps=EPS)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), by_hand(kind), rtol=2e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_equal_rewards_gives_exactly_zero(kind: AdvantageKind) -> None:
    rewards = torch.tensor([0.1] * 3 + [0.7] * 7, dtype=torch.float64)
    groups = torch.tensor([0] * 3 + [1] * 7)
    assert torch.equal(advantages(rewards, groups, kind, eps=EPS), torch.zeros(10))


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and group ids in random order, every group of two to five members."""
    ids = draw(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=5, unique=True))
    groups = [group for group in ids for _ in range(draw(st.integers(2, 5)))]
    groups = draw(st.permutations(groups))
    reward = st.floats(-100, 100, width=32).map(lambda x: round(x, 3))
    rewards = draw(st.lists(reward, min_size=len(groups), max_size=len(groups)))
    return torch.tensor(rewards), torch.tensor(groups)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(batch=batches())
def test_advantages_sum_to_zero_in_every_group(
    kind: AdvantageKind, batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    rewards, groups = batch
    result = advantages(rewards, groups, kind, eps=EPS).double()
    for group in groups.unique():
        members = result[groups == group]
        assert abs(float(members.sum())) <= 1e-6 * max(1.0, float(members.abs().sum()))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(batch=batches(), data=st.data())
def test_permutation_equivariance(
    kind: AdvantageKind, batch: tuple[torch.Tensor, torch.Tensor], data: st.DataObject
) -> None:
    rewards, groups = batch
    order = torch.tensor(data.draw(st.permutations(range(len(rewards)))))
    permuted = advantages(rewards[order], groups[order], kind, eps=EPS)
    torch.testing.assert_close(
        permuted, advantages(rewards, groups, kind, eps=EPS)[order], rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("kind", ["group_norm", "group_mean", "leave_one_out"])
def test_groups_do_not_see_each_other(kind: AdvantageKind) -> None:
    alone = advantages(REWARDS[GROUPS == 7], GROUPS[GROUPS == 7], kind, eps=EPS)
    assert torch.equal(advantages(REWARDS, GROUPS, kind, eps=EPS)[GROUPS == 7], alone)


@pytest.mark.parametrize("kind", KINDS)
def test_case_41_a_rejected_sample_does_not_move_its_siblings(kind: AdvantageKind) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0])
    groups = torch.tensor([0, 0, 0, 1, 1])
    keep = torch.tensor([True, True, False, True, True])
    without = advantages(rewards[keep], groups[keep], kind, eps=EPS)
    for reward in (0.5, -1e6, float("nan"), float("inf")):
        rewards[2] = reward
        result = advantages(rewards, groups, kind, eps=EPS, keep_S=keep)
        assert torch.equal(result[keep], without)
        assert result[2] == 0


def test_case_41_groups_left_with_one_are_refused_and_can_be_dropped() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([5, 5, 9, 9])
    keep = torch.tensor([True, True, True, False])
    with pytest.raises(ValueError, match=r"single kept sample.*\[9\]"):
        advantages(rewards, groups, "group_norm", eps=EPS, keep_S=keep)
    keep = drop_small_groups(groups, keep)
    assert keep.tolist() == [True, True, False, False]
    assert advantages(rewards, groups, "group_mean", eps=EPS, keep_S=keep).tolist() == [0.5, -0.5, 0.0, 0.0]


def test_drop_small_groups_keeps_pairs_in_any_order() -> None:
    assert drop_small_groups(torch.tensor([4, 2, 4, 3, -1, 3, 3])).tolist() == [
        True,
        False,
        True,
        True,
        False,
        True,
        True,
    ]


def test_nothing_kept_gives_zeros() -> None:
    nothing = torch.zeros(5, dtype=torch.bool)
    assert torch.equal(advantages(REWARDS, GROUPS, "group_norm", keep_S=nothing), torch.zeros(5))
    assert not drop_small_groups(GROUPS, nothing).any()
    assert not dynamic_sampling_mask(REWARDS, GROUPS, nothing).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rewards_that_are_no_numbers_are_refused(bad: float) -> None:
    rewards = REWARDS.clone()
    rewards[3] = bad
    with pytest.raises(RewardError, match=r"samples \[3\]"):
        advantages(rewards, GROUPS, "group_mean", eps=EPS)
    with pytest.raises(RewardError):
        dynamic_sampling_mask(rewards, GROUPS)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown advantage kind"):
        advantages(REWARDS, GROUPS, "median", eps=EPS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eps"):
        advantages(REWARDS, GROUPS, "group_norm", eps=0.0)
    with pytest.raises(ValueError, match="int64"):
        advantages(REWARDS, GROUPS.float(), "group_norm")
    with pytest.raises(ValueError, match="group ids"):
        advantages(REWARDS[:4], GROUPS, "group_norm")
    with pytest.raises(ValueError, match="keep mask"):
        advantages(REWARDS, GROUPS, "group_norm", keep_S=torch.ones(5))


def test_dynamic_sampling_keeps_groups_whose_rewards_differ() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.1, 0.1, 0.1])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 3])
    assert dynamic_sampling_mask(rewards, groups).tolist() == [True] * 2 + [False] * 7


def test_dynamic_sampling_looks_at_kept_samples_only() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    keep = torch.tensor([True, True, False, True, True, False])
    assert dynamic_sampling_mask(rewards, groups, keep).tolist() == [False, False, False, True, True, False]


def test_overlong_penalty_is_flat_then_linear_then_flat() -> None:
    lengths = torch.tensor([0, 60, 80, 85, 90, 99, 100, 130])
    expected = [0.0, 0.0, 0.0, -0.25, -0.5, -0.95, -1.0, -1.0]
    torch.testing.assert_close(overlong_penalty(lengths, 100, 20, 1.0), torch.tensor(expected))
    torch.testing.assert_close(overlong_penalty(lengths, 100, 20, 0.5), 0.5 * torch.tensor(expected))
    assert torch.equal(overlong_penalty(lengths, 100, 0, 1.0), torch.zeros(8))
    for buffer in (-1, 101):
        with pytest.raises(ValueError, match="buffer"):
            overlong_penalty(lengths, 100, buffer, 1.0)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), count=st.integers(1, 6))
def test_segment_sums_equal_a_plain_loop(data: st.DataObject, count: int) -> None:
    segments = data.draw(st.lists(st.integers(0, count - 1), max_size=30))
    values = data.draw(st.lists(st.floats(-1e3, 1e3), min_size=len(segments), max_size=len(segments)))
    expected = [0.0] * count
    for value, segment in zip(values, segments, strict=True):
        expected[segment] += value
    result = segment_sum(
        torch.tensor(values, dtype=torch.float64), torch.tensor(segments, dtype=torch.int64), count
    )
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-12, atol=1e-9)
