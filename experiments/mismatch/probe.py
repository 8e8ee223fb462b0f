"""The gradient an update follows, beside the one that BF16 would have: cosines, every so many steps.

The reference is the gradient that a BF16 trainer with nothing to correct takes from the same rollout: a second decoder over the
same masters under the flow `bf16`, *all* samples that were drawn (also those that a correction rejects, and baselines over all
of them), every importance ratio 1. Two figures:

    probe/cosine            every sample counts as it was drawn: what FP8 products, weights and rejections turn
    probe/cosine_weighted   every token of the reference weighted by its untruncated ratio, BF16 policy over rollout: with the
                            bias of another sampler taken out, as far as a token's own ratio can

In the uncorrected split flow the first is 1 by construction: it follows just that gradient, and its bias is in the second.

It is taken of the first mini-batch of an update, before any optimizer step. Gradients are put aside and back, so the run's bits
are those of a run without a probe. Works on whatever kernels the run has. Next: `run.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms import advantages, token_coefficients
from lockstep.algorithms.reduced import Reduced
from lockstep.bench.sides import cosine
from lockstep.bench.training import layer_cosines
from lockstep.correction.mismatch import Mismatch
from lockstep.models.build import sharing_decoder
from lockstep.models.decoder import Decoder
from lockstep.numerics.flow import bf16_flow
from lockstep.trainer.sample import Sample
from lockstep.trainer.update import Scales, Updater

MAX_LOG_RATIO = 20.0
Gradients = dict[str, Tensor]


class ProbedUpdater(Updater):
    """An updater whose first mini-batch is compared when `armed`. drawn: all samples of the step that got a reward."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.armed = False
        self.drawn: list[Sample] = []
        self._twin: Decoder | None = None

    def gradients(
        self,
        batch: list[Sample],
        scales: Scales,
        mismatch: Mismatch | None,
        metrics: dict[str, float],
        *,
        last: bool = False,
    ) -> list[dict[str, Reduced]]:
        """See `Updater`; adds the cosines to `metrics`."""
        reduced = super().gradients(batch, scales, mismatch, metrics, last=last)
        if self.armed:
            self.armed = False
            begun = time.perf_counter()
            metrics.update(self.compare_gradients(batch))
            metrics["time/probe_s"] = time.perf_counter() - begun
        return reduced

    def compare_gradients(self, batch: Sequence[Sample]) -> dict[str, float]:
        """Cosines of the gradient that lies in the masters with both references, which leave it as it is."""
        samples = self.all_of(batch)
        parameters = dict(self.parts.decoder.named_parameters())
        kept = {name: p.grad for name, p in parameters.items()}
        ours = {name: grad for name, grad in kept.items() if grad is not None}
        found = {}
        try:
            plain = self.in_bf16(samples, parameters, lambda logp_N, rollout_N: torch.ones_like(logp_N))
            found["probe/cosine"] = _cosine(ours, plain)
            layers = layer_cosines(ours, plain)
            found["probe/cosine_worst_layer"] = min(layers.values(), default=float("nan"))
            weighted = self.in_bf16(samples, parameters, _ratio)
            found["probe/cosine_weighted"] = _cosine(ours, weighted)
        finally:
            for name, parameter in parameters.items():
                parameter.grad = kept[name]
        return found

    def all_of(self, batch: Sequence[Sample]) -> list[Sample]:
        """What was drawn for the groups of this mini-batch; for all groups where there is but one."""
        if self.spec.mini_batches == 1:
            return self.drawn
        last = max(s.group for s in batch)
        return [s for s in self.drawn if s.group <= last]

    def in_bf16(
        self,
        samples: list[Sample],
        parameters: dict[str, torch.nn.Parameter],
        weight: Callable[[Tensor, Tensor], Tensor],
    ) -> Gradients:
        """The policy gradient of these samples in BF16 at ratio 1, every token times `weight` of its (BF16, rollout) log p."""
        recipe, device, decoder = self.recipe, self.parts.device, self.twin()
        for parameter in parameters.values():
            parameter.grad = None
        rewards = torch.tensor([s.reward for s in samples])
        group = torch.tensor([s.group for s in samples])
        advantage_S = advantages(rewards, group, recipe.advantage, eps=recipe.advantage_eps)
        lengths = torch.tensor([s.completion.trained_tokens for s in samples])
        limit = self.parts.spec.rollout.max_new_tokens
        coef_S = advantage_S * token_coefficients(lengths, recipe.denominator, max_tokens=limit)
        coef_of = {id(s): coef for s, coef in zip(samples, coef_S.tolist(), strict=True)}
        with decoder.uncaptured():  # the decoder may be the trainer's own, whose gradients are kept
            for members, micro in self.packs.microbatches(self.packs.divided(samples, {}).items):
                logp_N, _ = micro.log_probs(decoder, None)
                coef_N = torch.tensor([coef_of[id(s)] for s in members]).to(device)[micro.sample_N]
                coef_N = coef_N * weight(logp_N.detach(), micro.rollout_N)
                (-(coef_N * logp_N).sum()).backward()
        return {name: p.grad for name, p in parameters.items() if p.grad is not None}

    def twin(self) -> Decoder:
        """A decoder in BF16 at the masters' present values: the trainer's own where it is one."""
        decoder = self.parts.decoder
        if not decoder.flow.is_fp8 and not decoder.flow.kv_fp8:
            return decoder
        if self._twin is None:
            self._twin = sharing_decoder(decoder, bf16_flow())
        if self._twin.version != decoder.version:
            self._twin.refresh(decoder.version)
        return self._twin


def _ratio(logp_N: Tensor, rollout_N: Tensor) -> Tensor:
    return (logp_N - rollout_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _cosine(ours: Gradients, theirs: Gradients) -> float:
    names = [name for name in ours if name in theirs]
    return cosine([ours[n] for n in names], [theirs[n] for n in names])
