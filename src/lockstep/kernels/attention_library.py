"""Who computes the gradient of attention, and the one file that talks to torch's own backward kernels.

Four paths take the exact forward's output and log-sum-exp:

- `two-pass`, our kernels (`triton/attention_backward.py`): the same bits in every run of the program, keys as codes with their
  scales in FP32, any packing. The default, and the only path of a deterministic run besides `formula`.
- `cudnn`: the fastest, but it adds up dq with atomics and torch has no switch for that, so its last bits change from run to
  run. It takes whole sequences as a dense batch: torch rebuilds cuDNN's plan at every packed call before 2.14 (42 ms each).
- `flash`: torch's FlashAttention 2, packed, keys of shared prompts listed once for each run. Deterministic when torch's
  switch is on, slower than that by partial sums of dq. Never chosen; the baseline of `lockstep bench attention`.
- `formula`: plain torch, for head sizes that nothing else takes, and for FP32.

cuDNN and flash know no scales, so codes are dequantized to BF16 for them: exact for powers of two, else rounded, and then p is no
longer the forward's. So `choose` never gives them scaled keys.

Layouts of the log-sum-exp (natural, FP32): flash wants [H, T]; cuDNN [B, H, length] up to some torch version and a trailing 1
from then on, so the forward operator is asked once. Sources: aten/src/ATen/native/transformers/cuda/attention_backward.cu and
.../cudnn/MHA.cpp.

Legend: T rows, S key rows, W keys of all runs, H query heads, G key/value heads, D head size, B sequences.
Next: `gradient_index.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.kernels.attention_form import PLAIN, AttentionForm
from lockstep.kernels.attention_formula import formula_grad, values_of
from lockstep.kernels.gradient_index import Dense, GradientIndex
from lockstep.kernels.triton.attention_backward import sum_rows, two_pass_grad
from lockstep.kernels.triton.kv import kv_values
from lockstep.numerics.formats import E4M3

if TYPE_CHECKING:
    from lockstep.kernels.packed_index import PackedIndex, StaticIndex

Path = Literal["two-pass", "cudnn", "flash", "formula"]
Gradients = tuple[Tensor, Tensor, Tensor]
WIDEST = 128
"""Head size up to which the kernels go; it has to be a multiple of 8."""
SHORTEST = 128
"""Length of a dense batch from which it goes to cuDNN."""
WASTE = 1.3
"""Padding up to which a dense batch is still the faster one, in pairs of query and key."""


def choose(index: GradientIndex, dim: int, form: AttentionForm, *, deterministic: bool) -> Path:
    """Who computes the gradient under these conditions."""
    if dim % 8 or dim > WIDEST:
        return "formula"
    if deterministic or form.k_scale_G is not None or not fits_cudnn(index):
        return "two-pass"
    return "cudnn"


def fits_cudnn(index: GradientIndex) -> bool:
    """Whether the pack is whole sequences, none sharing a key, of so similar lengths that padding costs little."""
    dense = index.dense
    return dense is not None and dense.length >= SHORTEST and dense.waste <= WASTE


def attention_grad(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    index: PackedIndex | StaticIndex,
    form: AttentionForm = PLAIN,
    *,
    deterministic: bool = True,
    path: Path | None = None,
) -> Gradients:
    """(dq [T, H, D], dk, dv [S, G, D]) in q's type, of the values that codes stand for.

    k_SGD, v_SGD: BF16, or e4m3 codes with the scales of `form`; BF16 together with scales are the codes' values, as in the
    forward. lse_TH: base 2, FP32, the forward's. Saturated elements are the caller's affair. path: this one, whatever
    `choose` says (tests and benchmarks). Raises ConfigError for FP8 queries, and for a path that does not take the pack.
    """
    if form.query_scale is not None:
        raise ConfigError(
            "FP8 queries and probabilities have no gradient on the GPU yet",
            where="flow.attention",
            fix="set flow.attention to bf16, or kernels to reference",
        )
    assert q_THD.dtype == grad_THD.dtype == out_THD.dtype and lse_TH.dtype == torch.float32
    dim, tables = q_THD.shape[-1], index.gradient
    path = path or choose(tables, dim, form, deterministic=deterministic)
    if path == "formula" or q_THD.dtype != torch.bfloat16:
        found = formula_grad(grad_THD, q_THD, k_SGD, v_SGD, out_THD, lse_TH, tables.runs, form)
        return tuple(x.to(q_THD.dtype) for x in found)  # type: ignore[return-value]
    if dim % 8 or dim > WIDEST:
        raise ConfigError(f"no {path} gradient of heads of {dim}", where="kernels", fix="leave the path open")
    scales = None
    if form.k_scale_G is not None and form.v_scale_G is not None:
        scales = (form.k_scale_G, form.v_scale_G)
    # Our kernels take codes' values and the scales apart; the library takes their product, rounded to BF16.
    if path == "two-pass" and k_SGD.dtype == v_SGD.dtype == E4M3:
        k, v = kv_values(k_SGD.contiguous(), v_SGD.contiguous(), tables.rows_W)
    else:
        k_by, v_by = (None, None) if scales is None or path == "two-pass" else scales
        k = values_of(k_SGD, tables.rows_W, k_by, torch.bfloat16).contiguous()
        v = values_of(v_SGD, tables.rows_W, v_by, torch.bfloat16).contiguous()
    grad, q, out = (x.contiguous() for x in (grad_THD, q_THD, out_THD))
    if path == "cudnn":
        dq, dk, dv = _cudnn_grad(grad, q, k, v, out, lse_TH, tables)
    elif path == "flash":
        dq, dk, dv = _flash_grad(grad, q, k, v, out, lse_TH, tables, deterministic=deterministic)
    else:
        k, v = k[: tables.entries], v[: tables.entries]
        dq, dk, dv = two_pass_grad(grad, q, k, v, out, lse_TH.contiguous(), tables, scales)
    if tables.rows_W is None and len(k_SGD) == len(dk):
        return dq, dk, dv
    return dq, *sum_rows(dk, dv, tables, len(k_SGD), q_THD.dtype)


def _flash_grad(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_WGD: Tensor,
    v_WGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    index: GradientIndex,
    *,
    deterministic: bool,
) -> Gradients:
    """Runs as packed sequences whose causal mask is aligned at the end: query i of a run sees its keys up to position + i."""
    rows = index.query_rows
    if rows is None and index.covered != len(q_THD):
        rows = torch.arange(index.covered, device=q_THD.device)
    grad, q, out, lse = (x if rows is None else x[rows] for x in (grad_THD, q_THD, out_THD, lse_TH))
    unused = torch.zeros(2, dtype=torch.int64, device=q.device)  # the state of dropout
    with _torch_deterministic(deterministic):
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, q, k_WGD[: index.entries], v_WGD[: index.entries], out, _natural(lse.t()),
            index.query_starts, index.key_starts, index.longest_query, index.longest_key,
            0.0, True, unused, unused,
        )  # fmt: skip
    if rows is not None:
        dq = torch.zeros_like(q_THD).index_copy_(0, rows, dq)
    return dq, dk, dv


def _cudnn_grad(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    index: GradientIndex,
) -> Gradients:
    """A dense batch [B, H, length, D], views of the packed rows where lengths are equal. Rows of padding have zero gradients
    and lie behind every query, so nothing sees them."""
    dense = index.dense
    if dense is None or not len(k_SGD) == len(q_THD) == index.entries:
        raise ConfigError(
            "cuDNN takes whole sequences without shared prompts", where="kernels", fix="leave the path open"
        )
    grad, q, k, v, out = (_batch(x, dense).transpose(1, 2) for x in (grad_THD, q_THD, k_SGD, v_SGD, out_THD))
    lse = _natural(_batch(lse_TH, dense).transpose(1, 2))
    if _trailing_one(q.device):
        lse = lse[..., None]
    found = torch.ops.aten._cudnn_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        *_no_dropout(q.device),
        None,
        None,
        None,
        dense.length,
        dense.length,
        0.0,
        True,
    )
    dq, dk, dv = (x.transpose(1, 2).flatten(0, 1) for x in found)
    if dense.place_T is None:
        return dq, dk, dv
    return dq[dense.place_T], dk[dense.place_T], dv[dense.place_T]


def _batch(x_T: Tensor, dense: Dense) -> Tensor:
    """Packed rows [T, ...] as [B, length, ...]."""
    if dense.place_T is not None:
        whole = x_T.new_zeros(dense.sequences * dense.length, *x_T.shape[1:])
        x_T = whole.index_copy_(0, dense.place_T, x_T)
    return x_T.view(dense.sequences, dense.length, *x_T.shape[1:])


def _natural(lse: Tensor) -> Tensor:
    """Base 2 to base e, contiguous as it stands."""
    return (lse * math.log(2.0)).contiguous()


def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """Seed and offset of a dropout that does not take place."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return zero, zero


@cache
def _trailing_one(device: torch.device) -> bool:
    """Whether this torch's cuDNN operators keep the log-sum-exp as [B, H, length, 1]."""
    x = torch.zeros(1, 1, 128, 64, dtype=torch.bfloat16, device=device)
    lse = torch.ops.aten._cudnn_attention_forward(x, x, x, None, None, None, 128, 128, True, 0.0, True)[1]
    return int(lse.dim()) == 4


@contextmanager
def _torch_deterministic(on: bool) -> Iterator[None]:
    """Torch's own switch for the time of a call: its operators have no argument for it."""
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(on or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
