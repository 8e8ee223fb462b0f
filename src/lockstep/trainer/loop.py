"""The training loop, top to bottom: prompts, rollout, rewards, advantages, update, publication, evaluation, checkpoint.

In a unified flow the old log-probabilities are the rollout's own. There is no pass that recomputes them: the first forward of an
update yields the trainer's, and comparing the two costs nothing; they are equal bit for bit, or the run stops. A split flow
may be corrected (`corrector.py`): what has to be rejected is known before anything is taken from the others.

Next: `update.py` for the gradient, `../rollout/engine.py` for the samples, `../models/decoder.py` for the model.
"""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.algorithms import (
    advantages,
    drop_small_groups,
    dynamic_sampling_mask,
    overlong_penalty,
    resolve,
)
from lockstep.data.tokenize import EncodedPrompt
from lockstep.errors import CheckpointError
from lockstep.models.checkpoint import save
from lockstep.nn.kv_scales import KVScales
from lockstep.observe.logger import RunLogger
from lockstep.observe.metrics import PhaseTimer, peak_memory
from lockstep.observe.sinks import SampleRecord, select
from lockstep.rewards.evaluate import Rewards
from lockstep.rollout.types import Completion, Request
from lockstep.sync.publish import Publisher
from lockstep.sync.receipt import Receipt
from lockstep.trainer.backend import choice
from lockstep.trainer.checkpoint import Progress, list_checkpoints, load_checkpoint, save_checkpoint
from lockstep.trainer.control import Control
from lockstep.trainer.evaluation import Evaluator
from lockstep.trainer.optimizer import Optimizer
from lockstep.trainer.sample import Expected, Sample, admit
from lockstep.trainer.scale_history import ScaleHistory
from lockstep.trainer.scoring import add_counts, completion_metrics, reward_metrics, score
from lockstep.trainer.setup import Parts, sampling_params
from lockstep.trainer.update import Updater
from lockstep.trainer.warm_start import warm_start

MAX_SAMPLING_ROUNDS = 4
"""Dynamic sampling draws prompts at most this often to fill a step."""


@dataclass(frozen=True)
class RunResult:
    """Where a run ended. digest: SHA-256 of the published weights."""

    step: int
    digest: str
    metrics: dict[str, float]


