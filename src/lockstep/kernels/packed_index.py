"""Where the rows of a packed forward pass keep their keys, and which tiles of queries walk over them: on a GPU.

`PackedIndex` is made for one pack. `StaticIndex` has room for many packs and stays where it is, so a captured pass can read the
next pack through it: what its kernels are launched over depends on the room alone.
Lists that are shorter than their room end in copies of their last entry. A tile twice writes the same values twice.

Next: `gradient_index.py`, the backward pass's view; `../models/trunk_graph.py`, which captures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lockstep.kernels.attention_form import CHUNK, PAGE
from lockstep.kernels.attention_index import Run
from lockstep.kernels.gradient_index import GAP, KEY_TILE, QUERY_TILE, Dense, GradientIndex, gradient_index
from lockstep.kernels.upload import upload

ALIGNED = 64
"""Lists of a static index begin at multiples of so many numbers."""
FEW_RUNS = 16
"""A room is made for at least so many runs, and for a power of two of them."""
SPARE_ENTRIES = 1.25
"""Where keys are shared, a room is made for so many times as many as the first pack has, in quarters of its rows."""


@dataclass(frozen=True)
class PrefillIndex:
    """Query tiles and block tables of one forward pass.

    tiles_N4: int32 (first query row, rows, position of the first, where its sequence's table begins). table: int32 pages,
    sequence after sequence. longest: last position + 1 of any tile. block: rows of a tile.
    """

    tiles_N4: Tensor
    table: Tensor
    longest: int
    block: int


@dataclass(frozen=True)
class Tables:
    """Row `rows_W[i]` of the keys goes to slot `slots_W[i]` of so many pages; prefill walks over them."""

    prefill: PrefillIndex
    rows_W: Tensor
    slots_W: Tensor
    pages: int


def block_of(runs: Sequence[Run]) -> int:
    """Rows of a tile of queries."""
    return 128 if sum(r.count for r in runs) > 64 * len(runs) else 64


def tables_of(runs: Sequence[Run], device: torch.device | None = None) -> Tables:
    """Pages, block tables and query tiles, those with most keys first."""
    page, longest = 0, 0
    tiles, tables, slots = [], [], []
    block = block_of(runs)
    for run in runs:
        keys = run.position + run.count
        pages = -(-keys // PAGE)
        for start in range(0, run.count, block):
            count = min(block, run.count - start)
            tiles.append((run.row + start, count, run.position + start, page))
        tables.append(torch.arange(page, page + pages, dtype=torch.int32))
        slots.append(torch.arange(page * PAGE, page * PAGE + keys))
        page += pages
        longest = max(longest, keys)
    tiles.sort(key=lambda t: -t[2])
    rows_W = torch.cat([r.slots[: r.position + r.count].cpu() for r in runs])
    prefill = PrefillIndex(
        upload(torch.tensor(tiles, dtype=torch.int32), device),
        upload(torch.cat(tables), device),
        longest,
        block,
    )
    return Tables(prefill, upload(rows_W, device), upload(torch.cat(slots), device), page)


@dataclass(frozen=True)
class PackedIndex:
    """Packed runs, for `group` query heads a key/value head. tables: what the forward pass walks over."""

    runs: tuple[Run, ...]
    group: int
    tables: Tables

    @cached_property
    def gradient(self) -> GradientIndex:
        """What the backward pass walks over: made when it is first asked for, and kept for all layers."""
        return gradient_index(self.runs, self.tables.rows_W.device)


@dataclass(frozen=True)
class Room:
    """What a pack needs of a static index, and what one has: exactly `rows` rows, so many runs and keys of all runs.

    block: rows of a tile of queries. chunked: some row sees more than one chunk of keys. shared: some key belongs to several
    runs. batch: the rows are so many whole sequences of one length, which a library may take for a dense batch; 0 where they
    aren't, or where none may.
    """

    rows: int
    runs: int
    entries: int
    block: int
    chunked: bool
    shared: bool
    batch: int

    @classmethod
    def of(cls, runs: Sequence[Run], *, dense: bool = False) -> Room:
        """What runs that cover all rows need. dense: whether a library may take them for a dense batch."""
        rows, keys = sum(r.count for r in runs), [r.position + r.count for r in runs]
        shared = any(r.position > 0 for r in runs)
        batch = len(runs) if dense and not shared and len({run.count for run in runs}) == 1 else 0
        return cls(rows, len(runs), sum(keys), block_of(runs), max(keys) > CHUNK, shared, batch)

    @property
    def kind(self) -> tuple[int, ...]:
        """Equal for rooms of which the larger holds what the smaller does, with the same bits."""
        return self.rows, self.block, self.chunked, self.shared, self.batch

    def holds(self, needed: Room) -> bool:
        """Whether a pack that needs `needed` fits."""
        return self.kind == needed.kind and self.runs >= needed.runs and self.entries >= needed.entries

    def spacious(self, before: Room | None = None) -> Room:
        """Room to spare for other packs of the kind, and for those of a room that was too small: few rooms are made then. What
        isn't used costs little, since lists end in copies of their smallest tile."""
        runs, entries = max(FEW_RUNS, 1 << (self.runs - 1).bit_length()), self.entries
        if self.shared:
            entries = _up(int(SPARE_ENTRIES * entries), max(KEY_TILE, self.rows // 4))
        if before is not None:
            runs, entries = max(runs, before.runs), max(entries, before.entries)
        return replace(self, runs=runs, entries=entries)

    @property
    def pages(self) -> int:
        """Of 64 keys, enough for any such runs."""
        return self.entries // PAGE + self.runs


class StaticIndex:
    """An index in fixed storage, read like a `PackedIndex` that `fill` has put in."""

    def __init__(self, room: Room, group: int, device: torch.device) -> None:
        self.room, self.group = room, group
        tiles, key_tiles = room.rows // room.block + room.runs, room.entries // KEY_TILE + room.runs
        query_tiles = room.rows // QUERY_TILE + room.runs
        self._small = _Lists(
            [(tiles, 4), (room.pages,), (key_tiles, 6), (query_tiles, 5)], torch.int32, device
        )
        self._large = _Lists([(room.entries,)] * 3 + [(room.rows + 1,)], torch.int64, device)
        tiles_N4, table, key_tiles_N6, query_tiles_N5 = self._small.views
        rows_W, slots_W, order_W, begin_S1 = self._large.views
        longest = CHUNK + 1 if room.chunked else CHUNK
        self.tables = Tables(PrefillIndex(tiles_N4, table, longest, room.block), rows_W, slots_W, room.pages)
        starts = torch.zeros(room.runs + 1, dtype=torch.int32, device=device)  # only a library reads them
        self.gradient = GradientIndex(
            runs=(),
            rows_W=rows_W if room.shared else None,
            shared=room.shared,
            entries=room.entries,
            key_rows=room.rows,
            order_W=order_W,
            begin_S1=begin_S1,
            query_starts=starts,
            key_starts=starts,
            query_rows=None,
            covered=room.rows,
            longest_query=room.rows,
            longest_key=longest,
            key_tiles_N6=key_tiles_N6,
            query_tiles_N5=query_tiles_N5,
            spaced_rows=_up(room.rows + GAP * room.runs, 4),
            dense=Dense(room.batch, room.rows // room.batch, None, 1.0) if room.batch else None,
        )

    def fill(self, runs: Sequence[Run]) -> None:
        """Puts in runs that the room holds."""
        assert self.room.holds(Room.of(runs, dense=self.room.batch > 0)), "these runs need another room"
        forward, backward = tables_of(runs), gradient_index(runs)
        assert self.gradient.dense in (None, backward.dense), "rows of a batch lie in its order"
        prefill = forward.prefill
        self._small.fill([prefill.tiles_N4, prefill.table, backward.key_tiles_N6, backward.query_tiles_N5])
        self._large.fill([forward.rows_W, forward.slots_W, backward.order_W, backward.begin_S1])


class _Lists:
    """Lists of one type side by side, so that they travel in one copy."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = shapes
        sizes = [_up(torch.Size(shape).numel(), ALIGNED) for shape in shapes]
        self.all = torch.zeros(sum(sizes), dtype=dtype, device=device)
        parts = self.all.split(sizes)
        self.views = [p[: torch.Size(s).numel()].view(s) for p, s in zip(parts, shapes, strict=True)]
        self.sizes = sizes

    def fill(self, lists: Sequence[Tensor]) -> None:
        """Each list, then its last entry as often as there is room."""
        pinned = self.all.is_cuda
        staged = torch.empty(self.all.shape, dtype=self.all.dtype, pin_memory=pinned)
        for part, shape, found in zip(staged.split(self.sizes), self.shapes, lists, strict=True):
            assert len(found) <= shape[0], "a list is longer than its room"
            view = part[: torch.Size(shape).numel()].view(shape)
            view[: len(found)] = found
            view[len(found) :] = found[-1]
        self.all.copy_(staged, non_blocking=pinned)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
