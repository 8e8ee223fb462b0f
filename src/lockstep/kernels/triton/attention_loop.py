"""The loop of attention: one definition, two kernels, equal bits.

For a row, keys come in steps of 64 (a page), ascending, within chunks of CHUNK keys. In a chunk an online softmax in base 2
runs over the steps; its state starts empty. Then the chunk's state joins the row's, ascending:

    s = q k^T                                  warpgroup instruction, FP32
    m' = max(m, max(s) f);  p = r(2^fma(s, f, -m'))           f = log2(e) / sqrt(D) * key scale
    l  = l 2^(m - m') + p 1;   acc = acc 2^(m - m') + p v     both as products, so that no sum depends on a layout
    join:  M' = max(M, m);  L = fma(L, 2^(M - M'), l 2^(m - M'));  A likewise
    o  = bf16(A / L * value scale)

`prefill_kernel` has tiles of 64 or 128 queries of one head as the left operand. `decode_kernel` has one query: its group of heads
is the right operand, 16 columns wide, and the keys (or values) are the left one, so that the 64 rows of the warpgroup
instruction are all used. A decode program takes one chunk; when there are several, `join_kernel` adds them up in order. A row
that sees no key of a step or chunk keeps its state bit for bit.

Operands are BF16, and r rounds to it. Over codes they are FP16 (`numbers.half`, `numbers.WIDEN`): codes are exact in both, and
have an instruction that makes FP16 of them.

Next: `wide_attention.py`, the same loop for long packs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lockstep.kernels.triton.numbers import (
    after_previous,
    half,
    load_widened,
    operands_arrived,
    scale_of,
    short_codes_of,
)


@triton.jit
def _soft(s, m, factor, KIND: tl.constexpr, AXIS: tl.constexpr):
    """(p in KIND, new maximum, decay of the old state) of one key step; s is masked with -inf."""
    new = tl.maximum(m, tl.max(s, AXIS) * factor)
    wide = tl.expand_dims(new, AXIS) + tl.zeros_like(s)
    p = tl.exp2(tl.fma(s, factor + tl.zeros_like(s), -wide))
    return p.to(KIND), new, tl.exp2(m - new)


@triton.jit
def _load_tile(
    pointer,
    R: tl.constexpr,
    RP: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    KV8: tl.constexpr,
    VALUES: tl.constexpr,
):
    """[RP, LP] of a page's tile of R rows and L columns."""
    if KV8:
        x = load_widened(pointer.to(tl.pointer_type(tl.int32)), R, RP, L, LP, VALUES)
    else:
        r, c = tl.arange(0, RP)[:, None], tl.arange(0, LP)[None, :]
        x = tl.load(pointer + r * L + c, mask=(r < R) & (c < L), other=0.0)
    return x


@triton.jit
def _store(
    o,
    o_ptr,
    at,
    inside,
    scale_ptr,
    scale_at,
    heads_in,
    OUT8: tl.constexpr,
    POW2: tl.constexpr,
    AXIS: tl.constexpr,
):
    """Output rounded to BF16, or that as 1x128 codes: a head of size 128 is a group. D runs along AXIS of o."""
    if OUT8:
        y = o.to(tl.bfloat16).to(tl.float32)
        scale = scale_of(tl.max(tl.abs(y), AXIS), POW2)
        tl.store(o_ptr + at, short_codes_of(y, tl.expand_dims(scale, AXIS), POW2), mask=inside)
        tl.store(scale_ptr + scale_at, scale, mask=heads_in)
    else:
        tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), mask=inside)


