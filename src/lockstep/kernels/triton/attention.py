"""Attention over 64-token pages: one definition, two kernels, equal bits.

For a row, keys come in steps of 64 (a page), ascending, within chunks of CHUNK keys. In a chunk an online softmax in base 2
runs over the steps; its state starts empty. Then the chunk's state joins the row's, ascending:

    s = q k^T                                  warpgroup instruction, FP32
    m' = max(m, max(s) f);  p = bf16(2^fma(s, f, -m'))        f = log2(e) / sqrt(D) * key scale
    l  = l 2^(m - m') + p 1;   acc = acc 2^(m - m') + p v     both as products, so that no sum depends on a layout
    join:  M' = max(M, m);  L = fma(L, 2^(M - M'), l 2^(m - M'));  A likewise
    o  = bf16(A / L * value scale)

`_prefill` has tiles of 64 or 128 queries of one head as the left operand; with WIDE, `wide_attention.py` takes its place for BF16
pages and head sizes 64 and 128. `_decode` has one query: its group of heads is the right operand, 16 columns wide, and
the keys (or values) are the left one, so that the 64 rows of the warpgroup instruction are all used. A decode program takes one
chunk; when there are several, `_join` adds them up in order. A row that sees no key of a step or chunk keeps its state bit for
bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.operation import operation
from lockstep.kernels.triton import wide_attention
from lockstep.kernels.triton.numbers import after_previous, codes_of, load_widened, scale_of
from lockstep.kernels.triton.quantize import empty_codes
from lockstep.numerics.formats import ScaleKind

Codes = tuple[Tensor, Tensor]
"""e4m3 codes and their scales."""
PAGE = 64
CHUNK = 2048
"""Keys of one chunk: a part of the definition, since it fixes where states are joined."""
WIDE = True
"""Whether prefill goes through `wide_attention.py` where that takes the shapes. No bit may depend on it."""
LOG2E = 1.0 / math.log(2.0)


@triton.jit
def _soft(s, m, factor, AXIS: tl.constexpr):
    """(p in BF16, new maximum, decay of the old state) of one key step; s is masked with -inf."""
    new = tl.maximum(m, tl.max(s, AXIS) * factor)
    wide = tl.expand_dims(new, AXIS) + tl.zeros_like(s)
    p = tl.exp2(tl.fma(s, factor + tl.zeros_like(s), -wide))
    return p.to(tl.bfloat16), new, tl.exp2(m - new)


@triton.jit
def _load_tile(
    pointer, R: tl.constexpr, RP: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, KV8: tl.constexpr
):
    """[RP, LP] BF16 of a page's tile of R rows and L columns."""
    if KV8:
        x = load_widened(pointer.to(tl.pointer_type(tl.int32)), RP, L, LP)
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
        tl.store(o_ptr + at, codes_of(y, tl.expand_dims(scale, AXIS) + tl.zeros_like(y)), mask=inside)
        tl.store(scale_ptr + scale_at, scale, mask=heads_in)
    else:
        tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _prefill(
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
    q = tl.load(q_ptr + q_at, mask=q_ok, other=0.0)
    factor = base
    if SCALED:
        factor = base * tl.load(ks_ptr + g)
    end = position + count
    pages = tl.cdiv(end, 64)
    ones = tl.full((64, 16), 1.0, tl.bfloat16)
    big_m = tl.full((BM,), -1e30, tl.float32)
    big_l = tl.zeros((BM, 16), tl.float32)
    big_a = tl.zeros((BM, DP), tl.float32)
    for start in range(0, pages, STEPS):
        m = tl.full((BM,), -1e30, tl.float32)
        den = tl.zeros((BM, 16), tl.float32)
        acc = tl.zeros((BM, DP), tl.float32)
        for step in range(start, tl.minimum(start + STEPS, pages)):
            at = tl.load(table_ptr + step).to(tl.int64) * (G * 64 * D) + g * (64 * D)
            k = _load_tile(k_ptr + at, 64, 64, D, DP, KV8)
            v = _load_tile(v_ptr + at, D, DP, 64, 64, KV8)
            s = tl.dot(q, tl.trans(k))
            s = tl.where((step * 64 + c)[None, :] <= rows[:, None], s, -float("inf"))
            p, m, decay = _soft(s, m, factor, 1)
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
    o = tl.div_rn(big_a, total[:, None] + tl.zeros_like(big_a))
    if SCALED:
        o = o * tl.load(vs_ptr + g)
    scale_at = h.to(tl.int64) * scale_stride + first + r
    _store(o, o_ptr, q_at, q_ok, scale_ptr, scale_at, r < count, OUT8, POW2, 1)
    if LSE:
        tl.store(lse_ptr + (first + r) * H + h, big_m + tl.log2(total), mask=r < count)


@triton.jit
def _decode(
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
    q = tl.load(q_ptr + q_at, mask=q_ok, other=0.0)
    factor = base
    if KV8:
        factor = base * tl.load(ks_ptr + g)
    table_ptr += b * table_stride
    ones = tl.full((64, 64), 1.0, tl.bfloat16)
    m = tl.full((QP,), -1e30, tl.float32)
    den = tl.zeros((64, QP), tl.float32)
    acc = tl.zeros((DP, QP), tl.float32)
    for step in range(start, tl.minimum(start + STEPS, pages)):
        at = tl.load(table_ptr + step).to(tl.int64) * (G * 64 * D) + g * (64 * D)
        k = _load_tile(k_ptr + at, 64, 64, D, DP, KV8)
        v = _load_tile(v_ptr + at, D, DP, 64, 64, KV8)
        s = tl.dot(k, q)
        s = tl.where((step * 64 + c)[:, None] < n, s, -float("inf"))
        p, m, decay = _soft(s, m, factor, 0)
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
        o = tl.div_rn(acc, total[None, :] + tl.zeros_like(acc))
        if KV8:
            o = o * tl.load(vs_ptr + g)
        scale_at = (g * Q + i).to(tl.int64) * scale_stride + b
        _store(o, o_ptr, q_at, q_ok, scale_ptr, scale_at, i < Q, OUT8, POW2, 0)


@triton.jit
def _join(
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
    KV8: tl.constexpr,
    OUT8: tl.constexpr,
    POW2: tl.constexpr,
):
    after_previous()
    h, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, DP)
    chunks = tl.cdiv(tl.cdiv(tl.load(length_ptr + b), 64), STEPS)
    big_m = tl.full((1,), -1e30, tl.float32)
    big_l = tl.zeros((1,), tl.float32)
    big_a = tl.zeros((DP,), tl.float32)
    for chunk in range(chunks):
        part = (b * H + h) * splits + chunk
        m = tl.load(state_ptr + part * 2 + tl.zeros((1,), tl.int64))
        den = tl.load(state_ptr + part * 2 + 1 + tl.zeros((1,), tl.int64))
        acc = tl.load(part_ptr + part * D + d, mask=d < D, other=0.0)
        new = tl.maximum(big_m, m)
        x, y = tl.exp2(big_m - new), tl.exp2(m - new)
        big_l = tl.fma(big_l, x, den * y)
        big_a = tl.fma(big_a, x + tl.zeros_like(acc), acc * y)
        big_m = new
    o = tl.div_rn(big_a, big_l + tl.zeros_like(big_a))
    if KV8:
        o = o * tl.load(vs_ptr + h // (H // G))
    o = o[None, :]
    one = tl.zeros((1,), tl.int64)
    at = ((b * H + h) * D + d)[None, :]
    scale_at = one + h.to(tl.int64) * scale_stride + b
    _store(o, o_ptr, at, (d < D)[None, :], scale_ptr, scale_at, one == 0, OUT8, POW2, 1)


@dataclass(frozen=True)
class PrefillIndex:
    """Query tiles and block tables of one forward pass.

    tiles_N4: int32 (first query row, rows, position of the first, where its sequence's table begins). table: int32 pages,
    sequence after sequence. longest: last position + 1 of any tile. block: rows of a tile.
    """

    tiles_N4: Tensor
    table: Tensor
    longest: int
    block: int


def prefill(
    q_THD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    index: PrefillIndex,
    scales: tuple[Tensor, Tensor] | None,
    *,
    lse: bool = False,
    codes: ScaleKind | None = None,
) -> tuple[Tensor | Codes, Tensor]:
    """(o [T, H, D], base-2 log-sum-exp [T, H] FP32 if asked for) of packed queries over their pages. With `codes`, o is 1x128
    codes [T, H D] and their scales [T, H]; D must be 128. Pages hold codes, or BF16; with `scales` BF16 pages hold the values
    of codes, which are exact in BF16."""
    k_scale, v_scale = scales if scales is not None else (None, None)
    found = _prefill_rows(
        q_THD,
        k_pages,
        v_pages,
        index.tiles_N4,
        index.table,
        k_scale,
        v_scale,
        longest=index.longest,
        block=index.block,
        lse=lse,
        codes=codes,
    )
    return (found[0] if codes is None else (found[0], found[1])), (found[-1] if lse else found[0])


def _results(q_THD: Tensor, codes: str | None, lse: bool = False) -> list[Tensor]:
    """Storage for the output like the queries, or for its codes and scales; then for the log-sum-exp if it is wanted."""
    rows, heads, dim = q_THD.shape
    assert codes is None or dim == 128, "a head is a group of 128"
    out = (torch.empty_like(q_THD),) if codes is None else empty_codes(rows, heads * dim, q_THD.device)
    return [*out, *([torch.empty(rows, heads, dtype=torch.float32, device=q_THD.device)] if lse else ())]


@operation("prefill_attention", fake=_results)
def _prefill_rows(
    q_THD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tiles_N4: Tensor,
    table: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    longest: int,
    block: int,
    lse: bool,
    codes: str | None,
) -> list[Tensor]:
    rows, heads, dim = q_THD.shape
    kv_heads = k_pages.shape[1]
    found = _results(q_THD, codes, lse)
    out, out_scale, lse_TH = found[0], found[0] if codes is None else found[1], found[-1]
    scales = (out, out) if k_scale is None or v_scale is None else (k_scale, v_scale)
    scaled = k_scale is not None
    if rows and WIDE and wide_attention.takes(q_THD, k_pages, block):
        wide_attention.launch(
            q_THD,
            k_pages,
            v_pages,
            out,
            lse_TH,
            tiles_N4,
            table,
            scales,
            out_scale,
            base=dim**-0.5 * LOG2E,
            block=block,
            chunks=longest > CHUNK,
            steps=CHUNK // PAGE,
            scaled=scaled,
            lse=lse,
            codes=codes is not None,
            pow2=codes == "pow2",
        )
    elif rows:
        _prefill[(heads, len(tiles_N4))](
            q_THD,
            _raw(k_pages),
            _raw(v_pages),
            out,
            lse_TH,
            tiles_N4,
            table,
            *scales,
            out_scale,
            out_scale.stride(1),
            dim**-0.5 * LOG2E,
            heads,
            kv_heads,
            dim,
            triton.next_power_of_2(dim),
            block,
            longest > CHUNK,
            CHUNK // PAGE,
            k_pages.element_size() == 1,
            scaled,
            lse,
            codes is not None,
            codes == "pow2",
            num_warps=8 if block == 128 else 4,
            num_stages=3,
        )
    return found


@dataclass(frozen=True)
class DecodeIndex:
    """One query a sequence. lengths_B: int32 keys of each, table_BP: int32 pages, longest: bound on every length."""

    lengths_B: Tensor
    table_BP: Tensor
    longest: int


def decode(
    q_BHD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    index: DecodeIndex,
    scales: tuple[Tensor, Tensor] | None,
    *,
    codes: ScaleKind | None = None,
    stages: int = 0,
    warps: int = 4,
) -> Tensor | Codes:
    """o [B, H, D] (or its codes, as in `prefill`): the last position of every sequence."""
    k_scale, v_scale = scales if scales is not None else (None, None)
    found = _decode_rows(
        q_BHD,
        k_pages,
        v_pages,
        index.lengths_B,
        index.table_BP,
        k_scale,
        v_scale,
        longest=index.longest,
        codes=codes,
        stages=stages,
        warps=warps,
    )
    return found[0] if codes is None else (found[0], found[1])


@operation("decode_attention", fake=lambda q_BHD, codes: _results(q_BHD, codes))
def _decode_rows(
    q_BHD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    lengths_B: Tensor,
    table_BP: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    longest: int,
    codes: str | None,
    stages: int,
    warps: int,
) -> list[Tensor]:
    batch, heads, dim = q_BHD.shape
    kv_heads = k_pages.shape[1]
    found = _results(q_BHD, codes)
    out, out_scale, scaled = found[0], found[-1], k_scale is not None
    splits = triton.cdiv(longest, CHUNK)
    stages = stages or _stages(kv_heads * batch * splits)
    k_scale, v_scale = (out, out) if k_scale is None or v_scale is None else (k_scale, v_scale)
    part = state = out
    if splits > 1:
        part = torch.empty(batch * heads * splits, dim, dtype=torch.float32, device=out.device)
        state = torch.empty(batch * heads * splits, 2, dtype=torch.float32, device=out.device)
    dim_p = triton.next_power_of_2(dim)
    _decode[(kv_heads, batch, splits)](
        q_BHD,
        _raw(k_pages),
        _raw(v_pages),
        out,
        part,
        state,
        table_BP,
        lengths_B,
        k_scale,
        v_scale,
        out_scale,
        out_scale.stride(1),
        dim**-0.5 * LOG2E,
        table_BP.stride(0),
        splits,
        heads,
        kv_heads,
        dim,
        dim_p,
        max(16, triton.next_power_of_2(heads // kv_heads)),
        CHUNK // PAGE,
        splits > 1,
        scaled,
        codes is not None,
        codes == "pow2",
        num_warps=warps,
        num_stages=stages,
        launch_pdl=True,
    )
    if splits > 1:
        _join[(heads, batch)](
            part,
            state,
            out,
            lengths_B,
            v_scale,
            out_scale,
            out_scale.stride(1),
            splits,
            heads,
            kv_heads,
            dim,
            dim_p,
            CHUNK // PAGE,
            scaled,
            codes is not None,
            codes == "pow2",
            num_warps=1,
            launch_pdl=True,
        )
    return found


def _stages(programs: int) -> int:
    """Copies in flight of a decode program. Five keep the memory busiest, but then two programs fill a multiprocessor; with
    three, four of them do, which is better where that makes one wave of what would be two."""
    slots = 2 * torch.cuda.get_device_properties().multi_processor_count
    return 3 if slots < programs <= 2 * slots else 5


def _raw(pages: Tensor) -> Tensor:
    return pages.view(torch.uint8) if pages.element_size() == 1 else pages
