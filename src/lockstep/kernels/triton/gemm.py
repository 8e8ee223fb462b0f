"""Matrix products that obey the row law: block-scaled FP8, and BF16 with FP32 accumulation.

    FP8   y_TN = sum over blocks of 128 along K, ascending: (x codes w codes^T) * (x scale * w scale), FP32, rounded once
    BF16  y_TN = x_TK w_NK^T, FP32 accumulators over K ascending

What decides the bits is the tensor-core instruction, not the tile: the warpgroup instruction gives a row the same result in
every tile of 64 or more rows, with tokens as the left operand or, swapped, as the right; the older warp-level one does not.
So every tile here has 64 rows or more on the left. Rows beyond M are masked.

The library (`scaled_mm`, cuBLASLt with zero workspace) is in the same class and faster for most sizes: `../hopper.py`
proves it for a weight's shape before using it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.operation import operation
from lockstep.kernels.triton.numbers import operands_arrived
from lockstep.kernels.triton.sizes import cdiv


@triton.jit
def banded(tile, m_tiles, n_tiles, GM: tl.constexpr):
    """(row tile, column tile) of a tile by its number: bands of GM row tiles, so that neighbours share weights in the L2. It only
    reckons, so Gluon kernels call it too."""
    width = GM * n_tiles
    first = (tile // width) * GM
    size = tl.minimum(m_tiles - first, GM)
    return first + (tile % width) % size, (tile % width) // size


@triton.jit
def _tile(M, N, BM: tl.constexpr, BN: tl.constexpr, GM: tl.constexpr):
    """(row tile, column tile) of this program."""
    return banded(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GM)


@triton.jit
def _fp8(
    x_ptr,
    w_ptr,
    y_ptr,
    xs_ptr,
    ws_ptr,
    M,
    N,
    K,
    xs_m,
    xs_k,
    ws_n,
    ws_k,
    WGROUP,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GM: tl.constexpr,
    EVEN: tl.constexpr,
    SWAP: tl.constexpr,
):
    pm, pn = _tile(M, N, BM, BN, GM)
    rm, rn, rk = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN), tl.arange(0, 128)
    x_p = x_ptr + rm[:, None].to(tl.int64) * K + rk[None, :]
    w_p = w_ptr + rn[:, None].to(tl.int64) * K + rk[None, :]
    xs_p = xs_ptr + rm.to(tl.int64) * xs_m
    ws_p = ws_ptr + (rn // WGROUP).to(tl.int64) * ws_n
    m_ok, n_ok = rm < M, rn < N
    if SWAP:
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        acc = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(K, 128)):
        if EVEN:
            x = tl.load(x_p, mask=m_ok[:, None], other=0.0)
            w = tl.load(w_p, mask=n_ok[:, None], other=0.0)
        else:
            left = K - k * 128
            x = tl.load(x_p, mask=m_ok[:, None] & (rk[None, :] < left), other=0.0)
            w = tl.load(w_p, mask=n_ok[:, None] & (rk[None, :] < left), other=0.0)
        xs = tl.load(xs_p, mask=m_ok, other=0.0)
        ws = tl.load(ws_p, mask=n_ok, other=0.0)
        operands_arrived()
        if SWAP:
            acc += tl.dot(w, tl.trans(x)) * (ws[:, None] * xs[None, :])
        else:
            acc += tl.dot(x, tl.trans(w)) * (xs[:, None] * ws[None, :])
        x_p += 128
        w_p += 128
        xs_p += xs_k
        ws_p += ws_k
    if SWAP:
        out = y_ptr + rm[None, :].to(tl.int64) * N + rn[:, None]
        tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=m_ok[None, :] & n_ok[:, None])
    else:
        out = y_ptr + rm[:, None].to(tl.int64) * N + rn[None, :]
        tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=m_ok[:, None] & n_ok[None, :])


def empty_product(x_TK: Tensor, w_NK: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Storage for x w^T [T, N]."""
    return torch.empty(x_TK.shape[0], w_NK.shape[0], dtype=dtype, device=x_TK.device)


def fp8_matmul(
    x_codes_TK: Tensor,
    x_scale: Tensor,
    w_codes_NK: Tensor,
    w_scale: Tensor,
    *,
    w_group: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Block-scaled x w^T, [T, N]. x_scale [T, ceil(K / 128)]; w_scale [ceil(N / w_group), ceil(K / 128)]; any shape."""
    rows, depth = x_codes_TK.shape
    columns = w_codes_NK.shape[0]
    y = empty_product(x_codes_TK, w_codes_NK, dtype)
    if rows == 0:
        return y
    swap = rows <= 32
    bm, bn = (16 if rows <= 16 else 32, 64) if swap else (64, 64) if rows <= 128 else (128, 128)
    grid = (cdiv(rows, bm) * cdiv(columns, bn),)
    _fp8[grid](
        x_codes_TK,
        w_codes_NK,
        y,
        x_scale,
        w_scale,
        rows,
        columns,
        depth,
        x_scale.stride(0),
        x_scale.stride(1),
        w_scale.stride(0),
        w_scale.stride(1),
        w_group,
        bm,
        bn,
        8,
        depth % 128 == 0,
        swap,
        num_warps=8 if bm == 128 else 4,
        num_stages=4,
    )
    return y


@triton.jit
def _bf16(
    x_ptr,
    w_ptr,
    y_ptr,
    M,
    N,
    K,
    x_m,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GM: tl.constexpr,
    EVEN: tl.constexpr,
):
    pm, pn = _tile(M, N, BM, BN, GM)
    rm, rn, rk = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN), tl.arange(0, BK)
    x_p = x_ptr + rm[:, None].to(tl.int64) * x_m + rk[None, :]
    w_p = w_ptr + rn[:, None].to(tl.int64) * K + rk[None, :]
    m_ok, n_ok = rm[:, None] < M, rn[:, None] < N
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(K, BK)):
        if EVEN:
            x, w = tl.load(x_p, mask=m_ok, other=0.0), tl.load(w_p, mask=n_ok, other=0.0)
        else:
            left = rk[None, :] < K - k * BK
            x, w = tl.load(x_p, mask=m_ok & left, other=0.0), tl.load(w_p, mask=n_ok & left, other=0.0)
        operands_arrived()
        acc = tl.dot(x, tl.trans(w), acc)
        x_p += BK
        w_p += BK
    out = y_ptr + rm[:, None].to(tl.int64) * N + rn[None, :]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=m_ok & (rn[None, :] < N))


@operation("bf16_linear", fake=empty_product)
def bf16_matmul(x_TK: Tensor, w_NK: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x w^T with FP32 accumulation, [T, N] in `dtype`. Last dimensions contiguous."""
    rows, depth = x_TK.shape
    columns = w_NK.shape[0]
    y = empty_product(x_TK, w_NK, dtype)
    if rows == 0:
        return y
    bm, bn, warps = (64, 128, 4) if rows <= 64 else (128, 128, 8) if rows <= 512 else (128, 256, 8)
    grid = (cdiv(rows, bm) * cdiv(columns, bn),)
    _bf16[grid](
        x_TK,
        w_NK,
        y,
        rows,
        columns,
        depth,
        x_TK.stride(0),
        bm,
        bn,
        64,
        8,
        depth % 64 == 0,
        num_warps=warps,
        num_stages=4 if bn < 256 else 3,
    )
    return y
