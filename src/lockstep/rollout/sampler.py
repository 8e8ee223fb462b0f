"""From hidden states to tokens: temperature, truncation, Gumbel sampling, and the log-probability of what was drawn.

The log-probability comes from the same two kernels as the trainer's (`nn/head.py`), over the tempered and untruncated
distribution. Truncation only decides what may be drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.nn.head import CHUNK, Table, target_log_prob
from lockstep.rollout.noise import gumbel
from lockstep.rollout.types import SamplingParams


@dataclass(frozen=True)
class Drawn:
    """tokens and FP32 log-probabilities of each row."""

    tokens: list[int]
    logprobs: list[float]


def draw(h_RK: Tensor, head: Table, params: Sequence[SamplingParams], keys: list[tuple[int, int]]) -> Drawn:
    """Samples a token for each row of hidden states [R, K]; `keys` are the rows' noise keys."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for start in range(0, len(h_RK), CHUNK):
        rows = slice(start, start + CHUNK)
        some = params[rows]
        temperature = torch.tensor([p.score_temperature for p in some], device=h_RK.device)
        logits = head.logits(h_RK[rows], temperature)
        normalizer = head.kernels.log_normalizer(logits)
        scores = logits
        if any(p.truncated for p in some):
            scores = torch.stack([truncate(row, p) for row, p in zip(logits, some, strict=True)])
        hot = torch.tensor([p.temperature > 0 for p in some], device=h_RK.device)
        if bool(hot.any()):
            noise = gumbel(keys[rows], logits.shape[1], logits.device)
            scores = scores + noise.masked_fill_(~hot[:, None], 0.0)
        token = scores.argmax(-1)
        tokens += token.tolist()
        logprobs += target_log_prob(logits, normalizer, token).tolist()
    return Drawn(tokens, logprobs)


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
