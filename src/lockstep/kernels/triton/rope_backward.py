"""From the gradients of attention's inputs to that of the projected row: saturation, rotation back, q/k norm.

    dk = 0 where |k| > 448 x its scale (likewise dv)       a saturated code has no gradient; k as the forward made it
    d(rotated) turned by minus the angle, rounded to BF16
    norm's gradient with the raw head as its input, rounded to BF16; its weight's summed over rows and heads

Queries, keys and values are three launches of one kind each. A program takes every so-many-th tile of rows (a row is one head
of one token) and keeps its part of the weight's gradient; `norm_backward.sum_parts` adds the parts in order.

Next: `rope.py`, the forward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.operation import operation
from lockstep.kernels.triton.norm_backward import sum_parts
from lockstep.kernels.triton.numbers import E4M3_MAX, half_norm
from lockstep.kernels.triton.sizes import cdiv, power_of_2

PROGRAMS = 528
"""At most: four for each multiprocessor of an H100. The bits of the norms' gradients depend on it."""
ROWS = 16
"""Rows of a tile."""


@triton.jit(do_not_specialize=["rows"])
def _heads_backward(
    grad_ptr,
    x_ptr,
    out_ptr,
    weight_ptr,
    table_ptr,
    position_ptr,
    scale_ptr,
    part_ptr,
    rows,
    x_stride,
    out_stride,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_P: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    CLIP: tl.constexpr,
):
    own, programs = tl.program_id(0), tl.num_programs(0)
    half = tl.arange(0, HALF_P)
    inside = half < HALF
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    dwa, dwb = tl.zeros((R, HALF_P), tl.float32), tl.zeros((R, HALF_P), tl.float32)
    if NORM:
        wa = tl.load(weight_ptr + half, mask=inside, other=0.0)
        wb = tl.load(weight_ptr + HALF + half, mask=inside, other=0.0)
    for tile in range(own, tl.cdiv(rows, R), programs):
        row = tile * R + tl.arange(0, R)
        known = row < rows
        token, head = row // HEADS, row % HEADS
        ok = known[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * D + half[None, :]
        da = tl.load(grad_ptr + at, mask=ok, other=0.0).to(dtype).to(tl.float32)
        db = tl.load(grad_ptr + at + HALF, mask=ok, other=0.0).to(dtype).to(tl.float32)
        position = tl.load(position_ptr + token, mask=known, other=0).to(tl.int64)
        turn = position[:, None] * (2 * HALF) + half[None, :]
        cos = tl.load(table_ptr + turn, mask=ok, other=0.0)
        sin = tl.load(table_ptr + turn + HALF, mask=ok, other=0.0)
        a, b = da, db
        if NORM or CLIP:
            at = (token.to(tl.int64) * x_stride + head * D)[:, None] + half[None, :]
            a = tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32)
            b = tl.load(x_ptr + at + HALF, mask=ok, other=0.0).to(tl.float32)
        if CLIP:
            ka, kb = a, b
            if NORM:
                ka, kb = half_norm(a, b, wa, wb, eps, D, dtype)
            limit = tl.load(scale_ptr + head, mask=known, other=0.0)[:, None] * E4M3_MAX
            da = tl.where(tl.abs((ka * cos - kb * sin).to(dtype).to(tl.float32)) > limit, 0.0, da)
            db = tl.where(tl.abs((kb * cos + ka * sin).to(dtype).to(tl.float32)) > limit, 0.0, db)
        da, db = da * cos + db * sin, db * cos - da * sin
        if NORM:
            da, db = da.to(dtype).to(tl.float32), db.to(dtype).to(tl.float32)
            inverse = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
            na, nb = a * inverse, b * inverse
            ga, gb = da * wa.to(tl.float32)[None, :], db * wb.to(tl.float32)[None, :]
            mean = (tl.sum(ga * na + gb * nb, 1) / D)[:, None]
            dwa += da * na
            dwb += db * nb
            da, db = inverse * (ga - na * mean), inverse * (gb - nb * mean)
        at = (token.to(tl.int64) * out_stride + head * D)[:, None] + half[None, :]
        tl.store(out_ptr + at, da.to(dtype), mask=ok)
        tl.store(out_ptr + at + HALF, db.to(dtype), mask=ok)
    if NORM:
        part_ptr += own * D + half
        tl.store(part_ptr, tl.sum(dwa, 0), mask=inside)
        tl.store(part_ptr + HALF, tl.sum(dwb, 0), mask=inside)


