"""A 128-bit fingerprint of a working copy: one definition, evaluated on a CPU or within the kernel that writes the codes.

A receipt compares what two sides hold. SHA-256 over all bytes would cost a second or more for each billion of them on one host
core; this costs nothing where the codes are in registers anyway. It finds accidents: bytes lost, swapped, shifted, stale, in
the wrong tile. It is no defence against somebody who looks for a collision.

A tensor is cut into tiles of 16 KiB, which are 4096 little-endian words of four bytes, with zeros beyond the end. Codes with
scales are cut as their scales are, into 128 x 128, and the scale's bits are word 4096 of its tile; anything else is cut in the
order of memory, so that it can be read in one stream. For each of two key schedules

    sum(tile)   = sum over o of key(o) * word(o)           o = 32 row + column of the word; mod 2^64
    fingerprint = sum over tiles of factor(tile) * sum(tile)                                mod 2^64

Words and keys are signed numbers of 32 bits; the keys of a schedule are all different and none is zero, and factors are odd, so
one changed word always changes the fingerprint, and so do two words of a tile that change places. Keys and factors look random,
so changes that cancel under one schedule have no reason to under the other. Everything is a sum: in which order tiles are done,
and what is added up before, is free, so parallel programs come to the same number.

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
WORDS = TILE * TILE // 4
CHUNK = 16
"""Tiles summed at a time."""

SEEDS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
"""Each schedule's; a tile's factor is `MIX64` of seed + tile number, with the last bit set."""
MIX32 = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))
"""Steps x = (x ^ x >> shift) * factor: lowbias32 of Chris Wellons, a permutation of 32-bit numbers. Of a word's number plus one
it makes the first key."""
MORE32 = (17, 0xED5AD4BB)
"""One more step makes the second key of the first."""
MIX64 = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""The same for 64 bits: the end of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""


def fingerprint(x: Tensor, scale: Tensor | None = None) -> Fingerprint:
    """Of a tensor x of any type and shape, or of one-byte codes [R, C] with scales [ceil(R / 128), ceil(C / 128)] FP32.

    Raises ValueError for scales of another shape.
    """
    words_TO = _stream(x) if scale is None else _blocks(x, scale)
    bits_T = None if scale is None else scale.contiguous().view(torch.int32).flatten().long()
    tile_T = torch.arange(len(words_TO), device=x.device)
    found = []
    for sum_T, key, seed in zip(_sums(words_TO), keys(x.device), SEEDS, strict=True):
        if bits_T is not None:
            sum_T += key[WORDS] * bits_T
        found.append(int((sum_T * (_mix64(tile_T + _signed(seed)) | 1)).sum()) & (2**64 - 1))
    return found[0], found[1]


def _stream(x: Tensor) -> Tensor:
    """Tiles in the order of memory, [tiles, 4096] int32."""
    data = x.contiguous().flatten().view(torch.uint8)
    return F.pad(data, (0, -len(data) % (4 * WORDS))).view(torch.int32).view(-1, WORDS)


def _blocks(x: Tensor, scale: Tensor) -> Tensor:
    """Tiles of 128 x 128 codes, row by row, [tiles, 4096] int32."""
    down, across = (-(-size // TILE) for size in x.shape)
    if scale.shape != (down, across):
        raise ValueError(f"scales of shape {tuple(scale.shape)}, one a tile would be {(down, across)}")
    rows = F.pad(x.contiguous().view(torch.uint8), (0, -x.shape[1] % TILE, 0, -x.shape[0] % TILE))
    return rows.view(torch.int32).view(down, TILE, across, TILE // 4).transpose(1, 2).reshape(-1, WORDS)


def _sums(words_TO: Tensor) -> tuple[Tensor, Tensor]:
    """sum(tile) of the words under both schedules, int64 with wrap-around."""
    sums_2T = torch.empty(2, len(words_TO), dtype=torch.int64, device=words_TO.device)
    products = torch.empty_like(words_TO[:CHUNK], dtype=torch.int64)
    for first in range(0, len(words_TO), CHUNK):
        wide = words_TO[first : first + CHUNK].long()
        for sums_T, key in zip(sums_2T, keys(words_TO.device), strict=True):
            product = torch.mul(wide, key[:WORDS], out=products[: len(wide)])
            torch.sum(product, 1, out=sums_T[first : first + CHUNK])
    return sums_2T[0], sums_2T[1]


@lru_cache
def keys(device: torch.device) -> tuple[Tensor, Tensor]:
    """Both key schedules, [4097] int64 that hold signed 32-bit numbers."""
    x = torch.arange(WORDS + 1, dtype=torch.int64) + 1
    made = []
    for steps in (MIX32, (MORE32,)):
        for shift, factor in steps:
            x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
        made.append(x.to(torch.int32).long().to(device))
    return made[0], made[1]


def _mix64(x: Tensor) -> Tensor:
    """Of int64, whose shifts are arithmetic: the copies of the sign are cut off."""
    for shift, factor in MIX64:
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return x


def _signed(x: int) -> int:
    """The int64 with these bits."""
    return x - 2**64 if x >= 2**63 else x
