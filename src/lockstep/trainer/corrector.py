"""The correction within a training step: when the old policy is known, who is rejected, what every token weighs.

The order is that of docs/mismatch.md, and it is the point: *score* the samples under the trainer's weights before the update,
*reject*, and only then take baselines, advantages and the denominator; weights come last, over what is trained on. The
old policy is free when nothing of this has to be known before the update's own first forward, which is the case for plain
weights and one optimizer step: then that forward's log-probabilities are the old ones. Otherwise one pass without gradient
scores the step's samples, once.

In a unified flow without a correction nothing happens here: the rollout's numbers are the old policy's, bit for bit.

Next: `../correction/weights.py` for the arithmetic, `update.py` for the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.correction.policies import CurrentLogp, OldLogp, RolloutLogp
from lockstep.correction.spec import resolve
from lockstep.correction.weights import Corrected, correct
from lockstep.errors import ContractError
from lockstep.trainer.sample import Sample, by_sample
from lockstep.trainer.setup import Parts


@dataclass(eq=False)
class TokenRecord:
    """What is known of the trained tokens of a sample. keep_N, weight_N: once they are decided."""

    sample: Sample
    old: OldLogp
    rollout: RolloutLogp
    keep_N: Tensor | None = None
    weight_N: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Terms:
    """What the loss takes from the correction, by token. anchor_N: denominator of the importance ratio. None: all 1, all kept."""

    anchor_N: Tensor
    weight_N: Tensor | None = None
    keep_N: Tensor | None = None


class Corrector:
    """Holds the correction, and the records of the step at hand. `correction` may be replaced between two steps."""

    def __init__(self, parts: Parts) -> None:
        update = parts.spec.update
        self.parts, self.correction = parts, resolve(parts.spec.correction)
        self.single = update.epochs * update.mini_batches == 1
        self.records: dict[int, TokenRecord] = {}

    @property
    def on_rollout(self) -> bool:
        """The importance ratio of the loss is against the rollout policy."""
        return self.correction.bypass_mode or (self.parts.flows.unified and not self.correction.active)

    @property
    def uses_old(self) -> bool:
        """The old policy appears, in the importance ratio or in the correction."""
        return not self.on_rollout or replace(self.correction, bypass_mode=False).active

    @property
    def needs_pass(self) -> bool:
        """The old policy has to be known before the update's first forward, or beyond its first optimizer step."""
        before = self.correction.rejects or self.correction.needs_batch
        return before or (self.uses_old and not self.single)

    def remember(self, sample: Sample, old_N: Tensor) -> None:
        """The trainer's log-probabilities of a sample's trained tokens, before the update. ContractError if not finite."""
        if not bool(torch.isfinite(old_N).all()):
            raise ContractError(
                f"the trainer's log-probabilities of sample {sample.completion.sample_index} of prompt "
                f"{sample.completion.prompt_index} are not finite: its weights or activations are broken"
            )
        rollout_N = torch.tensor(sample.completion.trained_logprobs, dtype=torch.float32, device=old_N.device)
        self.records[id(sample)] = TokenRecord(sample, OldLogp(old_N), RolloutLogp(rollout_N))

    def learn(self, samples: Sequence[Sample], old_N: Tensor) -> bool:
        """Remembers these samples, by the update's first forward (this rank's or another's), where no pass has: then nothing had
        moved in it. Whether that was so."""
        if not self.uses_old or all(id(s) in self.records for s in samples):
            return False
        assert not self.needs_pass, "a pass should have scored these samples before the update"
        for sample, own_N in zip(samples, by_sample(samples, old_N.to(self.parts.device)), strict=True):
            self.remember(sample, own_N)
        return True

    def reject(self, samples: Sequence[Sample]) -> tuple[list[bool], dict[str, float]]:
        """Which of these remembered samples stay, and what share went. Nobody's reward was looked at yet."""
        found = self._correct(samples)
        return found.keep_S.tolist(), {k: v for k, v in found.metrics.items() if is_about_rejection(k)}

    def weigh(self, samples: Sequence[Sample]) -> Corrected | None:
        """Masks and weights of all samples of the update, from their records; None when there is nothing to weigh."""
        if not samples or not self.correction.active or any(id(s) not in self.records for s in samples):
            return None
        found = self._correct(samples)
        lengths = [s.completion.trained_tokens for s in samples]
        parts = zip(found.keep_N.split(lengths), found.weight_N.split(lengths), strict=True)
        for sample, (keep_N, weight_N) in zip(samples, parts, strict=True):
            self.records[id(sample)].keep_N, self.records[id(sample)].weight_N = keep_N, weight_N
        return found

    def lengths(self, samples: Sequence[Sample]) -> Tensor:
        """Tokens of each sample that the denominator counts."""
        kept = [r.keep_N if (r := self.records.get(id(s))) else None for s in samples]
        return torch.tensor(
            [
                s.completion.trained_tokens if keep_N is None else int(keep_N.sum())
                for s, keep_N in zip(samples, kept, strict=True)
            ]
        )

    def terms(self, samples: Sequence[Sample], current: CurrentLogp, rollout: RolloutLogp) -> Terms:
        """For the tokens of these samples in their order, under the weights of `current`. Where no pass has remembered them,
        nothing has moved yet, and `current` is the old policy."""
        if not self.uses_old:
            return Terms(rollout.values_N)
        if self.learn(samples, current.values_N.detach()):
            self.weigh(samples)
        records = [self.records[id(s)] for s in samples]
        old_N = torch.cat([r.old.values_N for r in records])
        anchor_N = rollout.values_N if self.on_rollout else old_N
        return Terms(anchor_N, _joined([r.weight_N for r in records]), _joined([r.keep_N for r in records]))

    def _correct(self, samples: Sequence[Sample]) -> Corrected:
        records = [self.records[id(s)] for s in samples]
        old = OldLogp(torch.cat([r.old.values_N for r in records]))
        rollout = RolloutLogp(torch.cat([r.rollout.values_N for r in records]))
        device = old.values_N.device
        lengths = torch.tensor([s.completion.trained_tokens for s in samples], device=device)
        sample_N = torch.arange(len(samples), device=device).repeat_interleave(lengths)
        return correct(old, rollout, sample_N, len(samples), self.correction)


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    """All of them, when there are any; masks and weights are decided for all samples or for none."""
    found = [p for p in parts if p is not None]
    assert len(found) in (0, len(parts))
    return torch.cat(found) if found else None


def is_about_rejection(metric: str) -> bool:
    """Metrics of all samples that were scored; the others are of those that are trained on."""
    words = ("rollout_rs", "rejected", "veto", "catastrophic", "length_trap")
    return any(word in metric for word in words)
