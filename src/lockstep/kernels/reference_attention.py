"""Causal attention over slots: one loop over keys in steps of 64 serves packed training, prefill and paged decode.

For a query row, with keys in ascending steps of 64 and base-2 softmax state in FP32 (FlashAttention-2, arXiv 2307.08691,
algorithm 1, with the rounding spelled out):

    s   = (q . k) * (softmax_scale * log2 e * k_scale)         FP32
    m'  = max(m, max s);  a = 2^(m - m');  p = bf16(2^(s - m'))
    l   = l a + sum p;    acc = acc a + p v
    o   = bf16(acc / l * v_scale)

`p` is rounded to BF16 before the value product *and* before its sum. FP8 keys and values are widened exactly; their scales
never touch the codes. A key step in which a row has no key leaves its state bit for bit: a = 1, p = 0. So a row may share
a tile with longer ones. 2^t is computed as exp(t ln 2): torch's own exp2 rounds differently at the end of a vector than
inside it, its exp doesn't.

The backward pass recomputes p and takes the gradient straight through the BF16 rounding; saturated FP8 elements are the
caller's affair.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.kernels.attention_index import KEY_STEP, AttentionIndex, TileGroup
from lockstep.kernels.rowwise import row_bmm, tree_sum
from lockstep.numerics.formats import E4M3
from lockstep.numerics.quantize import widen

LOG2E = 1.0 / math.log(2.0)
LN2 = math.log(2.0)
_EMPTY = -1e30


def attention_forward(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    index: AttentionIndex,
    k_scale_G: Tensor | None,
    v_scale_G: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(o [T, H, D] in q's type, base-2 log-sum-exp [T, H] FP32).

    k_SGD, v_SGD: key/value store [S, KV heads, D] in BF16 or e4m3. dtype: FP32 or FP64, type of the products.
    """
    out = torch.zeros_like(q_THD)
    lse = torch.zeros(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
    factor_G = _score_factor(q_THD, k_SGD, k_scale_G)
    for tile in index.tiles:
        q = _gather_queries(q_THD, tile, index.group, dtype)
        o, m, denominator = _tile_forward(q, k_SGD, v_SGD, tile, factor_G)
        o = o / denominator.clamp(min=1e-30)[..., None]
        if v_scale_G is not None:
            o = o * v_scale_G[None, :, None, None]
        _scatter(out, o.to(q_THD.dtype), tile, index.group)
        _scatter(lse[..., None], (m + denominator.log() * LOG2E)[..., None], tile, index.group)
    return out, lse


def attention_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    index: AttentionIndex,
    k_scale_G: Tensor | None,
    v_scale_G: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq [T, H, D], dk, dv [S, KV heads, D]) in FP32, of the true keys and values (code times scale)."""
    dq = torch.zeros(q_THD.shape, dtype=torch.float32, device=q_THD.device)
    dk, dv = (torch.zeros(k_SGD.shape, dtype=torch.float32, device=q_THD.device) for _ in range(2))
    delta_TH = (grad_THD.float() * out_THD.float()).sum(-1)
    for tile in index.tiles:
        _tile_backward(
            tile,
            index.group,
            grad_THD,
            q_THD,
            k_SGD,
            v_SGD,
            lse_TH,
            delta_TH,
            k_scale_G,
            v_scale_G,
            dtype,
            dq,
            dk,
            dv,
        )
    return dq, dk, dv


def _tile_forward(
    q_BGMD: Tensor, k_SGD: Tensor, v_SGD: Tensor, tile: TileGroup, factor_G: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Unnormalised output [B, G, M, D], maximum and denominator [B, G, M], FP32."""
    batch, heads, rows, dim = q_BGMD.shape
    acc = torch.zeros(batch, heads, rows, dim, device=q_BGMD.device)
    m = torch.full((batch, heads, rows), _EMPTY, device=q_BGMD.device)
    total = torch.zeros_like(m)
    for step, count in enumerate(tile.active):
        k = _gather_keys(k_SGD, tile, step, count, q_BGMD.dtype)
        v = _gather_keys(v_SGD, tile, step, count, q_BGMD.dtype)
        s = _scores(q_BGMD[:count], k, tile.hidden[step], factor_G)
        m_new = torch.maximum(m[:count], s.amax(-1))
        p = s.sub_(m_new[..., None]).mul_(LN2).exp_().bfloat16().float()
        a = ((m[:count] - m_new) * LN2).exp_()
        total[:count] = total[:count] * a + tree_sum(p)
        product = row_bmm(p.to(q_BGMD.dtype).flatten(0, 1), v.flatten(0, 1)).view(count, heads, rows, dim)
        acc[:count] = acc[:count] * a[..., None] + product.float()
        m[:count] = m_new
    return acc, m, total


def _tile_backward(
    tile: TileGroup,
    group: int,
    grad_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    lse_TH: Tensor,
    delta_TH: Tensor,
    k_scale_G: Tensor | None,
    v_scale_G: Tensor | None,
    dtype: torch.dtype,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    q = _gather_queries(q_THD, tile, group, dtype)
    do = _gather_queries(grad_THD, tile, group, dtype)
    lse = _gather_queries(lse_TH[..., None], tile, group, torch.float32)
    delta = _gather_queries(delta_TH[..., None], tile, group, torch.float32)
    factor_G = _score_factor(q_THD, k_SGD, k_scale_G)
    dq_tile = torch.zeros_like(q)
    v_factor = 1.0 if v_scale_G is None else v_scale_G[None, :, None, None]
    k_factor = 1.0 if k_scale_G is None else k_scale_G[None, :, None, None]
    softmax_scale = q_THD.shape[-1] ** -0.5
    for step, count in enumerate(tile.active):
        k = _gather_keys(k_SGD, tile, step, count, dtype) * k_factor
        v = _gather_keys(v_SGD, tile, step, count, dtype) * v_factor
        codes = _gather_keys(k_SGD, tile, step, count, dtype)
        s = _scores(q[:count], codes, tile.hidden[step], factor_G)
        p = s.sub_(lse[:count]).mul_(LN2).exp_().to(dtype)
        slots = tile.slots[step]
        dv.index_add_(0, slots, _to_store(p.mT @ do[:count]))
        ds = p * (do[:count] @ v.mT - delta[:count]) * softmax_scale
        dq_tile[:count] += ds @ k
        dk.index_add_(0, slots, _to_store(ds.mT @ q[:count]))
    _scatter(dq, dq_tile.float(), tile, group)


def _score_factor(q_THD: Tensor, k_SGD: Tensor, k_scale_G: Tensor | None) -> Tensor:
    base = torch.full(
        (k_SGD.shape[1],), q_THD.shape[-1] ** -0.5 * LOG2E, dtype=torch.float32, device=q_THD.device
    )
    return base if k_scale_G is None else base * k_scale_G


def _scores(q_BGMD: Tensor, k_BGKD: Tensor, hidden: Tensor, factor_G: Tensor) -> Tensor:
    """Masked base-2 scores [B, G, M, 64] FP32."""
    s = row_bmm(q_BGMD.flatten(0, 1), k_BGKD.flatten(0, 1).mT).view(*q_BGMD.shape[:3], KEY_STEP).float()
    return s.mul_(factor_G[None, :, None, None]).masked_fill_(hidden, -torch.inf)


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
