"""Working copies remade where they lie: one pass over the FP32 masters, launched in waves, one launch for each shape.

A program reads the master and the old code of each element once, writes code and scale, and keeps the account: how many codes
changed, the largest value and error, and its part of the tensor's fingerprint, while the codes are still in registers. Codes and
scales are those of `numerics/quantize.py`, byte for byte; the account is the reference's (`../renew.py`).

Where there are scales a program takes a block of 128 x 128, since it needs the block's maximum first. BF16 values are a stream:
programs stay on their processors, take piece after piece in the order of memory and leave one account in the end.

Findings are integers added or maximised atomically, so their order is free; the bits of a FP32 that isn't negative are ordered as
its values are, with infinity and NaN above all others. That is how a master that isn't finite shows: its tile is written all the
same, and whoever reads the findings must not use it.

Legend: N outputs, K inputs of a weight. Next: `fingerprint.py`, `tables.py`, `../in_place.py`, which calls this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.fingerprint import (
    FIRST,
    add_tile,
    factors_of,
    fingerprint_of,
    keys_of,
    times,
    words_of,
)
from lockstep.kernels.triton.numbers import codes_of, scale_of
from lockstep.kernels.triton.sizes import cdiv, processors
from lockstep.kernels.triton.tables import FIELDS, FOUND, SHARDS, Group, Table
from lockstep.numerics.fingerprint import Fingerprint
from lockstep.numerics.formats import BLOCK

WARPS, REGISTERS = 16, 64
"""Of a program that makes codes, and of a thread of any: two programs on a processor, one loads while the other computes."""
ROUND_WARPS, ROUND_WORDS = 8, 2048
"""Of a program that rounds: it takes so many words of two BF16 values at a time, all of a tile or a part of it."""
ROUND_PROGRAMS, ROUND_STAGES = 4, 1
"""On each processor, where they stay and take step after step; and how many steps' loads are under way."""
FIRST_VALUES = 1 << 26
"""As soon as so many values wait, and as many as were begun before, their kernels are launched: the device has work while the
host prepares what comes next, and launches are few."""
MOST_VALUES = 1 << 30
"""So many that wait are enough in any case: what the host has to do about a wave it does while the next one runs, and the last
one should not be long."""
ALONE = 1 << 28
"""A tensor of so many values is a wave: mostly the head, which comes last, and while it is remade the host takes what was found
out about all others."""
INFINITY_F32 = 0x7F800000
INFINITY_BF16 = 0x7F80


@triton.jit
def _all_of(changed, largest, a, b, changed_2, largest_2, c, d):
    """Findings of two parts as one: what changed, the largest, and both keyed sums."""
    return changed + changed_2, tl.maximum(largest, largest_2), a + c, b + d