class Trainer:
    """One run. `run` is the whole story."""

    def __init__(self, parts: Parts, rewards: Rewards, logger: RunLogger) -> None:
        spec = parts.spec
        self.parts, self.spec, self.rewards, self.logger = parts, spec, rewards, logger
        self.recipe = resolve(spec.algorithm)
        steps = spec.update.steps * spec.update.mini_batches * spec.update.epochs
        self.ranks = parts.ranks
        self.optimizer = Optimizer(parts.decoder.named_parameters(), spec.optim, steps, self.ranks)
        self.publisher = Publisher(parts.decoder, parts.engine)
        self.updater = Updater(parts, self.recipe, self.optimizer)
        self.evaluator = Evaluator(parts, rewards) if spec.eval.every else None
        self.progress = Progress(ranks=self.ranks.size)
        self.history = ScaleHistory(spec.flow, parts.device)
        self.timer = PhaseTimer(wait=torch.cuda.synchronize if parts.device.type == "cuda" else None)
        self.receipt: Receipt | None = None
        self.run_dir = Path(spec.run_dir)
        self.force_recalibrate = False
        self.control = Control(self)

    def run(self, resume: str = "auto", config_yaml: str = "") -> RunResult:
        """Trains from the newest checkpoint (or the beginning) to the last step, and exports the model."""
        metrics: dict[str, float] = {}
        for told in (choice(self.spec, self.parts.kernels), self.parts.note):
            if told is not None:
                self.logger.note(told)
        resumed = self.resume(resume)
        if config_yaml and self.ranks.first:
            self.logger.folder.config_file.write_text(config_yaml)
        if not resumed:
            self.begin()
        while self.progress.step < self.spec.update.steps:
            metrics = self.step()
        if self.spec.checkpoint.export_hf and self.ranks.first:
            self.export()
        assert self.receipt is not None
        return RunResult(self.progress.step, self.receipt.digest, metrics)

    def begin(self) -> None:
        """What comes before the first step: warm start, KV calibration, version 1, evaluation."""
        if self.parts.dropped_prompts:
            self.logger.note(
                f"{self.parts.dropped_prompts} prompts longer than data.max_prompt_tokens are left out"
            )
        warm_start(self.parts, self.logger)
        self.publish(must_change=False)
        self.updater.keep_reference(self.run_dir)
        metrics = self.evaluate()
        if metrics:
            self.logger.step(0, metrics)
        self.timer.result()
        if self.spec.checkpoint.every:
            self.save()

    def step(self) -> dict[str, float]:
        """One training step."""
        with self.timer.phase("rollout"):
            samples, metrics = self.sample()
        with self.timer.phase("train"):
            metrics |= self.updater.update(samples, self.history)
            if self.updater.warning:
                self.logger.note(self.updater.warning)
        with self.timer.phase("publish"):
            self.progress.step += 1
            metrics |= self.publish(must_change=self.updater.moved)
        with self.timer.phase("control"):
            metrics |= self.control.observe(metrics, samples)
        metrics |= self.evaluate()
        self.log(metrics, samples)
        self.control.stop_if_ordered()
        if self.spec.checkpoint.every and self.progress.step % self.spec.checkpoint.every == 0:
            self.save()
        return metrics

    def sample(self) -> tuple[list[Sample], dict[str, float]]:
        """Rollouts with rewards and advantages: enough groups to learn from, or the step is refused. What the correction rejects
        goes before anything is taken from the others: baselines, advantages, and in the update the denominator."""
        wanted = self.spec.rollout.prompts_per_step
        kept: list[Sample] = []
        metrics: dict[str, float] = {}
        rounds = groups = 0
        while groups < wanted and rounds < (MAX_SAMPLING_ROUNDS if self.recipe.dynamic_sampling else 1):
            drawn, metrics_round = self.rollout_and_score(wanted)
            scoring = self.timer.phase("old_logp") if self.updater.corrector.needs_pass else nullcontext()
            with scoring:
                screened, rejected = self.updater.screen(drawn, self.history)
            metrics_round |= rejected
            metrics = add_counts(metrics, metrics_round) if metrics else metrics_round
            rewards = torch.tensor([s.reward for s in drawn])
            group = torch.tensor([s.group for s in drawn], dtype=torch.long)
            keep = torch.tensor(screened, dtype=torch.bool)
            if self.recipe.dynamic_sampling and drawn:
                keep &= dynamic_sampling_mask(rewards, group)
            if drawn:
                keep &= drop_small_groups(group, keep)
            kept += [s for s, k in zip(drawn, keep.tolist(), strict=True) if k]
            groups = len({s.group for s in kept})
            rounds += 1
        kept = [s for s in kept if s.group in sorted({s.group for s in kept})[:wanted]]
        if self.recipe.dynamic_sampling:
            metrics["data/sampling_rounds"] = float(rounds)
        metrics["data/kept_groups"] = float(min(groups, wanted))
        self.set_advantages(kept)
        return kept, metrics

    def rollout_and_score(self, count: int) -> tuple[list[Sample], dict[str, float]]:
        """Samples of the next `count` prompts that keep the sample contract and got a reward."""
        start = self.progress.ordinal
        prompts = self.parts.stream.take(start, count)
        self.progress.ordinal += count
        completions = self.generate(start, prompts)
        sent = {start + i: p.ids for i, p in enumerate(prompts)}
        expected = Expected(
            self.progress.version,
            self.progress.scale_version,
            self.parts.model_spec.vocab_size,
            sent,
            self.parts.replayed,
        )
        completions, metrics = admit(completions, expected, self.spec.data.on_bad_sample)
        samples = [
            Sample(c, prompts[c.prompt_index - start].example, c.prompt_index, self.parts.text)
            for c in completions
        ]
        metrics |= score(self.rewards, samples, self.ranks)
        scored = [s for s in samples if s.reward is not None]
        metrics |= completion_metrics(completions)
        metrics |= reward_metrics(scored)
        metrics["data/epoch"] = self.progress.ordinal / self.parts.stream.epoch_size
        self.progress.tokens += sum(len(c.prompt_ids) + len(c.token_ids) for c in completions)
        return scored, metrics

    def generate(self, start: int, prompts: list[EncodedPrompt]) -> list[Completion]:
        """Rollouts of prompts with ordinals from `start` on."""
        params = sampling_params(self.parts)
        samples = self.spec.rollout.samples_per_prompt
        requests = [Request(p.ids, start + i, samples, params) for i, p in enumerate(prompts)]
        return self.parts.generate(
            requests,
            seed=self.spec.seed,
            step=self.progress.step,
            expected_version=self.progress.version,
            expected_scale_version=self.progress.scale_version,
            progress=self.logger.busy,
        )

    def set_advantages(self, samples: list[Sample]) -> None:
        """Advantages of the samples that will be trained on; whatever was rejected is already gone (field failure 41)."""
        if not samples:
            return
        rewards = torch.tensor([s.reward for s in samples])
        if self.recipe.overlong_buffer:
            lengths = torch.tensor([s.completion.trained_tokens for s in samples])
            limit = self.spec.rollout.max_new_tokens
            rewards = rewards + overlong_penalty(
                lengths, limit, self.recipe.overlong_buffer, self.recipe.overlong_penalty
            )
        group = torch.tensor([s.group for s in samples])
        values = advantages(rewards, group, self.recipe.advantage, eps=self.recipe.advantage_eps)
        for sample, value in zip(samples, values.tolist(), strict=True):
            sample.advantage = value

    def publish(self, *, must_change: bool) -> dict[str, float]:
        """Makes the next weight version current on both sides, and with it the KV scales that the last step asks for."""
        self.progress.version += 1
        scales = self.calibrate if self.parts.flows.rollout.kv_fp8 else None
        self.receipt = self.publisher.publish(self.progress.version, scales=scales, must_change=must_change)
        self.ranks.alike(self.receipt.digest, f"weights v{self.receipt.version}")
        self.force_recalibrate = False
        self.logger.receipt(self.progress.step, self.receipt.to_dict())
        kv = {"kv/scale_version": float(self.history.version), "kv/scale_drift": self.history.drift}
        return (kv if self.parts.flows.rollout.kv_fp8 else {}) | {
            "sync/version": float(self.receipt.version),
            "sync/bytes": float(self.receipt.bytes),
            "sync/tensors": float(self.receipt.tensors),
            "sync/changed_codes_pct": self.receipt.changed_pct,
            "sync/max_rel_err": self.receipt.max_rel_err,
        }

    @property
    def scales(self) -> KVScales | None:
        """The KV scales in use; None without, and before the first calibration."""
        return self.history.current

    def calibrate(self) -> KVScales | None:
        """The KV scales to publish next, None when those in use stay: from the first step's real prompts, later from what the
        training forward saw, or always from the engine's forward over the prompts to come. The new weights are there already.
        """
        flow, seen = self.spec.flow, self.updater.seen
        self.updater.seen = None
        if self.scales is None or (flow.kv_calibration == "rollout" and flow.kv_recalibrate == "step"):
            seen = self.parts.measure_kv(self.progress.ordinal)
        scales = self.history.advance(seen, force=self.force_recalibrate)
        self.progress.scale_version = self.history.version
        return scales

    def evaluate(self) -> dict[str, float]:
        """Held-out metrics, on the steps that have an evaluation."""
        every, step = self.spec.eval.every, self.progress.step
        if self.evaluator is None or (step % every and step != self.spec.update.steps):
            return {}
        with self.timer.phase("eval"):
            return self.evaluator.run(step, self.progress.version, self.progress.scale_version)

    def log(self, metrics: dict[str, float], samples: list[Sample]) -> None:
        """Everything about the finished step goes to the sinks at once."""
        metrics["num_tokens"] = float(self.progress.tokens)
        metrics |= self.timer.result() | peak_memory()
        shown = select(samples, self.spec.observe.samples_per_step) if self.ranks.first else []
        self.logger.step(self.progress.step, metrics, [self.record(s) for s in shown])

    def record(self, sample: Sample) -> SampleRecord:
        """A sample for samples.jsonl."""
        completion = sample.completion
        answer = sample.example.columns.get("answer")
        return SampleRecord(
            prompt=str(self.parts.tokenizer.decode(completion.prompt_ids)),
            completion=sample.text,
            answer=None if answer is None else str(answer),
            reward=sample.reward,
            parts=sample.parts,
            finish_reason=completion.finish_reason,
            tokens=len(completion.token_ids),
            mean_logp=sum(completion.trained_logprobs) / completion.trained_tokens,
            max_abs_dlogp=sample.max_abs_dlogp,
            weight_version=completion.spans[0].version,
        )

    def resume(self, wish: str) -> bool:
        """Restores a checkpoint and publishes its version first (prime-rl 3016); False when there is none to go on from.

        wish: `auto` (the newest of this run), `never`, or a checkpoint's path.
        """
        kept = self.run_dir / "checkpoints"
        found = self.ranks.told(list_checkpoints(kept)) if wish == "auto" else [Path(wish)]
        if wish == "never" or not found:
            if self.ranks.first:
                self.start_anew(asked=wish == "never")
            self.ranks.wait()
            return False
        self.progress = load_checkpoint(
            found[-1], self.parts.decoder, self.optimizer, self.history, self.config()
        )
        if self.progress.step > self.spec.update.steps:
            raise CheckpointError(
                f"the checkpoint has {self.progress.step} steps, the run only {self.spec.update.steps}",
                where=str(found[-1]),
                fix="raise update.steps, or use --resume never",
            )
        self.logger.resume(self.progress.step)
        self.control.restore()
        self.updater.calibrator.load(self.progress.clip_calibration)
        self.receipt = self.publisher.publish(self.progress.version, scales=self.scales)
        self.updater.keep_reference(self.run_dir)
        self.logger.note(f"resumed from {found[-1].name}, weights {self.receipt.digest[:12]}")
        if self.progress.ranks != self.ranks.size:
            self.logger.note(
                f"{self.ranks.size} processes now, {self.progress.ranks} before: gradients are added up in another order, so "
                "this run won't equal one that wasn't interrupted bit for bit"
            )
            self.progress.ranks = self.ranks.size
        self.timer.result()
        return True

    def start_anew(self, *, asked: bool) -> None:
        """Clears what an earlier run left in the folder: all of it when asked to, else only a beginning without a step."""
        steps = self.logger.last_step or 0
        if steps and not asked:
            raise CheckpointError(
                f"the folder holds {steps} steps of a run but no checkpoint to go on from",
                where=str(self.run_dir),
                fix="give another run_dir, or start anew with --resume never, which removes them",
            )
        shutil.rmtree(self.run_dir / "checkpoints", ignore_errors=True)
        self.logger.resume(-1)

    def save(self) -> None:
        """A full checkpoint of the finished step."""
        self.progress.clip_calibration = self.updater.calibrator.state()
        save_checkpoint(
            self.run_dir / "checkpoints",
            self.progress,
            self.parts.decoder,
            self.optimizer,
            self.history,
            self.config(),
            self.spec.checkpoint.keep,
        )

    def config(self) -> dict[str, Any]:
        """The run's specification as plain data, with the kernels that `auto` took and the fingerprint of the data it names."""
        kernels = self.parts.kernels.name
        return {**asdict(self.spec), "kernels": kernels, "data_fingerprint": self.parts.fingerprint}

    def export(self) -> None:
        """The trained weights as a Hugging Face checkpoint."""
        dtype = getattr(torch, self.spec.checkpoint.export_dtype)
        save(
            self.run_dir / "model",
            self.parts.model_spec,
            self.parts.decoder.named_parameters(),
            dtype=dtype,
            tokenizer=self.parts.tokenizer,
            overwrite=True,
        )
