"""The update: from samples with advantages to optimizer steps, and the comparison that comes for free.

A step's samples are cut into mini-batches of whole groups (one optimizer step each) and those into micro-batches under a
token budget. One global denominator holds for a mini-batch, so the number of micro-batches changes nothing. The first
mini-batch is computed under the very weights that sampled it: its log-probabilities are compared with the rollout's
*before* the optimizer moves.

Next: `microbatch.py` for the rows, `../algorithms/losses.py` for the loss.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.algorithms import LossInput, merge_metrics, policy_loss, token_coefficients
from lockstep.algorithms.reduced import Reduced
from lockstep.algorithms.spec import Recipe
from lockstep.correction.mismatch import Mismatch, truncated_weight
from lockstep.data.packing import GroupLengths, fill_ratio, pack
from lockstep.errors import CheckpointError, ContractError
from lockstep.models.decoder import Decoder
from lockstep.nn.kv_scales import KVScales
from lockstep.trainer.microbatch import MicroBatch, make_microbatch
from lockstep.trainer.optimizer import Optimizer
from lockstep.trainer.sample import Sample
from lockstep.trainer.setup import Parts


class Updater:
    """Turns samples into optimizer steps. `moved` says whether the last update had a gradient to follow,
    `warning` that its mismatch was beyond the tolerance."""

    def __init__(self, parts: Parts, recipe: Recipe, optimizer: Optimizer) -> None:
        self.parts, self.recipe, self.optimizer = parts, recipe, optimizer
        self.spec = parts.spec.update
        self.reference: Decoder | None = None
        self.moved = False
        self.warning = ""
        mismatch = parts.spec.mismatch
        unified = parts.flows.unified
        self.action = (
            ("stop" if unified else "warn") if mismatch.on_violation == "auto" else mismatch.on_violation
        )
        self.tolerance = (0.0 if unified else 1.0) if mismatch.tolerance == -1.0 else mismatch.tolerance
        self.truncate = mismatch.truncate

    def keep_reference(self, run_dir: Path) -> None:
        """The reference policy of the KL term: the weights before the first step, kept in the run's folder."""
        if not self.recipe.needs_reference:
            return
        decoder, path = self.parts.decoder, run_dir / "reference.safetensors"
        if self.optimizer.steps == 0:
            save_file({n: p.detach().contiguous() for n, p in decoder.named_parameters()}, path)
        elif not path.is_file():
            raise CheckpointError("the reference policy is missing", where=str(path), fix="start anew")
        self.reference = Decoder(decoder.spec, decoder.flow, decoder.kernels)
        tensors = load_file(path)
        with torch.no_grad():
            for name, parameter in self.reference.named_parameters():
                parameter.copy_(tensors[name])
        self.reference.requires_grad_(False).refresh(0)

    def update(self, samples: list[Sample], scales: KVScales | None) -> dict[str, float]:
        """All optimizer steps of one training step, and their metrics. Without samples nothing moves.

        Raises ContractError when rollout and trainer disagree beyond the tolerance and the action is `stop`.
        """
        trainer_scales = scales if self.parts.flows.trainer.kv_fp8 else None
        mismatch = Mismatch()
        reduced: list[dict[str, Reduced]] = []
        metrics: dict[str, float] = {"optim/lr": self.optimizer.learning_rate()}
        applied = 0
        self.moved, self.warning = False, ""
        trained = [b for b in self.mini_batches(samples) if b]
        old = self.old_log_probs(samples, trainer_scales) if self.needs_old(len(trained)) else None
        for epoch in range(self.spec.epochs):
            for number, batch in enumerate(trained):
                first = epoch == 0 and number == 0
                reduced += self.gradients(batch, trainer_scales, mismatch if first else None, old, metrics)
                if first:
                    self.judge(mismatch)
                result = self.optimizer.step()
                applied += result.applied
                self.moved |= result.applied and result.grad_norm > 0 and result.lr > 0
                metrics["optim/grad_norm"] = result.grad_norm
                if not (epoch == self.spec.epochs - 1 and number == len(trained) - 1):
                    self.parts.decoder.refresh(self.parts.decoder.version)
        metrics["optim/applied_steps"] = float(applied)
        metrics["optim/skipped_steps"] = float(self.optimizer.skipped)
        metrics |= {name: value.result() for name, value in merge_metrics(reduced).items()}
        return metrics | mismatch.metrics()

    def mini_batches(self, samples: list[Sample]) -> list[list[Sample]]:
        """Whole groups in order, in as equal parts as possible."""
        groups = list(dict.fromkeys(s.group for s in samples))
        parts = min(self.spec.mini_batches, max(len(groups), 1))
        owner = {g: i * parts // len(groups) for i, g in enumerate(groups)}
        return [[s for s in samples if owner[s.group] == part] for part in range(parts)]

    def gradients(
        self,
        batch: list[Sample],
        scales: KVScales | None,
        mismatch: Mismatch | None,
        old: dict[int, Tensor] | None,
        metrics: dict[str, float],
    ) -> list[dict[str, Reduced]]:
        """Accumulates the gradient of one mini-batch; compares with the rollout when `mismatch` is given."""
        lengths = torch.tensor([len(s.completion.token_ids) for s in batch])
        limit = self.parts.spec.rollout.max_new_tokens
        coef_S = token_coefficients(lengths, self.recipe.denominator, max_tokens=limit)
        bins = self.pack(batch, metrics)
        reduced = []
        for members in bins:
            chosen = [batch[i] for i in members]
            micro = self.microbatch(chosen)
            logp_N, entropy_N = micro.log_probs(self.parts.decoder, scales)
            if mismatch is not None:
                mismatch.see(logp_N, micro.rollout_N)
                self.note_differences(chosen, micro, logp_N)
            old_N, weight_N = self.old_and_weight(chosen, micro, logp_N, old)
            out = policy_loss(
                LossInput(
                    logp_N,
                    old_N,
                    torch.tensor([s.advantage for s in chosen])[micro.sample_N],
                    micro.sample_N,
                    coef_S[torch.tensor(members)][micro.sample_N],
                    weight_N=weight_N,
                    entropy_N=entropy_N,
                    ref_logp_N=self.reference_log_probs(micro, scales),
                    length_S=lengths[torch.tensor(members)],
                ),
                self.recipe,
            )
            out.loss.backward()
            reduced.append(out.metrics)
        return reduced

    def pack(self, batch: list[Sample], metrics: dict[str, float]) -> list[list[int]]:
        """Micro-batches of sample numbers under the token budget."""
        groups: dict[int, list[Sample]] = {}
        for sample in batch:
            groups.setdefault(sample.group, []).append(sample)
        assert [s for g in groups.values() for s in g] == batch, "samples of a group stand together"
        lengths = [
            GroupLengths(len(g[0].completion.prompt_ids), tuple(len(s.completion.token_ids) for s in g))
            for g in groups.values()
        ]
        budget, share = self.spec.max_tokens_per_microbatch, self.spec.share_prompts
        bins = pack(lengths, budget, share)
        metrics["data/microbatches"] = metrics.get("data/microbatches", 0.0) + len(bins)
        metrics["data/packing_fill"] = fill_ratio(bins, lengths, budget, share)
        return bins

    def microbatch(self, samples: list[Sample]) -> MicroBatch:
        """Packed rows of these samples."""
        return make_microbatch(
            [s.completion for s in samples], self.parts.group, share_prompts=self.spec.share_prompts
        )

    def needs_old(self, mini_batches: int) -> bool:
        """Whether the trainer's old log-probabilities need a pass of their own: only to correct over several steps."""
        return self.action == "correct" and self.spec.epochs * mini_batches > 1

    @torch.no_grad()
    def old_log_probs(self, samples: list[Sample], scales: KVScales | None) -> dict[int, Tensor]:
        """The trainer's log-probabilities before the first optimizer step, by id of the sample."""
        found: dict[int, Tensor] = {}
        for members in self.pack(samples, {}):
            chosen = [samples[i] for i in members]
            micro = self.microbatch(chosen)
            logp_N, _ = micro.log_probs(self.parts.decoder, scales)
            for i, sample in enumerate(chosen):
                found[id(sample)] = logp_N[micro.sample_N == i]
        return found

    def old_and_weight(
        self, chosen: list[Sample], micro: MicroBatch, logp_N: Tensor, old: dict[int, Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """The denominator of the importance ratio, and the correction weight of trainer over rollout."""
        if self.action != "correct":
            return micro.rollout_N, None
        old_N = logp_N.detach() if old is None else torch.cat([old[id(s)] for s in chosen])
        return old_N, truncated_weight(old_N, micro.rollout_N, self.truncate)

    @torch.no_grad()
    def reference_log_probs(self, micro: MicroBatch, scales: KVScales | None) -> Tensor | None:
        """Log-probabilities [N] under the reference policy, when the loss has a KL term."""
        return None if self.reference is None else micro.log_probs(self.reference, scales)[0]

    def note_differences(self, chosen: list[Sample], micro: MicroBatch, logp_N: Tensor) -> None:
        """Largest difference of each sample, for samples.jsonl."""
        difference = (logp_N.detach() - micro.rollout_N).abs()
        for i, sample in enumerate(chosen):
            sample.max_abs_dlogp = float(difference[micro.sample_N == i].max())

    def judge(self, mismatch: Mismatch) -> None:
        """Stops the run, or warns, when it promised equality, or a band, and the first forward says otherwise."""
        if mismatch.max_abs <= self.tolerance:
            return
        if self.action == "warn":
            self.warning = (
                f"max |delta logp| {mismatch.max_abs:.3e} exceeds mismatch.tolerance {self.tolerance:g}"
            )
        if self.action == "stop":
            raise ContractError(
                f"rollout and trainer disagree: max |delta logp| {mismatch.max_abs:.3e} over {mismatch.tokens} tokens "
                f"({mismatch.tokens - mismatch.exact} differ), allowed is {self.tolerance:g}; "
                "run `lockstep audit` on this config to find the operation, or set mismatch.on_violation"
            )
