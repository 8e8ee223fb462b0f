"""The gradient of attention as it is written down, in plain torch: for head sizes that no kernel takes.

    p  = 2^(s - lse);   dv = p^T do;   ds = p (do v^T - delta) / sqrt(D);   dq = ds k;   dk = ds^T q        delta = sum(do o)

A chunk of queries against all keys of its run at a time, in the given type; the runs one after the other, so the sum over
runs that share a key has one order. A slow path, tens of times slower than a kernel, and exact but for rounding.

Next: `attention_library.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.kernels.attention_form import AttentionForm
from lockstep.kernels.attention_index import Run
from lockstep.numerics.formats import E4M3

QUERIES = 512
"""Queries of a chunk: at 8,192 keys and 32 heads, scores of 512 MiB in FP32."""


def formula_grad(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    runs: Sequence[Run],
    form: AttentionForm,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [T, H, D], dk, dv [S, G, D]) in `dtype`, of the values that codes stand for."""
    heads, dim = q_THD.shape[1:]
    groups = k_SGD.shape[1]
    softmax_scale = dim**-0.5
    delta_TH = (grad_THD.to(dtype) * out_THD.to(dtype)).sum(-1)
    dq = torch.zeros(q_THD.shape, dtype=dtype, device=q_THD.device)
    dk, dv = (torch.zeros(k_SGD.shape, dtype=dtype, device=q_THD.device) for _ in range(2))
    for run in runs:
        slots = run.slots[: run.position + run.count].to(q_THD.device)
        k, v = values_of(k_SGD, slots, form.k_scale_G, dtype), values_of(v_SGD, slots, form.v_scale_G, dtype)
        dk_run, dv_run = torch.zeros_like(k), torch.zeros_like(v)
        for start in range(0, run.count, QUERIES):
            count = min(QUERIES, run.count - start)
            seen, rows = run.position + start + count, slice(run.row + start, run.row + start + count)
            q, do = (x[rows].to(dtype).view(count, groups, heads // groups, dim) for x in (q_THD, grad_THD))
            lse, delta = (
                x[rows].to(dtype).view(count, groups, -1).permute(1, 2, 0)[..., None]
                for x in (lse_TH, delta_TH)
            )
            s = torch.einsum("tgqd,sgd->gqts", q, k[:seen]) * softmax_scale
            position = torch.arange(seen - count, seen, device=s.device)
            s = s.masked_fill(torch.arange(seen, device=s.device) > position[:, None], -torch.inf)
            p = (s - lse * math.log(2.0)).exp()
            dv_run[:seen] += torch.einsum("gqts,tgqd->sgd", p, do)
            ds = p * (torch.einsum("tgqd,sgd->gqts", do, v[:seen]) - delta) * softmax_scale
            dq[rows] = torch.einsum("gqts,sgd->tgqd", ds, k[:seen]).reshape(count, heads, dim)
            dk_run[:seen] += torch.einsum("gqts,tgqd->sgd", ds, q)
        # A row occurs once in a run, so this is no sum over duplicates.
        dk[slots] = dk[slots] + dk_run
        dv[slots] = dv[slots] + dv_run
    return dq, dk, dv


def values_of(x_SGD: Tensor, rows_W: Tensor | None, scale_G: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What rows of keys or values stand for, [W, G, D]: all rows, or the given ones; codes widened and scaled."""
    if rows_W is not None:
        raw = x_SGD.view(torch.uint8) if x_SGD.dtype == E4M3 else x_SGD
        x_SGD = raw[rows_W].view(x_SGD.dtype)
    if scale_G is not None:
        if x_SGD.dtype == E4M3:
            x_SGD = x_SGD.float()
        x_SGD = x_SGD.to(torch.promote_types(dtype, torch.float32)) * scale_G[None, :, None]
    return x_SGD.to(dtype)
