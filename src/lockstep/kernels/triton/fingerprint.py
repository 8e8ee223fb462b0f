"""Fingerprints on a GPU: the very numbers of `numerics/fingerprint.py`, from words in registers or read from memory.

Next: `refresh.py`, which takes them of the codes it writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.tables import FIELDS, FOUND, SHARDS, Table
from lockstep.numerics.fingerprint import TILE, Fingerprint

FIRST = tl.constexpr(3)
"""Where among the findings about a tensor the two halves of its fingerprint are."""


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _keyed_sum(words, key):
    wide = key.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.sum(wide * words.to(tl.int64)).to(tl.uint64, bitcast=True)


@triton.jit
def add_tile(words, tile, scale_bits, found_ptr, after):
    """Adds a tile's part to the fingerprint of its tensor. words: int32 [128, 32]. tile: int32. scale_bits: uint32.

    after: an int32 that is never negative, which a compiler can't know. Keys depend on it, or else they would all be made
    early, while registers are short.
    """
    one = (after >= 0).to(tl.int32)
    number = tl.arange(0, 128)[:, None] * 32 + tl.arange(0, 32)[None, :]
    first = _mix32((number + one).to(tl.uint32))
    second = (first ^ (first >> 17)) * 0xED5AD4BB
    place = (tile.to(tl.uint64) << 32) | scale_bits.to(tl.uint64)
    part = _mix64(_keyed_sum(words, first) + _mix64(place))
    tl.atomic_add(found_ptr, part.to(tl.int64, bitcast=True), sem="relaxed")
    part = _mix64(_keyed_sum(words, second) + _mix64(place + 0x9E3779B97F4A7C15))
    tl.atomic_add(found_ptr + 1, part.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def words_of(values, PER_WORD: tl.constexpr):
    """int32 [128, 32] of unsigned integers [128, 32 PER_WORD], the first in the lowest bits."""
    parts = tl.reshape(values.to(tl.uint32), (128, 32, PER_WORD))
    shift = (tl.arange(0, PER_WORD) * (32 // PER_WORD)).to(tl.uint32)
    return tl.sum(parts << shift[None, None, :], 2).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["width"])
def _fingerprint(
    table_ptr,
    found_ptr,
    rows,
    width,
    FIELDS: tl.constexpr,
    FOUND: tl.constexpr,
    SHARDS: tl.constexpr,
    WORDS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """width: words in a row, or bytes when rows aren't made of whole words."""
    column, block, entry = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    tile = block * tl.num_programs(0) + column
    address_ptr = table_ptr + entry * FIELDS
    first = block * 128
    count: tl.constexpr = 32 if WORDS else 128
    r, c = tl.arange(0, 128)[:, None], column * count + tl.arange(0, count)[None, :]
    inside = (first + r < rows) & (c < width)
    base = tl.load(address_ptr)
    if WORDS:
        x_ptr = base.to(tl.pointer_type(tl.int32)) + first.to(tl.int64) * width
        words = tl.load(x_ptr + r * width + c, mask=inside, other=0)
    else:
        b_ptr = base.to(tl.pointer_type(tl.uint8)) + first.to(tl.int64) * width
        words = words_of(tl.load(b_ptr + r * width + c, mask=inside, other=0), 4)
    bits = tl.full((), 0, tl.uint32)
    if SCALED:
        bits = tl.load(tl.load(address_ptr + 1).to(tl.pointer_type(tl.uint32)) + tile)
    add_tile(words, tile, bits, found_ptr + (entry * SHARDS + tile % SHARDS) * FOUND + FIRST, tile)


def fingerprints(held: Sequence[tuple[Tensor, Tensor | None]]) -> list[Fingerprint]:
    """Of each (codes, scale) or (values, None) on one device: a launch for each shape, one wait for all."""
    table = Table()
    for value, scale in held:
        matrix = (value if value.dim() == 2 else value.reshape(1, -1)).contiguous()
        rows, nbytes = matrix.shape[0], matrix.shape[1] * matrix.element_size()
        tiles = triton.cdiv(rows, TILE), triton.cdiv(nbytes, TILE)
        if scale is not None and scale.shape != tiles:
            raise ValueError(f"scales of shape {tuple(scale.shape)}, one a tile would be {tiles}")
        whole = nbytes % 4 == 0 and matrix.data_ptr() % 4 == 0
        kind = (rows, nbytes // 4 if whole else nbytes, tiles, whole, scale is not None)
        table.add(kind, matrix, None if scale is None else scale.contiguous())
    for group in table.groups(held[0][0].device):
        rows, width, (down, across), whole, scaled = group.kind
        if down * across:
            _fingerprint[(across, down, len(group))](
                group.addresses, group.found, rows, width, FIELDS, FOUND, SHARDS, whole, scaled, num_warps=8
            )
    return [fingerprint_of(row) for row in table.read()]


def fingerprint_of(found: Sequence[int]) -> Fingerprint:
    """From the findings about a tensor."""
    first, second = (found[FIRST.value + i] & (2**64 - 1) for i in range(2))
    return first, second
