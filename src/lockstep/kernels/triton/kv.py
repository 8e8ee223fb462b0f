"""Keys and values on their way into FP8: their largest values, how many saturate, and their codes.

Maxima and counts are gathered by atomics, on the bits of absolute values and on integers, where the order changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.operation import operation
from lockstep.kernels.triton.numbers import E4M3_MAX
from lockstep.kernels.triton.rope import fixed_codes
from lockstep.kernels.triton.sizes import cdiv, power_of_2
from lockstep.numerics.formats import E4M3

ELEMENTS = 8192
"""Of one program."""


@triton.jit
def _watch(
    k_ptr,
    v_ptr,
    ks_ptr,
    vs_ptr,
    maxima_ptr,
    count_ptr,
    rows,
    maxima_stride,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    R: tl.constexpr,
    SCALED: tl.constexpr,
):
    g, which = tl.program_id(1), tl.program_id(2)
    r, d = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, DP)
    at = (r[:, None] * G + g) * D + d[None, :]
    ok = (r < rows)[:, None] & (d < D)[None, :]
    if which == 0:
        x = tl.load(k_ptr + at, mask=ok, other=0.0)
    else:
        x = tl.load(v_ptr + at, mask=ok, other=0.0)
    # As integers, absolute values are in order, and NaN is above infinity.
    bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(maxima_ptr + which * maxima_stride + g, tl.max(tl.max(bits, 1), 0), sem="relaxed")
    if SCALED:
        if which == 0:
            limit = tl.load(ks_ptr + g) * E4M3_MAX
        else:
            limit = tl.load(vs_ptr + g) * E4M3_MAX
        beyond = (bits.to(tl.float32, bitcast=True) > limit) & ok
        found = tl.sum(tl.sum(beyond.to(tl.int32), 1), 0)
        if found > 0:
            tl.atomic_add(count_ptr, found.to(tl.int64), sem="relaxed")


def watch(
    k_TGD: Tensor,
    v_TGD: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    maxima_2G: Tensor,
    saturated: Tensor,
) -> None:
    """Raises `maxima_2G` (FP32, heads contiguous) to the absolute maxima of keys and values [T, G, D]; NaN and infinity stay in
    them. `saturated` (int64, one element) grows by the number of elements beyond 448 times their scale [G]."""
    k_scale, v_scale = scales if scales is not None else (None, None)
    _gather(k_TGD, v_TGD, k_scale, v_scale, maxima_2G, saturated)


@operation("watch_kv", fake=lambda: None, mutates=("maxima_2G", "saturated"))
def _gather(
    k_TGD: Tensor,
    v_TGD: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    maxima_2G: Tensor,
    saturated: Tensor,
) -> None:
    rows, heads, dim = k_TGD.shape
    assert k_TGD.is_contiguous() and v_TGD.is_contiguous() and maxima_2G.stride(1) == 1
    dim_p = power_of_2(dim)
    step = max(ELEMENTS // dim_p, 16)
    if rows:
        _watch[(cdiv(rows, step), heads, 2)](
            k_TGD,
            v_TGD,
            k_scale if k_scale is not None else maxima_2G,
            v_scale if v_scale is not None else maxima_2G,
            maxima_2G.view(torch.int32),
            saturated,
            rows,
            maxima_2G.stride(0),
            heads,
            dim,
            dim_p,
            step,
            k_scale is not None,
            num_warps=4,
        )


@triton.jit
def _codes(x_ptr, out_ptr, scale_ptr, count, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < count
    x = tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + (at // D) % G)
    tl.store(out_ptr + at, fixed_codes(x, scale), mask=ok)


def _empty_codes(x_SGD: Tensor) -> Tensor:
    return torch.empty(x_SGD.shape, dtype=E4M3, device=x_SGD.device)


@operation("kv_codes", fake=_empty_codes)
def kv_codes(x_SGD: Tensor, scale_G: Tensor) -> Tensor:
    """e4m3 codes of keys or values [S, G, D] under fixed per-head scales; larger values saturate."""
    _, heads, dim = x_SGD.shape
    x_SGD = x_SGD.contiguous()
    out = _empty_codes(x_SGD)
    if x_SGD.numel():
        _codes[(cdiv(x_SGD.numel(), 4096),)](
            x_SGD, out, scale_G, x_SGD.numel(), heads, dim, 4096, num_warps=8
        )
    return out
