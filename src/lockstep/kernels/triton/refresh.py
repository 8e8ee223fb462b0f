"""Working copies remade where they lie: one pass over the FP32 masters, one launch for each shape, one wait for all.

A program takes a tile, reads the master and the old code of each element once, writes code and scale, and keeps the account: how
many codes changed, the largest value and error, and the tile's part of the tensor's fingerprint, while the codes are still in
registers. Codes and scales are those of `numerics/quantize.py`, byte for byte; the account is the reference's
(`../renew.py`).

Findings are integers added or maximised atomically, so their order is free; the bits of a FP32 that isn't negative are ordered as
its values are, with infinity and NaN above all others. That is how a master that isn't finite shows: its tile is written all the
same, and whoever reads the findings must not use it.

Legend: N outputs, K inputs of a weight. Next: `fingerprint.py`, `tables.py`, `../in_place.py`, which calls this.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.fingerprint import FIRST, add_tile, fingerprint_of, words_of
from lockstep.kernels.triton.numbers import scale_of
from lockstep.kernels.triton.tables import FIELDS, FOUND, SHARDS, Group, Table
from lockstep.numerics.fingerprint import Fingerprint
from lockstep.numerics.formats import BLOCK

HALF = 64
"""BF16 values in a row of a tile."""
WARPS, REGISTERS = 16, 64
"""Of a program, and of its threads: two programs on a processor, one of which loads while the other computes."""
INFINITY_F32 = 0x7F800000
INFINITY_BF16 = 0x7F80


@triton.jit
def _account(found_ptr, changed, peak, error):
    tl.atomic_add(found_ptr, changed.to(tl.int64), sem="relaxed")
    tl.atomic_max(found_ptr + 1, peak.to(tl.int64), sem="relaxed")
    tl.atomic_max(found_ptr + 2, error.to(tl.int64), sem="relaxed")


@triton.jit
def _changed_bytes(old, new):
    """How many of the four bytes of words differ."""
    x = (old ^ new).to(tl.uint32, bitcast=True)
    high = (((x & 0x7F7F7F7F) + 0x7F7F7F7F) | x) & 0x80808080
    return (high >> 7) * 0x01010101 >> 24


@triton.jit
def _codes(x, scale):
    """e4m3(x / scale) of a block whose scale is this one; the quotient is `div_rn`'s wherever the code is not a zero.

    One division for the block: with r the rounded reciprocal, a quotient off by less than one unit in the last place and
    its exact remainder, q + remainder * r is rounded as the quotient itself would be (Markstein 1990). What is below the smallest
    code may lose its sign on the way, so that is put back. Beyond 448 there is rounding at most, which the cast undoes.
    """
    r = tl.div_rn(1.0, scale) + tl.zeros_like(x)
    minus = -scale + tl.zeros_like(x)
    q = x * r
    q = tl.fma(tl.fma(q, minus, x), r, q)
    q = tl.fma(tl.fma(q, minus, x), r, q)
    bits = (q.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True).to(tl.float8e4nv)


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
    codes = _codes(x, scale)
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

    changed = tl.sum(_changed_bytes(old, new).to(tl.int32))
    error = tl.max(tl.abs(codes.to(tl.float32) * scale - x)).to(tl.int32, bitcast=True)
    row_found = found_ptr + (entry * SHARDS + tile % SHARDS) * FOUND
    _account(row_found, changed, peak, error)
    add_tile(new, tile, scale.to(tl.uint32, bitcast=True), row_found + FIRST, error)


@triton.jit
def _round(
    table_ptr,
    found_ptr,
    N,
    K,
    FIELDS: tl.constexpr,
    FOUND: tl.constexpr,
    SHARDS: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """BF16 values, 128 x 64 a tile. ALIGNED: rows are a multiple of four long."""
    column, block, entry = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    tile = block * tl.num_programs(0) + column
    address_ptr = table_ptr + entry * FIELDS
    first = block * 128
    r = tl.arange(0, 128)[:, None]
    c = column * 64 + tl.arange(0, 64)[None, :]
    inside = (first + r < N) & (c < K)
    x_ptr = tl.load(address_ptr).to(tl.pointer_type(tl.float32))
    y_ptr = tl.load(address_ptr + 1).to(tl.pointer_type(tl.int16))
    if ALIGNED:
        # Eight bytes of BF16 beside sixteen of FP32: a thread keeps the same four elements of both.
        x_ptr, y_ptr, K = tl.multiple_of(x_ptr, 16), tl.multiple_of(y_ptr, 8), tl.multiple_of(K, 4)
    x_ptr += first.to(tl.int64) * K
    y_ptr += first.to(tl.int64) * K
    if FULL:
        x = tl.load(x_ptr + r * K + c)
        old = tl.load(y_ptr + r * K + c)
    else:
        x = tl.load(x_ptr + r * K + c, mask=inside, other=0.0)
        old = tl.load(y_ptr + r * K + c, mask=inside, other=0)
    new = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    if FULL:
        tl.store(y_ptr + r * K + c, new)
    else:
        tl.store(y_ptr + r * K + c, new, mask=inside)
    peak = tl.max(new.to(tl.int32) & 0x7FFF)
    changed = tl.sum((old != new).to(tl.int32))
    row_found = found_ptr + (entry * SHARDS + tile % SHARDS) * FOUND
    _account(row_found, changed, peak, tl.full((), 0, tl.int32))
    words = words_of(new.to(tl.uint16, bitcast=True), 2)
    add_tile(words, tile, tl.full((), 0, tl.uint32), row_found + FIRST, peak)


@dataclass(frozen=True)
class Codes:
    """Where the codes of a weight are to go: codes [N, K] and scale [ceil(N / 128), ceil(K / 128)], both contiguous. library: the
    scales in rows that may be longer. rows: [N, ceil(K / 128)], contiguous, a block's scale in each of its rows."""

    codes: Tensor
    scale: Tensor
    library: Tensor | None
    rows: Tensor | None