@triton.jit
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    tile_ptr,
    table_ptr,
    ks_ptr,
    vs_ptr,
    scale_ptr,
    scale_stride,
    base,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    KV8: tl.constexpr,
    SCALED: tl.constexpr,
    LSE: tl.constexpr,
    OUT8: tl.constexpr,
    POW2: tl.constexpr,
):
    tile = tl.program_id(1)
    h = tl.program_id(0)
    g = h // (H // G)
    first = tl.load(tile_ptr + tile * 4).to(tl.int64)
    count = tl.load(tile_ptr + tile * 4 + 1)
    position = tl.load(tile_ptr + tile * 4 + 2)
    table_ptr += tl.load(tile_ptr + tile * 4 + 3)
    r, d, c = tl.arange(0, BM), tl.arange(0, DP), tl.arange(0, 64)
    rows = position + r
    q_at = (first + r)[:, None] * (H * D) + h * D + d[None, :]
    q_ok = (r < count)[:, None] & (d < D)[None, :]
    kind: tl.constexpr = tl.float16 if KV8 else k_ptr.dtype.element_ty
    q = tl.load(q_ptr + q_at, mask=q_ok, other=0.0)
    if kind == tl.float16:
        q = half(q)
    factor = base
    if SCALED:
        factor = base * tl.load(ks_ptr + g)
    end = position + count
    pages = tl.cdiv(end, 64)
    ones = tl.full((64, 16), 1.0, kind)
    big_m = tl.full((BM,), -1e30, tl.float32)
    big_l = tl.zeros((BM, 16), tl.float32)
    big_a = tl.zeros((BM, DP), tl.float32)
    for start in range(0, pages, STEPS):
        m = tl.full((BM,), -1e30, tl.float32)
        den = tl.zeros((BM, 16), tl.float32)
        acc = tl.zeros((BM, DP), tl.float32)
        for step in range(start, tl.minimum(start + STEPS, pages)):
            at = tl.load(table_ptr + step).to(tl.int64) * (G * 64 * D) + g * (64 * D)
            k = _load_tile(k_ptr + at, 64, 64, D, DP, KV8, False)
            v = _load_tile(v_ptr + at, D, DP, 64, 64, KV8, True)
            if not KV8:
                operands_arrived()
            s = tl.dot(q, tl.trans(k))
            s = tl.where((step * 64 + c)[None, :] <= rows[:, None], s, -float("inf"))
            p, m, decay = _soft(s, m, factor, kind, 1)
            den = tl.dot(p, ones, den * decay[:, None])
            acc = tl.dot(p, tl.trans(v), acc * decay[:, None])
        if CHUNKS:
            new = tl.maximum(big_m, m)
            x, y = tl.exp2(big_m - new), tl.exp2(m - new)
            big_l = tl.fma(big_l, x[:, None] + tl.zeros_like(den), den * y[:, None])
            big_a = tl.fma(big_a, x[:, None] + tl.zeros_like(acc), acc * y[:, None])
            big_m = new
        else:
            big_m, big_l, big_a = m, den, acc
    total = tl.max(big_l, 1)
    share = tl.div_rn(1.0, total)
    if SCALED:
        share = share * tl.load(vs_ptr + g)
    o = big_a * share[:, None]
    scale_at = h.to(tl.int64) * scale_stride + first + r
    _store(o, o_ptr, q_at, q_ok, scale_ptr, scale_at, r < count, OUT8, POW2, 1)
    if LSE:
        tl.store(lse_ptr + (first + r) * H + h, big_m + tl.log2(total), mask=r < count)


