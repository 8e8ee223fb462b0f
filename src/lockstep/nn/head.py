"""Embedding and output head: BF16 working copies, FP32 logits, and log-probabilities that never hold a batch's logits.

A tied head is the embedding's own module, so there is one master, one working copy and one gradient (field failure 68).
The training function walks over rows in chunks, keeps the log-normalizer and recomputes logits in the backward pass; it and
the engine's sampler take log-probabilities from the same two kernels, `logits` and `log_normalizer`; a token drawn from a
truncated distribution is normalised on both sides over the ids that the sampler recorded (`sampling_mask.py`).

A backend that fuses does a chunk without masks in few passes (`score`, `logits_grad`); the gradient of its logits is rounded to
BF16, both products read that and the BF16 weight, and the weight's gradient is summed over chunks in FP32. As many rows as fit
`PROBABILITY_BYTES` store their probabilities in BF16 on the way forward: their gradient is made over them, without the product
that logits take. Which rows these are depends on shapes alone, so a step has the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.kernels.fused import FusedKernels
from lockstep.kernels.reference import PackedWeight
from lockstep.kernels.table import Kernels
from lockstep.nn.rows import add_rows, add_rows_to
from lockstep.nn.sampling_mask import KeptRows, SamplingMask
from lockstep.nn.working import Working
from lockstep.numerics.flow import Flow
from lockstep.numerics.formats import BF16

CHUNK = 256
"""Rows of logits held at a time on a CPU."""
LOGITS_BYTES = 1 << 30
"""FP32 logits held at a time by a backend that fuses: more rows make faster products."""
PROBABILITY_BYTES = 3 << 30
"""BF16 probabilities stored between a forward and its backward pass by a backend that fuses, at most."""
CHUNKS = 2
"""Chunks whose BF16 gradients are multiplied together, since adding to an FP32 gradient of all weights costs as much as a
product of 500 rows."""


class Table(Working):
    """A [V, K] matrix used to look up tokens, to score them, or both.

    in_place: where kernels fuse, backward passes add to the weight's `.grad` themselves, instead of returning a gradient that is
    as large and mostly zeros. Hooks don't see it then.
    """

    def __init__(self, vocabulary: int, hidden: int, *, flow: Flow, kernels: Kernels) -> None:
        super().__init__(kernels, BF16, flow.activation)
        self.weight = nn.Parameter(torch.empty(vocabulary, hidden))
        self.in_place = False

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
        wanted = torch.is_grad_enabled() and (h_TK.requires_grad or self.weight.requires_grad)
        able = self.kernels.fused and mask is None
        stored = stored_rows(len(h_TK), len(self.weight)) if wanted and able else 0
        return _LogProbs.apply(h_TK, self.weight, targets_T, temperature_T, self, mask, stored)  # type: ignore[no-any-return]


def _total(table: Table) -> Tensor | None:
    """The gradient so far, to be added to; None where it has to be returned."""
    if not table.in_place or not table.kernels.fused:
        return None
    if table.weight.grad is None:
        table.weight.grad = torch.zeros_like(table.weight)
    return table.weight.grad


def chunk_rows(kernels: Kernels, vocabulary: int) -> int:
    """Rows of logits to hold at a time; values don't depend on it."""
    return max(LOGITS_BYTES // (4 * vocabulary) // 128, 1) * 128 if kernels.fused else CHUNK


def stored_rows(rows: int, vocabulary: int) -> int:
    """How many of so many rows store their probabilities, where a backend fuses: the first ones, all or whole 128s of them.
    Gradients' bits depend on it."""
    most = PROBABILITY_BYTES // (2 * vocabulary)
    return rows if rows <= most else most // 128 * 128


def target_log_prob(logits_TV: Tensor, log_normalizer_T: Tensor, targets_T: Tensor) -> Tensor:
    """log p of the targets, [T] FP32: the one subtraction that trainer and sampler share."""
    return logits_TV.gather(1, targets_T[:, None])[:, 0] - log_normalizer_T


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_T: Tensor, weight: Tensor, table: Table) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.table = table
        assert table.working.plain is not None
        return F.embedding(ids_T, table.working.plain)

    @staticmethod
    def backward(ctx: Any, grad_TK: Tensor) -> Any:
        (ids_T,) = ctx.saved_tensors
        total_VK = _total(ctx.table)
        if total_VK is None:
            return None, add_rows(grad_TK, ids_T, len(ctx.table.weight)), None
        add_rows_to(total_VK, grad_TK, ids_T)
        return None, None, None


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
        stored: int,
    ) -> Any:
        """stored: how many of the first rows store their probabilities. It's decided outside: in here gradients are off, and the
        context says of a weight that it needs one under `no_grad` too."""
        chunk = chunk_rows(table.kernels, len(weight))
        p_SV = h_TK.new_empty(stored, len(weight), dtype=torch.bfloat16) if stored else None
        parts = []
        for start in range(0, len(h_TK), chunk):
            rows = slice(start, min(start + chunk, len(h_TK)))
            kept = None if mask is None else mask.rows(rows.start, rows.stop)
            p = None if p_SV is None else p_SV[rows]  # fewer rows, or none, where the chunk reaches beyond
            parts.append(_scored(table, h_TK[rows], targets_T[rows], temperature_T[rows], kept, p))
        log_prob_T, normalizer_T, entropy_T = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.table, ctx.mask, ctx.p_SV = table, mask, p_SV
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h_TK, targets_T, temperature_T, log_prob_T, normalizer_T, entropy_T)
        return log_prob_T, entropy_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_T: Tensor | None, grad_entropy_T: Tensor | None) -> Any:
        h_TK, targets_T, temperature_T, log_prob_T, normalizer_T, entropy_T = ctx.saved_tensors
        grad_T = torch.zeros_like(entropy_T) if grad_T is None else grad_T.contiguous()
        grad_entropy_T = None if grad_entropy_T is None else grad_entropy_T.contiguous()
        gradient = _LogitsGradient(
            ctx.table,
            ctx.mask,
            h_TK,
            targets_T,
            temperature_T,
            log_prob_T,
            normalizer_T,
            entropy_T,
            grad_T,
            grad_entropy_T,
            _taken(ctx),
        )
        total_VK = _total(ctx.table) if ctx.needs_input_grad[1] else None
        dh_TK, dw = gradient.products(needs_weight=ctx.needs_input_grad[1], total_VK=total_VK)
        return dh_TK, dw, None, None, None, None, None