@dataclass(frozen=True)
class Findings:
    """About one tensor: elements whose code or value changed, the largest value and error of codes, whether all is finite."""

    changed: int
    peak: float
    error: float
    finite: bool
    fingerprint: Fingerprint


@dataclass(frozen=True)
class _Kind:
    """What the tensors of one launch have in common. aligned: rows are made of whole words and of 16 bytes of the master."""

    rows: int
    columns: int
    aligned: bool
    quantized: bool
    pow2: bool = False
    library_stride: int = 0
    row_scales: bool = False


class Pass:
    """Masters on one device remade as codes or BF16 values, each in its place: `add`, `launch` as often as is good, then
    `findings`."""

    def __init__(self) -> None:
        self._table, self._quantized = Table(), list[bool]()
        self._device = torch.device("cuda")

    def add(self, master: Tensor, place: Codes | Tensor, *, pow2: bool) -> None:
        """A FP32 matrix or vector and where it goes. pow2: scales are powers of two."""
        rows, columns = master.shape if master.dim() == 2 else (1, master.numel())
        aligned = columns % 4 == 0 and master.data_ptr() % 16 == 0
        self._device = master.device
        self._quantized.append(isinstance(place, Codes))
        if isinstance(place, Codes):
            aligned &= place.codes.data_ptr() % 4 == 0
            stride = 0 if place.library is None else place.library.stride(0)
            kind = _Kind(rows, columns, aligned, True, pow2, stride, place.rows is not None)
            self._table.add(kind, master, place.codes, place.scale, place.library, place.rows)
        else:
            aligned &= place.data_ptr() % 8 == 0
            self._table.add(_Kind(rows, columns, aligned, False), master, place)

    def launch(self) -> None:
        """Begins with what was added; nothing waits."""
        for group in self._table.groups(self._device):
            if group.kind.rows and group.kind.columns:
                _launch(group)

    def findings(self) -> list[Findings]:
        """About every tensor in the order of `add`. Waits for the device, once."""
        rows = self._table.read()
        return [_findings(row, quantized) for row, quantized in zip(rows, self._quantized, strict=True)]


def _launch(group: Group) -> None:
    kind: _Kind = group.kind
    width = BLOCK if kind.quantized else HALF
    grid = (triton.cdiv(kind.columns, width), triton.cdiv(kind.rows, BLOCK), len(group))
    full = kind.aligned and kind.rows % BLOCK == 0 and kind.columns % width == 0
    common = (group.addresses, group.found, kind.rows, kind.columns)
    if not kind.quantized:
        _round[grid](*common, FIELDS, FOUND, SHARDS, full, kind.aligned, num_warps=8)
        return
    _requantize[grid](
        *common,
        kind.columns // 4,
        kind.library_stride,
        FIELDS,
        FOUND,
        SHARDS,
        full,
        kind.aligned,
        kind.library_stride > 0,
        kind.row_scales,
        kind.pow2,
        num_warps=WARPS,
        maxnreg=REGISTERS if kind.aligned else 2 * REGISTERS,
        enable_fp_fusion=False,
    )


def _findings(row: Sequence[int], quantized: bool) -> Findings:
    changed, peak, error = row[:3]
    finite = peak < (INFINITY_F32 if quantized else INFINITY_BF16)
    values = struct.unpack("<ff", struct.pack("<ii", peak, error))
    return Findings(changed, values[0], values[1], finite, fingerprint_of(row))
