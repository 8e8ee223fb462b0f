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
from lockstep.kernels.table import Kernels
from lockstep.kernels.truncation import Truncation
from lockstep.models.fused import fused_kernels
from lockstep.nn.head import CHUNK, Table, target_log_prob
from lockstep.nn.sampling_mask import Kept, SamplingMask
from lockstep.rollout.noise import gumbel, keys_at
from lockstep.rollout.types import TIES, SamplingParams


@dataclass(frozen=True)
class Drawn:
    """tokens and FP32 log-probabilities of each row; what truncation kept, for rows that record it."""

    tokens: list[int]
    logprobs: list[float]
    kept: list[Kept | None]


def draw(
    h_RK: Tensor, head: Table, params: Sequence[SamplingParams], noise: Sequence[tuple[int, int]]
) -> Drawn:
    """Samples a token for each row of hidden states [R, K]. noise: each row's `row_state`, and the position that goes into it.

    Raises CapacityError when truncation keeps more ids of a row than there is `room` for.
    """
    drawn = Drawn([], [], [])
    for start in range(0, len(h_RK), CHUNK):
        rows = slice(start, start + CHUNK)
        some = params[rows]
        temperature = torch.tensor([p.score_temperature for p in some], device=h_RK.device)
        logits = head.logits(h_RK[rows], temperature)
        normalizer = head.kernels.log_normalizer(logits)
        least: Tensor | None = None
        kept: list[Kept | None] = [None] * len(some)
        if any(p.truncated for p in some):
            least = head.kernels.threshold(logits, truncation_of(some, logits.device))
            if any(p.records for p in some):
                normalizer, kept = record(logits, logits >= least[:, None], normalizer, some)
        token = _choose(head.kernels, logits, least, [p.temperature > 0 for p in some], noise[rows])
        drawn.tokens.extend(token.tolist())
        drawn.logprobs.extend(target_log_prob(logits, normalizer, token).tolist())
        drawn.kept.extend(kept)
    return drawn


def _choose(
    kernels: Kernels,
    logits_RV: Tensor,
    least_R: Tensor | None,
    hot: Sequence[bool],
    noise: Sequence[tuple[int, int]],
) -> Tensor:
    """The token [R] with the largest score of each row: with noise where a row is `hot`, of logits from `least_R` on."""
    device = logits_RV.device
    if kernels.fused:  # the launches of a captured step
        state, position = (torch.tensor(x, device=device) for x in zip(*noise, strict=True))
        temperature = torch.tensor(hot, device=device).float()
        return fused_kernels(kernels).sample(logits_RV, temperature, state, position, least_R)
    scores = logits_RV if least_R is None else logits_RV.masked_fill(logits_RV < least_R[:, None], -torch.inf)
    if any(hot):
        keys = [keys_at(*row) for row in noise]
        cold = ~torch.tensor(hot, device=device)
        scores = scores + gumbel(keys, logits_RV.shape[1], device).masked_fill_(cold[:, None], 0.0)
    return scores.argmax(-1)


def truncation_of(params: Sequence[SamplingParams], device: torch.device) -> Truncation:
    """What each row asks for."""
    return Truncation.of(
        [p.top_k for p in params], [p.min_p for p in params], [p.top_p for p in params], device
    )


def refuse_wide(count: int, params: SamplingParams) -> None:
    """Raises CapacityError when that is more recorded ids of a token than there is room for."""
    if count > params.room:
        raise CapacityError(
            f"truncation keeps {count} ids of a token",
            where="rollout.max_kept",
            why=f"at most {params.max_kept} are recorded for the trainer, and {TIES} as likely as the last",
            fix="raise rollout.max_kept, or set a lower rollout.top_k",
        )


def record(
    logits_RV: Tensor, left_RV: Tensor, full_R: Tensor, params: Sequence[SamplingParams]
) -> tuple[Tensor, list[Kept | None]]:
    """(log-normalizers [R], what each row kept) where some rows record: `left_RV` (bool) is what truncation left,
    `full_R` the log-normalizers over the vocabulary, which rows that record nothing go on with."""
    records_R = torch.tensor([p.records for p in params], device=logits_RV.device)
    inside_RV = left_RV & records_R[:, None]
    counts = inside_RV.sum(1).tolist()
    for count, p in zip(counts, params, strict=True):
        refuse_wide(count, p)
    ids = inside_RV.nonzero()[:, 1].int().cpu().split(counts)
    mask = SamplingMask.of([(i, 1.0) for i in ids]).to(logits_RV.device)
    rows = mask.rows(0, len(params))
    normalizer_R = full_R if rows is None else rows.log_normalizer(logits_RV, full_R)
    mass = (normalizer_R - full_R).exp().clamp(max=1.0).tolist()
    kept = [(i, m) if p.records else None for i, m, p in zip(ids, mass, params, strict=True)]
    return normalizer_R, kept
