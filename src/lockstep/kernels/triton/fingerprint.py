"""Fingerprints on a GPU: the very numbers of `numerics/fingerprint.py`, from words in registers or read from memory.

Next: `refresh.py`, which takes them of the codes it writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.sizes import cdiv
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
def keys_of(number):
    """Both keys, int32, of words by their number in the tile, uint32."""
    first = _mix32(number + 1)
    second = (first ^ (first >> 17)) * 0xED5AD4BB
    return first.to(tl.int32, bitcast=True), second.to(tl.int32, bitcast=True)


@triton.jit
def factors_of(tile):
    """Both factors, int64, of a tile."""
    number = tile.to(tl.uint64)
    first, second = _mix64(number + 0x9E3779B97F4A7C15), _mix64(number + 0xD1B54A32D192ED03)
    return (first | 1).to(tl.int64, bitcast=True), (second | 1).to(tl.int64, bitcast=True)


@triton.jit
def times(key, words):
    """int64 products of int32 numbers. Spelled out, since a compiler that keeps keys over a loop widens them first, which takes
    twice the registers and a longer product."""
    return tl.inline_asm_elementwise(
        "mul.wide.s32 $0, $1, $2;", "=l,r,r", [key, words], dtype=tl.int64, is_pure=True, pack=1
    )


@triton.jit
def add_tile(first, second, tile, scale_bits, found_ptr):
    """Adds a tile's part to the fingerprint of its tensor. first, second: sums of its words, times their keys. scale_bits: int32,
    zero without a scale."""
    key, other = keys_of(tl.full((), 4096, tl.uint32))
    factor, factor_2 = factors_of(tile)
    tl.atomic_add(found_ptr, factor * (first + times(key, scale_bits)), sem="relaxed")
    tl.atomic_add(found_ptr + 1, factor_2 * (second + times(other, scale_bits)), sem="relaxed")


@triton.jit
def _sum_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def words_of(values, PER_WORD: tl.constexpr):
    """int32 [128, 32] of unsigned integers [128, 32 PER_WORD], the first in the lowest bits."""
    parts = tl.reshape(values.to(tl.uint32), (128, 32, PER_WORD))
    shift = (tl.arange(0, PER_WORD) * (32 // PER_WORD)).to(tl.uint32)
    return tl.sum(parts << shift[None, None, :], 2).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["width", "count"])
def _fingerprint(
    table_ptr,
    found_ptr,
    rows,
    width,
    count,
    FIELDS: tl.constexpr,
    FOUND: tl.constexpr,
    SHARDS: tl.constexpr,
    WORDS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """width: words in a row, or bytes when the tensor isn't made of whole words; count: of the tensor, which may end inside a
    row."""
    tile, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    address_ptr = table_ptr + entry * FIELDS
    per_row: tl.constexpr = 32 if WORDS else 128
    across = tl.cdiv(width, per_row)
    first, column = tile // across * 128, tile % across
    r, c = tl.arange(0, 128)[:, None], column * per_row + tl.arange(0, per_row)[None, :]
    begin = first.to(tl.int64) * width
    inside = (first + r < rows) & (c < width) & (r * width + c < count - begin)
    base = tl.load(address_ptr)
    if WORDS:
        words = tl.load(base.to(tl.pointer_type(tl.int32)) + begin + (r * width + c), mask=inside, other=0)
    else:
        raw = tl.load(base.to(tl.pointer_type(tl.uint8)) + begin + (r * width + c), mask=inside, other=0)
        words = words_of(raw, 4)
    bits = tl.full((), 0, tl.int32)
    if SCALED:
        bits = tl.load(tl.load(address_ptr + 1).to(tl.pointer_type(tl.int32)) + tile)
    key, other = keys_of((tl.arange(0, 128)[:, None] * 32 + tl.arange(0, 32)[None, :]).to(tl.uint32))
    sums = tl.reduce((times(key, words), times(other, words)), None, _sum_both)
    add_tile(sums[0], sums[1], tile, bits, found_ptr + (entry * SHARDS + tile % SHARDS) * FOUND + FIRST)


def fingerprints(held: Sequence[tuple[Tensor, Tensor | None]]) -> list[Fingerprint]:
    """Of each (codes, scale) or (values, None) on one device: a launch for each shape, one wait for all."""
    table, kept = Table(), []
    for value, scale in held:
        value, scale = value.contiguous(), None if scale is None else scale.contiguous()
        kept.append((value, scale))
        nbytes = value.numel() * value.element_size()
        # Without scales the tiles are those of a matrix with 128 bytes a row.
        rows, width = (cdiv(nbytes, TILE), TILE) if scale is None else tuple(value.shape)
        tiles = cdiv(rows, TILE), cdiv(width, TILE)
        if scale is not None and scale.shape != tiles:
            raise ValueError(f"scales of shape {tuple(scale.shape)}, one a tile would be {tiles}")
        whole = width % 4 == nbytes % 4 == value.data_ptr() % 4 == 0
        per_word = 4 if whole else 1
        kind = (rows, width // per_word, nbytes // per_word, tiles, whole, scale is not None)
        table.add(kind, value.data_ptr(), 0 if scale is None else scale.data_ptr())
    for group in table.groups(held[0][0].device):
        rows, width, count, (down, across), whole, scaled = group.kind
        if down * across:
            _fingerprint[(down * across, len(group))](
                group.addresses,
                group.found,
                rows,
                width,
                count,
                FIELDS,
                FOUND,
                SHARDS,
                whole,
                scaled,
                num_warps=8,
            )
    table.close()
    found = [fingerprint_of(row) for row, _ in table.read()]
    kept.clear()
    return found


def fingerprint_of(found: Sequence[int]) -> Fingerprint:
    """From the findings about a tensor."""
    first, second = (found[FIRST.value + i] & (2**64 - 1) for i in range(2))
    return first, second