@triton.jit
def _values_backward(
    grad_ptr,
    x_ptr,
    out_ptr,
    scale_ptr,
    count,
    x_stride,
    out_stride,
    G: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    CLIP: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    ok = at < count
    token, column = at // (G * D), at % (G * D)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    dv = tl.load(grad_ptr + at, mask=ok, other=0.0).to(dtype)
    if CLIP:
        v = tl.load(x_ptr + token * x_stride + column, mask=ok, other=0.0).to(tl.float32)
        limit = tl.load(scale_ptr + column // D, mask=ok, other=0.0) * E4M3_MAX
        dv = tl.where(tl.abs(v) > limit, 0.0, dv)
    tl.store(out_ptr + token * out_stride + column, dv, mask=ok)


def rope_backward(
    dq_THD: Tensor,
    dk_TGD: Tensor,
    dv_TGD: Tensor,
    qkv_TN: Tensor,
    table_PD: Tensor,
    positions_T: Tensor,
    *,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    scales: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(gradient of the projected rows [T, (H + 2 G) D] in their type, of the q and the k norm's weight [D] FP32, if any).

    dq, dk, dv: BF16 or FP32, contiguous. qkv_TN: the rows before norm and rotation. table_PD: [positions, 2, D / 2] FP32.
    norms: weights of the q and k norm. scales: FP32 [G] of keys and values that went through FP8: elements beyond their range get
    no gradient.
    """
    q_norm, k_norm = norms if norms is not None else (None, None)
    k_scale, v_scale = scales if scales is not None else (None, None)
    found = _backward(
        dq_THD, dk_TGD, dv_TGD, qkv_TN, table_PD, positions_T, q_norm, k_norm, k_scale, v_scale, eps=eps
    )
    return found[0], *((found[1], found[2]) if norms is not None else (None, None))


def _results(dq_THD: Tensor, qkv_TN: Tensor, q_norm: Tensor | None) -> list[Tensor]:
    """Shapes of the rows' gradient and, with norms, of their weights'."""
    weights = 0 if q_norm is None else 2
    dim, device = dq_THD.shape[2], qkv_TN.device
    return [
        torch.empty(qkv_TN.shape, dtype=qkv_TN.dtype, device=device),
        *(torch.empty(dim, dtype=torch.float32, device=device) for _ in range(weights)),
    ]


@operation("rope_backward", fake=_results)
def _backward(
    dq_THD: Tensor,
    dk_TGD: Tensor,
    dv_TGD: Tensor,
    qkv_TN: Tensor,
    table_PD: Tensor,
    positions_T: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    eps: float,
) -> list[Tensor]:
    tokens, heads, dim = dq_THD.shape
    kv_heads = dk_TGD.shape[1]
    assert qkv_TN.shape == (tokens, (heads + 2 * kv_heads) * dim) and qkv_TN.stride(1) == 1
    out = torch.empty(qkv_TN.shape, dtype=qkv_TN.dtype, device=qkv_TN.device)
    k_first, v_first = heads * dim, (heads + kv_heads) * dim
    turn = (table_PD, positions_T)
    dq_weight = _heads(dq_THD, qkv_TN, out, turn, q_norm, eps, None)
    dk_weight = _heads(dk_TGD, qkv_TN[:, k_first:], out[:, k_first:], turn, k_norm, eps, k_scale)
    dv = dv_TGD.contiguous()
    if dv.numel():
        _values_backward[(cdiv(dv.numel(), 4096),)](
            dv,
            qkv_TN[:, v_first:],
            out[:, v_first:],
            v_scale if v_scale is not None else table_PD,
            dv.numel(),
            qkv_TN.stride(0),
            out.stride(0),
            kv_heads,
            dim,
            4096,
            v_scale is not None,
            num_warps=8,
        )
    return [out, *(dw for dw in (dq_weight, dk_weight) if dw is not None)]


def _heads(
    grad_THD: Tensor,
    x_TN: Tensor,
    out_TN: Tensor,
    turn: tuple[Tensor, Tensor],
    weight_D: Tensor | None,
    eps: float,
    scale_H: Tensor | None,
) -> Tensor | None:
    """Writes the gradient of these heads; gives that of their norm's weight. x and out begin with the heads' columns."""
    tokens, heads, dim = grad_THD.shape
    table_PD, positions_T = turn
    half = dim // 2
    if tokens == 0:
        return None if weight_D is None else torch.zeros(dim, dtype=torch.float32, device=x_TN.device)
    programs = min(cdiv(tokens * heads, ROWS), PROGRAMS)
    parts = table_PD
    if weight_D is not None:
        parts = torch.empty(programs, dim, dtype=torch.float32, device=x_TN.device)
    _heads_backward[(programs,)](
        grad_THD.contiguous(),
        x_TN,
        out_TN,
        weight_D if weight_D is not None else x_TN,
        table_PD,
        positions_T,
        scale_H if scale_H is not None else table_PD,
        parts,
        tokens * heads,
        x_TN.stride(0),
        out_TN.stride(0),
        eps,
        heads,
        dim,
        half,
        power_of_2(half),
        ROWS,
        weight_D is not None,
        scale_H is not None,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return None if weight_D is None else sum_parts(parts)
