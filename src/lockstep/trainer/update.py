"""The update: from samples with advantages to optimizer steps, and the comparison that comes for free.

A step's samples are cut into mini-batches of whole groups (one optimizer step each) and those into micro-batches under a
token budget. One global denominator holds for a mini-batch, so the number of micro-batches changes nothing. The first
mini-batch is computed under the very weights that sampled it: its log-probabilities are compared with the rollout's
*before* the optimizer moves. A correction that has to know them earlier gets a pass of its own, in `screen`.

Next: `packs.py` for micro-batches, `corrector.py` for the correction, `../algorithms/losses.py` for the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.algorithms import LossInput, merge_metrics, policy_loss, token_coefficients
from lockstep.algorithms.reduced import Reduced
from lockstep.algorithms.spec import Recipe
from lockstep.correction.mismatch import Mismatch
from lockstep.correction.policies import CurrentLogp, RolloutLogp
from lockstep.correction.presets import Correction
from lockstep.correction.tighten import tighten
from lockstep.errors import CheckpointError, ContractError
from lockstep.kernels.upload import upload
from lockstep.models.build import empty_decoder
from lockstep.models.decoder import Decoder
from lockstep.nn.kv_scales import AmaxCollector, KVMaxima, KVScales
from lockstep.trainer.clip_calibration import ClipCalibrator
from lockstep.trainer.corrector import Corrector, is_about_rejection
from lockstep.trainer.microbatch import MicroBatch
from lockstep.trainer.optimizer import Optimizer
from lockstep.trainer.packs import Packs
from lockstep.trainer.route_replay import expert_load
from lockstep.trainer.sample import Sample, by_sample
from lockstep.trainer.scale_history import ScaleHistory
from lockstep.trainer.setup import Parts
from lockstep.trainer.violation import NAME, examine

Scales = ScaleHistory | KVScales | None
"""KV scales by the version of a sample; None where the engine has a BF16 KV cache."""


@dataclass(frozen=True)
class Scored:
    """Of a micro-batch's tokens: number of the sample, and what trainer and rollout say, where the trainer is."""

    sample_N: Tensor
    trainer_N: Tensor
    rollout_N: Tensor


