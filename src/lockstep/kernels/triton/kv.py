"""Keys and values on their way into FP8: their largest values, how many saturate, their codes, and what codes stand for.

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
    seen_ptr,
    rows,
    maxima_stride,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    R: tl.constexpr,
    SCALED: tl.constexpr,
    SOME: tl.constexpr,
):
    g, which = tl.program_id(1), tl.program_id(2)
    r, d = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, DP)
    at = (r[:, None] * G + g) * D + d[None, :]
    known = r < rows
    if SOME:
        known &= tl.load(seen_ptr + r, mask=known, other=0) != 0
    ok = known[:, None] & (d < D)[None, :]
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
    seen_T: Tensor | None = None,
) -> None:
    """Raises `maxima_2G` (FP32, heads contiguous) to the absolute maxima of keys and values [T, G, D]; NaN and infinity stay in
    them. `saturated` (int64, one element) grows by the number of elements beyond 448 times their scale [G]. seen_T: bool, rows
    that count, all if None."""
    k_scale, v_scale = scales if scales is not None else (None, None)
    _gather(k_TGD, v_TGD, k_scale, v_scale, maxima_2G, saturated, seen_T)


@operation("watch_kv", fake=lambda: None, mutates=("maxima_2G", "saturated"))
def _gather(
    k_TGD: Tensor,
    v_TGD: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    maxima_2G: Tensor,
    saturated: Tensor,
    seen_T: Tensor | None,
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
            seen_T.view(torch.uint8) if seen_T is not None else k_TGD,
            rows,
            maxima_2G.stride(0),
            heads,
            dim,
            dim_p,
            step,
            k_scale is not None,
            seen_T is not None,
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


@triton.jit(do_not_specialize=["count"])
def _values(
    k_ptr,
    v_ptr,
    k_out_ptr,
    v_out_ptr,
    row_ptr,
    count,
    WIDTH: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < count
    source = at
    if LISTED:
        source = tl.load(row_ptr + at // WIDTH, mask=ok, other=0) * WIDTH + at % WIDTH
    if tl.program_id(1) == 0:
        tl.store(k_out_ptr + at, tl.load(k_ptr + source, mask=ok, other=0.0).to(tl.bfloat16), mask=ok)
    else:
        tl.store(v_out_ptr + at, tl.load(v_ptr + source, mask=ok, other=0.0).to(tl.bfloat16), mask=ok)


def _empty_values(k_SGD: Tensor, rows_W: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = (len(k_SGD) if rows_W is None else len(rows_W), *k_SGD.shape[1:])
    k, v = (torch.empty(shape, dtype=torch.bfloat16, device=k_SGD.device) for _ in range(2))
    return k, v


@operation("kv_values", fake=_empty_values)
def kv_values(k_SGD: Tensor, v_SGD: Tensor, rows_W: Tensor | None) -> tuple[Tensor, Tensor]:
    """(keys, values) [W, G, D] in BF16, exactly what codes stand for before they are scaled: rows `rows_W` (int64), or all."""
    assert k_SGD.is_contiguous() and v_SGD.is_contiguous()
    k, v = _empty_values(k_SGD, rows_W)
    if k.numel():
        width = k_SGD.shape[1] * k_SGD.shape[2]
        _values[(cdiv(k.numel(), 4096), 2)](
            k_SGD, v_SGD, k, v, k_SGD if rows_W is None else rows_W, k.numel(), width, rows_W is not None, 4096,
            num_warps=8,
        )  # fmt: skip
    return k, v
