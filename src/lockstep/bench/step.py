"""One whole GRPO step on random weights, phase by phase: this project's FP8 flow against a BF16 stack, same prompts and lengths.

    rollout                  our engine on both sides: FP8 with FP8 KV, or BF16
    packing                  samples side by side on the device
    old log-probabilities    BF16 only, by the baseline; in the FP8 flow the rollout's own are the trainer's, bit for bit
    forward, backward        of every micro-batch: the trainer's decoder, or the BF16 baseline (`baseline.py`)
    optimizer                the same
    publication              working copies from the masters; the engine reads the very same ones

The BF16 side is generous to BF16: its engine and trainer share working copies too, and its engine is ours. Times are the wall's,
host included. Every side runs a step to compile and capture, and is measured on the next ones. That the FP8 side needs no
old log-probabilities is checked on every step: one that differs ends the benchmark.

Next: `training.py` for the update alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.bench.goals import Goal
from lockstep.bench.profile import profile
from lockstep.bench.results import rounded
from lockstep.bench.rollout import flat_scales
from lockstep.bench.sides import Batch, Say, Side, Sides, batch_of, free, make_sides
from lockstep.bench.training import median_times
from lockstep.errors import ContractError
from lockstep.models.decoder import Decoder
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Completion, Request, SamplingParams
from lockstep.trainer.optimizer import Optimizer
from lockstep.trainer.spec import OptimSpec

PHASES = ("rollout", "packing", "old log-probabilities", "forward", "backward", "optimizer", "publication")
GOAL_MODEL = "qwen3-1.7b"
Times = dict[str, float]
"""Seconds by phase."""


@dataclass(frozen=True)
class StepWork:
    """What a step samples, and how many rows a micro-batch may have."""

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    microbatch_tokens: int

    @property
    def sequences(self) -> int:
        """Completions of a step."""
        return self.prompts * self.samples

    def requests(self, vocabulary: int) -> list[Request]:
        """The prompts, the same for every call; end tokens are not looked for."""
        draw, params = random.Random(0), SamplingParams(self.new_tokens)
        ids = [
            tuple(draw.randrange(vocabulary) for _ in range(self.prompt_tokens)) for _ in range(self.prompts)
        ]
        return [Request(prompt, i, self.samples, params) for i, prompt in enumerate(ids)]


@dataclass(frozen=True)
class Result:
    """Median seconds by phase of both sides, under "fp8" and "bf16", and the largest difference between the log-probabilities
    of rollout and trainer."""

    times: dict[str, Times]
    mismatch: dict[str, float]

    @property
    def ratio(self) -> float:
        """BF16 over FP8, whole steps."""
        return sum(self.times["bf16"].values()) / sum(self.times["fp8"].values())

    def lines(self) -> list[str]:
        """For a terminal."""
        ours, theirs = self.times["fp8"], self.times["bf16"]
        lines = [f"{'seconds':22} {'fp8':>9} {'bf16':>9} {'ratio':>7}"]
        for name in PHASES:
            cells = [f"{side[name]:.3f}" if name in side else "-" for side in (ours, theirs)]
            ratio = f"{theirs[name] / ours[name]:.2f}" if ours.get(name) and name in theirs else "-"
            lines.append(f"{name:22} {cells[0]:>9} {cells[1]:>9} {ratio:>7}")
        total = [sum(side.values()) for side in (ours, theirs)]
        lines.append(f"{'step':22} {total[0]:9.3f} {total[1]:9.3f} {self.ratio:7.3f}")
        told = ", ".join(f"{side} {value:.3e}" for side, value in self.mismatch.items())
        return [*lines, f"max |delta logp| between rollout and trainer: {told}"]

    def records(self) -> list[dict[str, Any]]:
        """For the result file."""
        rows: list[dict[str, Any]] = [
            {
                "side": side,
                **{name: rounded(s) for name, s in times.items()},
                "max_abs_dlogp": self.mismatch[side],
            }
            for side, times in self.times.items()
        ]
        return [*rows, {"ratio": rounded(self.ratio)}]


def run_step(
    decoder: Decoder, work: StepWork, *, steps: int, say: Say, captured: bool = False, profiled: bool = False
) -> Result:
    """Both sides, one after the other, since their caches would not fit side by side. decoder: masters that can be trained, under
    the FP8 flow. captured: training passes of its side are. profiled: also tells the kernels of forward and backward of one
    micro-batch.

    Raises ContractError when a log-probability of the FP8 side differs between rollout and trainer.
    """
    lengths = [work.prompt_tokens + work.new_tokens - 1] * max(
        work.microbatch_tokens // (work.prompt_tokens + work.new_tokens - 1), 1
    )
    scales = flat_scales(decoder).to(decoder.device) if decoder.flow.kv_fp8 else None
    sides = make_sides(decoder, lengths, scales=scales)
    sides.capture(captured)
    say(sides.choices)
    optimizer = Optimizer(decoder.named_parameters(), OptimSpec(lr=1e-7), 1000)
    times: dict[str, Times] = {}
    mismatch: dict[str, float] = {}
    for side in sides.both:
        runner = _Runner(side, sides, optimizer, work)
        runs = [runner.step(number) for number in range(steps + 1)]
        times[side.name] = median_times(runs[1:])
        mismatch[side.name] = runner.mismatch
        say(f"{side.name}: {sum(times[side.name].values()):.3f} s a step")
        if profiled:
            for line in profile(f"{side.name}, one micro-batch", runner.one_micro_batch):
                say(line)
        del runner
        free()
    if mismatch["fp8"] != 0.0:
        raise ContractError(
            f"rollout and trainer disagree in the FP8 flow: max |delta logp| {mismatch['fp8']:.3e}; without equality it would "
            "need old log-probabilities too"
        )
    return Result(times, mismatch)


class _Runner:
    """Steps of one side. mismatch: largest difference seen."""

    def __init__(self, side: Side, sides: Sides, optimizer: Optimizer, work: StepWork) -> None:
        self.side, self.optimizer, self.work = side, optimizer, work
        self.ours = side is sides.ours
        self.decoder = sides.ours.decoder if self.ours else sides.theirs.baseline.decoder
        self.engine = engine_of(self.decoder, work, sides)
        self.requests = work.requests(self.decoder.spec.vocab_size)
        draw = random.Random(1)
        self.advantages = [draw.gauss(0.0, 1.0) for _ in range(work.sequences)]
        self.mismatch = 0.0
        self.last: Batch | None = None

    def one_micro_batch(self) -> None:
        """Forward and backward of the last one, once more; gradients are dropped."""
        assert self.last is not None
        logp_N = self.side.log_probs(self.last)
        grpo_loss(logp_N, logp_N.detach(), self.last.advantage_N, len(logp_N)).backward()
        self.optimizer.adam.zero_grad(set_to_none=True)

    def step(self, number: int) -> Times:
        """Seconds by phase."""
        clock = _WallClock()
        completions = self.engine.generate(
            self.requests, seed=0, step=number, expected_version=self.decoder.version
        )
        clock.mark("rollout")
        batches = self._batches(completions)
        clock.mark("packing")
        self.last = batches[-1]
        old = [batch.micro.rollout_N for batch in batches]
        if not self.ours:
            with torch.no_grad():
                old = [self.side.log_probs(batch) for batch in batches]
            clock.mark("old log-probabilities")
        tokens = sum(len(batch.micro.targets_N) for batch in batches)
        differences = []
        for batch, old_N in zip(batches, old, strict=True):
            logp_N = self.side.log_probs(batch)
            loss = grpo_loss(logp_N, old_N, batch.advantage_N, tokens)
            differences.append((logp_N.detach() - batch.micro.rollout_N).abs().max())
            clock.mark("forward")
            loss.backward()
            clock.mark("backward")
        self.optimizer.step()
        clock.mark("optimizer")
        self.side.publish()
        if not self.ours:
            self.decoder.version += 1
        clock.mark("publication")
        self.mismatch = max(self.mismatch, float(torch.stack(differences).max()))
        return clock.times

    def _batches(self, completions: Sequence[Completion]) -> list[Batch]:
        """Micro-batches in the order of the samples, as full as they get."""
        budget, bins = self.work.microbatch_tokens, []
        rows = budget
        for number, completion in enumerate(completions):
            length = len(completion.prompt_ids) + len(completion.token_ids) - 1
            if rows + length > budget:
                bins.append([number])
                rows = length
            else:
                bins[-1].append(number)
                rows += length
        return [
            batch_of([completions[i] for i in some], self.decoder, [self.advantages[i] for i in some])
            for some in bins
        ]


def engine_of(decoder: Decoder, work: StepWork, sides: Sides) -> EmbeddedEngine:
    """An engine that holds all samples of a step at once."""
    rollout = RolloutSpec(
        max_running=work.sequences,
        max_batched_tokens=max(8192, work.sequences),
        page_size=64,
        samples_per_prompt=work.samples,
    )
    tokens = work.sequences * (work.prompt_tokens + work.new_tokens + 128)
    engine = EmbeddedEngine(decoder, rollout, cache_tokens=tokens)
    if decoder.flow.kv_fp8:
        assert sides.ours.scales is not None
        engine.set_kv_scales(sides.ours.scales)
    return engine


def grpo_loss(logp_N: Tensor, old_N: Tensor, advantage_N: Tensor, tokens: int) -> Tensor:
    """The clipped surrogate over all tokens of a step; at the first pass nothing is clipped."""
    ratio = (logp_N - old_N).exp()
    bounded = ratio.clamp(0.8, 1.28)
    return -torch.minimum(ratio * advantage_N, bounded * advantage_N).sum() / tokens


class _WallClock:
    """Seconds between marks, the device being done at each."""

    def __init__(self) -> None:
        self.times: Times = {}
        self.last = self._now()

    def mark(self, name: str) -> None:
        """The end of a phase; several of a name add up."""
        now = self._now()
        self.times[name] = self.times.get(name, 0.0) + now - self.last
        self.last = now

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def goals(model: str, result: Result) -> list[Goal]:
    """Which of the project's goals these figures answer."""
    return [Goal("D5", result.ratio, 1.5, "x BF16, whole step")] if model == GOAL_MODEL else []
