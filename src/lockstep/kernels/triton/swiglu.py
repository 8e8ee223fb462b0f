"""silu(gate) up, rounded once, with or without 1x128 quantization. gate and up are the halves of each row.

On demand, gate and up become codes in the same pass, for a backward pass that keeps them so: those of `quantize_rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.operation import operation
from lockstep.kernels.triton.numbers import after_previous, rounded, scale_of, short_codes_of, sigmoid
from lockstep.kernels.triton.quantize import empty_codes
from lockstep.kernels.triton.sizes import cdiv, power_of_2

MANY_ROWS = 96
"""From so many on a program takes 16 groups of 128 instead of 8: fewer instructions an element, which is what bounds it. No bit
depends on it."""


@triton.jit
def _swiglu(
    x_ptr,
    out_ptr,
    codes_ptr,
    scale_ptr,
    kept_ptr,
    kept_scale_ptr,
    N,
    x_stride,
    scale_stride,
    groups,
    GP: tl.constexpr,
    FP8: tl.constexpr,
    POW2: tl.constexpr,
    KEEP: tl.constexpr,
):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * GP + tl.arange(0, GP)
    c = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    gate = tl.load(x_ptr + row * x_stride + c, mask=c < N, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + N + c, mask=c < N, other=0.0).to(tl.float32)
    y = gate * sigmoid(gate) * up
    if FP8:
        y = rounded(y)
        scale = scale_of(tl.max(tl.abs(y), 1), POW2)
        tl.store(codes_ptr + row * N + c, short_codes_of(y, scale[:, None], POW2), mask=c < N)
        tl.store(scale_ptr + g.to(tl.int64) * scale_stride + row, scale, mask=g < groups)
        if KEEP:
            for half in tl.static_range(2):
                if half == 0:
                    x = gate
                else:
                    x = up
                scale = scale_of(tl.max(tl.abs(x), 1), POW2)
                at = kept_ptr + row * (2 * N) + half * N + c
                tl.store(at, short_codes_of(x, scale[:, None], POW2), mask=c < N)
                group = (half * groups + g).to(tl.int64)
                tl.store(kept_scale_ptr + group * scale_stride + row, scale, mask=g < groups)
    else:
        tl.store(out_ptr + row * N + c, y.to(out_ptr.dtype.element_ty), mask=c < N)


def swiglu(gate_up_TN: Tensor, *, fp8: bool, pow2: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """[T, N] BF16, or (codes, scale), of rows [T, 2 N] that hold gate and then up."""
    found = _gated(gate_up_TN, fp8=fp8, pow2=pow2, keep=False)
    return (found[0], found[1]) if fp8 else found[0]


def swiglu_kept(gate_up_TN: Tensor, *, pow2: bool) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(codes and scale [T, N] of silu(gate) up, codes and scale [T, 2 N] of gate and up themselves). N is a multiple of 128."""
    codes, scale, kept, kept_scale = _gated(gate_up_TN, fp8=True, pow2=pow2, keep=True)
    return (codes, scale), (kept, kept_scale)


def _results(gate_up_TN: Tensor, fp8: bool, keep: bool = False) -> list[Tensor]:
    """Storage for the rows, or for codes and scales; then for those of gate and up."""
    rows, columns = gate_up_TN.shape[0], gate_up_TN.shape[1] // 2
    if fp8:
        kept = empty_codes(rows, 2 * columns, gate_up_TN.device) if keep else ()
        return [*empty_codes(rows, columns, gate_up_TN.device), *kept]
    return [torch.empty(rows, columns, dtype=gate_up_TN.dtype, device=gate_up_TN.device)]


@operation("swiglu", fake=_results)
def _gated(gate_up_TN: Tensor, *, fp8: bool, pow2: bool, keep: bool) -> list[Tensor]:
    assert not keep or (fp8 and gate_up_TN.shape[1] % 256 == 0), "halves are whole groups"
    rows, columns = gate_up_TN.shape[0], gate_up_TN.shape[1] // 2
    groups = cdiv(columns, 128)
    step = min(power_of_2(groups), 8 if rows < MANY_ROWS else 16)
    found = _results(gate_up_TN, fp8, keep)
    plain, codes, scale = (gate_up_TN, *found[:2]) if fp8 else (found[0], found[0], found[0])
    kept, kept_scale = found[2:] if keep else (codes, scale)
    if rows:
        _swiglu[(rows, cdiv(groups, step))](
            gate_up_TN,
            plain,
            codes,
            scale,
            kept,
            kept_scale,
            columns,
            gate_up_TN.stride(0),
            scale.stride(1) if fp8 else 0,
            groups,
            step,
            fp8,
            pow2,
            keep,
            num_warps=4,
            launch_pdl=True,
        )
    return found
