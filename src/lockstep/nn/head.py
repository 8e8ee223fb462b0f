"""Embedding and output head: BF16 working copies, FP32 logits, and log-probabilities that never hold a batch's logits.

A tied head is the embedding's own module, so there is one master, one working copy and one gradient (field failure 68).
The training function walks over rows in chunks, keeps the log-normalizer and recomputes logits in the backward pass; it and
the engine's sampler take log-probabilities from the same two kernels, `logits` and `log_normalizer`; a token drawn from a
truncated distribution is normalised on both sides over the ids that the sampler recorded (`sampling_mask.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.kernels.table import Kernels
from lockstep.nn.sampling_mask import SamplingMask
from lockstep.nn.working import Working
from lockstep.numerics.flow import Flow
from lockstep.numerics.formats import BF16

CHUNK = 256
"""Rows of logits held at a time."""


class Table(Working):
    """A [V, K] matrix used to look up tokens, to score them, or both."""

    def __init__(self, vocabulary: int, hidden: int, *, flow: Flow, kernels: Kernels) -> None:
        super().__init__(kernels, BF16, flow.activation)
        self.weight = nn.Parameter(torch.empty(vocabulary, hidden))

    def forward(self, ids_T: Tensor) -> Tensor:
        """Embeddings [T, K]."""
        return _Lookup.apply(ids_T, self.weight, self)  # type: ignore[no-any-return]

    def logits(self, h_TK: Tensor, temperature_T: Tensor) -> Tensor:
        """[T, V] FP32 over each row's temperature, without gradient."""
        return self.kernels.logits(h_TK, self.working, temperature_T)

    def log_probs(
        self, h_TK: Tensor, targets_T: Tensor, temperature_T: Tensor, mask: SamplingMask | None = None
    ) -> tuple[Tensor, Tensor]:
        """(log-probability of each target, entropy of each distribution) [T] FP32, differentiable.

        The distribution is the one sampled from: `temperature_T` travels with the sample (field failure 36), and so does
        `mask`, the ids that truncation kept (field failure 37). A target must be among its token's kept ids.
        """
        mask = None if mask is None else mask.to(h_TK.device)
        return _LogProbs.apply(h_TK, self.weight, targets_T, temperature_T, self, mask)  # type: ignore[no-any-return]


def target_log_prob(logits_TV: Tensor, log_normalizer_T: Tensor, targets_T: Tensor) -> Tensor:
    """log p of the targets, [T] FP32: the one subtraction that trainer and sampler share."""
    return logits_TV.gather(1, targets_T[:, None])[:, 0] - log_normalizer_T


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_T: Tensor, weight: Tensor, table: Table) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.shape = weight.shape
        assert table.working.plain is not None
        return F.embedding(ids_T, table.working.plain)

    @staticmethod
    def backward(ctx: Any, grad_TK: Tensor) -> Any:
        (ids_T,) = ctx.saved_tensors
        dw = torch.zeros(ctx.shape, device=grad_TK.device)
        return None, dw.index_add_(0, ids_T, grad_TK.float()), None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_TK: Tensor,
        weight: Tensor,
        targets_T: Tensor,
        temperature_T: Tensor,
        table: Table,
        mask: SamplingMask | None,
    ) -> Any:
        kernels = table.kernels
        log_probs, normalizers, entropies = [], [], []
        for start in range(0, len(h_TK), CHUNK):
            rows = slice(start, start + CHUNK)
            logits = kernels.logits(h_TK[rows], table.working, temperature_T[rows])
            normalizer = kernels.log_normalizer(logits)
            kept = None if mask is None else mask.rows(start, start + len(logits))
            if kept is None:
                log_probs.append(target_log_prob(logits, normalizer, targets_T[rows]))
                entropies.append(kernels.entropy(logits, normalizer))
            else:
                normalizer = kept.log_normalizer(logits, normalizer)
                log_probs.append(target_log_prob(logits, normalizer, targets_T[rows]))
                entropy = kept.entropy(logits, normalizer)
                entropies.append(torch.where(kept.recorded_C, entropy, kernels.entropy(logits, normalizer)))
            normalizers.append(normalizer)
        ctx.table, ctx.mask = table, mask
        entropy_T, normalizer_T = torch.cat(entropies), torch.cat(normalizers)
        ctx.save_for_backward(h_TK, targets_T, temperature_T, normalizer_T, entropy_T)
        return torch.cat(log_probs), entropy_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor, grad_entropy_T: Tensor) -> Any:
        h_TK, targets_T, temperature_T, normalizer_T, entropy_T = ctx.saved_tensors
        kernels, working = ctx.table.kernels, ctx.table.working
        weight = working.dense if working.dense.dtype == torch.float32 else working.plain.float()
        dh = torch.empty(h_TK.shape, device=h_TK.device)
        dw = torch.zeros_like(weight)
        needs_entropy = bool((grad_entropy_T != 0).any())
        for start in range(0, len(h_TK), CHUNK):
            rows = slice(start, start + CHUNK)
            h = h_TK[rows]
            log_p = kernels.logits(h, working, temperature_T[rows]).sub_(normalizer_T[rows, None])
            p = log_p.exp()
            kept = None if ctx.mask is None else ctx.mask.rows(start, start + len(h))
            if kept is not None:
                outside = kept.outside(p.shape[1])
                p, log_p = p.masked_fill_(outside, 0.0), log_p.masked_fill_(outside, 0.0)
            d = p * -grad_T[rows, None]
            if needs_entropy:
                d -= grad_entropy_T[rows, None] * p * (log_p + entropy_T[rows, None])
            d.scatter_add_(1, targets_T[rows, None], grad_T[rows, None])
            d.div_(temperature_T[rows, None])
            dh[rows] = d @ weight
            dw.addmm_(d.t(), h.float())
        return dh.to(h_TK.dtype), dw, None, None, None, None
