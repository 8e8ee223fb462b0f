"""A 128-bit fingerprint of a working copy: one definition, evaluated on a CPU or within the kernel that writes the codes.

A receipt compares what two sides hold. SHA-256 over all bytes would cost a second or more for each billion of them on one host
core; this costs nothing where the codes are in registers anyway. It finds accidents: bytes lost, swapped, shifted, stale, in
the wrong tile. It is no defence against somebody who looks for a collision.

A tensor is a matrix of bytes (a vector is one row), cut into tiles of 128 x 128 bytes; a tile has 4096 little-endian words of
four bytes, with zeros beyond the edge. For each of two key schedules

    sum(tile)   = sum over o of key(o) * word(o)                      o = 32 row + column of the word; mod 2^64
    fingerprint = sum over tiles of mix64(sum(tile) + mix64(place))   place = 2^32 tile number + bits of its scale; mod 2^64

Words and keys are signed numbers of 32 bits; the keys of a schedule are all different and none is zero, so one changed word
always changes its sum, and changes that cancel under one schedule have no reason to under the other. `mix64` keeps tiles from
cancelling each other. Addition makes the order
in which tiles are done free, so parallel programs add up to the same number. Shape, type and name are not in it: whoever
hashes fingerprints adds them (`Decoder.digest`).

Next: `../kernels/triton/fingerprint.py`, the same on a GPU.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

Fingerprint = tuple[int, int]
"""Two unsigned numbers of 64 bits."""

TILE = 128
"""Rows, and bytes in a row, of a tile."""
WORDS = TILE // 4

PLACE_SEEDS = (0, 0x9E3779B97F4A7C15)
"""What is added to a tile's place."""
MIX32 = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))
"""Steps x = (x ^ x >> shift) * factor: lowbias32 of Chris Wellons, a permutation of 32-bit numbers. Of a word's number plus one
it makes the first key."""
MORE32 = (17, 0xED5AD4BB)
"""One more step makes the second key of the first."""
MIX64 = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""The same for 64 bits: the end of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""


def fingerprint(x: Tensor, scale: Tensor | None = None) -> Fingerprint:
    """Of a matrix or vector x of any type, or of one-byte codes [R, C] with scales [ceil(R / 128), ceil(C / 128)] FP32.

    Raises ValueError for scales of another shape.
    """
    rows = (x if x.dim() == 2 else x.reshape(1, -1)).contiguous().view(torch.uint8)
    if rows.shape[1] % TILE:
        rows = F.pad(rows, (0, -rows.shape[1] % TILE))
    words = rows.view(torch.int32).unflatten(1, (-1, WORDS))
    count, across = -(-len(words) // TILE), words.shape[1]
    place = torch.arange(count * across, device=x.device) << 32
    if scale is not None:
        if scale.shape != (count, across):
            raise ValueError(f"scales of shape {tuple(scale.shape)}, one a tile would be {(count, across)}")
        place |= scale.contiguous().view(torch.int32).flatten().long() & 0xFFFFFFFF
    sums = _tile_sums(words)
    mixed = (_mix64(s + _mix64(place + _signed(seed))) for s, seed in zip(sums, PLACE_SEEDS, strict=True))
    first, second = (int(m.sum()) & (2**64 - 1) for m in mixed)
    return first, second


def _tile_sums(words_RTW: Tensor) -> tuple[Tensor, Tensor]:
    """sum(tile) under both schedules, int64 with wrap-around, tiles row by row."""
    sums: tuple[list[Tensor], list[Tensor]] = ([], [])
    products = torch.empty_like(words_RTW[:TILE], dtype=torch.int64)
    for block in words_RTW.split(TILE):
        wide, product = block.long(), products[: len(block)]
        for found, key in zip(sums, keys(block.device), strict=True):
            torch.mul(wide, key[: len(block), None], out=product)
            found.append(product.sum((0, 2)))
    return torch.cat(sums[0]), torch.cat(sums[1])


@lru_cache
def keys(device: torch.device) -> tuple[Tensor, Tensor]:
    """Both key schedules, [128, 32] int64 that hold signed 32-bit numbers."""
    x = torch.arange(TILE * WORDS, dtype=torch.int64) + 1
    made = []
    for steps in (MIX32, (MORE32,)):
        for shift, factor in steps:
            x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
        made.append(x.to(torch.int32).long().view(TILE, WORDS).to(device))
    return made[0], made[1]


def _mix64(x: Tensor) -> Tensor:
    """Of int64, whose shifts are arithmetic: the copies of the sign are cut off."""
    for shift, factor in MIX64:
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return x


def _signed(x: int) -> int:
    """The int64 with these bits."""
    return x - 2**64 if x >= 2**63 else x
