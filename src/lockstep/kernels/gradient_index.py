"""Which keys and queries the gradient of attention walks over: the backward pass's view of packed runs.

The forward walks from queries to keys. The backward also walks from keys to queries, and where responses share a prompt, one
key row belongs to several runs: its gradient is a sum over them. Here keys are listed run after run (W of them, a shared row
several times), so that every kernel sees plain sequences, and `order_W`, `begin_S1` say which of the W entries belong to a
row, in ascending order: the order in which they are summed, the same in every run of the program.

Everything is made once for a pack and serves all its layers. Legend: R runs, W keys of all runs, S key rows, N tiles.

Next: `attention_library.py`, which chooses who computes; `triton/attention_backward.py` for the tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.attention_index import Run
from lockstep.kernels.upload import upload

KEY_TILE = 128
"""Keys of a tile that gathers over queries."""
QUERY_TILE = 128
"""Queries of a tile that gathers over keys."""
GAP = 128
"""Rows between two runs where numbers of queries are kept: a step or a tile may read this far past a run's end."""
PAD_TO = 256
"""Sequences in one dense batch are padded to a multiple of this, so that few sizes occur: a library plans each anew."""


@dataclass(frozen=True)
class Dense:
    """Whole sequences as a batch of equal lengths. place_T: int64 row of the batch [sequences * length] for each packed row,
    or None when the packed rows are the batch. waste: pairs of query and key in the batch over those that are needed."""

    sequences: int
    length: int
    place_T: Tensor | None
    waste: float


@dataclass(frozen=True)
class GradientIndex:
    """rows_W: int64 key row of every entry, or None where entry i is row i. shared: some row has several entries.
    order_W, begin_S1: int64 entries sorted by row, and where each row's begin. query_starts, key_starts: int32 [R + 1].
    query_rows: int64 rows of all runs one after the other, or None where they are the rows in order. covered: rows
    0 .. covered - 1 all belong to a run, and no others do; -1 where there are gaps.

    Tiles, int32, those with most work first. key_tiles_N6: first entry, keys, first query row that sees one of them, queries
    from there to the run's end, position of that query minus that of the first key, spaced row of that query.
    query_tiles_N5: first query row, queries, position of the first, the run's first entry, spaced row. A spaced row counts
    GAP more for each run before it; spaced_rows: their number, a multiple of four.
    """

    runs: tuple[Run, ...]
    rows_W: Tensor | None
    shared: bool
    entries: int
    key_rows: int
    order_W: Tensor
    begin_S1: Tensor
    query_starts: Tensor
    key_starts: Tensor
    query_rows: Tensor | None
    covered: int
    longest_query: int
    longest_key: int
    key_tiles_N6: Tensor
    query_tiles_N5: Tensor
    spaced_rows: int
    dense: Dense | None


def gradient_index(runs: Sequence[Run], device: torch.device | None = None) -> GradientIndex:
    """Tables of packed runs, on `device`."""
    rows = torch.cat([r.slots[: r.position + r.count].cpu() for r in runs])
    queries = torch.cat([torch.arange(r.row, r.row + r.count) for r in runs])
    identity = torch.equal(rows, torch.arange(len(rows)))
    in_order = torch.equal(queries, torch.arange(len(queries)))
    key_rows = int(rows.max()) + 1
    sorted_rows, order = torch.sort(rows, stable=True)
    key_counts = [r.position + r.count for r in runs]
    whole = in_order and identity and all(r.position == 0 for r in runs)
    return GradientIndex(
        runs=tuple(runs),
        rows_W=None if identity else upload(rows, device),
        shared=bool((sorted_rows[1:] == sorted_rows[:-1]).any()),
        entries=len(rows),
        key_rows=key_rows,
        order_W=upload(order, device),
        begin_S1=upload(torch.searchsorted(sorted_rows, torch.arange(key_rows + 1)), device),
        query_starts=upload(_starts([r.count for r in runs]), device),
        key_starts=upload(_starts(key_counts), device),
        query_rows=None if in_order else upload(queries, device),
        covered=len(queries) if len(queries) == int(queries.max()) + 1 else -1,
        longest_query=max(r.count for r in runs),
        longest_key=max(key_counts),
        key_tiles_N6=upload(_key_tiles(runs), device),
        query_tiles_N5=upload(_query_tiles(runs), device),
        spaced_rows=-(-(len(queries) + GAP * len(runs)) // 4) * 4,
        dense=_dense([r.count for r in runs], device) if whole else None,
    )


def _starts(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def _key_tiles(runs: Sequence[Run]) -> Tensor:
    tiles, entry, spaced = [], 0, 0
    for run in runs:
        keys = run.position + run.count
        for key in range(0, keys, KEY_TILE):
            query = max(0, key - run.position)
            seen = min(KEY_TILE, keys - key)
            ahead = run.position + query - key
            tiles.append((entry + key, seen, run.row + query, run.count - query, ahead, spaced + query))
        entry += keys
        spaced += run.count + GAP
    tiles.sort(key=lambda tile: -tile[3])
    return torch.tensor(tiles, dtype=torch.int32)


def _query_tiles(runs: Sequence[Run]) -> Tensor:
    tiles, entry, spaced = [], 0, 0
    for run in runs:
        for query in range(0, run.count, QUERY_TILE):
            count = min(QUERY_TILE, run.count - query)
            tiles.append((run.row + query, count, run.position + query, entry, spaced + query))
        entry += run.position + run.count
        spaced += run.count + GAP
    tiles.sort(key=lambda tile: -tile[2])
    return torch.tensor(tiles, dtype=torch.int32)


def _dense(lengths: Sequence[int], device: torch.device | None) -> Dense:
    length = lengths[0]
    if any(n != length for n in lengths):
        length = -(-max(lengths) // PAD_TO) * PAD_TO
    waste = len(lengths) * length * length / sum(n * n for n in lengths)
    if waste == 1.0:
        return Dense(len(lengths), length, None, waste)
    place = torch.cat([torch.arange(b * length, b * length + n) for b, n in enumerate(lengths)])
    return Dense(len(lengths), length, upload(place, device), waste)