class Updater:
    """Turns samples into optimizer steps. `moved` says whether the last update had a gradient to follow, `warning` what is wrong
    with its mismatch (beyond the tolerance, or too much for sequence ratios); `seen` are the KV maxima of its forwards."""

    def __init__(self, parts: Parts, recipe: Recipe, optimizer: Optimizer) -> None:
        self.parts, self.recipe, self.optimizer = parts, recipe, optimizer
        self.spec = parts.spec.update
        self.packs = Packs(parts)
        self.reference: Decoder | None = None
        self.moved = False
        self.warning = ""
        self.collector: AmaxCollector | None = None
        self.seen: KVMaxima | None = None
        self.load = expert_load(parts.model_spec)
        tolerance = parts.spec.mismatch.tolerance
        self.tolerance = (0.0 if parts.flows.unified else 1.0) if tolerance == -1.0 else tolerance
        self.mismatch = Mismatch()
        self.corrector = Corrector(parts)
        self.calibrator = ClipCalibrator(recipe, parts)
        self.trap_told = False

    @property
    def correction(self) -> Correction:
        """The correction in force. May be replaced between two steps."""
        return self.corrector.correction

    @correction.setter
    def correction(self, correction: Correction) -> None:
        self.corrector.correction = correction

    def tighten_correction(self) -> str | None:
        """Moves to the next stricter correction and says which; None when there is none (`correction/tighten.py`)."""
        found = tighten(self.correction)
        if found is None:
            return None
        self.correction, text = found
        return text

    @property
    def action(self) -> Literal["stop", "warn"]:
        """What a violation leads to. By itself it stops a unified run in which nothing is corrected, and warns otherwise."""
        asked = self.parts.spec.mismatch.on_violation
        if asked == "auto":
            return "stop" if self.parts.flows.unified and not self.correction.active else "warn"
        return asked

    def keep_reference(self, run_dir: Path) -> None:
        """The reference policy of the KL term: the weights before the first step, kept in the run's folder."""
        if not self.recipe.needs_reference:
            return
        decoder, path = self.parts.decoder, run_dir / "reference.safetensors"
        if self.optimizer.steps == 0 and self.parts.ranks.first:
            save_file({n: p.detach().contiguous() for n, p in decoder.named_parameters()}, path)
        self.parts.ranks.wait()
        if not path.is_file():
            raise CheckpointError("the reference policy is missing", where=str(path), fix="start anew")
        self.reference = empty_decoder(decoder.spec, decoder.flow, decoder.kernels, self.parts.device)
        tensors = load_file(path)
        with torch.no_grad():
            for name, parameter in self.reference.named_parameters():
                parameter.copy_(tensors[name])
        self.reference.requires_grad_(False).refresh(0)

    def update(self, samples: list[Sample], scales: Scales) -> dict[str, float]:
        """All optimizer steps of one training step, and their metrics. Without samples nothing moves.

        Raises ContractError when rollout and trainer disagree beyond the tolerance and the action is `stop`.
        """
        self.watch_kv()
        self.load = expert_load(self.parts.model_spec)
        mismatch, self.mismatch = self.mismatch, Mismatch()
        scored = mismatch.tokens > 0
        reduced: list[dict[str, Reduced]] = []
        metrics: dict[str, float] = {"optim/lr": self.optimizer.learning_rate()}
        applied, graphs = 0, self.parts.decoder.graphs
        launched = 0 if graphs is None else graphs.launched
        self.moved, self.warning = False, ""
        trained = [b for b in self.mini_batches(samples) if b]
        if scored:
            self.judge(mismatch, samples, scales)
            self.corrector.weigh(samples)
        if trained and self.calibrator.due():
            self.calibrator.begin(self.packs.microbatches(self.packs.divided(trained[-1], {}).own))
        for epoch in range(self.spec.epochs):
            for number, batch in enumerate(trained):
                first = epoch == 0 and number == 0 and not scored
                last = epoch == self.spec.epochs - 1 and number == len(trained) - 1
                reduced += self.gradients(batch, scales, mismatch if first else None, metrics, last=last)
                metrics |= self.read_kv()
                if first:
                    self.judge(mismatch, batch, scales)
                result = self.optimizer.step()
                applied += result.applied
                self.moved |= result.applied and result.grad_norm > 0 and result.lr > 0
                metrics["optim/grad_norm"] = result.grad_norm
                if not last:
                    self.parts.decoder.refresh(self.parts.decoder.version)
        if graphs is not None:
            metrics["time/uncaptured_microbatches"] = float(graphs.launched - launched)
        metrics["optim/applied_steps"] = float(applied)
        metrics["optim/skipped_steps"] = float(self.optimizer.skipped)
        metrics |= {name: value.result() for name, value in merge_metrics(reduced).items()}
        metrics |= self.read_load()
        metrics |= self.calibrator.end() | self.close_correction(samples, scored=scored)
        return metrics | mismatch.metrics()

    def screen(self, samples: list[Sample], scales: Scales) -> tuple[list[bool], dict[str, float]]:
        """Which samples the correction keeps, and what share went. Before baselines are taken: where the correction has to know
        the old policy now, a pass without gradient scores the samples under it and compares them with the rollout."""
        if not samples or not self.corrector.needs_pass:
            return [True] * len(samples), {}
        old = self.old_log_probs(samples, scales, self.mismatch)
        for sample in samples:
            self.corrector.remember(sample, old[id(sample)])
        return self.corrector.reject(samples)

    def close_correction(self, samples: list[Sample], *, scored: bool) -> dict[str, float]:
        """Metrics of the step's weights; forgets its records. Where there was a pass, `screen` has told what was rejected."""
        found = self.corrector.weigh(samples)
        self.corrector.records.clear()
        if found is None:
            return {}
        if found.warning and not self.trap_told:
            self.trap_told = True
            self.warning = "; ".join(w for w in (self.warning, found.warning) if w)
        return {k: v for k, v in found.metrics.items() if not (scored and is_about_rejection(k))}

    def mini_batches(self, samples: list[Sample]) -> list[list[Sample]]:
        """Whole groups in order, in as equal parts as possible."""
        groups = list(dict.fromkeys(s.group for s in samples))
        parts = min(self.spec.mini_batches, max(len(groups), 1))
        owner = {g: i * parts // len(groups) for i, g in enumerate(groups)}
        return [[s for s in samples if owner[s.group] == part] for part in range(parts)]

    def gradients(
        self,
        batch: list[Sample],
        scales: Scales,
        mismatch: Mismatch | None,
        metrics: dict[str, float],
        *,
        last: bool = False,
    ) -> list[dict[str, Reduced]]:
        """Accumulates the gradient of one mini-batch; compares with the rollout when `mismatch` is given. Clip bounds are
        calibrated on the last one."""
        limit = self.parts.spec.rollout.max_new_tokens
        counted = self.corrector.lengths(batch)
        coef_S = token_coefficients(counted, self.recipe.denominator, max_tokens=limit).tolist()
        coef_of = {id(s): coef for s, coef in zip(batch, coef_S, strict=True)}
        recipe, device = self.calibrator.recipe(self.recipe), self.parts.device
        reduced = []
        seen: list[Scored] = []
        division = self.packs.divided(batch, metrics)
        for chosen, micro in self.packs.microbatches(division.own):
            logp_N, entropy_N = self.log_probs(micro, scales)
            seen.append(Scored(micro.sample_N, logp_N.detach(), micro.rollout_N))
            terms = self.corrector.terms(chosen, CurrentLogp(logp_N), RolloutLogp(micro.rollout_N))
            coef_N = upload(torch.tensor([coef_of[id(s)] for s in chosen]), device)[micro.sample_N]
            inputs = LossInput(
                logp_N,
                terms.anchor_N,
                upload(torch.tensor([s.advantage for s in chosen]), device)[micro.sample_N],
                micro.sample_N,
                coef_N if terms.keep_N is None else torch.where(terms.keep_N, coef_N, 0.0),
                weight_N=terms.weight_N,
                entropy_N=entropy_N,
                ref_logp_N=self.reference_log_probs(micro, scales),
                length_S=torch.tensor([s.completion.trained_tokens for s in chosen]),
            )
            if last and self.calibrator.measuring:
                self.calibrator.see(chosen, micro, inputs)
            out = policy_loss(inputs, recipe)
            out.loss.backward()
            reduced.append(out.metrics)
        if mismatch is not None:
            everyones = division.gather(seen)
            self.compare(division.items, everyones, mismatch)
            for chosen, part in zip(division.items, everyones, strict=True):
                self.corrector.learn(chosen, part.trainer_N)
        return division.gather(reduced)

    def compare(self, packs: Sequence[list[Sample]], scored: Sequence[Scored], mismatch: Mismatch) -> None:
        """Takes scored micro-batches into account, all at once: until here no GPU had to be waited for."""
        for samples, part in zip(packs, scored, strict=True):
            trainer_N, rollout_N = part.trainer_N.cpu(), part.rollout_N.cpu()
            mismatch.see(trainer_N, rollout_N, part.sample_N.cpu())
            differences = by_sample(samples, (trainer_N - rollout_N).abs())
            for sample, difference_N in zip(samples, differences, strict=True):
                sample.max_abs_dlogp = float(difference_N.max())

    @torch.no_grad()
    def old_log_probs(
        self, samples: list[Sample], scales: Scales, mismatch: Mismatch | None = None
    ) -> dict[int, Tensor]:
        """The trainer's log-probabilities before the first optimizer step, by id of the sample; compared with the rollout's
        when `mismatch` is given."""
        found: dict[int, Tensor] = {}
        division, own = self.packs.divided(samples, {}), []
        for _, micro in self.packs.microbatches(division.own):
            logp_N, _ = micro.log_probs(self.parts.decoder, _own(scales, micro))
            own.append(Scored(micro.sample_N, logp_N, micro.rollout_N))
        scored = division.gather(own)
        if mismatch is not None:
            self.compare(division.items, scored, mismatch)
        for chosen, part in zip(division.items, scored, strict=True):
            logp_N = part.trainer_N.to(self.parts.device)
            found |= {id(s): own_N for s, own_N in zip(chosen, by_sample(chosen, logp_N), strict=True)}
        return found

    @torch.no_grad()
    def reference_log_probs(self, micro: MicroBatch, scales: Scales) -> Tensor | None:
        """Log-probabilities [N] under the reference policy, when the loss has a KL term."""
        if self.reference is None:
            return None
        own_routes = replace(micro, routes_TLk=None)
        return own_routes.log_probs(self.reference, _own(scales, micro))[0]

    def log_probs(self, micro: MicroBatch, scales: Scales) -> tuple[Tensor, Tensor]:
        """(log-probability, entropy) [N] under the KV scales that the samples were drawn with; maxima are gathered on the way."""
        return micro.log_probs(self.parts.decoder, _own(scales, micro), self.collector, self.load)

    def watch_kv(self) -> None:
        """Begins to gather KV maxima, where the engine has an FP8 KV cache."""
        model, device = self.parts.model_spec, self.parts.device
        watched = self.parts.flows.rollout.kv_fp8
        self.collector = AmaxCollector(model.num_layers, model.num_kv_heads, device) if watched else None
        self.seen = None

    def read_kv(self) -> dict[str, float]:
        """What the step's forwards saw of keys and values so far, in one transfer; `seen` keeps the maxima.

        Raises ContractError, naming the layer, when one was not finite.
        """
        if self.collector is None:
            return {}
        self.seen = reduce(KVMaxima.with_those, self.parts.ranks.gather(self.collector.read()))
        if not self.seen.elements:
            return {}
        return {"kv/saturation_pct": 100.0 * self.seen.saturated / self.seen.elements}

    def read_load(self) -> dict[str, float]:
        """What the experts got of all rows of the step."""
        if self.load is None:
            return {}
        first, *others = self.parts.ranks.gather(self.load)
        for other in others:
            first.add(other)
        return first.metrics()

    def judge(self, mismatch: Mismatch, samples: list[Sample], scales: Scales) -> None:
        """Stops the run, or warns, when it promised equality, or a band, and the first forward of these samples says otherwise.
        Weights are still those of the rollout."""
        if mismatch.max_abs <= self.tolerance:
            return
        if self.action == "warn":
            self.warning = (
                f"max |delta logp| {mismatch.max_abs:.3e} exceeds mismatch.tolerance {self.tolerance:g}"
            )
        if self.action == "stop":
            found = examine(
                samples,
                lambda some: self.packs.microbatches(self.packs.divided(some, {}).items),
                lambda micro: micro.log_probs(self.parts.decoder, _own(scales, micro))[0],
            )
            folder = Path(self.parts.spec.run_dir)
            path = found.write(folder) if self.parts.ranks.first else folder / NAME
            raise ContractError(
                f"rollout and trainer disagree: max |delta logp| {mismatch.max_abs:.3e} over {mismatch.tokens} tokens "
                f"({mismatch.tokens - mismatch.exact} differ), allowed is {self.tolerance:g}; {found.line()} ({path}); "
                "run `lockstep audit` on this config to find the operation, or set mismatch.on_violation"
            )


def _own(scales: Scales, micro: MicroBatch) -> KVScales | None:
    """The scales that the samples were drawn with; None where the engine has a BF16 KV cache."""
    return None if scales is None or not scales.version else scales.of(micro.scale_version)