@triton.jit
def _per_thread(x, THREADS: tl.constexpr, NEXT: tl.constexpr):
    """[.., THREADS, NEXT]: as loads lay it out, a thread has NEXT neighbours of each row, so sums over the other dimensions stay
    within it."""
    return tl.reshape(x, (x.numel // (NEXT * THREADS), THREADS, NEXT))


@triton.jit
def _changed_bytes(old, new):
    """How many of the four bytes of words differ."""
    x = (old ^ new).to(tl.uint32, bitcast=True)
    high = (((x & 0x7F7F7F7F) + 0x7F7F7F7F) | x) & 0x80808080
    return (high >> 7) * 0x01010101 >> 24


@triton.jit(do_not_specialize=["words"])
def _requantize(
    table_ptr,
    found_ptr,
    N,
    K,
    words,
    library_stride,
    FIELDS: tl.constexpr,
    FOUND: tl.constexpr,
    SHARDS: tl.constexpr,
    FULL: tl.constexpr,
    WORDS: tl.constexpr,
    LIBRARY: tl.constexpr,
    ROWS: tl.constexpr,
    POW2: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Codes of 128 x 128 blocks. FULL: blocks are whole. WORDS: rows are made of whole words of four codes. `words` in a row are
    counted apart from K, so that a thread takes one word, and what it holds of the master belongs to it. ROWS: scales also
    once a row.
    """
    column, block, entry = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    across = tl.num_programs(0)
    tile = block * across + column
    address_ptr = table_ptr + entry * FIELDS
    first = block * 128
    r = tl.arange(0, 128)[:, None]
    c = column * 128 + tl.arange(0, 128)[None, :]
    inside = (first + r < N) & (c < K)
    w = column * 32 + tl.arange(0, 32)[None, :]
    word_inside = (first + r < N) & (w < words)

    x_ptr = tl.load(address_ptr).to(tl.pointer_type(tl.float32))
    if WORDS:
        K = tl.multiple_of(K, 4)
        x_ptr = tl.multiple_of(x_ptr, 16)
    x_ptr += first.to(tl.int64) * K
    codes_ptr = tl.load(address_ptr + 1).to(tl.pointer_type(tl.uint8)) + first.to(tl.int64) * K
    word_ptr = codes_ptr.to(tl.pointer_type(tl.int32))
    if FULL:
        x = tl.load(x_ptr + r * K + c)
        old = tl.load(word_ptr + r * words + w)
    else:
        x = tl.load(x_ptr + r * K + c, mask=inside, other=0.0)
        if WORDS:
            old = tl.load(word_ptr + r * words + w, mask=word_inside, other=0)
        else:
            old = words_of(tl.load(codes_ptr + r * K + c, mask=inside, other=0), 4)

    peak = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale = scale_of(peak.to(tl.float32, bitcast=True), POW2)
    codes = codes_of(x, scale)
    raw = codes.to(tl.uint8, bitcast=True)
    new = words_of(raw, 4)
    late = words + (peak < 0).to(tl.int32)  # is `words`; addresses are made again, not kept in registers
    if FULL:
        tl.store(word_ptr + r * late + w, new)
    else:
        if WORDS:
            tl.store(word_ptr + r * late + w, new, mask=word_inside)
        else:
            tl.store(codes_ptr + r * K + c, raw, mask=inside)
    tl.store(tl.load(address_ptr + 2).to(tl.pointer_type(tl.float32)) + tile, scale)
    if LIBRARY:
        library_ptr = tl.load(address_ptr + 3).to(tl.pointer_type(tl.float32))
        tl.store(library_ptr + block * library_stride + column, scale)
    if ROWS:
        row_ptr = tl.load(address_ptr + 4).to(tl.pointer_type(tl.float32))
        row = first + tl.arange(0, 128)
        tl.store(row_ptr + row * across + column, scale + tl.zeros((128,), tl.float32), mask=row < N)

    changed = tl.sum(_per_thread(_changed_bytes(old, new).to(tl.int32), THREADS, 1), 0)
    error = tl.abs(codes.to(tl.float32) * scale - x).to(tl.int32, bitcast=True)
    error = tl.max(tl.reshape(error, (128, 32, 4)), 2)
    # Keys depend on an error that is never negative, which a compiler can't know, or else they would be made while registers
    # are short.
    number = tl.arange(0, 128)[:, None] * 32 + tl.arange(0, 32)[None, :]
    key, other = keys_of((number - (error < 0).to(tl.int32)).to(tl.uint32))
    error = tl.max(_per_thread(error, THREADS, 1), 0)
    first = tl.sum(_per_thread(times(key, new), THREADS, 1), 0)
    second = tl.sum(_per_thread(times(other, new), THREADS, 1), 0)
    found = tl.reduce((changed, error, first, second), None, _all_of)
    row_found = found_ptr + (entry * SHARDS + tile % SHARDS) * FOUND
    tl.atomic_add(row_found, found[0].to(tl.int64), sem="relaxed")
    tl.atomic_max(row_found + 1, peak.to(tl.int64), sem="relaxed")
    tl.atomic_max(row_found + 2, found[1].to(tl.int64), sem="relaxed")
    add_tile(found[2], found[3], tile, scale.to(tl.int32, bitcast=True), row_found + FIRST)


@triton.jit
def _half(word, odd: tl.constexpr):
    """One of the two BF16 in words, as an integer that isn't negative."""
    return (word >> 16) & 0xFFFF if odd else word & 0xFFFF


@triton.jit
def _word(even, odd):
    """Two 16-bit numbers as one word."""
    return (even.to(tl.int32) & 0xFFFF) | (odd.to(tl.int32) << 16)


@triton.jit
def _bf16(x):
    return x.to(tl.bfloat16).to(tl.int16, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def _round(
    table_ptr,
    found_ptr,
    count,
    FIELDS: tl.constexpr,
    FOUND: tl.constexpr,
    SHARDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORDS: tl.constexpr,
    THREADS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`count` BF16 values of each tensor, in the order of memory. ALIGNED: they are a multiple of four.

    Programs stay and take WORDS pairs at a time; their number times WORDS is a multiple of a tile, so a thread has the same
    place in every tile and keeps its keys. Findings stay in registers until the end.
    """
    program, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    address_ptr = table_ptr + entry * FIELDS
    x_ptr = tl.load(address_ptr).to(tl.pointer_type(tl.float32))
    y_ptr = tl.load(address_ptr + 1).to(tl.pointer_type(tl.int16))
    word_ptr = y_ptr.to(tl.pointer_type(tl.int32))
    i, w = tl.arange(0, 2 * WORDS), tl.arange(0, WORDS)
    if ALIGNED:
        # Eight bytes of BF16 beside sixteen of FP32: a thread keeps the same four elements of both.
        x_ptr, word_ptr = tl.multiple_of(x_ptr, 16), tl.multiple_of(word_ptr, 8)
    key, other = keys_of((program * WORDS % 4096 + w).to(tl.uint32))
    changed, peak = tl.zeros((THREADS,), tl.int32), tl.zeros((THREADS,), tl.int32)
    first, second = tl.zeros((THREADS,), tl.int64), tl.zeros((THREADS,), tl.int64)
    for step in tl.range(program, tl.cdiv(count, 2 * WORDS), tl.num_programs(0), num_stages=STAGES):
        at = step.to(tl.int64) * WORDS
        left = count - 2 * at
        if ALIGNED:
            left = tl.multiple_of(left, 4)
        x = tl.load(x_ptr + 2 * at + i, mask=i < left, other=0.0)
        if ALIGNED:
            old = tl.load(word_ptr + at + w, mask=w < left // 2, other=0)
        else:
            halves = tl.load(y_ptr + 2 * at + i, mask=i < left, other=0)
            even, odd = tl.split(tl.reshape(halves, (WORDS, 2)))
            old = _word(even, odd)
        even, odd = tl.split(tl.reshape(x, (WORDS, 2)))
        even, odd = _bf16(even), _bf16(odd)
        new = _word(even, odd)
        if ALIGNED:
            tl.store(word_ptr + at + w, new, mask=w < left // 2)
        else:
            tl.store(y_ptr + 2 * at + i, tl.reshape(tl.join(even, odd), (2 * WORDS,)), mask=i < left)
        largest = tl.maximum(_half(new, 0) & 0x7FFF, _half(new, 1) & 0x7FFF)
        differ = (_half(old ^ new, 0) != 0).to(tl.int32) + (_half(old ^ new, 1) != 0).to(tl.int32)
        peak = tl.maximum(peak, tl.max(tl.max(_per_thread(largest, THREADS, 2), 2), 0))
        changed += tl.sum(tl.sum(_per_thread(differ, THREADS, 2), 2), 0)
        factor, factor_2 = factors_of(step // (4096 // WORDS))
        first += factor * tl.sum(tl.sum(_per_thread(times(key, new), THREADS, 2), 2), 0)
        second += factor_2 * tl.sum(tl.sum(_per_thread(times(other, new), THREADS, 2), 2), 0)
    found = tl.reduce((changed, peak, first, second), 0, _all_of)
    row_found = found_ptr + (entry * SHARDS + program % SHARDS) * FOUND
    tl.atomic_add(row_found, found[0].to(tl.int64), sem="relaxed")
    tl.atomic_max(row_found + 1, found[1].to(tl.int64), sem="relaxed")
    tl.atomic_add(row_found + FIRST, found[2], sem="relaxed")
    tl.atomic_add(row_found + FIRST + 1, found[3], sem="relaxed")


@dataclass(frozen=True)
class Codes:
    """Where the codes of a weight are to go: codes [N, K] and scale [ceil(N / 128), ceil(K / 128)], both contiguous. library: the
    scales in rows that may be longer. rows: [N, ceil(K / 128)], contiguous, a block's scale in each of its rows."""

    codes: Tensor
    scale: Tensor
    library: Tensor | None
    rows: Tensor | None


class Findings(NamedTuple):
    """About one tensor: elements whose code or value changed, the largest value and error of codes, whether all is finite."""

    changed: int
    peak: float
    error: float
    finite: bool
    fingerprint: Fingerprint


class _Codes(NamedTuple):
    """What weights of one launch have in common. aligned: rows are made of whole words and of 16 bytes of the master."""

    rows: int
    columns: int
    aligned: bool
    pow2: bool
    library_stride: int
    row_scales: bool


class _Values(NamedTuple):
    """The same of BF16 values, which are done in the order of memory."""

    numel: int
    aligned: bool


class Added(NamedTuple):
    """A master and its place as a launch takes them. addresses: the master's first."""

    kind: _Codes | _Values
    addresses: tuple[int, ...]
    quantized: bool
    numel: int
    device: torch.device


class Pass:
    """Masters on one device remade as codes or BF16 values, each in its place: `add` them, `launch`, then `findings`. Whoever
    asks keeps the tensors alive until the last finding."""

    def __init__(self) -> None:
        self._table, self._quantized = Table(), list[bool]()
        self._device = torch.device("cuda")
        self._waiting = self._begun = 0

    def add(self, master: Tensor, place: Codes | Tensor, *, pow2: bool) -> Added:
        """A FP32 matrix or vector and where it goes. pow2: scales are powers of two. Begins with it when enough waits. What this
        gives can be added `again` to another pass, as long as master and place are where they are."""
        added = self._record(master, place, pow2=pow2)
        self.again(added)
        return added

    def again(self, added: Added) -> None:
        """See `add`."""
        if added.numel >= ALONE and self._waiting:
            self.launch()
        self._device = added.device
        self._table.add(added.kind, *added.addresses)
        self._quantized.append(added.quantized)
        self._waiting += added.numel
        if self._waiting >= min(max(self._begun, FIRST_VALUES), MOST_VALUES):
            self.launch()

    def _record(self, master: Tensor, place: Codes | Tensor, *, pow2: bool) -> Added:
        count, address = master.numel(), master.data_ptr()
        aligned = address % 16 == 0
        if isinstance(place, Codes):
            codes, library = place.codes.data_ptr(), place.library
            rows, columns = master.shape
            aligned &= columns % 4 == codes % 4 == 0
            stride = 0 if library is None else library.stride(0)
            kind = _Codes(rows, columns, aligned, pow2, stride, place.rows is not None)
            others = (0 if t is None else t.data_ptr() for t in (place.scale, library, place.rows))
            return Added(kind, (address, codes, *others), True, count, master.device)
        values = place.data_ptr()
        whole = _Values(count, aligned and count % 4 == values % 8 == 0)
        return Added(whole, (address, values), False, count, master.device)

    def launch(self) -> None:
        """Begins with what was added; nothing waits."""
        for group in self._table.groups(self._device):
            if isinstance(group.kind, _Codes):
                _launch_codes(group, group.kind)
            else:
                _launch_values(group, group.kind)
        self._table.close()
        self._begun, self._waiting = self._begun + self._waiting, 0

    def findings(self) -> Iterator[Findings]:
        """About every tensor in the order of `add`, as soon as the device has got so far."""
        infinity = {True: INFINITY_F32, False: INFINITY_BF16}
        for (row, (peak, error)), quantized in zip(self._table.read(), self._quantized, strict=True):
            yield Findings(row[0], peak, error, row[1] < infinity[quantized], fingerprint_of(row))


def _launch_codes(group: Group, kind: _Codes) -> None:
    if not kind.rows * kind.columns:
        return
    grid = (cdiv(kind.columns, BLOCK), cdiv(kind.rows, BLOCK), len(group))
    _requantize[grid](
        group.addresses,
        group.found,
        kind.rows,
        kind.columns,
        kind.columns // 4,
        kind.library_stride,
        FIELDS,
        FOUND,
        SHARDS,
        kind.aligned and kind.rows % BLOCK == 0 and kind.columns % BLOCK == 0,
        kind.aligned,
        kind.library_stride > 0,
        kind.row_scales,
        kind.pow2,
        32 * WARPS,
        num_warps=WARPS,
        maxnreg=REGISTERS if kind.aligned else 2 * REGISTERS,
        enable_fp_fusion=False,
    )


def _launch_values(group: Group, kind: _Values) -> None:
    if not kind.numel:
        return
    steps = cdiv(kind.numel, 2 * ROUND_WORDS)
    per_tile = 4096 // ROUND_WORDS
    most = -(-ROUND_PROGRAMS * processors(group.found.device) // per_tile) * per_tile
    _round[(min(steps, most), len(group))](
        group.addresses,
        group.found,
        kind.numel,
        FIELDS,
        FOUND,
        SHARDS,
        kind.aligned,
        ROUND_WORDS,
        32 * ROUND_WARPS,
        ROUND_STAGES,
        num_warps=ROUND_WARPS,
        maxnreg=REGISTERS if kind.aligned else 2 * REGISTERS,
    )
