"""BF16 product by bulk copies, first of all for few rows: decode sizes of what stays in BF16.

    y_TN = x_TK w_NK^T, summed by the tensor cores in steps of 16 along K, ascending; rounded once

As in `narrow_gemm.py` the weight is the left operand (where its tiles are small, tokens are), a ring of bulk copies keeps the
memory busy, and the first weights are fetched while the kernel before this one ends. There are no scales, so one chain of
products runs through all of K. Its order is that of `gemm.bf16_matmul`, hence the bits; `../hopper.py` proves it for every weight
shape on the spot.
"""

from __future__ import annotations

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.kernels.triton.gemm import banded, empty_product
from lockstep.kernels.triton.narrow_gemm import Arrangement
from lockstep.kernels.triton.ring import arrived, boxes
from lockstep.kernels.triton.sizes import cdiv

STEP = 64
"""Elements along K of one copy: 128 bytes."""
BAND = gl.constexpr(8)
"""Tiles along tokens of a band; see `gemm.banded`."""


@gluon.jit
def _place(tile, tiles, tiles_m, BN: gl.constexpr, BM: gl.constexpr):
    """(first output, first token) of a tile."""
    m, n = banded(tile, tiles_m, tiles // tiles_m, BAND)
    return n * BN, m * BM


@gluon.jit
def _copy(
    w_desc,
    x_desc,
    rings,
    sizes,
    BN: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warp that keeps the ring full, block after block, tile after tile."""
    w_ring, x_ring, ready, free = rings
    tiles, tiles_m, count = sizes
    size: gl.constexpr = w_desc.block_type.nbytes + x_desc.block_type.nbytes
    first = gl.program_id(0)
    n0, m0 = _place(first, tiles, tiles_m, BN, BM)
    for s in gl.static_range(STAGES):
        if s < count:
            mbarrier.expect(ready.index(s), size)
            tma.async_copy_global_to_shared(w_desc, [n0, s * 64], ready.index(s), w_ring.index(s))
    gdc_wait()
    gdc_launch_dependents()
    for s in gl.static_range(STAGES):
        if s < count:
            tma.async_copy_global_to_shared(x_desc, [m0, s * 64], ready.index(s), x_ring.index(s))
    filled = gl.minimum(STAGES, count)
    at = filled
    for tile in range(first, tiles, gl.num_programs(0)):
        n0, m0 = _place(tile, tiles, tiles_m, BN, BM)
        for k in range(gl.where(tile == first, filled, 0), count):
            stage = at % STAGES
            mbarrier.wait(free.index(stage), ((at // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, size)
            tma.async_copy_global_to_shared(w_desc, [n0, k * 64], bar, w_ring.index(stage))
            tma.async_copy_global_to_shared(x_desc, [m0, k * 64], bar, x_ring.index(stage))
            at += 1


@gluon.jit
def _multiply(
    rings,
    y_ptr,
    M,
    N,
    sizes,
    BN: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    LEFT: gl.constexpr,
):
    """The warpgroups that multiply and store. A block is given back when the product after it has begun and it is done."""
    w_ring, x_ring, ready, free = rings
    tiles, tiles_m, count = sizes
    AXIS: gl.constexpr = 1 if LEFT else 0
    ROWS: gl.constexpr = BM if LEFT else BN
    COLUMNS: gl.constexpr = BN if LEFT else BM
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, COLUMNS, 16]
    )
    base = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n0, m0 = _place(tile, tiles, tiles_m, BN, BM)
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        for k in range(count):
            at = base + k
            stage = at % STAGES
            arrived(ready, at, STAGES)
            w, x = w_ring.index(stage), x_ring.index(stage)
            if LEFT:
                acc = warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True)
            else:
                acc = warpgroup_mma(w, x.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            if k > 0:
                mbarrier.arrive(free.index((at - 1) % STAGES), count=1)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(free.index((base + count - 1) % STAGES), count=1)
        base += count
        m = gl.expand_dims(m0 + gl.arange(0, BM, layout=gl.SliceLayout(AXIS, layout)), AXIS)
        n = gl.expand_dims(n0 + gl.arange(0, BN, layout=gl.SliceLayout(1 - AXIS, layout)), 1 - AXIS)
        gl.store(y_ptr + m * N + n, acc.to(y_ptr.dtype.element_ty), mask=(m < M) & (n < N))


@gluon.jit
def _narrow_bf16(
    w_desc,
    x_desc,
    y_ptr,
    M,
    N,
    count,
    tiles,
    tiles_m,
    BN: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    LEFT: gl.constexpr,
):
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, 64], w_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, 64], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    fence_async_shared()
    rings, sizes = (w_ring, x_ring, ready, free), (tiles, tiles_m, count)
    gl.warp_specialize(
        [
            (_multiply, (rings, y_ptr, M, N, sizes, BN, BM, STAGES, WARPS, LEFT)),
            (_copy, (w_desc, x_desc, rings, sizes, BN, BM, STAGES)),
        ],
        [1],
        [24],
    )


def narrow_bf16_matmul(
    x_MK: Tensor,
    w_NK: Tensor,
    *,
    tile: int = 64,
    stages: int = 9,
    tokens: int = 0,
    left: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x w^T [M, N] in `dtype`; options are those of `narrow_gemm.Arrangement`. What `takes` says has to be so."""
    rows, depth = x_MK.shape
    columns = w_NK.shape[0]
    form = Arrangement.of(rows, columns, tile=tile, tokens=tokens, left=left)
    y = empty_product(x_MK, w_NK, dtype)
    _narrow_bf16[form.grid](
        boxes(w_NK, tile, STEP),
        boxes(x_MK, form.bm, STEP),
        y,
        rows,
        columns,
        cdiv(depth, STEP),
        form.tiles,
        form.tiles_m,
        tile,
        form.bm,
        stages,
        form.warps,
        bool(left),
        **form.options,
    )
    return y


def takes(x_MK: Tensor, w_NK: Tensor) -> bool:
    """Whether bulk copies can read these operands, and results can be counted in 31 bits."""
    aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 and t.stride(1) == 1 for t in (x_MK, w_NK))
    return aligned and x_MK.dtype == w_NK.dtype == torch.bfloat16 and len(x_MK) * len(w_NK) < 2**31
