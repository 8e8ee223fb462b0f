"""Packing: each sample once, never over budget, groups together where they fit, the same every time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.packing import GroupLengths, bin_tokens, fill_ratio, pack
from lockstep.errors import CapacityError, DataError

BUDGET = 100
groups_that_fit = st.lists(
    st.builds(
        GroupLengths,
        prompt=st.integers(0, 40),
        responses=st.lists(st.integers(0, 60), max_size=8).map(tuple),
    ),
    max_size=12,
)


def slow_tokens(samples: list[int], groups: list[GroupLengths], share: bool) -> int:
    """By the definition, without the bookkeeping of the code under test."""
    flat = [(g, length) for g, group in enumerate(groups) for length in group.responses]
    members = [flat[s] for s in samples]
    prompts = {g for g, _ in members} if share else [g for g, _ in members]
    return sum(length for _, length in members) + sum(groups[g].prompt for g in prompts)


@given(groups_that_fit, st.booleans())
def test_every_sample_once_and_no_bin_over_budget(groups: list[GroupLengths], share: bool) -> None:
    bins = pack(groups, BUDGET, share)
    assert sorted(s for b in bins for s in b) == list(range(sum(len(g.responses) for g in groups)))
    sizes = [slow_tokens(b, groups, share) for b in bins]
    assert all(b and b == sorted(b) for b in bins)
    assert all(size <= BUDGET for size in sizes)
    assert bin_tokens(bins, groups, share) == sizes
    assert fill_ratio(bins, groups, BUDGET, share) == (sum(sizes) / (BUDGET * len(bins)) if bins else 1.0)


@given(groups_that_fit, st.booleans())
def test_a_group_that_fits_is_not_split(groups: list[GroupLengths], share: bool) -> None:
    bins = pack(groups, BUDGET, share)
    first = 0
    for group in groups:
        samples = list(range(first, first + len(group.responses)))
        first += len(samples)
        if samples and slow_tokens(list(range(len(samples))), [group], share) <= BUDGET:
            assert any(set(samples) <= set(b) for b in bins)


@given(groups_that_fit, st.booleans())
def test_the_same_input_gives_the_same_bins(groups: list[GroupLengths], share: bool) -> None:
    assert pack(groups, BUDGET, share) == pack(list(groups), BUDGET, share)


@given(groups_that_fit)
def test_no_two_bins_could_be_one(groups: list[GroupLengths]) -> None:
    """First-fit leaves at most one bin half empty, except where keeping a group together forbids a better fit."""
    whole = [g for g in groups if slow_tokens(list(range(len(g.responses))), [g], True) <= BUDGET]
    sizes = [slow_tokens(b, whole, True) for b in pack(whole, BUDGET, True)]
    assert sum(size <= BUDGET // 2 for size in sizes) <= 1


def test_sharing_the_prompt_counts_it_once() -> None:
    group = GroupLengths(40, (10, 10, 10, 10))
    assert pack([group], 80, share_prompt=True) == [[0, 1, 2, 3]]
    assert pack([group], 80, share_prompt=False) == [[0], [1], [2], [3]]
    assert pack([group], 100, share_prompt=False) == [[0, 1], [2, 3]]
    assert fill_ratio([[0, 1, 2, 3]], [group], 80, True) == 1.0


def test_a_split_group_leaves_its_last_bin_to_others() -> None:
    groups = [GroupLengths(10, (50, 50, 20)), GroupLengths(5, (20,))]
    bins = pack(groups, 100, share_prompt=True)
    assert bins == [[0, 2], [1, 3]]


def test_larger_groups_first_and_ties_in_order() -> None:
    groups = [GroupLengths(0, (30,)), GroupLengths(0, (60,)), GroupLengths(0, (60,)), GroupLengths(0, (40,))]
    assert pack(groups, 100, True) == [[1, 3], [0, 2]]
    assert pack([], 100, True) == []


def test_a_sample_over_budget_is_refused_with_the_numbers() -> None:
    with pytest.raises(CapacityError, match=r"sample 1 of group 0 has 60 \+ 50 = 110 tokens.*is 100"):
        pack([GroupLengths(60, (10, 50))], 100, True)
    with pytest.raises(DataError, match="negative"):
        GroupLengths(5, (-1,))
