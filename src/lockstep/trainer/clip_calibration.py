"""Measures what the noise of low precision does to the clipped ratio, and keeps the calibrated bounds between measurements.

Every `clip_calibration_every` training steps, on the last mini-batch of the update, the most off-policy one: a BF16 decoder over
the same masters scores its tokens before the first optimizer step and again where the loss takes its gradient. That ratio is
the reference for the bounds of the next steps, which move half of the way to what was measured. Two extra forwards of one
mini-batch; where the trainer is BF16 itself, its own decoder is the reference.

Next: `../algorithms/calibration.py` for the formulas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lockstep.algorithms import LossInput
from lockstep.algorithms.calibration import ClipBounds, calibrated_bounds
from lockstep.algorithms.spec import Recipe
from lockstep.models.build import sharing_decoder
from lockstep.models.decoder import Decoder
from lockstep.numerics.flow import bf16_flow
from lockstep.trainer.microbatch import MicroBatch
from lockstep.trainer.sample import Sample, by_sample
from lockstep.trainer.setup import Parts

SMOOTHING = 0.5
"""Bounds move this share of the way to the newly measured ones. (The paper smooths too, and doesn't say by how much.)"""


class ClipCalibrator:
    """The bounds in force, and the measurement of the step at hand."""

    def __init__(self, recipe: Recipe, parts: Parts) -> None:
        self.every, self.parts = recipe.clip_calibration_every, parts
        self.nominal = ClipBounds(1.0 - recipe.clip_low, 1.0 + recipe.clip_high)
        self.bounds = self.nominal
        self.updates = 0
        self.measuring = False
        self._shadow: Decoder | None = None
        self._now = parts.decoder
        self._old: dict[int, Tensor] = {}
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def recipe(self, recipe: Recipe) -> Recipe:
        """`recipe` with the bounds in force; untouched when nothing is calibrated."""
        if self.bounds == self.nominal:
            return recipe
        return replace(recipe, clip_low=1.0 - self.bounds.lower, clip_high=self.bounds.upper - 1.0)

    def begin(self, micros: Iterable[tuple[Sequence[Sample], MicroBatch]]) -> None:
        """Before the first optimizer step, with the micro-batches of the last mini-batch."""
        decoder = self._reference()
        for samples, micro in micros:
            old = by_sample(samples, _log_probs(decoder, micro))
            self._old |= {id(s): own_N for s, own_N in zip(samples, old, strict=True)}
        self.measuring = True

    def due(self) -> bool:
        """Whether this update is to be measured. Counts updates."""
        due = self.every > 0 and self.updates % self.every == 0
        self.updates += 1
        return due

    def see(self, samples: Sequence[Sample], micro: MicroBatch, inputs: LossInput) -> None:
        """The tokens of one micro-batch of the last mini-batch, as the loss gets them. Only those that count."""
        if not self._seen:
            self._now = self._reference()
        reference_N = _log_probs(self._now, micro) - torch.cat([self._old[id(s)] for s in samples])
        log_ratio_N = inputs.logp_N.detach() - inputs.old_logp_N.detach()
        counted_N = inputs.coef_N != 0
        self._seen.append((log_ratio_N[counted_N], reference_N[counted_N], inputs.advantage_N[counted_N]))

    def end(self) -> dict[str, float]:
        """After the update: the next bounds from what was seen. Metrics of the bounds that were in force."""
        metrics = {"policy/clip_bound_low": self.bounds.lower, "policy/clip_bound_high": self.bounds.upper}
        everyones = self.parts.ranks.gather(self._seen) if self.measuring else []
        seen = [part for some in everyones for part in some]
        if seen:
            log_ratio, reference, advantage = (torch.cat(x) for x in zip(*seen, strict=True))
            if bool(torch.isfinite(log_ratio).all() & torch.isfinite(reference).all()):
                ratio, true = (x.double().clamp(-20, 20).exp() for x in (log_ratio, reference))
                measured = calibrated_bounds(ratio, true, advantage, self.nominal)
                self.bounds = self.bounds.towards(measured, SMOOTHING)
        self.measuring, self._old, self._seen = False, {}, []
        return metrics if self.every else {}

    def state(self) -> list[float]:
        """For a checkpoint; empty when nothing is calibrated."""
        return [self.bounds.lower, self.bounds.upper, float(self.updates)] if self.every else []

    def load(self, state: Sequence[float]) -> None:
        """Restores what `state` gave."""
        if state:
            self.bounds, self.updates = ClipBounds(state[0], state[1]), int(state[2])

    def _reference(self) -> Decoder:
        """A BF16 decoder at the masters' present values: the trainer's own, or one that shares them."""
        decoder = self.parts.decoder
        if not decoder.flow.is_fp8 and not decoder.flow.kv_fp8:
            return decoder
        if self._shadow is None:
            self._shadow = sharing_decoder(decoder, bf16_flow())
        self._shadow.refresh(decoder.version)
        return self._shadow


@torch.no_grad()
def _log_probs(decoder: Decoder, micro: MicroBatch) -> Tensor:
    return micro.log_probs(decoder, None)[0]