@triton.jit(do_not_specialize=["splits", "table_stride"])
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    part_ptr,
    state_ptr,
    table_ptr,
    length_ptr,
    ks_ptr,
    vs_ptr,
    scale_ptr,
    scale_stride,
    base,
    table_stride,
    splits,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    QP: tl.constexpr,
    STEPS: tl.constexpr,
    SPLIT: tl.constexpr,
    KV8: tl.constexpr,
    OUT8: tl.constexpr,
    POW2: tl.constexpr,
):
    after_previous()
    g, b, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    Q: tl.constexpr = H // G
    n = tl.load(length_ptr + b)
    pages = tl.cdiv(n, 64)
    start = chunk * STEPS
    if start >= pages:
        return
    i, d, c = tl.arange(0, QP), tl.arange(0, DP), tl.arange(0, 64)
    q_at = (b * H + g * Q + i)[None, :] * D + d[:, None]
    q_ok = (i < Q)[None, :] & (d < D)[:, None]
    kind: tl.constexpr = tl.float16 if KV8 else k_ptr.dtype.element_ty
    q = tl.load(q_ptr + q_at, mask=q_ok, other=0.0)
    if kind == tl.float16:
        q = half(q)
    factor = base
    if KV8:
        factor = base * tl.load(ks_ptr + g)
    table_ptr += b * table_stride
    ones = tl.full((64, 64), 1.0, kind)
    m = tl.full((QP,), -1e30, tl.float32)
    den = tl.zeros((64, QP), tl.float32)
    acc = tl.zeros((DP, QP), tl.float32)
    for step in range(start, tl.minimum(start + STEPS, pages)):
        at = tl.load(table_ptr + step).to(tl.int64) * (G * 64 * D) + g * (64 * D)
        k = _load_tile(k_ptr + at, 64, 64, D, DP, KV8, False)
        v = _load_tile(v_ptr + at, D, DP, 64, 64, KV8, True)
        if not KV8:
            operands_arrived()
        s = tl.dot(k, q)
        s = tl.where((step * 64 + c)[:, None] < n, s, -float("inf"))
        p, m, decay = _soft(s, m, factor, kind, 0)
        den = tl.dot(ones, p, den * decay[None, :])
        acc = tl.dot(v, p, acc * decay[None, :])
    total = tl.max(den, 0)
    if SPLIT:
        part = (b * H + g * Q + i) * splits + chunk
        inside = i < Q
        tl.store(state_ptr + part * 2, m, mask=inside)
        tl.store(state_ptr + part * 2 + 1, total, mask=inside)
        tl.store(part_ptr + part[None, :] * D + d[:, None], acc, mask=q_ok)
    else:
        share = tl.div_rn(1.0, total)
        if KV8:
            share = share * tl.load(vs_ptr + g)
        o = acc * share[None, :]
        scale_at = (g * Q + i).to(tl.int64) * scale_stride + b
        _store(o, o_ptr, q_at, q_ok, scale_ptr, scale_at, i < Q, OUT8, POW2, 0)


@triton.jit(do_not_specialize=["splits"])
def join_kernel(
    part_ptr,
    state_ptr,
    o_ptr,
    length_ptr,
    vs_ptr,
    scale_ptr,
    scale_stride,
    splits,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    STEPS: tl.constexpr,
    HEADS: tl.constexpr,
    KV8: tl.constexpr,
    OUT8: tl.constexpr,
    POW2: tl.constexpr,
):
    """Chunks of a row joined in ascending order, HEADS heads a program."""
    after_previous()
    h, b = tl.program_id(0) * HEADS + tl.arange(0, HEADS), tl.program_id(1).to(tl.int64)
    d, known = tl.arange(0, DP), h < H
    inside = known[:, None] & (d < D)[None, :]
    chunks = tl.cdiv(tl.cdiv(tl.load(length_ptr + b), 64), STEPS)
    big_m = tl.full((HEADS,), -1e30, tl.float32)
    big_l = tl.zeros((HEADS,), tl.float32)
    big_a = tl.zeros((HEADS, DP), tl.float32)
    for chunk in range(chunks):
        part = (b * H + h) * splits + chunk
        m = tl.load(state_ptr + part * 2, mask=known, other=0.0)
        den = tl.load(state_ptr + part * 2 + 1, mask=known, other=1.0)
        acc = tl.load(part_ptr + part[:, None] * D + d[None, :], mask=inside, other=0.0)
        new = tl.maximum(big_m, m)
        x, y = tl.exp2(big_m - new), tl.exp2(m - new)
        big_l = tl.fma(big_l, x, den * y)
        big_a = tl.fma(big_a, x[:, None] + tl.zeros_like(acc), acc * y[:, None])
        big_m = new
    share = tl.div_rn(1.0, big_l)
    if KV8:
        share = share * tl.load(vs_ptr + h // (H // G), mask=known, other=0.0)
    o = big_a * share[:, None]
    at = ((b * H + h) * D)[:, None] + d[None, :]
    scale_at = h.to(tl.int64) * scale_stride + b
    _store(o, o_ptr, at, inside, scale_ptr, scale_at, known, OUT8, POW2, 1)
