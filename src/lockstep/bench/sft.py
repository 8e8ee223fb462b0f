"""Whether FP8 changes what is learnt: supervised fine-tuning under the FP8 flow and under BF16, from the same weights.

Three runs over the same corpus: BF16 and FP8 with the same order of sequences, and BF16 with another order. Every so many steps
the loss on held-out text is taken in BF16, whatever the run's own flow: what has been learnt, not what FP8 costs whoever asks
(under its own flow the loss is given beside it). The two BF16 runs show how far curves lie apart that differ in nothing that
matters; the FP8 curve should lie no farther from its BF16 twin than that.

Masters begin spread within the rounding of their BF16 values. A BF16 checkpoint's lie in the middle of it: for SmolLM2, of what
25 steps with a peak rate of 2e-5 move masters, half arrives in the BF16 copies, while FP8 codes, which cut elsewhere, follow from
the first step on, as they would for any weights that have been trained for a while.

Next: `gradients.py`, one gradient rather than five hundred steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.bench.corpus import load_corpus
from lockstep.bench.goals import Goal
from lockstep.bench.gradients import load_decoder, loss_sum
from lockstep.bench.sides import Say
from lockstep.data.order import permutation
from lockstep.kernels.table import Kernels
from lockstep.models.decoder import Decoder
from lockstep.numerics.flow import Flow, bf16_flow
from lockstep.rollout.types import Completion
from lockstep.trainer.optimizer import Optimizer
from lockstep.trainer.spec import OptimSpec


@dataclass(frozen=True)
class SFT:
    """How to fine-tune. batch: sequences of a step. every: steps between two looks at held-out text, `held_out` sequences."""

    steps: int = 500
    batch: int = 4
    length: int = 512
    lr: float = 2e-5
    every: int = 25
    held_out: int = 16


@dataclass(frozen=True)
class Curve:
    """One run: held-out loss by step, scored in BF16 and under the run's own flow, and the training loss of every step."""

    name: str
    held_out: dict[int, float]
    own: dict[int, float]
    training: tuple[float, ...]


@dataclass(frozen=True)
class Curves:
    """FP8, its BF16 twin, and BF16 with another order."""

    fp8: Curve
    twin: Curve
    other: Curve

    @property
    def noise(self) -> float:
        """Largest distance between the two BF16 curves, after the first look: all runs begin with the same weights."""
        return _distance(self.twin, self.other)

    @property
    def difference(self) -> float:
        """The same between FP8 and its twin."""
        return _distance(self.fp8, self.twin)

    def lines(self) -> list[str]:
        """For a terminal."""
        curves = (self.fp8, self.twin, self.other)
        lines = [
            f"{'step':>6} " + " ".join(f"{name:>12}" for name in (*(c.name for c in curves), "asked in FP8"))
        ]
        for step in self.fp8.held_out:
            found = [*(curve.held_out[step] for curve in curves), self.fp8.own[step]]
            lines.append(f"{step:6} " + " ".join(f"{loss:12.5f}" for loss in found))
        return [
            *lines,
            f"FP8 against BF16 at most {self.difference:.5f}, two orders in BF16 {self.noise:.5f}",
        ]

    def records(self) -> list[dict[str, Any]]:
        """For the result file."""
        return [
            {"run": curve.name, "step": step, "held_out_loss": loss, "own_flow": curve.own[step]}
            for curve in (self.fp8, self.twin, self.other)
            for step, loss in curve.held_out.items()
        ]


def run_sft(folder: Path, flow: Flow, kernels: Kernels, sft: SFT, *, say: Say) -> Curves:
    """All three runs."""
    judge = load_decoder(folder, bf16_flow(), kernels)

    def run(name: str, own: Flow, seed: int) -> Curve:
        decoder = load_decoder(folder, own, kernels)
        spread(decoder)
        return fine_tune(decoder, judge, folder, sft, name, seed, say)

    fp8 = run(flow.name, flow, 0)
    return Curves(fp8, run("bf16", bf16_flow(), 0), run("bf16, seed 1", bf16_flow(), 1))


@torch.no_grad()
def spread(decoder: Decoder, seed: int = 0) -> None:
    """Moves every master to a random place within the rounding of its BF16 value, and publishes."""
    generator = torch.Generator(decoder.device).manual_seed(seed)
    for master in decoder.parameters():
        mantissa, exponent = torch.frexp(master)
        exponent -= (mantissa.abs() == 0.5).int()  # values below a power of two lie half as far apart
        step = torch.ldexp(torch.ones_like(master), exponent - 8)
        noise = torch.rand(master.shape, generator=generator, device=master.device) - 0.5
        master.add_(0.98 * step * noise)
    decoder.refresh(1)


def fine_tune(
    decoder: Decoder, judge: Decoder, folder: Path, sft: SFT, name: str, seed: int, say: Say
) -> Curve:
    """One run of AdamW with linear warm-up and decay. judge: scores held-out text. seed: order of the sequences."""
    train, held = load_corpus(folder, decoder.spec, sft.length)
    held = held[: sft.held_out]
    optim = OptimSpec(lr=sft.lr, warmup_steps=min(20, sft.steps), schedule="linear")
    optimizer = Optimizer(decoder.named_parameters(), optim, sft.steps)

    def look(step: int) -> None:
        own[step] = held_out_loss(decoder, held)
        looks[step] = judged(judge, decoder, held) if decoder.flow.is_fp8 else own[step]

    looks, own, losses = dict[int, float](), dict[int, float](), list[torch.Tensor]()
    look(0)
    size = min(sft.batch, len(train))
    for step in range(1, sft.steps + 1):
        chosen = [train[_at(seed, size * (step - 1) + i, len(train))] for i in range(size)]
        loss = loss_sum(decoder, chosen) / sum(len(c.token_ids) for c in chosen)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        decoder.refresh(step + 1)
        if step % sft.every == 0 or step == sft.steps:
            look(step)
            say(f"{name} {step}/{sft.steps}: held-out loss {looks[step]:.5f}")
    return Curve(name, looks, own, tuple(torch.stack(losses).tolist()) if losses else ())


@torch.no_grad()
def judged(judge: Decoder, decoder: Decoder, held: Sequence[Completion]) -> float:
    """Held-out loss of these masters under the judge's flow."""
    for theirs, ours in zip(judge.parameters(), decoder.parameters(), strict=True):
        theirs.copy_(ours)
    judge.refresh(1)
    return held_out_loss(judge, held)


@torch.no_grad()
def held_out_loss(decoder: Decoder, held: Sequence[Completion]) -> float:
    """Mean -log p over all tokens."""
    total = sum(float(loss_sum(decoder, held[i : i + 4])) for i in range(0, len(held), 4))
    return total / sum(len(c.token_ids) for c in held)


def _at(seed: int, place: int, count: int) -> int:
    """Number of the sequence at a place of an order that begins anew, differently, when all were seen."""
    return int(permutation(seed, place // count, count)[place % count])


def _distance(a: Curve, b: Curve) -> float:
    return max((abs(a.held_out[step] - b.held_out[step]) for step in a.held_out if step), default=0.0)


def goals(found: Curves) -> list[Goal]:
    """Which of the project's goals this answers: only a run of 500 steps does."""
    if max(found.fp8.held_out) < 500 or not found.noise:
        return []
    ratio = found.difference / found.noise
    return [Goal("D6b", ratio, 1.0, "of the distance between two bf16 orders", higher_is_better=False)]
