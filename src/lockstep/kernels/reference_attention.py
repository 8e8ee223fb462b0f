"""Causal attention over slots: one loop over keys in steps of 64 serves packed training, prefill and paged decode.

For a query row, with keys in ascending steps of 64 and base-2 softmax state in FP32 (FlashAttention-2, arXiv 2307.08691,
algorithm 1, with the rounding spelled out):

    s   = (q . k) * (softmax_scale * log2 e * k_scale)         FP32
    m'  = max(m, max s);  a = 2^(m - m');  p = r(2^(s - m'))
    l   = l a + sum p;    acc = acc a + p v
    o   = bf16(acc / l * v_scale)

`r` rounds to BF16, over FP8 keys and values to FP16: before the value product *and* before its sum. Those are widened
exactly; their scales never touch the codes. A key step in which a row has no key leaves its state bit for bit: a = 1, p = 0.
So a row may share a tile with longer ones. 2^t is computed as exp(t ln 2): torch's own exp2 rounds differently at the end of
a vector than inside it, its exp doesn't.

FP8 attention (`AttentionForm.query_scale`) changes two lines and nothing else. A query row gets e4m3 codes under a scale of
its own for each head, which joins the factor of s; and p = e4m3(448 * 2^(s - m')), so that the largest probability is the
largest code. The 448 is in acc and in l alike: o needs no correction, the log-sum-exp a constant one. Products are then of
codes, as FP8 tensor cores multiply them.

The backward pass recomputes p and takes the gradient straight through every rounding, to the values the codes stand for;
saturated FP8 elements are the caller's affair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.attention_form import AttentionForm
from lockstep.kernels.attention_index import KEY_STEP, AttentionIndex, TileGroup
from lockstep.kernels.rowwise import row_bmm, tree_sum
from lockstep.numerics.formats import E4M3, E4M3_MAX, ScaleKind
from lockstep.numerics.quantize import scale_from_amax, to_codes, widen

LOG2E = 1.0 / math.log(2.0)
LN2 = math.log(2.0)
_EMPTY = -1e30


@dataclass(frozen=True)
class _Queries:
    """values_THD: what is multiplied with keys, BF16 values or FP32 values of codes. factor_TH1: FP32, what a score is
    multiplied by on the query's side; None for plain queries."""

    values_THD: Tensor
    factor_TH1: Tensor | None


