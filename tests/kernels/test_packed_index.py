"""An index in fixed storage says of a pack what an index made for it says, and no more than some of it twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.bench.attention_backward import packed_runs
from lockstep.kernels.attention_form import CHUNK, PAGE
from lockstep.kernels.gradient_index import Dense, gradient_index
from lockstep.kernels.packed_index import Room, StaticIndex, tables_of

CPU = torch.device("cpu")


def same_list(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found[: len(expected)], expected)
    assert (found[len(expected) :] == expected[-1]).all()


GROUPS = st.lists(
    st.tuples(st.integers(1, 2500), st.lists(st.integers(1, 300), max_size=4)), min_size=1, max_size=9
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(GROUPS)
def test_a_static_index_holds_every_pack_of_its_room(groups: list[tuple[int, list[int]]]) -> None:
    runs = packed_runs(groups)
    room = Room.of(runs)
    index = StaticIndex(room, 4, CPU)
    index.fill(runs)
    made, backward = tables_of(runs), gradient_index(runs)
    for found, expected in (
        (index.tables.prefill.tiles_N4, made.prefill.tiles_N4),
        (index.tables.prefill.table, made.prefill.table),
        (index.tables.rows_W, made.rows_W),
        (index.tables.slots_W, made.slots_W),
        (index.gradient.key_tiles_N6, backward.key_tiles_N6),
        (index.gradient.query_tiles_N5, backward.query_tiles_N5),
        (index.gradient.order_W, backward.order_W),
        (index.gradient.begin_S1, backward.begin_S1),
    ):
        same_list(found, expected)
    assert index.tables.prefill.block == made.prefill.block
    assert (index.tables.prefill.longest > CHUNK) == (made.prefill.longest > CHUNK)
    assert index.tables.pages >= made.pages and int(index.tables.slots_W.max()) < made.pages * PAGE
    assert index.gradient.spaced_rows >= backward.spaced_rows
    assert (index.gradient.rows_W is None) == (backward.rows_W is None) == (not room.shared)
    assert index.gradient.shared == backward.shared
    assert index.gradient.covered == backward.covered == room.rows == backward.key_rows
    assert len(index.gradient.begin_S1) == room.rows + 1


def test_rooms_are_few() -> None:
    """Lengths may differ a little."""
    assert Room.of(packed_runs([(900, []), (1148, [])])) == Room.of(
        packed_runs([(500, []), (600, []), (948, [])])
    )
    assert Room.of(packed_runs([(100, [50, 60]), (46, [])])) == Room.of(
        packed_runs([(90, [40, 80]), (46, [])])
    )
    assert Room.of(packed_runs([(256, [])])) != Room.of(packed_runs([(128, [128])])), "keys that are shared"
    assert Room.of(packed_runs([(2304, [])])) != Room.of(packed_runs([(1152, []), (1152, [])])), (
        "a second chunk"
    )


def test_a_batch_of_whole_sequences() -> None:
    """A library may take them as they lie, and only them; where none may, its shape makes no room of its own."""
    equal, other = packed_runs([(256, [])] * 4), packed_runs([(512, []), (512, [])])
    room = Room.of(equal, dense=True)
    index = StaticIndex(room, 4, CPU)
    index.fill(equal)
    assert index.gradient.dense == gradient_index(equal).dense == Dense(4, 256, None, 1.0)
    assert Room.of(other, dense=True) != room and Room.of(other) == Room.of(equal) != room
    with pytest.raises(AssertionError, match="another room"):
        index.fill(other)
    for runs in (packed_runs([(100, []), (156, [])]), packed_runs([(64, [64, 64])]), equal):
        dense = runs is not equal
        assert StaticIndex(Room.of(runs, dense=dense), 4, CPU).gradient.dense is None


def test_another_room_is_refused() -> None:
    index = StaticIndex(Room.of(packed_runs([(256, [])])), 4, CPU)
    with pytest.raises(AssertionError, match="another room"):
        index.fill(packed_runs([(384, [])]))
