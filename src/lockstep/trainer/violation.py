"""What can be said at once when rollout and trainer disagree although they promised not to: where, and whom to doubt.

    where    a whole prompt (its keys and values differ), samples from some token on (a decode step), or tokens alone (the head)
    again    the trainer's forward a second time: other bits mean that it doesn't repeat itself
    alone    a sample that differs, scored by itself in a pack of one: another answer than in its pack means that rows of the
             training forward depend on their neighbours; the rollout's answer means the pack is wrong, the trainer's that the
             rollout is

Written to `violation.json` in the run's folder; the error's text has the short form.

Next: `update.py`, which asks; `lockstep audit`, which finds the operation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from lockstep.trainer.microbatch import MicroBatch
from lockstep.trainer.sample import Sample, by_sample

NAME = "violation.json"
MOST_ALONE = 8
"""Samples that are scored by themselves."""
Packs = Callable[[list[Sample]], Iterator[tuple[list[Sample], MicroBatch]]]
Score = Callable[[MicroBatch], Tensor]


@dataclass(frozen=True)
class Differing:
    """One sample: how many of its trained tokens differ, the first of them, and the largest difference. alone: whose bits it has
    when scored by itself, None where that wasn't tried. tokens: what was drawn; deltas: trainer minus rollout."""

    prompt: int
    sample: int
    trained: int
    differ: int
    first: int
    largest: float
    alone: str | None
    tokens: tuple[int, ...]
    deltas: tuple[float, ...]


@dataclass(frozen=True)
class Violation:
    """repeats: whether the training forward gave the same bits twice."""

    repeats: bool
    samples: int
    differing: tuple[Differing, ...]

    def line(self) -> str:
        """For the error's text."""
        if not self.differing:
            return f"a second training forward agrees with the rollout in all {self.samples} samples: it doesn't repeat itself"
        prompts = sorted({d.prompt for d in self.differing})
        earliest = min(self.differing, key=lambda d: (d.first, d.prompt, d.sample))
        alone = sorted({d.alone for d in self.differing if d.alone is not None})
        return (
            f"{len(self.differing)} of {self.samples} samples differ, of prompts {', '.join(map(str, prompts[:6]))}"
            f"{' and more' if len(prompts) > 6 else ''}; the earliest at token {earliest.first} of sample {earliest.sample} of "
            f"prompt {earliest.prompt}; the training forward {'repeats' if self.repeats else 'does not repeat'} itself; "
            f"scored alone they have the bits of {' or '.join(alone)}"
        )

    def write(self, folder: Path) -> Path:
        """As JSON; the path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / NAME
        path.write_text(json.dumps(asdict(self), indent=1))
        return path


@torch.no_grad()
def examine(samples: list[Sample], packs: Packs, score: Score) -> Violation:
    """Scores the samples again under the present weights. packs: micro-batches of samples; score: log-probabilities [N]."""
    first, again = _scored(samples, packs, score), _scored(samples, packs, score)
    repeats = all(torch.equal(first[i], again[i]) for i in first)
    found, tried = [], 0
    for sample in samples:
        trainer, rollout = first[id(sample)], torch.tensor(sample.completion.trained_logprobs)
        wrong = trainer != rollout
        if not bool(wrong.any()):
            continue
        alone = None
        if tried < MOST_ALONE:
            tried += 1
            alone = _whose(_scored([sample], packs, score)[id(sample)], trainer, rollout)
        at, delta = wrong.nonzero().flatten(), trainer - rollout
        completion = sample.completion
        found.append(
            Differing(
                completion.prompt_index,
                completion.sample_index,
                len(trainer),
                len(at),
                int(at[0]),
                float(delta.abs().max()),
                alone,
                completion.token_ids,
                tuple(delta.tolist()),
            )
        )
    return Violation(repeats, len(samples), tuple(found))


def _scored(samples: list[Sample], packs: Packs, score: Score) -> dict[int, Tensor]:
    """The trainer's log-probabilities of each sample, on the CPU, by its id."""
    found: dict[int, Tensor] = {}
    for chosen, micro in packs(samples):
        found |= {id(s): own for s, own in zip(chosen, by_sample(chosen, score(micro).cpu()), strict=True)}
    return found


def _whose(alone: Tensor, trainer: Tensor, rollout: Tensor) -> str:
    if torch.equal(alone, trainer):
        return "the trainer"
    return "the rollout" if torch.equal(alone, rollout) else "neither"