def attention_forward(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    index: AttentionIndex,
    form: AttentionForm,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(o [T, H, D] in q's type, base-2 log-sum-exp [T, H] FP32).

    k_SGD, v_SGD: key/value store [S, KV heads, D] in BF16 or e4m3, as `form` says. dtype: FP32 or FP64, type of the
    products.
    """
    out = torch.zeros_like(q_THD)
    lse = torch.zeros(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
    queries = _queries(q_THD, form)
    for tile in index.tiles:
        q = _gather_queries(queries.values_THD, tile, index.group, dtype)
        factor = _score_factor(queries, k_SGD, form, tile, index.group)
        o, m, denominator = _tile_forward(q, k_SGD, v_SGD, tile, factor, form.query_scale is not None)
        o = o / denominator.clamp(min=1e-30)[..., None]
        if form.v_scale_G is not None:
            o = o * form.v_scale_G[None, :, None, None]
        if form.query_scale is not None:
            denominator = denominator / E4M3_MAX
        _scatter(out, o.to(q_THD.dtype), tile, index.group)
        _scatter(lse[..., None], (m + denominator.log() * LOG2E)[..., None], tile, index.group)
    return out, lse


def quantize_queries(q_THD: Tensor, kind: ScaleKind) -> tuple[Tensor, Tensor]:
    """(FP32 values of e4m3 codes [T, H, D], scales [T, H, 1] FP32): one scale for each row and head. A row that isn't finite
    becomes NaN."""
    q = q_THD.float()
    scale = scale_from_amax(q.abs().amax(-1, keepdim=True), kind)
    return to_codes(q / scale).float(), scale


def _queries(q_THD: Tensor, form: AttentionForm) -> _Queries:
    if form.query_scale is None:
        return _Queries(q_THD, None)
    return _Queries(*quantize_queries(q_THD, form.query_scale))


def _tile_forward(
    q_BGMD: Tensor, k_SGD: Tensor, v_SGD: Tensor, tile: TileGroup, factor: Tensor, fp8: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Unnormalised output [B, G, M, D], maximum and denominator [B, G, M], FP32; with FP8 probabilities both sums are 448
    times as large."""
    batch, heads, rows, dim = q_BGMD.shape
    acc = torch.zeros(batch, heads, rows, dim, device=q_BGMD.device)
    m = torch.full((batch, heads, rows), _EMPTY, device=q_BGMD.device)
    total = torch.zeros_like(m)
    rounding = torch.float16 if k_SGD.dtype == E4M3 else torch.bfloat16
    for step, count in enumerate(tile.active):
        k = _gather_keys(k_SGD, tile, step, count, q_BGMD.dtype)
        v = _gather_keys(v_SGD, tile, step, count, q_BGMD.dtype)
        s = _scores(q_BGMD[:count], k, tile.hidden[step], factor[:count])
        m_new = torch.maximum(m[:count], s.amax(-1))
        p = s.sub_(m_new[..., None]).mul_(LN2).exp_()
        # NaN survives torch's own widening, which `widen` trades for speed.
        p = to_codes(p.mul_(E4M3_MAX)).float() if fp8 else p.to(rounding).float()
        a = ((m[:count] - m_new) * LN2).exp_()
        total[:count] = total[:count] * a + tree_sum(p)
        product = row_bmm(p.to(q_BGMD.dtype).flatten(0, 1), v.flatten(0, 1)).view(count, heads, rows, dim)
        acc[:count] = acc[:count] * a[..., None] + product.float()
        m[:count] = m_new
    return acc, m, total


@dataclass(frozen=True)
class _Backward:
    """What every tile of a backward pass reads, and the three gradients it adds to."""

    grad_THD: Tensor
    queries: _Queries
    k_SGD: Tensor
    v_SGD: Tensor
    lse_TH: Tensor
    delta_TH: Tensor
    group: int
    form: AttentionForm
    dtype: torch.dtype
    dq_THD: Tensor
    dk_SGD: Tensor
    dv_SGD: Tensor

    def tile(self, tile: TileGroup) -> None:
        """Adds the gradients of one group of tiles."""
        q = _gather_queries(self.queries.values_THD, tile, self.group, self.dtype)
        q_true = q
        if self.queries.factor_TH1 is not None:
            q_true = q * _gather_queries(self.queries.factor_TH1, tile, self.group, self.dtype)
        do = _gather_queries(self.grad_THD, tile, self.group, self.dtype)
        lse = _gather_queries(self.lse_TH[..., None], tile, self.group, torch.float32)
        delta = _gather_queries(self.delta_TH[..., None], tile, self.group, torch.float32)
        factor = _score_factor(self.queries, self.k_SGD, self.form, tile, self.group)
        dq_tile = torch.zeros_like(q)
        k_scale, v_scale = _by_head(self.form.k_scale_G), _by_head(self.form.v_scale_G)
        softmax_scale = q.shape[-1] ** -0.5
        for step, count in enumerate(tile.active):
            codes = _gather_keys(self.k_SGD, tile, step, count, self.dtype)
            v = _gather_keys(self.v_SGD, tile, step, count, self.dtype) * v_scale
            s = _scores(q[:count], codes, tile.hidden[step], factor[:count])
            p = s.sub_(lse[:count]).mul_(LN2).exp_().to(self.dtype)
            slots = tile.slots[step]
            self.dv_SGD.index_add_(0, slots, _to_store(p.mT @ do[:count]))
            ds = p * (do[:count] @ v.mT - delta[:count]) * softmax_scale
            dq_tile[:count] += ds @ (codes * k_scale)
            self.dk_SGD.index_add_(0, slots, _to_store(ds.mT @ q_true[:count]))
        _scatter(self.dq_THD, dq_tile.float(), tile, self.group)


def attention_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    index: AttentionIndex,
    form: AttentionForm,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq [T, H, D], dk, dv [S, KV heads, D]) in FP32, of the true values (code times scale)."""
    dq = torch.zeros(q_THD.shape, dtype=torch.float32, device=q_THD.device)
    dk, dv = (torch.zeros(k_SGD.shape, dtype=torch.float32, device=q_THD.device) for _ in range(2))
    delta_TH = (grad_THD.float() * out_THD.float()).sum(-1)
    queries = _queries(q_THD, form)
    backward = _Backward(
        grad_THD, queries, k_SGD, v_SGD, lse_TH, delta_TH, index.group, form, dtype, dq, dk, dv
    )
    for tile in index.tiles:
        backward.tile(tile)
    return dq, dk, dv


def _by_head(scale_G: Tensor | None) -> Tensor | float:
    return 1.0 if scale_G is None else scale_G[None, :, None, None]


def _score_factor(
    queries: _Queries, k_SGD: Tensor, form: AttentionForm, tile: TileGroup, group: int
) -> Tensor:
    """What a tile's products are multiplied by to be base-2 scores, FP32 [B, G, M or 1, 1]."""
    dim = queries.values_THD.shape[-1]
    base = torch.full((k_SGD.shape[1],), dim**-0.5 * LOG2E, dtype=torch.float32, device=k_SGD.device)
    if form.k_scale_G is not None:
        base = base * form.k_scale_G
    factor = base[None, :, None, None]
    if queries.factor_TH1 is None:
        return factor.expand(len(tile.query_BQ), -1, -1, -1)
    return factor * _gather_queries(queries.factor_TH1, tile, group, torch.float32)


def _scores(q_BGMD: Tensor, k_BGKD: Tensor, hidden: Tensor, factor: Tensor) -> Tensor:
    """Masked base-2 scores [B, G, M, 64] FP32."""
    s = row_bmm(q_BGMD.flatten(0, 1), k_BGKD.flatten(0, 1).mT).view(*q_BGMD.shape[:3], KEY_STEP).float()
    return s.mul_(factor).masked_fill_(hidden, -torch.inf)


def _gather_queries(x_THD: Tensor, tile: TileGroup, group: int, dtype: torch.dtype) -> Tensor:
    """[B, KV heads, M, D]: row (query * group + head in group) of each tile, padded to the tile's M rows."""
    batch, size = tile.query_BQ.shape
    heads = x_THD.shape[1] // group
    x = x_THD[tile.query_BQ.reshape(-1)].view(batch, size, heads, group, -1).to(dtype)
    x = x.permute(0, 2, 1, 3, 4).reshape(batch, heads, size * group, -1)
    out = x.new_zeros(batch, heads, tile.rows, x.shape[-1])
    out[:, :, : size * group] = x
    return out


def _scatter(out_THD: Tensor, tile_BGMD: Tensor, tile: TileGroup, group: int) -> None:
    batch, size = tile.query_BQ.shape
    heads, dim = tile_BGMD.shape[1], tile_BGMD.shape[-1]
    x = tile_BGMD[:, :, : size * group].reshape(batch, heads, size, group, dim).permute(0, 2, 1, 3, 4)
    real = tile.position_BQ.reshape(-1) >= 0
    rows = tile.query_BQ.reshape(-1)[real]
    out_THD[rows] = x.reshape(batch * size, heads * group, dim)[real]


def _gather_keys(store_SGD: Tensor, tile: TileGroup, step: int, count: int, dtype: torch.dtype) -> Tensor:
    """[count, KV heads, 64, D] of the given key step, widened."""
    if store_SGD.dtype == E4M3:
        rows = widen(store_SGD.view(torch.uint8)[tile.slots[step]].view(E4M3))
    else:
        rows = store_SGD[tile.slots[step]]
    heads, dim = store_SGD.shape[1:]
    out = torch.empty(count, heads, KEY_STEP, dim, dtype=dtype, device=store_SGD.device)
    return out.copy_(rows.view(count, KEY_STEP, heads, dim).transpose(1, 2))


def _to_store(x_BGKD: Tensor) -> Tensor:
    return x_BGKD.transpose(1, 2).flatten(0, 1).float()
