"""The gradient of attention in two passes, each of which owns what it writes: the same bits in every run, no atomics.

`_keys_pass` holds a tile of keys of one key/value head and walks over the queries that see them, all heads of the group;
`_queries_pass` holds a tile of queries of one head and walks over its keys:

    s  = q k^T;   dp = do v^T                            warpgroup instruction, FP32
    p  = 2^(s f - lse);   ds = p (dp fv - delta)         f as in the forward, so p is the forward's; fv the values' scale
    dv += bf16(p)^T do;   dk += bf16(ds)^T q             keys pass,    dk times 1 / sqrt(D) at the end
    dq += bf16(ds) k                                     queries pass, dq times 1 / sqrt(D) and the keys' scale at the end

Seven products instead of the five of a single pass: that is the price of sums in a fixed order. Keys are codes (widened to
BF16, exact) whose scales are applied to FP32 numbers, as in the forward. Rows are read by TMA with the head as the outermost
dimension, so a head of 80 is padded with zeros, and rows past the last one are zeros. Log-sum-exp and delta are kept with a
gap after every run, where lse = inf and delta = 0: a query past its end has p = 0, and only steps on the diagonal compare
positions.

A row that several runs see gets FP32 partial gradients, one for each, and `sum_rows` adds them in ascending order.

Legend: T rows, H query heads, G key/value heads, D head size, W keys of all runs, S key rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep.kernels.gradient_index import KEY_TILE, QUERY_TILE, GradientIndex
from lockstep.kernels.operation import operation
from lockstep.kernels.triton.attention import LOG2E
from lockstep.kernels.triton.sizes import cdiv, power_of_2

STEP = 64
"""Rows of a step: queries in the keys pass, keys in the queries pass."""
SUM_COLUMNS = 1024


@triton.jit
def _delta_pass(
    do_ptr, o_ptr, lse_ptr, delta_ptr, lse_to_ptr, tile_ptr, spaced_rows, H: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """delta = sum(do o) and the log-sum-exp at spaced rows, head by head: a walk over a run's rows reads whole lines."""
    h, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(tile_ptr + tile * 5).to(tl.int64)
    count = tl.load(tile_ptr + tile * 5 + 1)
    to = h.to(tl.int64) * spaced_rows + tl.load(tile_ptr + tile * 5 + 4)
    r, d = tl.arange(0, BM), tl.arange(0, DP)
    at = ((row + r) * H + h)[:, None] * D + d[None, :]
    ok = (r < count)[:, None] & (d < D)[None, :]
    do = tl.load(do_ptr + at, mask=ok, other=0.0).to(tl.float32)
    o = tl.load(o_ptr + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(delta_ptr + to + r, tl.sum(do * o, 1), mask=r < count)
    tl.store(lse_to_ptr + to + r, tl.load(lse_ptr + (row + r) * H + h, mask=r < count), mask=r < count)


@triton.jit
def _rows(desc, head, row, N: tl.constexpr, DP: tl.constexpr):
    """[N, DP] rows of one head."""
    return desc.load([head, row, 0]).reshape(N, DP)


@triton.jit
def _numbers(ptr, head, spaced_rows, spaced, N: tl.constexpr):
    """[N] numbers of one head's rows."""
    return tl.load(ptr + head.to(tl.int64) * spaced_rows + spaced + tl.arange(0, N))


@triton.jit
def _walk_queries(
    dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, h, row, spaced_rows, spaced, ahead, factor, v_scale, first, last,
    DP: tl.constexpr, KEYS: tl.constexpr, BM: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Steps first .. last over the queries of one head. ahead: position of query 0 minus that of key 0."""
    r, c = tl.arange(0, BM), tl.arange(0, KEYS)
    for step in range(first, last):
        at = step * BM
        q = _rows(q_desc, h, row + at, BM, DP)
        do = _rows(do_desc, h, row + at, BM, DP)
        lse = _numbers(lse_ptr, h, spaced_rows, spaced + at, BM)
        delta = _numbers(delta_ptr, h, spaced_rows, spaced + at, BM)
        s = tl.dot(k, tl.trans(q))
        p = tl.exp2(s * factor - lse[None, :])
        if DIAGONAL:
            p = tl.where(c[:, None] <= (ahead + at + r)[None, :], p, 0.0)
        dv = tl.dot(p.to(tl.bfloat16), do, dv)
        dp = tl.dot(v, tl.trans(do))
        ds = p * (dp * v_scale - delta[None, :])
        dk = tl.dot(ds.to(tl.bfloat16), q, dk)
    return dk, dv


@triton.jit
def _keys_pass(
    q_desc, do_desc, k_desc, v_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, tile_ptr, ks_ptr, vs_ptr, spaced_rows, base,
    softmax_scale, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr, BM: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    g, tile = tl.program_id(0), tl.program_id(1)
    entry = tl.load(tile_ptr + tile * 6)
    keys = tl.load(tile_ptr + tile * 6 + 1)
    row = tl.load(tile_ptr + tile * 6 + 2)
    count = tl.load(tile_ptr + tile * 6 + 3)
    ahead = tl.load(tile_ptr + tile * 6 + 4)
    spaced = tl.load(tile_ptr + tile * 6 + 5)
    k = _rows(k_desc, g, entry, KEYS, DP)
    v = _rows(v_desc, g, entry, KEYS, DP)
    factor, v_scale = base, 1.0
    if SCALED:
        factor = base * tl.load(ks_ptr + g)
        v_scale = tl.load(vs_ptr + g)
    steps = tl.cdiv(count, BM)
    diagonal = tl.minimum(tl.cdiv(tl.maximum(KEYS - 1 - ahead, 0), BM), steps)
    dk = tl.zeros((KEYS, DP), tl.float32)
    dv = tl.zeros((KEYS, DP), tl.float32)
    for h in range(g * (H // G), (g + 1) * (H // G)):
        dk, dv = _walk_queries(
            dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, h, row, spaced_rows, spaced, ahead, factor, v_scale,
            0, diagonal, DP, KEYS, BM, True,
        )  # fmt: skip
        dk, dv = _walk_queries(
            dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, h, row, spaced_rows, spaced, ahead, factor, v_scale,
            diagonal, steps, DP, KEYS, BM, False,
        )  # fmt: skip
    c, d = tl.arange(0, KEYS), tl.arange(0, DP)
    to = ((entry + c).to(tl.int64) * G + g)[:, None] * D + d[None, :]
    ok = (c < keys)[:, None] & (d < D)[None, :]
    tl.store(dk_ptr + to, (dk * softmax_scale).to(dk_ptr.dtype.element_ty), mask=ok)
    tl.store(dv_ptr + to, dv.to(dv_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _walk_keys(
    dq, q, do, lse, delta, k_desc, v_desc, g, entry, position, factor, v_scale, first, last,
    DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Steps first .. last over the keys of one run."""
    r, c = tl.arange(0, BM), tl.arange(0, BN)
    for step in range(first, last):
        at = step * BN
        k = _rows(k_desc, g, entry + at, BN, DP)
        v = _rows(v_desc, g, entry + at, BN, DP)
        s = tl.dot(q, tl.trans(k))
        dp = tl.dot(do, tl.trans(v))
        p = tl.exp2(s * factor - lse[:, None])
        if DIAGONAL:
            p = tl.where((at + c)[None, :] <= (position + r)[:, None], p, 0.0)
        ds = p * (dp * v_scale - delta[:, None])
        dq = tl.dot(ds.to(tl.bfloat16), k, dq)
    return dq


@triton.jit
def _queries_pass(
    q_desc, do_desc, k_desc, v_desc, lse_ptr, delta_ptr, dq_ptr, tile_ptr, ks_ptr, vs_ptr, spaced_rows, base, softmax_scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    h, tile = tl.program_id(0), tl.program_id(1)
    g = h // (H // G)
    row = tl.load(tile_ptr + tile * 5)
    count = tl.load(tile_ptr + tile * 5 + 1)
    position = tl.load(tile_ptr + tile * 5 + 2)
    entry = tl.load(tile_ptr + tile * 5 + 3)
    spaced = tl.load(tile_ptr + tile * 5 + 4)
    q = _rows(q_desc, h, row, BM, DP)
    do = _rows(do_desc, h, row, BM, DP)
    r, d = tl.arange(0, BM), tl.arange(0, DP)
    lse = tl.where(r < count, _numbers(lse_ptr, h, spaced_rows, spaced, BM), float("inf"))
    delta = _numbers(delta_ptr, h, spaced_rows, spaced, BM)
    factor, v_scale, q_scale = base, 1.0, softmax_scale
    if SCALED:
        factor = base * tl.load(ks_ptr + g)
        v_scale = tl.load(vs_ptr + g)
        q_scale = softmax_scale * tl.load(ks_ptr + g)
    whole = (position + 1) // BN
    dq = tl.zeros((BM, DP), tl.float32)
    dq = _walk_keys(
        dq,
        q,
        do,
        lse,
        delta,
        k_desc,
        v_desc,
        g,
        entry,
        position,
        factor,
        v_scale,
        0,
        whole,
        DP,
        BM,
        BN,
        False,
    )
    dq = _walk_keys(
        dq, q, do, lse, delta, k_desc, v_desc, g, entry, position, factor, v_scale, whole,
        tl.cdiv(position + count, BN), DP, BM, BN, True,
    )  # fmt: skip
    to = ((row + r).to(tl.int64) * H + h)[:, None] * D + d[None, :]
    ok = (r < count)[:, None] & (d < D)[None, :]
    tl.store(dq_ptr + to, (dq * q_scale).to(tl.bfloat16), mask=ok)


@triton.jit
def _sum_pass(
    dk_ptr, dv_ptr, dk_to_ptr, dv_to_ptr, order_ptr, begin_ptr, known, WIDTH: tl.constexpr, BN: tl.constexpr
):
    """One key row, BN of its columns: partial gradients in ascending order, in FP32."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    first = tl.load(begin_ptr + row, mask=row < known, other=0)
    last = tl.load(begin_ptr + row + 1, mask=row < known, other=0)
    dk = tl.zeros((BN,), tl.float32)
    dv = tl.zeros((BN,), tl.float32)
    for i in range(first, last):
        at = tl.load(order_ptr + i) * WIDTH + c
        dk += tl.load(dk_ptr + at, mask=c < WIDTH, other=0.0).to(tl.float32)
        dv += tl.load(dv_ptr + at, mask=c < WIDTH, other=0.0).to(tl.float32)
    to = row * WIDTH + c
    tl.store(dk_to_ptr + to, dk.to(dk_to_ptr.dtype.element_ty), mask=c < WIDTH)
    tl.store(dv_to_ptr + to, dv.to(dv_to_ptr.dtype.element_ty), mask=c < WIDTH)


def two_pass_grad(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_WGD: Tensor,
    v_WGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    index: GradientIndex,
    scales: tuple[Tensor, Tensor] | None,
    *,
    stages: int = 3,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [T, H, D] BF16, dk, dv [W, G, D]) of keys and values that are listed run after run, BF16 or the values of codes in
    BF16 (then with `scales`; dk and dv are gradients of code times scale). dk, dv are FP32 where rows are shared and a sum is
    still to come, else BF16. D is a multiple of 8, at most 128."""
    k_scale, v_scale = scales if scales is not None else (None, None)
    return _two_passes(
        grad_THD, q_THD, k_WGD, v_WGD, out_THD, lse_TH, index.key_tiles_N6, index.query_tiles_N5, k_scale, v_scale,
        spaced_rows=index.spaced_rows, whole=index.covered == len(q_THD), shared=index.shared, stages=stages,
    )  # fmt: skip


def _gradients(q_THD: Tensor, k_WGD: Tensor, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Storage for dq, dk and dv."""
    partial = torch.float32 if shared else torch.bfloat16
    dk, dv = (torch.empty(k_WGD.shape, dtype=partial, device=q_THD.device) for _ in range(2))
    return torch.empty_like(q_THD), dk, dv


@operation("attention_grad", fake=_gradients)
def _two_passes(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_WGD: Tensor,
    v_WGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    key_tiles_N6: Tensor,
    query_tiles_N5: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    spaced_rows: int,
    whole: bool,
    shared: bool,
    stages: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """whole: every query belongs to a tile, else the rows between get zero."""
    _, heads, dim = q_THD.shape
    kv_heads, width = k_WGD.shape[1], power_of_2(dim)
    assert dim % 8 == 0 and dim <= 128, "see attention_library.choose"
    device, spaced, scaled = q_THD.device, spaced_rows, k_scale is not None
    delta_HP = torch.zeros(heads, spaced, device=device)
    lse_HP = torch.full((heads, spaced), torch.inf, device=device)
    _delta_pass[(heads, len(query_tiles_N5))](
        grad_THD, out_THD, lse_TH, delta_HP, lse_HP, query_tiles_N5, spaced, heads, dim, width, QUERY_TILE,
        num_warps=8,
    )  # fmt: skip
    dq, dk, dv = _gradients(q_THD, k_WGD, shared)
    if not whole:
        dq.zero_()
    k_scale, v_scale = (delta_HP, delta_HP) if k_scale is None or v_scale is None else (k_scale, v_scale)
    base, softmax_scale = dim**-0.5 * LOG2E, dim**-0.5
    _keys_pass[(kv_heads, len(key_tiles_N6))](
        *(_by_head(x, STEP, width) for x in (q_THD, grad_THD)),
        *(_by_head(x, KEY_TILE, width) for x in (k_WGD, v_WGD)),
        lse_HP, delta_HP, dk, dv, key_tiles_N6, k_scale, v_scale, spaced, base, softmax_scale,
        heads, kv_heads, dim, width, KEY_TILE, STEP, scaled, num_warps=8, num_stages=stages,
    )  # fmt: skip
    _queries_pass[(heads, len(query_tiles_N5))](
        *(_by_head(x, QUERY_TILE, width) for x in (q_THD, grad_THD)),
        *(_by_head(x, STEP, width) for x in (k_WGD, v_WGD)),
        lse_HP, delta_HP, dq, query_tiles_N5, k_scale, v_scale, spaced, base, softmax_scale,
        heads, kv_heads, dim, width, QUERY_TILE, STEP, scaled, num_warps=8, num_stages=stages,
    )  # fmt: skip
    return dq, dk, dv


def sum_rows(
    dk_WGD: Tensor, dv_WGD: Tensor, index: GradientIndex, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(dk, dv) [rows, G, D] from the gradients of every run's keys; rows that no run sees get zero."""
    return _sum_rows(
        dk_WGD, dv_WGD, index.order_W, index.begin_S1, known=index.key_rows, rows=rows, dtype=dtype
    )


def _sums(dk_WGD: Tensor, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (rows, *dk_WGD.shape[1:])
    return torch.empty(shape, dtype=dtype, device=dk_WGD.device), torch.empty(
        shape, dtype=dtype, device=dk_WGD.device
    )


@operation("attention_grad_sum", fake=_sums)
def _sum_rows(
    dk_WGD: Tensor,
    dv_WGD: Tensor,
    order_W: Tensor,
    begin_S1: Tensor,
    *,
    known: int,
    rows: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """known: key rows that the index speaks of."""
    dk, dv = _sums(dk_WGD, rows, dtype)
    width = dk_WGD.shape[1] * dk_WGD.shape[2]
    _sum_pass[(rows, cdiv(width, SUM_COLUMNS))](
        dk_WGD, dv_WGD, dk, dv, order_W, begin_S1, known, width, SUM_COLUMNS, num_warps=4
    )
    return dk, dv


def _by_head(x_THD: Tensor, count: int, width: int) -> TensorDescriptor:
    """Blocks [1, count, width] of [H, T, D]; whatever lies outside is zero."""
    rows, heads, dim = x_THD.shape
    return TensorDescriptor(x_THD, [heads, rows, dim], [dim, heads * dim, 1], [1, count, width])
