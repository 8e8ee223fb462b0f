"""An index in fixed storage says of a pack what an index made for it says, and no more than some of it twice."""

from __future__ import annotations

from dataclasses import replace

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
@given(GROUPS, st.booleans())
def test_a_static_index_holds_every_pack_of_its_room(
    groups: list[tuple[int, list[int]]], spacious: bool
) -> None:
    runs = packed_runs(groups)
    room = Room.of(runs)
    if spacious:
        room = room.spacious()
        assert room.holds(Room.of(runs)) and room.holds(room)
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


def test_what_a_room_holds() -> None:
    """Fewer runs and keys of as many rows, where the same kernels serve both."""
    few, many = (
        Room.of(packed_runs([(900, []), (1148, [])])),
        Room.of(packed_runs([(100, [])] * 20 + [(48, [])])),
    )
    assert (
        many.holds(few) and not few.holds(many) and few.spacious().runs == 16 and many.spacious().runs == 32
    )
    assert many.spacious(few) == many.spacious() and few.spacious(many).holds(many)
    shared, longer = (Room.of(packed_runs([(n, [356 - n // 2] * 2), (312, [])])) for n in (100, 200))
    assert (shared.rows, longer.rows) == (1024, 1024) and shared.entries == 1224 and longer.entries == 1424
    assert not shared.holds(longer) and shared.spacious().entries == 1536 and shared.spacious().holds(longer)
    assert longer.spacious(replace(shared, entries=4096)).entries == 4096
    others = ([(2048, [])], [(512, [512])], [(1024, [])], [(64, [])] * 16, [(512, []), (512, [])])
    kinds = [Room.of(packed_runs(groups), dense=True).kind for groups in others]
    assert len(set(kinds)) == len(others), "rows, shared keys, tiles, a batch"
    assert (
        Room.of(packed_runs([(CHUNK + 256, [])])).kind != Room.of(packed_runs([(1152, []), (1152, [])])).kind
    )


def test_a_batch_of_whole_sequences() -> None:
    """A library may take them as they lie, and only them; where none may, its shape makes no room of its own."""
    equal, other = packed_runs([(256, [])] * 4), packed_runs([(512, []), (512, [])])
    room = Room.of(equal, dense=True)
    index = StaticIndex(room, 4, CPU)
    index.fill(equal)
    assert index.gradient.dense == gradient_index(equal).dense == Dense(4, 256, None, 1.0)
    assert (
        Room.of(other, dense=True).kind != room.kind
        and Room.of(other).kind == Room.of(equal).kind != room.kind
    )
    with pytest.raises(AssertionError, match="need another room"):
        index.fill(other)
    for runs in (packed_runs([(100, []), (156, [])]), packed_runs([(64, [64, 64])]), equal):
        dense = runs is not equal
        assert StaticIndex(Room.of(runs, dense=dense), 4, CPU).gradient.dense is None


def test_another_room_is_refused() -> None:
    index = StaticIndex(Room.of(packed_runs([(256, [])])), 4, CPU)
    with pytest.raises(AssertionError, match="need another room"):
        index.fill(packed_runs([(384, [])]))
