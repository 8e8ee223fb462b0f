"""Residual addition, RMSNorm and 1x128 quantization of a row in one pass; every part but the norm is optional.

The sum of squares is taken over one row inside one program, always in the same layout: the launch shape depends on K only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.operation import operation
from lockstep.kernels.triton.numbers import after_previous, rounded
from lockstep.kernels.triton.quantize import empty_codes, store_row_codes
from lockstep.kernels.triton.sizes import cdiv, power_of_2


@triton.jit
def _norm(
    x_ptr,
    delta_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    codes_ptr,
    scale_ptr,
    inverse_ptr,
    K,
    eps,
    scale_stride,
    groups,
    GP: tl.constexpr,
    ADD: tl.constexpr,
    FP8: tl.constexpr,
    POW2: tl.constexpr,
):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, GP)[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = c < K
    x = tl.load(x_ptr + row * K + c, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + c, mask=inside, other=0.0)  # on its way while the row is summed up
    if ADD:
        delta = tl.load(delta_ptr + row * K + c, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * K + c, x, mask=inside)
    x = x.to(tl.float32)
    mean = tl.div_rn(tl.sum(tl.sum(x * x, 1), 0), K.to(tl.float32))
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    y = x * inverse * weight.to(tl.float32)
    if FP8:
        tl.store(inverse_ptr + row, inverse)
        store_row_codes(rounded(y), row, codes_ptr, scale_ptr, K, scale_stride, groups, GP, POW2)
    else:
        tl.store(out_ptr + row * K + c, y.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x_TK: Tensor,
    weight_K: Tensor,
    eps: float,
    *,
    delta_TK: Tensor | None = None,
    fp8: bool,
    pow2: bool = False,
) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
    """(x + delta, its norm): the norm as BF16 rows, or as (codes, scale) when `fp8`. All inputs contiguous."""
    if fp8:
        total, codes, _ = kept_norm(x_TK, weight_K, eps, delta_TK=delta_TK, pow2=pow2)
        return total, codes
    *sums, out = _add_norm(x_TK, weight_K, eps, delta_TK, fp8=False, pow2=False)
    return (sums[0] if sums else x_TK), out


def kept_norm(
    x_TK: Tensor, weight_K: Tensor, eps: float, *, delta_TK: Tensor | None = None, pow2: bool
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """(x + delta, codes and scales of its norm, 1 / sqrt(mean square + eps) of every row, FP32): `rms_norm` for a backward pass,
    which makes the norm again from the last (`columns.columns_of`). Both are one kernel: the engine's bits are the trainer's."""
    *sums, codes, scale, inverse_T = _add_norm(x_TK, weight_K, eps, delta_TK, fp8=True, pow2=pow2)
    return (sums[0] if sums else x_TK), (codes, scale), inverse_T


def _results(x_TK: Tensor, delta_TK: Tensor | None, fp8: bool) -> list[Tensor]:
    """Storage for the sum, if there is one, and then for the norm, or for its codes, scales and row factors."""
    rows, columns = x_TK.shape
    total = () if delta_TK is None else (torch.empty_like(x_TK),)
    if not fp8:
        return [*total, torch.empty_like(x_TK)]
    inverse_T = torch.empty(rows, dtype=torch.float32, device=x_TK.device)
    return [*total, *empty_codes(rows, columns, x_TK.device), inverse_T]


@operation("add_norm", fake=_results)
def _add_norm(
    x_TK: Tensor, weight_K: Tensor, eps: float, delta_TK: Tensor | None, *, fp8: bool, pow2: bool
) -> list[Tensor]:
    rows, columns = x_TK.shape
    groups = cdiv(columns, 128)
    found = _results(x_TK, delta_TK, fp8)
    out, *more = found[0 if delta_TK is None else 1 :]
    scale, inverse_T = more if fp8 else (x_TK, x_TK)
    if rows:
        blocks = power_of_2(groups)
        _norm[(rows,)](
            x_TK,
            x_TK if delta_TK is None else delta_TK,
            weight_K,
            x_TK if delta_TK is None else found[0],
            x_TK if fp8 else out,
            out if fp8 else x_TK,
            scale,
            inverse_T,
            columns,
            eps,
            scale.stride(1) if fp8 else 0,
            groups,
            blocks,
            delta_TK is not None,
            fp8,
            pow2,
            num_warps=min(16, max(4, blocks // 2)),
            launch_pdl=True,
        )
    return found
