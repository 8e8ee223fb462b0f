"""From a projected row to attention's inputs in one kernel: q/k norm, rotary embedding, and the write to the paged cache.

Pages hold 64 tokens, the key step of attention. Within a page a head's keys lie as [64, D] and its values as [D, 64]: each
is the left operand of a decode product as it stands, so no byte is transposed when it is read thousands of times.

    k_pages [pages, G, 64, D]     v_pages [pages, G, D, 64]     BF16, or e4m3 under one scale for each head

Within a row of e4m3 codes (D of a key, 64 keys of a value's dimension) elements stand as `numbers.place_of` says.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.operation import operation
from lockstep.kernels.triton.numbers import E4M3_MAX, after_previous_first, place_of
from lockstep.kernels.triton.sizes import cdiv, power_of_2

HEADS = 8
"""Heads of one kind that a program takes."""
WRITTEN = 64
"""Rows of a head that a program writes to pages."""


@triton.jit
def _half_norm(a, b, wa, wb, eps, D: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm over a head given as its halves [heads, D / 2], rounded to the activation type."""
    mean = tl.div_rn(tl.sum(a * a + b * b, 1), tl.full((a.shape[0],), D, tl.float32))
    inverse = tl.div_rn(tl.full((a.shape[0],), 1.0, tl.float32), tl.sqrt_rn(mean + eps))[:, None]
    a = (a * inverse * wa.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    b = (b * inverse * wb.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    return a, b


@triton.jit
def fixed_codes(x, scale):
    """e4m3 codes under a given scale; larger values saturate."""
    scaled = tl.div_rn(x, scale + tl.zeros_like(x))
    return tl.minimum(tl.maximum(scaled, -E4M3_MAX), E4M3_MAX).to(tl.float8e4nv)


@triton.jit
def _rope(
    qkv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    qw_ptr,
    kw_ptr,
    table_ptr,
    position_ptr,
    slot_ptr,
    ks_ptr,
    vs_ptr,
    flag_ptr,
    qkv_stride,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_P: tl.constexpr,
    HB: tl.constexpr,
    NORM: tl.constexpr,
    PAGED: tl.constexpr,
    KV8: tl.constexpr,
    EARLY: tl.constexpr,
):
    if not EARLY:
        after_previous_first()
    t = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    q_chunks: tl.constexpr = (H + HB - 1) // HB
    g_chunks: tl.constexpr = (G + HB - 1) // HB
    half = tl.arange(0, HALF_P)
    inside = half < HALF
    head = tl.arange(0, HB)
    is_q = chunk < q_chunks
    is_v = chunk >= q_chunks + g_chunks
    local = tl.where(is_q, chunk, tl.where(is_v, chunk - q_chunks - g_chunks, chunk - q_chunks)) * HB + head
    limit = tl.where(is_q, H, G)
    base = tl.where(is_q, 0, tl.where(is_v, H + G, H)) + local
    ok = (local < limit)[:, None] & inside[None, :]
    source = qkv_ptr + t * qkv_stride + base[:, None] * D + half[None, :]
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    # Whatever is read is asked for at once: few rows have nothing else to hide the memory's latency behind. Past the first-level
    # cache, which may hold the last step's.
    position = tl.load(position_ptr + t, cache_modifier=".cg")
    if not EARLY:
        a = tl.load(source, mask=ok, other=0.0).to(tl.float32)
        b = tl.load(source + HALF, mask=ok, other=0.0).to(tl.float32)
    if PAGED:
        slot = tl.load(slot_ptr + t, cache_modifier=".cg")
        if KV8:
            k_scale = tl.load(ks_ptr + local, mask=local < G, other=1.0, cache_modifier=".cg")[:, None]
            v_scale = tl.load(vs_ptr + local, mask=local < G, other=1.0, cache_modifier=".cg")[:, None]
    turn = table_ptr + position * (2 * HALF) + half
    cos = tl.load(turn, mask=inside & (is_v ^ True), other=0.0, cache_modifier=".cg")[None, :]
    sin = tl.load(turn + HALF, mask=inside & (is_v ^ True), other=0.0, cache_modifier=".cg")[None, :]
    if NORM:
        if is_q:
            wa = tl.load(qw_ptr + half, mask=inside, other=0.0, cache_modifier=".cg")
            wb = tl.load(qw_ptr + HALF + half, mask=inside, other=0.0, cache_modifier=".cg")
        else:
            wa = tl.load(kw_ptr + half, mask=inside, other=0.0, cache_modifier=".cg")
            wb = tl.load(kw_ptr + HALF + half, mask=inside, other=0.0, cache_modifier=".cg")
    if EARLY:
        after_previous_first()
        a = tl.load(source, mask=ok, other=0.0).to(tl.float32)
        b = tl.load(source + HALF, mask=ok, other=0.0).to(tl.float32)
    if not is_v:
        if NORM:
            a, b = _half_norm(a, b, wa, wb, eps, D, dtype)
        a, b = a * cos - b * sin, b * cos + a * sin
        a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
    if is_q:
        q_to = q_ptr + (t * H + local)[:, None] * D + half[None, :]
        tl.store(q_to, a.to(dtype), mask=ok)
        tl.store(q_to + HALF, b.to(dtype), mask=ok)
    elif PAGED:
        tile = (slot // 64 * G + local)[:, None] * (64 * D)
        at = slot % 64
        wild = tl.max(tl.max((tl.abs(a) + tl.abs(b) < float("inf")).to(tl.int32) ^ 1, 1), 0)
        if wild > 0:
            tl.store(flag_ptr, 1)
        if is_v:
            v_to = v_ptr + tile + half[None, :] * 64 + (place_of(at, 4) if KV8 else at)
            if KV8:
                tl.store(v_to, fixed_codes(a, v_scale), mask=ok)
                tl.store(v_to + HALF * 64, fixed_codes(b, v_scale), mask=ok)
            else:
                tl.store(v_to, a.to(dtype), mask=ok)
                tl.store(v_to + HALF * 64, b.to(dtype), mask=ok)
        else:
            k_to = k_ptr + tile + at * D + half[None, :]
            if KV8:
                k_row = k_ptr + tile + at * D
                tl.store(k_row + place_of(half, D // 16)[None, :], fixed_codes(a, k_scale), mask=ok)
                tl.store(k_row + place_of(half + HALF, D // 16)[None, :], fixed_codes(b, k_scale), mask=ok)
            else:
                tl.store(k_to, a.to(dtype), mask=ok)
                tl.store(k_to + HALF, b.to(dtype), mask=ok)
    else:
        if is_v:
            row_v = v_ptr + (t * G + local)[:, None] * D + half[None, :]
            tl.store(row_v, a.to(dtype), mask=ok)
            tl.store(row_v + HALF, b.to(dtype), mask=ok)
        else:
            row_k = k_ptr + (t * G + local)[:, None] * D + half[None, :]
            tl.store(row_k, a.to(dtype), mask=ok)
            tl.store(row_k + HALF, b.to(dtype), mask=ok)


def rope_and_write(
    qkv: Tensor,
    table_PD: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    scales: tuple[Tensor, Tensor] | None,
    flag: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """q [T, H, D] after norm and rotation; keys and values go to their slots.

    qkv: [T, (H + 2 G) D]. table_PD: [positions, 2, D / 2] FP32 cos and sin. slots_T: int64, page * 64 + offset.
    norms: weights of the q and k norm. scales: FP32 [G] of keys and values for an e4m3 cache. flag: int32 [1], set to 1 when
    a key or value is not finite: its e4m3 code would be a plausible number, and a BF16 one would poison whoever gets the page.
    early: the kernel launched just before wrote nothing of what is read here but `qkv`, and let this one in after its own wait
    (or at its end): all else is read while it runs.
    """
    q_norm, k_norm = norms if norms is not None else (None, None)
    k_scale, v_scale = scales if scales is not None else (None, None)
    return _rope_and_write(
        qkv,
        table_PD,
        positions_T,
        slots_T,
        k_pages,
        v_pages,
        q_norm,
        k_norm,
        k_scale,
        v_scale,
        flag,
        heads=heads,
        eps=eps,
        early=early,
    )


def _queries(qkv: Tensor, k_pages: Tensor, heads: int) -> Tensor:
    return torch.empty(qkv.shape[0], heads, k_pages.shape[3], dtype=qkv.dtype, device=qkv.device)


@operation("rope_and_write", fake=_queries, mutates=("k_pages", "v_pages", "flag"))
def _rope_and_write(
    qkv: Tensor,
    table_PD: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    flag: Tensor | None,
    *,
    heads: int,
    eps: float,
    early: bool,
) -> Tensor:
    q = _queries(qkv, k_pages, heads)
    places, norms, scales = (table_PD, positions_T, slots_T), (q_norm, k_norm), (k_scale, v_scale)
    _launch(qkv, q, k_pages, v_pages, places, norms, eps, scales, flag, paged=True, early=early)
    return q


def rope_rows(
    qkv: Tensor,
    table_PD: Tensor,
    positions_T: Tensor,
    *,
    heads: int,
    kv_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q [T, H, D], k, v [T, G, D]) after norm and rotation, as rows."""
    q_norm, k_norm = norms if norms is not None else (None, None)
    return _rope_rows(qkv, table_PD, positions_T, q_norm, k_norm, heads=heads, kv_heads=kv_heads, eps=eps)


def _rows(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, dim = qkv.shape[0], qkv.shape[1] // (heads + 2 * kv_heads)
    q, k, v = (
        torch.empty(rows, n, dim, dtype=qkv.dtype, device=qkv.device) for n in (heads, kv_heads, kv_heads)
    )
    return q, k, v


@operation("rope_rows", fake=_rows)
def _rope_rows(
    qkv: Tensor,
    table_PD: Tensor,
    positions_T: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    *,
    heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _rows(qkv, heads, kv_heads)
    places, nothing = (table_PD, positions_T, positions_T), (None, None)
    _launch(qkv, q, k, v, places, (q_norm, k_norm), eps, nothing, None, paged=False)
    return q, k, v


def _launch(
    qkv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: tuple[Tensor, Tensor, Tensor],
    norms: tuple[Tensor | None, Tensor | None],
    eps: float,
    scales: tuple[Tensor | None, Tensor | None],
    flag: Tensor | None,
    *,
    paged: bool,
    early: bool = False,
) -> None:
    """places: table, positions and slots. k, v: pages, or rows."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    table_PD, positions_T, slots_T = places
    if rows == 0:
        return
    chunks = cdiv(heads, HEADS) + 2 * cdiv(kv_heads, HEADS)
    half = head_dim // 2
    (q_weight, k_weight), (k_scale, v_scale) = norms, scales
    _rope[(rows, chunks)](
        qkv,
        q,
        k,
        v,
        q_weight if q_weight is not None else qkv,
        k_weight if k_weight is not None else qkv,
        table_PD,
        positions_T,
        slots_T,
        k_scale if k_scale is not None else table_PD,
        v_scale if v_scale is not None else table_PD,
        flag if flag is not None else torch.empty(1, dtype=torch.int32, device=qkv.device),
        qkv.stride(0),
        eps,
        heads,
        kv_heads,
        head_dim,
        half,
        power_of_2(half),
        HEADS,
        q_weight is not None,
        paged,
        k_scale is not None,
        early,
        num_warps=2,
        enable_fp_fusion=False,
        launch_pdl=True,
    )


@triton.jit
def _write(
    k_ptr,
    v_ptr,
    kp_ptr,
    vp_ptr,
    row_ptr,
    slot_ptr,
    ks_ptr,
    vs_ptr,
    W,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WB: tl.constexpr,
    KV8: tl.constexpr,
    CODES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """WB rows of one head. Neighbours mostly go to neighbouring slots; the compiler gives neighbouring threads neighbouring rows
    where it stores values (it knows of no better order), so what lies side by side in a page is written at once.
    """
    i, g = tl.program_id(0) * WB + tl.arange(0, WB), tl.program_id(1)
    known = i < W
    row, slot = tl.load(row_ptr + i, mask=known, other=0), tl.load(slot_ptr + i, mask=known, other=0)
    d = tl.arange(0, DP)
    source = (row * G + g)[:, None] * D + d[None, :]
    ok = known[:, None] & (d < D)[None, :]
    k = tl.load(k_ptr + source, mask=ok, other=0.0)
    v = tl.load(v_ptr + source, mask=ok, other=0.0)
    tile, at = (slot // 64 * G + g) * (64 * D), slot % 64
    k_at, v_at = d, at
    if CODES:
        k_at, v_at = place_of(d, D // 16), place_of(at, 4)
    k_to = kp_ptr + (tile + at * D)[:, None] + k_at[None, :]
    v_to = vp_ptr + (tile + v_at)[:, None] + d[None, :] * 64
    if KV8:
        k = fixed_codes(k.to(tl.float32), tl.load(ks_ptr + g))
        v = fixed_codes(v.to(tl.float32), tl.load(vs_ptr + g))
        if WIDE:
            k, v = k.to(tl.float32).to(tl.bfloat16), v.to(tl.float32).to(tl.bfloat16)
    tl.store(k_to, k, mask=ok)
    tl.store(v_to, v, mask=ok)


def write_pages(
    k_TGD: Tensor,
    v_TGD: Tensor,
    rows_W: Tensor,
    slots_W: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scales: tuple[Tensor, Tensor] | None,
) -> None:
    """Writes row `rows_W[i]` of keys and values to slot `slots_W[i]` (int64); a row may go to several slots.

    With `scales` they are quantized; e4m3 pages take the codes, BF16 pages the values of the codes.
    """
    k_scale, v_scale = scales if scales is not None else (None, None)
    _write_pages(k_TGD, v_TGD, rows_W, slots_W, k_pages, v_pages, k_scale, v_scale)


@operation("write_pages", fake=lambda: None, mutates=("k_pages", "v_pages"))
def _write_pages(
    k_TGD: Tensor,
    v_TGD: Tensor,
    rows_W: Tensor,
    slots_W: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    if len(rows_W) == 0:
        return
    _, kv_heads, head_dim = k_TGD.shape
    scaled = k_scale is not None
    _write[(cdiv(len(rows_W), WRITTEN), kv_heads)](
        k_TGD,
        v_TGD,
        k_pages,
        v_pages,
        rows_W,
        slots_W,
        k_scale if k_scale is not None else k_TGD,
        v_scale if v_scale is not None else v_TGD,
        len(rows_W),
        kv_heads,
        head_dim,
        power_of_2(head_dim),
        WRITTEN,
        scaled,
        k_pages.element_size() == 1,
        scaled and k_pages.element_size() == 2,
        num_warps=8,
    )