def _taken(ctx: Any) -> Tensor | None:
    """The probabilities, which the gradient will overwrite. A second backward pass finds none, and makes all logits again."""
    p_SV: Tensor | None = ctx.p_SV
    ctx.p_SV = None
    return p_SV


def _scored(
    table: Table,
    h_CK: Tensor,
    targets_C: Tensor,
    temperature_C: Tensor,
    kept: KeptRows | None,
    p_SV: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability, log-normalizer, entropy) [C] of one chunk, whose first rows' probabilities go to `p_SV`."""
    kernels = table.kernels
    if kernels.fused and kept is None:
        return _fused(kernels).score(h_CK, table.working, targets_C, temperature_C, p_SV)
    logits = kernels.logits(h_CK, table.working, temperature_C)
    normalizer = kernels.log_normalizer(logits)
    if kept is None:
        log_prob = target_log_prob(logits, normalizer, targets_C)
        return log_prob, normalizer, kernels.entropy(logits, normalizer)
    normalizer = kept.log_normalizer(logits, normalizer)
    log_prob = target_log_prob(logits, normalizer, targets_C)
    entropy = kept.entropy(logits, normalizer)
    entropy = torch.where(kept.recorded_C, entropy, kernels.entropy(logits, normalizer))
    return log_prob, normalizer, entropy


