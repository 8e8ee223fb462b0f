"""Block-scaled FP8 product for few rows: decode sizes, where reading the weight is all that counts.

    y_TN = sum over blocks of 128 along K, ascending: (w codes x codes^T) * (x scale * w scale), FP32, rounded once

The weight is the left operand: 64 of its rows fill the warpgroup instruction, and the tokens are its columns, so nothing is
padded to 64 tokens. A program owns a tile of weight rows for all tokens and all of K, since the FP32 additions must keep their
order; what keeps the memory busy is a ring of bulk copies several blocks ahead. The product of the next block is issued before
the last one is added, so that additions hide behind the tensor cores.

The instruction and the order are those of `gemm.py` and of the library, hence the bits; `../hopper.py` proves it on the spot for
every weight shape and batch size class before this kernel is used.
"""

from __future__ import annotations

import torch
import triton
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

MOST_ROWS = 128


@gluon.jit
def _copy(w_desc, x_desc, s_desc, w_ring, x_ring, s_ring, ready, free, n0, m0, count, STAGES: gl.constexpr):
    """One warp that keeps the ring full: weight codes, token codes and token scales of block after block."""
    size: gl.constexpr = w_desc.block_type.nbytes + x_desc.block_type.nbytes + s_desc.block_type.nbytes
    # The weights don't depend on the kernel before: the first of them are fetched while it ends.
    for k in gl.static_range(STAGES):
        if k < count:
            mbarrier.expect(ready.index(k), size)
            tma.async_copy_global_to_shared(w_desc, [n0, k * 128], ready.index(k), w_ring.index(k))
    gdc_wait()
    gdc_launch_dependents()
    for k in gl.static_range(STAGES):
        if k < count:
            tma.async_copy_global_to_shared(x_desc, [m0, k * 128], ready.index(k), x_ring.index(k))
            tma.async_copy_global_to_shared(s_desc, [k, m0], ready.index(k), s_ring.index(k))
    for k in range(STAGES, count):
        stage = k % STAGES
        mbarrier.wait(free.index(stage), ((k // STAGES) & 1) ^ 1)
        bar = ready.index(stage)
        mbarrier.expect(bar, size)
        tma.async_copy_global_to_shared(w_desc, [n0, k * 128], bar, w_ring.index(stage))
        tma.async_copy_global_to_shared(x_desc, [m0, k * 128], bar, x_ring.index(stage))
        tma.async_copy_global_to_shared(s_desc, [k, m0], bar, s_ring.index(stage))


@gluon.jit
def _issue(w_ring, x_ring, ready, zero, k, STAGES: gl.constexpr):
    """Starts the product of block k once it has arrived."""
    stage = k % STAGES
    mbarrier.wait(ready.index(stage), (k // STAGES) & 1)
    return warpgroup_mma(
        w_ring.index(stage), x_ring.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
    )


@gluon.jit
def _multiply(
    w_ring,
    x_ring,
    s_ring,
    ready,
    free,
    y_ptr,
    ws_ptr,
    M,
    N,
    n0,
    m0,
    count,
    BN: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS_N: gl.constexpr,
    WARPS_M: gl.constexpr,
):
    """The warpgroups that multiply, scale, add and store."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS_N, WARPS_M], instr_shape=[16, BM // WARPS_M, 32]
    )
    column: gl.constexpr = gl.SliceLayout(0, layout)
    zero = gl.zeros([BN, BM], gl.float32, layout)
    acc = gl.zeros([BN, BM], gl.float32, layout)
    ws = gl.load(ws_ptr)
    ws_next = gl.load(ws_ptr + 1, mask=count > 1, other=0.0)
    product = _issue(w_ring, x_ring, ready, zero, 0, STAGES)
    for k in range(count - 1):
        following = _issue(w_ring, x_ring, ready, zero, k + 1, STAGES)
        scale = s_ring.index(k % STAGES).reshape([BM]).load(column) * ws
        ws = ws_next
        ws_next = gl.load(ws_ptr + k + 2, mask=k + 2 < count, other=0.0)
        done = warpgroup_mma_wait(num_outstanding=1, deps=(product,))
        acc += done * gl.expand_dims(scale, 0)
        mbarrier.arrive(free.index(k % STAGES), count=1)
        product = following
    done = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
    scale = s_ring.index((count - 1) % STAGES).reshape([BM]).load(column) * ws
    acc += done * gl.expand_dims(scale, 0)
    m = m0 + gl.arange(0, BM, layout=column)
    n = n0 + gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    out = y_ptr + gl.expand_dims(m, 0) * N + gl.expand_dims(n, 1)
    gl.store(out, acc.to(gl.bfloat16), mask=gl.expand_dims(m, 0) < M)


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
    BN: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS_N: gl.constexpr,
    WARPS_M: gl.constexpr,
):
    n0 = gl.program_id(0) * BN
    m0 = gl.program_id(1) * BM
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BN, 128], w_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BM, 128], x_desc.layout)
    s_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], s_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    fence_async_shared()
    ws_ptr += (n0 // 128) * ws_n
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    w_ring,
                    x_ring,
                    s_ring,
                    ready,
                    free,
                    y_ptr,
                    ws_ptr,
                    M,
                    N,
                    n0,
                    m0,
                    count,
                    BN,
                    BM,
                    STAGES,
                    WARPS_N,
                    WARPS_M,
                ),
            ),
            (
                _copy,
                (w_desc, x_desc, s_desc, w_ring, x_ring, s_ring, ready, free, n0, m0, count, STAGES),
            ),
        ],
        [1],
        [24],
    )


def shape_of(rows: int) -> int:
    """Tokens of a tile: a power of two, at least 32, since a bulk copy of scales fills 128 bytes."""
    return 32 if rows <= 32 else 64 if rows <= 64 else 128


def narrow_matmul(
    x_codes_MK: Tensor,
    x_scale: Tensor,
    w_codes_NK: Tensor,
    w_scale: Tensor,
    *,
    tile: int = 64,
    stages: int = 6,
    groups: int = 1,
    tokens: int = 0,
) -> Tensor:
    """Block-scaled x w^T [M, N] BF16 for M <= 128. x_scale [M, K / 128] with unit stride along M; N and K multiples of 128."""
    rows, depth = x_codes_MK.shape
    columns = w_codes_NK.shape[0]
    bm = tokens or shape_of(rows)
    y = torch.empty(rows, columns, dtype=torch.bfloat16, device=x_codes_MK.device)
    scale_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    _narrow[(columns // tile, triton.cdiv(rows, bm))](
        _descriptor(w_codes_NK, tile),
        _descriptor(x_codes_MK, bm),
        TensorDescriptor.from_tensor(x_scale.t(), [1, bm], scale_layout),
        y,
        w_scale,
        rows,
        columns,
        depth // 128,
        w_scale.stride(0),
        tile,
        bm,
        stages,
        tile // 16,
        groups,
        num_warps=tile // 16 * groups,
        launch_pdl=True,
    )
    return y


def _descriptor(codes: Tensor, rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([rows, 128], gl.float8e4nv)
    return TensorDescriptor.from_tensor(codes, [rows, 128], layout)
