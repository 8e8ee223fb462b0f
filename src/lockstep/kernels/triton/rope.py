"""From a projected row to attention's inputs in one kernel: q/k norm, rotary embedding, and the write to the paged cache.

Pages hold 64 tokens, the key step of attention. Within a page a head's keys lie as [64, D] and its values as [D, 64]: each
is the left operand of a decode product as it stands, so no byte is transposed when it is read thousands of times.

    k_pages [pages, G, 64, D]     v_pages [pages, G, D, 64]     BF16, or e4m3 under one scale for each head

Within a tile of e4m3 codes a key's elements stand as `numbers.place_of` says, values as `numbers.value_place` does.
"""

from __future__ import annotations

import torch
import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon

from lockstep.kernels.operation import operation
from lockstep.kernels.triton.numbers import (
    after_previous_first,
    half_norm,
    place_of,
    saturated_codes,
    value_place,
)
from lockstep.kernels.triton.sizes import cdiv, power_of_2

HEADS = 8
"""Heads of one kind that a program takes; more where a warp has room for more."""
PAIRS = 8
"""Neighbouring pairs of a head that a thread turns."""
WRITTEN = 64
"""Rows of a head that a program writes to pages."""


@gluon.jit
def _codes(x, scale):
    """`fixed_codes` for a tensor with a layout and a scale for each row."""
    r = gl.expand_dims(gl.div_rn(1.0, scale), 1) + gl.zeros_like(x)
    return saturated_codes(x, r, gl.expand_dims(-scale, 1) + gl.zeros_like(x))