@dataclass
class _LogitsGradient:
    """What the gradient of all rows' logits is made from: chunk by chunk, or of the rows that stored their probabilities over
    these, `p_SV`."""

    table: Table
    mask: SamplingMask | None
    h_TK: Tensor
    targets_T: Tensor
    temperature_T: Tensor
    log_prob_T: Tensor
    normalizer_T: Tensor
    entropy_T: Tensor
    grad_T: Tensor
    grad_entropy_T: Tensor | None
    p_SV: Tensor | None

    def products(self, *, needs_weight: bool, total_VK: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(dh [T, K] in h's type, dw [V, K] FP32). dw is added to `total_VK` if there is one, and not returned."""
        working = self.table.working
        assert working.plain is not None
        if self.table.kernels.fused:
            return self._fused_products(working, needs_weight=needs_weight, total_VK=total_VK)
        dense = working.dense
        weight = dense if dense is not None and dense.dtype == torch.float32 else working.plain.float()
        dh = torch.empty(self.h_TK.shape, device=self.h_TK.device)
        dw = torch.zeros_like(weight)
        has_entropy = self.grad_entropy_T is not None and bool((self.grad_entropy_T != 0).any())
        for start in range(0, len(dh), CHUNK):
            rows = slice(start, min(start + CHUNK, len(dh)))
            d = self._chunk(rows, has_entropy=has_entropy)
            dh[rows] = d @ weight
            dw.addmm_(d.t(), self.h_TK[rows].float())
        return dh.to(self.h_TK.dtype), dw

    def _fused_products(
        self, working: PackedWeight, *, needs_weight: bool, total_VK: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        kernels, plain = _fused(self.table.kernels), working.plain
        assert plain is not None
        dh, dw = torch.empty_like(self.h_TK), total_VK
        for rows, d in self._fused_gradients(chunk_rows(self.table.kernels, len(plain))):
            h = self.h_TK[rows]
            dh[rows] = kernels.linear_dgrad(d, working)
            if needs_weight and dw is None:
                dw = kernels.linear_wgrad(d, h)
            elif dw is not None:
                kernels.add_wgrad(dw, d, h)
            del d  # before the next one is made
        if needs_weight and dw is None:
            dw = torch.zeros(plain.shape, device=dh.device)
        return dh, dw if total_VK is None else None

    def _fused_gradients(self, chunk: int) -> Iterator[tuple[slice, Tensor]]:
        """(rows, gradient of their logits in BF16), all rows in turn. None of the gradients is held here."""
        stored = 0 if self.p_SV is None else len(self.p_SV)
        if stored:
            yield slice(0, stored), self._over_probabilities()
        for first in range(stored, len(self.h_TK), CHUNKS * chunk):
            rows = slice(first, min(first + CHUNKS * chunk, len(self.h_TK)))
            yield rows, self._from_logits(rows, chunk)

    def _over_probabilities(self) -> Tensor:
        p, self.p_SV = self.p_SV, None
        assert p is not None
        rows = slice(0, len(p))
        _fused(self.table.kernels).stored_logits_grad(
            p,
            self.targets_T[rows],
            self.temperature_T[rows],
            self.log_prob_T[rows],
            self.entropy_T[rows],
            self.grad_T[rows],
            None if self.grad_entropy_T is None else self.grad_entropy_T[rows],
        )
        return p

    def _from_logits(self, rows: slice, chunk: int) -> Tensor:
        shape = rows.stop - rows.start, len(self.table.weight)
        d = torch.empty(shape, dtype=torch.bfloat16, device=self.h_TK.device)
        for start in range(rows.start, rows.stop, chunk):
            end = min(start + chunk, rows.stop)
            self._fused_chunk(slice(start, end), d[start - rows.start : end - rows.start])
        return d

    def _fused_chunk(self, rows: slice, out_CV: Tensor) -> None:
        if self.mask is not None and self.mask.rows(rows.start, rows.stop) is not None:
            out_CV.copy_(self._chunk(rows, has_entropy=self.grad_entropy_T is not None))
            return
        _fused(self.table.kernels).logits_grad(
            self.h_TK[rows],
            self.table.working,
            self.targets_T[rows],
            self.temperature_T[rows],
            self.normalizer_T[rows],
            self.entropy_T[rows],
            self.grad_T[rows],
            None if self.grad_entropy_T is None else self.grad_entropy_T[rows],
            out_CV,
        )

    def _chunk(self, rows: slice, *, has_entropy: bool) -> Tensor:
        """Gradient [C, V] FP32 of the raw logits of some rows."""
        h, grad = self.h_TK[rows], self.grad_T[rows, None]
        logits = self.table.kernels.logits(h, self.table.working, self.temperature_T[rows])
        log_p = logits.sub_(self.normalizer_T[rows, None])
        p = log_p.exp()
        kept = None if self.mask is None else self.mask.rows(rows.start, rows.stop)
        if kept is not None:
            outside = kept.outside(p.shape[1])
            p, log_p = p.masked_fill_(outside, 0.0), log_p.masked_fill_(outside, 0.0)
        d = p * -grad
        if has_entropy:
            assert self.grad_entropy_T is not None
            d -= self.grad_entropy_T[rows, None] * p * (log_p + self.entropy_T[rows, None])
        d.scatter_add_(1, self.targets_T[rows, None], grad)
        return d.div_(self.temperature_T[rows, None])


def _fused(kernels: Kernels) -> FusedKernels:
    known: Any = kernels
    return known  # type: ignore[no-any-return]
