"""The stream is a pure function of seed and ordinal: any order of asking, any process, every numpy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.order import permutation, words
from lockstep.data.stream import PromptStream
from lockstep.errors import DataError


@given(size=st.integers(1, 40), seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 50))
def test_every_epoch_has_every_example_once(size: int, seed: int, epoch: int) -> None:
    stream = PromptStream(range(size), seed)
    assert sorted(stream.take(epoch * size, size)) == list(range(size))


@given(st.lists(st.integers(0, 500), min_size=1, max_size=20), st.integers(0, 1000))
def test_case_65_the_order_of_asking_does_not_matter(ordinals: list[int], seed: int) -> None:
    """A resumed run asks a new stream from its cursor on; it must get what the uninterrupted run would have got."""
    whole = PromptStream(range(13), seed).take(0, 501)
    permutation.cache_clear()
    resumed = PromptStream(range(13), seed)
    assert [resumed.at(n) for n in ordinals] == [whole[n] for n in ordinals]
    assert resumed.take(min(ordinals), 5) == PromptStream(range(13), seed).take(0, 600)[min(ordinals) :][:5]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    stream = PromptStream(range(50), seed=3)
    epochs = [tuple(stream.take(50 * e, 50)) for e in range(4)]
    assert len(set(epochs)) == 4
    assert epochs[0] != tuple(PromptStream(range(50), seed=4).take(0, 50))
    assert stream.position(120) == (2, epochs[2][20])


def test_without_shuffling_the_source_repeats() -> None:
    assert PromptStream("abc", seed=1, shuffle=False).take(0, 7) == list("abcabca")


def philox(seed: int, stream: int, count: int) -> list[int]:
    """Philox4x64-10 in plain Python (Salmon et al., SC11), counting blocks from 1 as numpy does."""
    mask, result, block = 2**64 - 1, [], 0
    while len(result) < count:
        block += 1
        c, key = [block, 0, 0, 0], [seed & mask, stream & mask]
        for _ in range(10):
            low, high = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
            c = [(high >> 64) ^ c[1] ^ key[0], high & mask, (low >> 64) ^ c[3] ^ key[1], low & mask]
            key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
        result += c
    return result[:count]


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (7, 3), (-1, 2**40)])
def test_the_order_is_fixed_for_all_time(seed: int, epoch: int) -> None:
    """By the generator's definition, not by what this numpy does: a change would break every resumed run."""
    expected = philox(seed, epoch, 11)
    assert [int(word) for word in words(seed, epoch, 11)] == expected
    assert permutation(seed, epoch, 11).tolist() == sorted(range(11), key=lambda i: expected[i])


def test_a_permutation_cannot_be_changed_from_outside() -> None:
    with pytest.raises(ValueError, match="read-only"):
        permutation(1, 1, 4)[0] = 3


def test_refuses() -> None:
    with pytest.raises(DataError, match="no examples"):
        PromptStream([], seed=0)
    with pytest.raises(IndexError, match="counts from 0"):
        PromptStream("a", seed=0).at(-1)
