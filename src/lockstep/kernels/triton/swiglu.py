"""silu(gate) up, rounded once, with or without 1x128 quantization. gate and up are the halves of each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.operation import operation
from lockstep.kernels.triton.numbers import after_previous, scale_of, short_codes_of
from lockstep.kernels.triton.quantize import empty_codes
from lockstep.kernels.triton.sizes import cdiv, power_of_2


@triton.jit
def _swiglu(
    x_ptr,
    out_ptr,
    codes_ptr,
    scale_ptr,
    N,
    x_stride,
    scale_stride,
    groups,
    GP: tl.constexpr,
    FP8: tl.constexpr,
    POW2: tl.constexpr,
):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * GP + tl.arange(0, GP)
    c = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    gate = tl.load(x_ptr + row * x_stride + c, mask=c < N, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + N + c, mask=c < N, other=0.0).to(tl.float32)
    y = (tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty)
    if FP8:
        y = y.to(tl.float32)
        scale = scale_of(tl.max(tl.abs(y), 1), POW2)
        tl.store(codes_ptr + row * N + c, short_codes_of(y, scale[:, None], POW2), mask=c < N)
        tl.store(scale_ptr + g.to(tl.int64) * scale_stride + row, scale, mask=g < groups)
    else:
        tl.store(out_ptr + row * N + c, y, mask=c < N)


def swiglu(gate_up_TN: Tensor, *, fp8: bool, pow2: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """[T, N] BF16, or (codes, scale), of rows [T, 2 N] that hold gate and then up."""
    found = _gated(gate_up_TN, fp8=fp8, pow2=pow2)
    return (found[0], found[1]) if fp8 else found[0]


def _results(gate_up_TN: Tensor, fp8: bool) -> list[Tensor]:
    """Storage for the rows, or for codes and scales."""
    rows, columns = gate_up_TN.shape[0], gate_up_TN.shape[1] // 2
    if fp8:
        return list(empty_codes(rows, columns, gate_up_TN.device))
    return [torch.empty(rows, columns, dtype=gate_up_TN.dtype, device=gate_up_TN.device)]


@operation("swiglu", fake=_results)
def _gated(gate_up_TN: Tensor, *, fp8: bool, pow2: bool) -> list[Tensor]:
    rows, columns = gate_up_TN.shape[0], gate_up_TN.shape[1] // 2
    groups = cdiv(columns, 128)
    step = min(power_of_2(groups), 8)
    found = _results(gate_up_TN, fp8)
    plain, codes, scale = (gate_up_TN, *found) if fp8 else (found[0], found[0], found[0])
    if rows:
        _swiglu[(rows, cdiv(groups, step))](
            gate_up_TN,
            plain,
            codes,
            scale,
            columns,
            gate_up_TN.stride(0),
            scale.stride(1) if fp8 else 0,
            groups,
            step,
            fp8,
            pow2,
            num_warps=4,
            launch_pdl=True,
        )
    return found
