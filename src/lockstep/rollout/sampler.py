"""From hidden states to tokens: temperature, truncation, Gumbel sampling, and the log-probability of what was drawn.

The log-probability comes from the same kernels as the trainer's (`nn/head.py`). Truncation decides what may be drawn; where it
is recorded (`SamplingParams.max_kept`), the log-probability is that of the truncated distribution, normalised over the very ids
that the trainer will normalise over.

Next: `../nn/sampling_mask.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import CapacityError
from lockstep.nn.head import CHUNK, Table, target_log_prob
from lockstep.nn.sampling_mask import Kept, SamplingMask
from lockstep.rollout.noise import gumbel
from lockstep.rollout.types import SamplingParams


@dataclass(frozen=True)
class Drawn:
    """tokens and FP32 log-probabilities of each row; what truncation kept, for rows that record it."""

    tokens: list[int]
    logprobs: list[float]
    kept: list[Kept | None]


def draw(h_RK: Tensor, head: Table, params: Sequence[SamplingParams], keys: list[tuple[int, int]]) -> Drawn:
    """Samples a token for each row of hidden states [R, K]; `keys` are the rows' noise keys.

    Raises CapacityError when truncation keeps more ids of a row than its `max_kept`.
    """
    drawn = Drawn([], [], [])
    for start in range(0, len(h_RK), CHUNK):
        rows = slice(start, start + CHUNK)
        some = params[rows]
        temperature = torch.tensor([p.score_temperature for p in some], device=h_RK.device)
        logits = head.logits(h_RK[rows], temperature)
        normalizer = head.kernels.log_normalizer(logits)
        scores = logits
        kept: list[Kept | None] = [None] * len(some)
        if any(p.truncated for p in some):
            scores = torch.stack([truncate(row, p) for row, p in zip(logits, some, strict=True)])
            if any(p.records for p in some):
                normalizer, kept = record(logits, scores, normalizer, some)
        hot = torch.tensor([p.temperature > 0 for p in some], device=h_RK.device)
        if bool(hot.any()):
            noise = gumbel(keys[rows], logits.shape[1], logits.device)
            scores = scores + noise.masked_fill_(~hot[:, None], 0.0)
        token = scores.argmax(-1)
        drawn.tokens.extend(token.tolist())
        drawn.logprobs.extend(target_log_prob(logits, normalizer, token).tolist())
        drawn.kept.extend(kept)
    return drawn


def truncate(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Logits [V] with everything outside top-k, min-p and top-p at -inf, in this order; the largest always stays."""
    out = logits_V.clone()
    if 0 < params.top_k < len(out):
        out[out < out.topk(params.top_k).values[-1]] = -torch.inf
    if params.min_p > 0:
        out[(out - out.max()).exp() < params.min_p] = -torch.inf
    if params.top_p < 1.0:
        ordered, where = out.double().sort(descending=True, stable=True)
        mass = ordered.softmax(0).cumsum(0)
        outside = where[1:][mass[:-1] >= params.top_p]
        out[outside] = -torch.inf
    return out


def record(
    logits_RV: Tensor, scores_RV: Tensor, full_R: Tensor, params: Sequence[SamplingParams]
) -> tuple[Tensor, list[Kept | None]]:
    """(log-normalizers [R], what each row kept) where some rows record: `scores_RV` is -inf at what truncation dropped,
    `full_R` the log-normalizers over the vocabulary, which rows that record nothing go on with."""
    records_R = torch.tensor([p.records for p in params], device=logits_RV.device)
    inside_RV = (scores_RV > -torch.inf) & records_R[:, None]
    counts = inside_RV.sum(1).tolist()
    for count, p in zip(counts, params, strict=True):
        if count > p.max_kept and p.records:
            raise CapacityError(
                f"truncation keeps {count} ids of a token",
                where="rollout.max_kept",
                why=f"at most {p.max_kept} are recorded for the trainer",
                fix="raise rollout.max_kept, or set a lower rollout.top_k",
            )
    ids = inside_RV.nonzero()[:, 1].int().cpu().split(counts)
    mask = SamplingMask.of([(i, 1.0) for i in ids]).to(logits_RV.device)
    rows = mask.rows(0, len(params))
    normalizer_R = full_R if rows is None else rows.log_normalizer(logits_RV, full_R)
    mass = (normalizer_R - full_R).exp().clamp(max=1.0).tolist()
    kept = [(i, m) if p.records else None for i, m, p in zip(ids, mass, params, strict=True)]
    return normalizer_R, kept
