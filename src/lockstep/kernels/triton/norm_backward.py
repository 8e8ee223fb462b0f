"""Gradient of RMSNorm, added to the residual stream's, in one pass.

    i = 1 / sqrt(mean(x^2) + eps);   n = x i;   g = dy w
    dh' = bf16(dh + i (g - n mean(g n)));   dw = sum over rows of dy n

Both means of a row come from one reduction. The number of programs is fixed: each takes every so-many-th row and keeps its
part of dw in registers; a second launch adds the parts in order, so that dw has the same bits in every run.

Next: `rope_backward.py`, which has norms of heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.operation import operation
from lockstep.kernels.triton.sizes import cdiv, power_of_2

WARPS = 2112
"""Of all programs together, at most: 16 for each multiprocessor of an H100. dw's bits depend on the number of programs, so that
doesn't depend on the card."""
STAGES = 3
"""Rows on their way to a program."""
PARTS = 64
"""Parts of a sum that are added side by side."""


@triton.jit
def _plus(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["T"])
def _norm_backward(
    grad_ptr,
    x_ptr,
    weight_ptr,
    dh_ptr,
    out_ptr,
    part_ptr,
    T,
    K,
    eps,
    KP: tl.constexpr,
    ADD: tl.constexpr,
    STAGES: tl.constexpr,
):
    own, programs = tl.program_id(0), tl.num_programs(0)
    c = tl.arange(0, KP)
    inside = c < K
    weight = tl.load(weight_ptr + c, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros((KP,), tl.float32)
    for row in tl.range(own, T, programs, num_stages=STAGES):
        at = row.to(tl.int64) * K + c
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        g = dy * weight
        squares, products = tl.reduce((x * x, g * x), 0, _plus)
        inverse = tl.rsqrt(squares / K + eps)
        n = x * inverse
        total = inverse * (g - n * (products * inverse / K))
        if ADD:
            total += tl.load(dh_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dw += dy * n
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(part_ptr + own * K + c, dw, mask=inside)


@triton.jit(do_not_specialize=["parts"])
def _sum_parts(part_ptr, out_ptr, parts, K, R: tl.constexpr, B: tl.constexpr):
    c, r = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, R)
    total = tl.zeros((R, B), tl.float32)
    for first in range(0, parts, R):
        inside = (first + r < parts)[:, None] & (c < K)[None, :]
        total += tl.load(part_ptr + (first + r)[:, None] * K + c[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + c, tl.sum(total, 0), mask=c < K)


def sum_parts(parts_PK: Tensor) -> Tensor:
    """[K] FP32: the sum over P, in an order that depends on P alone."""
    count, width = parts_PK.shape
    out = torch.empty(width, dtype=torch.float32, device=parts_PK.device)
    _sum_parts[(cdiv(width, 32),)](parts_PK, out, count, width, PARTS, 32, num_warps=4)
    return out


def _results(h_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Storage for the gradients of the input and of the weight."""
    return torch.empty_like(h_TK), torch.empty(h_TK.shape[1], dtype=torch.float32, device=h_TK.device)


@operation("norm_backward", fake=_results)
def norm_backward(
    grad_TK: Tensor, h_TK: Tensor, weight_K: Tensor, eps: float, dh_TK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(dh + the gradient of the norm's input, [T, K] in h's type; gradient of its weight, [K] FP32).

    grad_TK: BF16 or FP32. h_TK: what was normalised. dh_TK: gradient of h from elsewhere, if any. All contiguous.
    """
    tokens, width = h_TK.shape
    assert grad_TK.is_contiguous() and h_TK.is_contiguous() and (dh_TK is None or dh_TK.is_contiguous())
    if tokens == 0:
        return torch.empty_like(h_TK), torch.zeros(width, dtype=torch.float32, device=h_TK.device)
    padded = power_of_2(width)
    warps = min(16, max(4, padded // 512))
    programs = min(tokens, WARPS // warps)
    out = torch.empty_like(h_TK)
    parts = torch.empty(programs, width, dtype=torch.float32, device=h_TK.device)
    _norm_backward[(programs,)](
        grad_TK,
        h_TK,
        weight_K,
        h_TK if dh_TK is None else dh_TK,
        out,
        parts,
        tokens,
        width,
        eps,
        padded,
        dh_TK is not None,
        STAGES,
        num_warps=warps,
    )
    return out, sum_parts(parts)
