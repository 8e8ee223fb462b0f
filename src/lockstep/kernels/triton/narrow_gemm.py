"""Block-scaled FP8 product for few rows: decode sizes, where reading the weight is all that counts.

    y_TN = sum over blocks of 128 along K, ascending: (w codes x codes^T) * (x scale * w scale), FP32, rounded once

Every tile of the weight takes all tokens from the second-level cache again, as many bytes as its own where 64 rows of each make a
tile, and shared memory, which copies fill and products read, becomes the limit from 128 tokens on. Three tiles that share them,
and 128 of them at once, need less; 24,576 rows are 128 times 192.

Either operand may be the left one, whose 64 rows fill the warpgroup instruction. The weight, with tokens as columns: then nothing
is padded to 64 tokens. Or the tokens, where there are as many: then tiles of the weight may be smaller, which occupies more
processors, and a thread scales by two tokens' scales instead of as many as it has columns.

A program owns tiles of weight rows for all of K, since the FP32 additions must keep their order; what keeps the memory busy is
a ring of bulk copies several blocks ahead, which goes on into the next tile while this one is stored. The product of the next
block is issued before the last one is added, so that additions hide behind the tensor cores.

The instruction and the order are those of `gemm.py` and of the library, hence the bits; `../hopper.py` proves it on the spot for
every weight shape and batch size class before this kernel is used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.kernels.triton.gemm import empty_product
from lockstep.kernels.triton.ring import arrived, box_layout
from lockstep.kernels.triton.sizes import cdiv

MOST_ROWS = 256
"""Beyond, the library's larger tiles win."""
PARTS_REGISTERS = gl.constexpr(160)
"""Of a thread where three parts do."""


@gluon.jit
def _copy_weight(w_desc, k, n0, bar, w_ring, stage, BN: gl.constexpr, PARTS: gl.constexpr):
    """Asks for a slot's weight codes, those of one part after the other."""
    for part in gl.static_range(PARTS):
        tma.async_copy_global_to_shared(
            w_desc, [k, n0 + part * BN, 0], bar, w_ring.index(stage * PARTS + part)
        )


