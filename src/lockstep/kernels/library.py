"""The library's block-scaled FP8 products: cuBLASLt through `scaled_mm`, and the layouts that it demands.

    1x128 x 128x128   y_TN  = x_TK w_NK^T      forward, and with the transposed weight the input gradient; BF16
    1x128 x 128x128   dw_NK = dy_NT x_KT^T     columns, grouped along tokens; FP32
    1x128 x 1x128     the same where x has a scale for each column, or is no multiple of 128 wide; a quarter slower

The forward product of a shape is used only after `hopper.py` has proven its bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels import cublaslt
from lockstep.numerics.formats import BLOCK, E4M3
from lockstep.numerics.quantize import Quantized

ALIGNED = 16
"""Both widths of a weight gradient must be a multiple of this many codes."""


def library_scale(weight: Quantized) -> Tensor | None:
    """Scales with K / 128 padded to a multiple of four and transposed; None for shapes that the library refuses."""
    columns, depth = weight.shape
    if weight.group != (BLOCK, BLOCK) or columns % BLOCK or depth % BLOCK or depth == BLOCK:
        return None
    return F.pad(weight.scale, (0, -weight.scale.shape[1] % 4)).contiguous().t()


def scaled_mm(x: Quantized, w: Quantized, w_scale: Tensor) -> Tensor:
    """x w^T of 1x128 rows and a 128x128 weight whose `library_scale` is `w_scale`, rounded once to BF16, [T, N]."""
    return scaled_mm_codes(x.codes, x.scale, w.codes, w_scale)


def scaled_mm_codes(codes: Tensor, scale: Tensor, w_codes_NK: Tensor, w_scale: Tensor) -> Tensor:
    """The same of 1x128 codes [T, K] with their scale, and of a weight's codes."""
    count, depth = codes.shape
    padded = max(-(-count // 4) * 4, 4)
    if count != padded:
        whole = codes.untyped_storage().nbytes() >= (codes.storage_offset() + padded * depth)
        if whole and scale.stride() == (1, padded):
            codes = codes.as_strided((padded, depth), (depth, 1))
            scale = scale.as_strided((padded, scale.shape[1]), (1, padded))
        else:
            codes = F.pad(codes.view(torch.uint8), (0, 0, 0, padded - count)).view(E4M3)
            scale = F.pad(scale.t(), (0, padded - count), value=1.0).contiguous().t()
    elif scale.stride() != (1, padded):
        scale = scale.t().contiguous().t()
    kind = F.ScalingType
    y = F.scaled_mm(
        codes,
        w_codes_NK.t(),
        scale,
        kind.BlockWise1x128,
        w_scale,
        kind.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return y[:count]


def takes_columns(grad: Quantized, x: Quantized) -> bool:
    """Whether the library multiplies these columns."""
    return grad.shape[0] % ALIGNED == 0 and x.shape[0] % ALIGNED == 0


def add_columns(total_NK: Tensor, grad: Quantized, x: Quantized) -> bool:
    """Adds `scaled_mm_columns` to FP32 totals in place, with the bits of product and addition, where the library can: says so."""
    if not takes_columns(grad, x):
        return False
    scale, square = column_scale(x)
    return cublaslt.add_columns(total_NK, grad.codes, grad.scale, x.codes, scale, square=square)


def scaled_mm_columns(grad: Quantized, x: Quantized) -> Tensor:
    """dy x^T of columns dy [N, T] and x [K, T], T a multiple of 128: dy 1x128 along T with strides of scales (1, N), x as well or
    128x128 as `columns.empty_columns` lays it out. [N, K] FP32."""
    scale, square = column_scale(x)
    kind = F.ScalingType
    return F.scaled_mm(
        grad.codes,
        x.codes.t(),
        grad.scale,
        kind.BlockWise1x128,
        scale.t() if square else scale,
        kind.BlockWise128x128 if square else kind.BlockWise1x128,
        output_dtype=torch.float32,
    )


def column_scale(x: Quantized) -> tuple[Tensor, bool]:
    """(scales of columns [K, T] as the library takes them: [K, T / 128] with strides (1, K), False; or those of blocks of
    128x128, [K / 128, T / 128 rounded up to a multiple of four], True)."""
    if x.group[0] == 1:
        return x.scale, False
    width, depth = x.shape
    groups = depth // BLOCK
    if width % BLOCK or groups == 1:
        each = torch.empty(groups, width, dtype=x.scale.dtype, device=x.scale.device).t()
        return each.copy_(x.scale.repeat_interleave(BLOCK, 0)[:width]), False
    padded = -(-groups // 4) * 4
    assert x.scale.stride() == (padded, 1)
    return x.scale.as_strided((width // BLOCK, padded), (padded, 1)), True