@gluon.jit
def _write_value(
    v_ptr,
    source_ptr,
    flag_ptr,
    scale_ptr,
    slot,
    first,
    G: gl.constexpr,
    D: gl.constexpr,
    DP: gl.constexpr,
    HB: gl.constexpr,
    KV8: gl.constexpr,
):
    """A token's values of HB heads to its page. Neighbouring lanes have neighbouring dimensions, which lie in few sectors."""
    across: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    local = first + gl.arange(0, HB, layout=gl.SliceLayout(1, across))
    d = gl.arange(0, DP, layout=gl.SliceLayout(0, across))
    ok = gl.expand_dims(local < G, 1) & gl.expand_dims(d < D, 0)
    x = gl.load(source_ptr + gl.expand_dims(local * D, 1) + gl.expand_dims(d, 0), mask=ok, other=0.0)
    to = v_ptr + gl.expand_dims((slot // 64 * G + local) * (64 * D), 1)
    value = x.to(gl.float32)
    finite = gl.abs(value) < float("inf")
    gl.store(flag_ptr + gl.zeros([HB, DP], gl.int32, across), 1, mask=ok & (finite ^ True))
    if KV8:
        scale = gl.load(scale_ptr + local, mask=local < G, other=1.0)
        to += gl.expand_dims(value_place(d, slot % 64, D), 0)
        gl.store(to, _codes(value, scale), mask=ok)
    else:
        gl.store(to + gl.expand_dims(d * 64 + slot % 64, 0), x, mask=ok)


@gluon.jit
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
    H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    HALF: gl.constexpr,
    HALF_P: gl.constexpr,
    HB: gl.constexpr,
    E: gl.constexpr,
    NORM: gl.constexpr,
    PAGED: gl.constexpr,
    KV8: gl.constexpr,
    EARLY: gl.constexpr,
):
    """A thread owns E neighbouring pairs of one head, and whatever goes with them is loaded where it is used: no value changes
    hands but in the norm's sum, and nothing waits at a barrier. Values on their way to a page are spread otherwise."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, E], [32 * E // HALF_P, HALF_P // E], [gl.num_warps(), 1], [1, 0]
    )
    gl.static_assert(HB % (32 * E // HALF_P * gl.num_warps()) == 0)
    if not EARLY:
        after_previous_first()
    t = gl.program_id(0).to(gl.int64)
    chunk = gl.program_id(1)
    q_chunks: gl.constexpr = (H + HB - 1) // HB
    g_chunks: gl.constexpr = (G + HB - 1) // HB
    half = gl.arange(0, HALF_P, layout=gl.SliceLayout(0, layout))
    inside = half < HALF
    is_q = chunk < q_chunks
    is_v = chunk >= q_chunks + g_chunks
    first = chunk * HB
    limit = H
    base = 0
    if not is_q:
        first -= q_chunks * HB
        limit = G
        base = H
        if is_v:
            first -= g_chunks * HB
            base = H + G
    local = first + gl.arange(0, HB, layout=gl.SliceLayout(1, layout))
    ok = gl.expand_dims(local < limit, 1) & gl.expand_dims(inside, 0)
    at = gl.expand_dims((base + local) * D, 1) + gl.expand_dims(half, 0)
    source = qkv_ptr + t * qkv_stride + at
    dtype: gl.constexpr = qkv_ptr.dtype.element_ty
    # Whatever is read is asked for at once: few rows have nothing else to hide the memory's latency behind. Past the first-level
    # cache, which may hold the last step's.
    position = gl.load(position_ptr + t, cache_modifier=".cg")
    if PAGED:
        slot = gl.load(slot_ptr + t, cache_modifier=".cg")
        if is_v:
            if EARLY:
                after_previous_first()
            source_v = qkv_ptr + t * qkv_stride + (H + G) * D
            _write_value(v_ptr, source_v, flag_ptr, vs_ptr, slot, first, G, D, 2 * HALF_P, HB, KV8)
            return
        if KV8:
            k_scale = gl.load(ks_ptr + local, mask=local < G, other=1.0, cache_modifier=".cg")
    if not EARLY:
        a = gl.load(source, mask=ok, other=0.0)
        b = gl.load(source + HALF, mask=ok, other=0.0)
    turn = table_ptr + position * (2 * HALF) + half
    cos = gl.expand_dims(gl.load(turn, mask=inside, other=0.0, cache_modifier=".cg"), 0)
    sin = gl.expand_dims(gl.load(turn + HALF, mask=inside, other=0.0, cache_modifier=".cg"), 0)
    if NORM:
        w_ptr = kw_ptr
        if is_q:
            w_ptr = qw_ptr
        wa = gl.load(w_ptr + half, mask=inside, other=0.0, cache_modifier=".cg")
        wb = gl.load(w_ptr + HALF + half, mask=inside, other=0.0, cache_modifier=".cg")
    if EARLY:
        after_previous_first()
        a = gl.load(source, mask=ok, other=0.0)
        b = gl.load(source + HALF, mask=ok, other=0.0)
    a, b = a.to(gl.float32), b.to(gl.float32)
    if not is_v:
        if NORM:
            a, b = half_norm(a, b, wa, wb, eps, D, dtype)
        a, b = a * cos - b * sin, b * cos + a * sin
        a, b = a.to(dtype).to(gl.float32), b.to(dtype).to(gl.float32)
    if is_q:
        q_to = q_ptr + gl.expand_dims((t * H + local) * D, 1) + gl.expand_dims(half, 0)
        gl.store(q_to, a.to(dtype), mask=ok)
        gl.store(q_to + HALF, b.to(dtype), mask=ok)
    elif PAGED:
        tile = gl.expand_dims((slot // 64 * G + local) * (64 * D), 1)
        within = slot % 64
        finite = gl.abs(a) + gl.abs(b) < float("inf")
        gl.store(flag_ptr + gl.zeros([HB, HALF_P], gl.int32, layout), 1, mask=ok & (finite ^ True))
        k_row = k_ptr + tile + within * D
        if KV8:
            a_at, b_at = place_of(half, D // 16), place_of(half + HALF, D // 16)
            gl.store(k_row + gl.expand_dims(a_at, 0), _codes(a, k_scale), mask=ok)
            gl.store(k_row + gl.expand_dims(b_at, 0), _codes(b, k_scale), mask=ok)
        else:
            gl.store(k_row + gl.expand_dims(half, 0), a.to(dtype), mask=ok)
            gl.store(k_row + gl.expand_dims(half, 0) + HALF, b.to(dtype), mask=ok)
    else:
        kv_to = k_ptr
        if is_v:
            kv_to = v_ptr
        rows = kv_to + gl.expand_dims((t * G + local) * D, 1) + gl.expand_dims(half, 0)
        gl.store(rows, a.to(dtype), mask=ok)
        gl.store(rows + HALF, b.to(dtype), mask=ok)


@triton.jit
def fixed_codes(x, scale):
    """e4m3 codes under a given scale; larger values saturate."""
    return saturated_codes(x, tl.div_rn(1.0, scale) + tl.zeros_like(x), -scale + tl.zeros_like(x))


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
    half = head_dim // 2
    half_p = power_of_2(half)
    pairs = min(max(PAIRS, half_p // 32), half_p)
    together = max(HEADS, 32 * pairs // half_p)
    chunks = cdiv(heads, together) + 2 * cdiv(kv_heads, together)
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
        half_p,
        together,
        pairs,
        q_weight is not None,
        paged,
        k_scale is not None,
        early,
        num_warps=together * half_p // (32 * pairs),
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
    k_at, v_at = d, at[:, None] + d[None, :] * 64
    if CODES:
        k_at, v_at = place_of(d, D // 16), value_place(d[None, :], at[:, None], D)
    k_to = kp_ptr + (tile + at * D)[:, None] + k_at[None, :]
    v_to = vp_ptr + tile[:, None] + v_at
    if KV8:
        k = fixed_codes(k.to(tl.float32), tl.load(ks_ptr + g))
        v = fixed_codes(v.to(tl.float32), tl.load(vs_ptr + g))
        if WIDE:
            k, v = (
                k.to(tl.float32).to(kp_ptr.dtype.element_ty),
                v.to(tl.float32).to(vp_ptr.dtype.element_ty),
            )
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

    With `scales` they are quantized; e4m3 pages take the codes, others their values.
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
        num_warps=16,
    )