@gluon.jit
def _copy(
    w_desc,
    x_desc,
    s_desc,
    rings,
    sizes,
    BN: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
    PARTS: gl.constexpr,
):
    """One warp that keeps the ring full: weight codes, token codes and token scales, slot after slot, tile after tile."""
    w_ring, x_ring, s_ring, ready, free = rings
    tiles, tiles_m, count = sizes
    size: gl.constexpr = (
        PARTS * w_desc.block_type.nbytes + x_desc.block_type.nbytes + s_desc.block_type.nbytes
    )
    first = gl.program_id(0)
    n0, m0 = first // tiles_m * (PARTS * BN), first % tiles_m * BM
    steps = count // BLOCKS
    # The weights don't depend on the kernel before: the first of them are fetched while it ends.
    for s in gl.static_range(STAGES):
        if s < steps:
            mbarrier.expect(ready.index(s), size)
            _copy_weight(w_desc, s * BLOCKS, n0, ready.index(s), w_ring, s, BN, PARTS)
    gdc_wait()
    gdc_launch_dependents()
    for s in gl.static_range(STAGES):
        if s < steps:
            tma.async_copy_global_to_shared(x_desc, [s * BLOCKS, m0, 0], ready.index(s), x_ring.index(s))
            tma.async_copy_global_to_shared(s_desc, [s * BLOCKS, m0], ready.index(s), s_ring.index(s))
    filled = gl.minimum(STAGES, steps)
    at = filled
    for tile in range(first, tiles, gl.num_programs(0)):
        n0, m0 = tile // tiles_m * (PARTS * BN), tile % tiles_m * BM
        for step in range(gl.where(tile == first, filled, 0), steps):
            stage = at % STAGES
            mbarrier.wait(free.index(stage), ((at // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            k = step * BLOCKS
            mbarrier.expect(bar, size)
            _copy_weight(w_desc, k, n0, bar, w_ring, stage, BN, PARTS)
            tma.async_copy_global_to_shared(x_desc, [k, m0, 0], bar, x_ring.index(stage))
            tma.async_copy_global_to_shared(s_desc, [k, m0], bar, s_ring.index(stage))
            at += 1


@gluon.jit
def _issue(
    w_ring,
    x_ring,
    registers,
    slot,
    J: gl.constexpr,
    BN: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
    LEFT: gl.constexpr,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    HALF: gl.constexpr = 0,
):
    """Starts the product of block J of a slot that has arrived, of one half of its tokens where they come in two, into registers
    whose content is of no more use."""
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    HALVES: gl.constexpr = BM // 64 if LEFT else 1
    stage = slot % STAGES
    w = w_ring.index(stage * PARTS + PART)._reinterpret(gl.float8e4nv, [BLOCKS, BN, 128], flat).index(J)
    x = x_ring.index(stage)._reinterpret(gl.float8e4nv, [BLOCKS * HALVES, BM // HALVES, 128], flat)
    x = x.index(J * HALVES + HALF)
    if LEFT:
        found = warpgroup_mma(x, w.permute((1, 0)), registers, use_acc=False, is_async=True)
    else:
        found = warpgroup_mma(w, x.permute((1, 0)), registers, use_acc=False, is_async=True)
    return found


@gluon.jit
def _scale(
    s_ring,
    slot,
    J: gl.constexpr,
    weight_scale,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
    tokens: gl.constexpr,
    AXIS: gl.constexpr,
    HALF: gl.constexpr = 0,
):
    """Token scales of block J of a slot, or of a half, times the weight's, along the other axis than AXIS."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    HALVES: gl.constexpr = BM // 64 if AXIS == 1 else 1
    held = s_ring.index(slot % STAGES)._reinterpret(gl.float32, [BLOCKS * HALVES, BM // HALVES], flat)
    held = held.index(J * HALVES + HALF)
    return gl.expand_dims(held.load(tokens) * weight_scale, AXIS)


@gluon.jit
def _weight_scale(ws, at, count, following, more):
    """The weight's scale for the block `at`; beyond the tile's last, the `following` tile's first, if there are `more`."""
    return gl.load(gl.where(at < count, ws + at, following), mask=(at < count) | more, other=0.0)


@gluon.jit
def _multiply(
    rings,
    places,
    sizes,
    BN: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
    ROUND: gl.constexpr,
    WARPS: gl.constexpr,
    LEFT: gl.constexpr,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
):
    """The warpgroups that multiply, scale, add and store one part.

    Two sets of registers take turns as target of the products, and none is in flight where the loop comes round: else the
    assembler can't tell when a set may be read, and waits for every product where it is issued (its note C7514). So ROUND blocks
    are written out. Where three parts take turns, one set each is enough. Where 128 tokens are the left operand, each half of
    them has its own set and its own sums.

    A slot is given back after the branch of a wait, so that scales read from it are in registers (`ring.py`). The weight's first
    scale of a round is asked for a round earlier, the very first while the kernel before ends: the others lie in its cache line.
    """
    w_ring, x_ring, s_ring, ready, free = rings
    y_ptr, ws_ptr, M, N, ws_n = places
    tiles, tiles_m, count = sizes
    AXIS: gl.constexpr = 1 if LEFT else 0
    HALVES: gl.constexpr = BM // 64 if LEFT else 1
    ROWS: gl.constexpr = 64 if LEFT else BN
    COLUMNS: gl.constexpr = BN if LEFT else BM
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, COLUMNS, 32]
    )
    tokens: gl.constexpr = gl.SliceLayout(AXIS, layout)
    outputs: gl.constexpr = gl.SliceLayout(1 - AXIS, layout)
    even = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    odd = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    steps = count // BLOCKS
    TURNS: gl.constexpr = PARTS == 1 and HALVES == 1
    whole = count // ROUND * ROUND if TURNS else 0
    base = 0
    row = (gl.program_id(0) // tiles_m * PARTS + PART) * BN // 128 * ws_n
    ahead = gl.load(ws_ptr + row)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        later = tile + gl.num_programs(0)
        n0, m0 = (tile // tiles_m * PARTS + PART) * BN, tile % tiles_m * BM
        ws = ws_ptr + row
        row = (later // tiles_m * PARTS + PART) * BN // 128 * ws_n
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        low = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        if TURNS:
            for start in range(0, whole, ROUND):
                first = base + start // BLOCKS
                own = ahead
                ahead = _weight_scale(ws, start + ROUND, count, ws_ptr + row, later < tiles)
                arrived(ready, first, STAGES)
                even = _issue(w_ring, x_ring, even, first, 0, BN, BM, STAGES, BLOCKS, LEFT, PART, PARTS)
                scale = _scale(s_ring, first, 0, own, BM, STAGES, BLOCKS, tokens, AXIS)
                for u in gl.static_range(1, ROUND):
                    slot = first + u // BLOCKS
                    if u % BLOCKS == 0:
                        arrived(ready, slot, STAGES)
                    if u % 2 == 1:
                        odd = _issue(
                            w_ring, x_ring, odd, slot, u % BLOCKS, BN, BM, STAGES, BLOCKS, LEFT, PART, PARTS
                        )
                        even = warpgroup_mma_wait(num_outstanding=1, deps=(even,))
                        acc += even * scale
                    else:
                        even = _issue(
                            w_ring, x_ring, even, slot, u % BLOCKS, BN, BM, STAGES, BLOCKS, LEFT, PART, PARTS
                        )
                        odd = warpgroup_mma_wait(num_outstanding=1, deps=(odd,))
                        acc += odd * scale
                    if u % BLOCKS == 0:
                        mbarrier.arrive(free.index((slot - 1) % STAGES), count=1)
                    own = gl.load(ws + start + u)
                    scale = _scale(s_ring, slot, u % BLOCKS, own, BM, STAGES, BLOCKS, tokens, AXIS)
                odd = warpgroup_mma_wait(num_outstanding=0, deps=(odd,))
                acc += odd * scale
                last = first + (ROUND - 1) // BLOCKS
                arrived(ready, last, STAGES)
                mbarrier.arrive(free.index(last % STAGES), count=1)
        for step in range(whole // BLOCKS, steps):
            slot, own = base + step, ahead
            ahead = _weight_scale(ws, (step + 1) * BLOCKS, count, ws_ptr + row, later < tiles)
            arrived(ready, slot, STAGES)
            for j in gl.static_range(BLOCKS):
                even = _issue(w_ring, x_ring, even, slot, j, BN, BM, STAGES, BLOCKS, LEFT, PART, PARTS)
                if HALVES == 2:
                    odd = _issue(w_ring, x_ring, odd, slot, j, BN, BM, STAGES, BLOCKS, LEFT, PART, PARTS, 1)
                if j > 0:
                    own = gl.load(ws + step * BLOCKS + j)
                scale = _scale(s_ring, slot, j, own, BM, STAGES, BLOCKS, tokens, AXIS)
                even = warpgroup_mma_wait(num_outstanding=HALVES - 1, deps=(even,))
                acc += even * scale
                if HALVES == 2:
                    scale = _scale(s_ring, slot, j, own, BM, STAGES, BLOCKS, tokens, AXIS, 1)
                    odd = warpgroup_mma_wait(num_outstanding=0, deps=(odd,))
                    low += odd * scale
            arrived(ready, slot, STAGES)
            mbarrier.arrive(free.index(slot % STAGES), count=1)
        base += steps
        m = gl.expand_dims(m0 + gl.arange(0, BM // HALVES, layout=tokens), AXIS)
        n = gl.expand_dims(n0 + gl.arange(0, BN, layout=outputs), 1 - AXIS)
        gl.store(y_ptr + m * N + n, acc.to(gl.bfloat16), mask=m < M)
        if HALVES == 2:
            gl.store(y_ptr + (m + 64) * N + n, low.to(gl.bfloat16), mask=m + 64 < M)


@gluon.jit
def _narrow(
    w_desc,
    x_desc,
    s_desc,
    y_ptr,
    ws_ptr,
    M,
    N,
    count,
    ws_n,
    tiles,
    tiles_m,
    BN: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
    ROUND: gl.constexpr,
    WARPS: gl.constexpr,
    LEFT: gl.constexpr,
    PARTS: gl.constexpr,
):
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * PARTS, BLOCKS, BN, 128], w_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCKS, BM, 128], x_desc.layout)
    s_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCKS, BM], s_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=PARTS)
    fence_async_shared()
    rings, sizes = (w_ring, x_ring, s_ring, ready, free), (tiles, tiles_m, count)
    places = (y_ptr, ws_ptr, M, N, ws_n)
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_multiply, (rings, places, sizes, BN, BM, STAGES, BLOCKS, ROUND, WARPS, LEFT, 0, 1)),
                (_copy, (w_desc, x_desc, s_desc, rings, sizes, BN, BM, STAGES, BLOCKS, 1)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (rings, places, sizes, BN, BM, STAGES, BLOCKS, ROUND, WARPS, LEFT, 0, 3)),
                (_multiply, (rings, places, sizes, BN, BM, STAGES, BLOCKS, ROUND, WARPS, LEFT, 1, 3)),
                (_multiply, (rings, places, sizes, BN, BM, STAGES, BLOCKS, ROUND, WARPS, LEFT, 2, 3)),
                (_copy, (w_desc, x_desc, s_desc, rings, sizes, BN, BM, STAGES, BLOCKS, 3)),
            ],
            [WARPS, WARPS, 1],
            [PARTS_REGISTERS, PARTS_REGISTERS, 24],
        )


def shape_of(rows: int) -> int:
    """Tokens of a tile: a power of two, at least 32, since a bulk copy of scales fills 128 bytes."""
    return 32 if rows <= 32 else 64 if rows <= 64 else 128


def tokens_of(rows: int, left: int, tokens: int = 0) -> int:
    """Tokens of a tile of this form. As the left operand they are 64 or, with `left` 2, 128."""
    return 64 * left if left else tokens or shape_of(rows)


def fits(
    rows: int,
    columns: int,
    *,
    tile: int = 64,
    stages: int = 6,
    tokens: int = 0,
    left: int = 0,
    parts: int = 1,
) -> bool:
    """Whether the rings of this form have room in a multiprocessor's shared memory (227 KiB, some for barriers), and sums in its
    registers; whether three tiles at a time divide the outputs, `columns`; and whether it makes sense: few tokens don't fill a
    left operand, small tiles are for few tokens."""
    bm = tokens_of(rows, left, tokens)
    room = stages * ((parts * tile + bm) * 128 + bm * 4) <= 225 * 1024
    sensible = (rows <= 64 if tile < 64 else rows > 32 * left) if left else tile >= 64
    registers = (parts == 1 and left < 2) or bm * tile <= 4096 * max(left, 1)
    return room and registers and sensible and (parts == 1 or columns % (parts * tile) == 0)


class Arrangement(NamedTuple):
    """A launch of a program on each processor, which stays and takes tile after tile.

    bm: tokens of a tile. tiles_m: tiles along tokens, of `tiles` in all. warps: those that multiply.
    """

    bm: int
    tiles_m: int
    tiles: int
    warps: int
    grid: tuple[int]
    options: dict[str, int]

    @classmethod
    def of(
        cls, rows: int, columns: int, *, tile: int, left: int, tokens: int = 0, parts: int = 1
    ) -> Arrangement:
        """For a product [rows, columns]. tokens: of a tile, instead of `shape_of`; the others are options of `narrow_matmul`."""
        bm = tokens_of(rows, left, tokens)
        tiles_m = cdiv(rows, bm)
        tiles = cdiv(columns, parts * tile) * tiles_m
        most = torch.cuda.get_device_properties().multi_processor_count
        warps = (64 if left else tile) // 16
        options = {"num_warps": warps, "launch_pdl": True}
        return cls(bm, tiles_m, tiles, warps, (min(tiles, most),), options)


def narrow_matmul(
    x_codes_MK: Tensor,
    x_scale: Tensor,
    w_codes_NK: Tensor,
    w_scale: Tensor,
    *,
    tile: int = 64,
    stages: int = 6,
    left: int = 0,
    parts: int = 1,
) -> Tensor:
    """Block-scaled x w^T [M, N] BF16 for M <= MOST_ROWS. x_scale [M, K / 128]: unit stride along M; N, K: multiples of 128.

    tile: weight rows of a tile. left: tokens are the left operand, 64 of them or (2) twice as many; they have to be where a tile
    is smaller. stages: blocks that the ring holds; an even number travels two by two. parts: one tile, or three, each a
    warpgroup's, that share the copies of tokens; N is a multiple of them all.
    """
    rows, depth = x_codes_MK.shape
    columns, count = len(w_codes_NK), depth // 128
    form = Arrangement.of(rows, columns, tile=tile, left=left, parts=parts)
    blocks = 2 if count % 2 == stages % 2 == 0 else 1
    assert stages // blocks > 1, "a slot goes back after the next one has arrived"
    y = empty_product(x_codes_MK, w_codes_NK)
    scale_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    _narrow[form.grid](
        _descriptor(w_codes_NK, tile, blocks),
        _descriptor(x_codes_MK, form.bm, blocks),
        TensorDescriptor.from_tensor(x_scale.t(), [blocks, form.bm], scale_layout),
        y,
        w_scale,
        rows,
        columns,
        count,
        w_scale.stride(0),
        form.tiles,
        form.tiles_m,
        tile,
        form.bm,
        stages // blocks,
        blocks,
        4 if count % 8 or form.bm * tile > 4096 else 8,
        form.warps,
        bool(left),
        parts,
        **form.options,
    )
    return y


def _descriptor(codes: Tensor, rows: int, blocks: int) -> TensorDescriptor:
    """Boxes of so many blocks and rows: codes [R, K] seen as [K / 128, R, 128]."""
    count, depth = codes.shape
    box = [blocks, rows, 128]
    layout = box_layout(codes.dtype, *box)
    stride = codes.stride(0)
    return TensorDescriptor(codes, [depth // 128, count, 128], [128, stride, 1], box, layout)
