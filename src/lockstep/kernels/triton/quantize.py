"""1x128 quantization of rows: one program takes one row, so a row cannot depend on another.

Scales are stored [K / 128, M] with M padded to a multiple of four, as the block-scaled GEMM wants them; what callers see is
the transposed view [M, K / 128].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.operation import operation
from lockstep.kernels.triton.numbers import after_previous, codes_of, scale_of, short_codes_of
from lockstep.kernels.triton.sizes import cdiv, power_of_2
from lockstep.numerics.formats import BLOCK, E4M3


@triton.jit
def store_row_codes(
    y, row, codes_ptr, scale_ptr, K, scale_stride, groups, GP: tl.constexpr, POW2: tl.constexpr
):
    """Codes and scales of one row y [GP, 128] (zeros beyond K)."""
    g = tl.arange(0, GP)
    c = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    scale = scale_of(tl.max(tl.abs(y), 1), POW2)
    tl.store(codes_ptr + row * K + c, short_codes_of(y, scale[:, None], POW2), mask=c < K)
    tl.store(scale_ptr + g.to(tl.int64) * scale_stride + row, scale, mask=g < groups)


@triton.jit
def _quantize_rows(
    x_ptr, codes_ptr, scale_ptr, K, x_stride, scale_stride, groups, GP: tl.constexpr, POW2: tl.constexpr
):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GP
    g = first + tl.arange(0, GP)
    c = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + row * x_stride + c, mask=c < K, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(x), 1), POW2)
    if x_ptr.dtype.element_ty == tl.bfloat16:
        codes = short_codes_of(x, scale[:, None], POW2)
    else:
        codes = codes_of(x, scale[:, None])
    tl.store(codes_ptr + row * K + c, codes, mask=c < K)
    tl.store(scale_ptr + g.to(tl.int64) * scale_stride + row, scale, mask=g < groups)


def empty_codes(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(codes [M, K], scale [M, K / 128]) without values, on storage padded to a multiple of four rows."""
    padded = max(-(-rows // 4) * 4, 4)
    codes = torch.empty(padded, columns, dtype=E4M3, device=device)
    scale = torch.empty(-(-columns // BLOCK), padded, dtype=torch.float32, device=device).t()
    return (codes, scale) if rows == padded else (codes[:rows], scale[:rows])


@operation("quantize_rows", fake=lambda x_TK: empty_codes(x_TK.shape[0], x_TK.shape[1], x_TK.device))
def quantize_rows(x_TK: Tensor, *, pow2: bool) -> tuple[Tensor, Tensor]:
    """(codes [T, K], scale [T, ceil(K / 128)]) of rows whose last dimension is contiguous."""
    rows, columns = x_TK.shape
    assert x_TK.stride(1) == 1
    codes, scale = empty_codes(rows, columns, x_TK.device)
    groups = scale.shape[1]
    step = min(power_of_2(groups), 16)
    if rows:
        _quantize_rows[(rows, cdiv(groups, step))](
            x_TK,
            codes,
            scale,
            columns,
            x_TK.stride(0),
            scale.stride(1),
            groups,
            step,
            pow2,
            num_warps=4,
            launch_pdl=True,
        )
    return codes, scale
