"""Which rows attend to which keys: the one description that packed training and paged decode share.

A *run* is a stretch of consecutive queries of one sequence: a whole sequence in training, one token in decode, a chunk in
prefill. Its keys are named by slots, rows of a key/value store: the packed rows themselves in training, cache pages in the
engine. Position j of a sequence is always key j, and keys are visited in steps of 64 from position 0, so the order in
which a query meets its keys depends on nothing but its own position.

Next: `reference_attention.py` walks over this index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KEY_STEP = 64
LONG = 64
SHORT = (8, 16)
"""Rows of a tile: (queries of a run) x (query heads of one key/value head). Short tiles have the smaller size that holds a
query's heads."""


@dataclass(frozen=True)
class Run:
    """Queries at rows `row .. row + count` with positions `position ..`; `slots[j]` is the store row of key j."""

    row: int
    count: int
    position: int
    slots: Tensor


@dataclass(frozen=True)
class TileGroup:
    """Tiles of one size, sorted by descending number of key steps.

    query_BQ: query rows (padding: 0). position_BQ: their positions (padding: -1). slots_BL: key slots, padded with the
    tile's first slot to a multiple of 64. active: for each key step the number of leading tiles that still have keys.
    slots, hidden: for each key step the flat slots, and the mask [tiles, 1, rows, 64] of keys a row must not see.
    """

    rows: int
    query_BQ: Tensor
    position_BQ: Tensor
    slots_BL: Tensor
    active: tuple[int, ...]
    slots: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]


@dataclass(frozen=True)
class AttentionIndex:
    """All tiles of one forward pass, for a given number of query heads in a key/value group."""

    group: int
    tiles: tuple[TileGroup, ...]
    num_rows: int


def build_index(runs: Sequence[Run], group: int, device: torch.device | None = None) -> AttentionIndex:
    """Tiles for `runs`; `group` is the number of query heads for each key/value head."""
    short = next((s for s in SHORT if s >= group), None)
    if short is None:
        raise ValueError(f"{group} query heads for a key/value head; at most {SHORT[-1]} are supported")
    long_q, short_q = LONG // group, short // group
    pieces: dict[int, list[tuple[Run, int, int]]] = {LONG: [], short: []}
    for run in runs:
        done = 0
        while done < run.count:
            left = run.count - done
            rows, size = (LONG, long_q) if left > 4 * short_q else (short, short_q)
            pieces[rows].append((run, done, min(left, size)))
            done += min(left, size)
    tiles = tuple(
        _tile_group(rows, size, group, pieces[rows], device)
        for rows, size in ((LONG, long_q), (short, short_q))
        if pieces[rows]
    )
    return AttentionIndex(group, tiles, sum(r.count for r in runs))


def _tile_group(
    rows: int, size: int, group: int, pieces: list[tuple[Run, int, int]], device: torch.device | None
) -> TileGroup:
    steps = [(run.position + done + n + KEY_STEP - 1) // KEY_STEP for run, done, n in pieces]
    order = sorted(range(len(pieces)), key=lambda i: -steps[i])
    steps = [steps[i] for i in order]
    first = [pieces[i][0].row + pieces[i][1] for i in order]
    position = [pieces[i][0].position + pieces[i][1] for i in order]
    real = torch.tensor([pieces[i][2] for i in order])[:, None]
    offset = torch.arange(size)[None]
    query = torch.where(offset < real, torch.tensor(first)[:, None] + offset, 0)
    at = torch.where(offset < real, torch.tensor(position)[:, None] + offset, -1)
    slots = torch.zeros(len(order), steps[0] * KEY_STEP, dtype=torch.long)
    for b, i in enumerate(order):
        run, done, n = pieces[i]
        known = run.slots[: run.position + done + n]
        slots[b, : len(known)] = known
        slots[b, len(known) :] = known[0]
    active = tuple(sum(s > j for s in steps) for j in range(steps[0]))
    row_position = torch.full((len(order), rows), -1)
    row_position[:, : size * group] = at.repeat_interleave(group, 1)
    key = torch.arange(steps[0] * KEY_STEP)
    spans = [slice(j * KEY_STEP, (j + 1) * KEY_STEP) for j in range(steps[0])]
    return TileGroup(
        rows,
        query.to(device),
        at.to(device),
        slots.to(device),
        active,
        tuple(slots[:n, span].reshape(-1).to(device) for n, span in zip(active, spans, strict=True)),
        tuple(
            (key[span] > row_position[:n, :, None])[:, None].to(device)
            for n, span in zip(active, spans, strict=True)
        ),
    )
