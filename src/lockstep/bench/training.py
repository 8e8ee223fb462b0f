"""One optimizer step of training, FP8 against the BF16 baseline, phase by phase; and what a micro-batch keeps in memory.

    old log-probabilities    BF16 only: its bits differ from its engine's, so it scores the samples once more before the update
    forward, backward        of every micro-batch
    optimizer                gradient norm, clipping, fused AdamW: the same code over the same tensors on both sides
    publication              working copies from the masters; in FP8 transposed codes follow in the next backward pass

Both sides take turns in one process, over the same masters and the same rows. First their gradients are compared; then each takes
a step that warms up and some that are measured, and again; times are medians. Passes of the FP8 side are captured, as the
trainer's are: launched one by one they need more of a host than there is for few rows or a slow host. The baseline's need a
third of that and leave no gaps. Micro-batches of a few hundred rows are timed by the wall, host included.

Next: `training_layer.py` for one layer, `step.py` for a whole step with rollout.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.bench.baseline import saved_bytes_a_token
from lockstep.bench.goals import Goal
from lockstep.bench.profile import profile
from lockstep.bench.results import rounded
from lockstep.bench.shapes import preset
from lockstep.bench.sides import Batch, Clock, Ours, Say, Side, Sides, allocated, cosine
from lockstep.bench.timing import Call, Ceilings, events_ms
from lockstep.errors import ContractError
from lockstep.kernels.table import Kernels
from lockstep.models.decoder import Decoder
from lockstep.numerics.flow import bf16_flow, fp8_flow
from lockstep.numerics.quantize import quantize
from lockstep.trainer import footprint, workload
from lockstep.trainer.footprint import Keeping, Load
from lockstep.trainer.optimizer import Optimizer
from lockstep.trainer.spec import OptimSpec
from lockstep.trainer.workload import Card

PHASES = ("old log-probabilities", "forward", "backward", "optimizer", "publication")
GOAL_MODEL = "qwen3-1.7b"
BROKEN = 0.5
"""A gradient cosine of a layer below this is no rounding error: one side is wrong. With random weights, differences grow from
layer to layer: 28 layers leave 0.83, 36 leave 0.78."""
TURN = 2
"""Steps of one side that are measured before the other's turn, behind one that warms up (and captures)."""
WARM = 3
"""Micro-batches before one is profiled."""
Times = dict[str, float]
"""Milliseconds by phase."""


@dataclass(frozen=True)
class Agreement:
    """How alike both sides are on one batch: mean absolute difference of log-probabilities, cosine of all gradients, and the
    smallest cosine among layers (every weight of a layer as one vector)."""

    difference: float
    whole: float
    worst: float
    worst_layer: int

    def line(self) -> str:
        """For a terminal."""
        return (
            f"agreement with BF16: mean |delta logp| {self.difference:.4f}, gradient cosine {self.whole:.5f}, "
            f"worst layer {self.worst_layer}: {self.worst:.5f}"
        )


@dataclass(frozen=True)
class Memory:
    """Bytes of one micro-batch beyond what was there before: after the forward pass, and at most."""

    saved: int
    peak: int


@dataclass(frozen=True)
class Result:
    """Of both sides, under "fp8" and "bf16". floors: least times; predicted: bytes saved, from shapes."""

    rows: int
    agreement: Agreement
    times: dict[str, Times]
    memory: dict[str, Memory]
    floors: dict[str, Times]
    predicted: dict[str, int]

    def total(self, side: str, *, old: bool) -> float:
        """Milliseconds of a step, with or without the pass for old log-probabilities."""
        return sum(ms for name, ms in self.times[side].items() if old or name != PHASES[0])

    @property
    def step_ratio(self) -> float:
        """Forward, backward, optimizer and publication: BF16 over FP8."""
        return self.total("bf16", old=False) / self.total("fp8", old=False)

    @property
    def phase_ratio(self) -> float:
        """The same with the pass that BF16 needs and FP8 doesn't."""
        return self.total("bf16", old=True) / self.total("fp8", old=False)

    @property
    def memory_ratio(self) -> float:
        """Saved activations, FP8 over BF16; not a number where memory isn't counted."""
        there = self.memory["bf16"].saved
        return self.memory["fp8"].saved / there if there else math.nan

    def lines(self) -> list[str]:
        """Table of phases, ratios, memory; measured beside predicted."""
        lines = [f"{'ms':22} {'fp8':>9} {'floor':>9} {'bf16':>9} {'floor':>9} {'ratio':>7}"]
        for name in PHASES:
            cells = []
            for side in ("fp8", "bf16"):
                ms, floor = self.times[side].get(name), self.floors[side].get(name)
                cells += ["-" if x is None else f"{x:.2f}" for x in (ms, floor)]
            ours, theirs = (self.times[side].get(name) for side in ("fp8", "bf16"))
            ratio = f"{theirs / ours:.2f}" if ours and theirs else "-"
            lines.append(f"{name:22} " + " ".join(f"{cell:>9}" for cell in cells) + f" {ratio:>7}")
        lines.append(
            f"forward to publication {self.step_ratio:.3f}x; with BF16's old log-probabilities {self.phase_ratio:.3f}x"
        )
        for side in ("fp8", "bf16"):
            m = self.memory[side]
            lines.append(
                f"memory of {self.rows} rows, {side}: saved {m.saved / 1e9:.2f} GB (predicted {self.predicted[side] / 1e9:.2f}), "
                f"at most {m.peak / 1e9:.2f} GB"
            )
        return [*lines, f"saved activations, fp8 over bf16: {self.memory_ratio:.3f}"]

    def records(self) -> list[dict[str, Any]]:
        """For the result file."""
        found: list[dict[str, Any]] = [
            {
                "side": side,
                "phase": name,
                "ms": rounded(ms),
                "floor_ms": rounded(self.floors[side].get(name, 0.0)),
            }
            for side, times in self.times.items()
            for name, ms in times.items()
        ]
        found += [
            {"side": s, "saved": m.saved, "peak": m.peak, "predicted_saved": self.predicted[s]}
            for s, m in self.memory.items()
        ]
        a = self.agreement
        found.append(
            {"gradient_cosine": a.whole, "worst_layer_cosine": a.worst, "mean_abs_delta_logp": a.difference}
        )
        return found


def run_training(
    sides: Sides,
    batches: Sequence[Batch],
    card: Card,
    *,
    iterations: int,
    say: Say,
    captured: bool = False,
    profiled: bool = False,
) -> Result:
    """Agreement, then steps over all batches, both sides in turns. card: what the floors are computed with. captured: passes of
    our side are; memory is that of passes which are not. profiled: also tells the kernels of a micro-batch."""
    decoder = sides.ours.decoder
    optimizer = Optimizer(decoder.named_parameters(), OptimSpec(lr=1e-7), 1000)
    agreement = compare(sides, batches[0])
    say(agreement.line())
    measured: dict[str, list[Times]] = {side.name: [] for side in sides.both}
    for begun in range(0, iterations, TURN):
        for side in sides.both:
            with sides.turn(captured=captured):
                runs = [one_step(side, batches, optimizer) for _ in range(min(TURN, iterations - begun) + 1)]
            measured[side.name] += runs[1:]
    times = {name: median_times(runs) for name, runs in measured.items()}
    for side in sides.both if profiled else ():
        with sides.turn(captured=captured):
            for line in kernels_of(side, batches[0]):
                say(line)
            optimizer.adam.zero_grad(set_to_none=True)
    memory = {side.name: memory_of(side, batches[0], optimizer) for side in sides.both}
    return Result(
        batches[0].rows,
        agreement,
        times,
        memory,
        {side.name: floors(side, decoder, batches, card) for side in sides.both},
        {side.name: predicted_saved(side, decoder, batches[0]) for side in sides.both},
    )


def one_step(side: Side, batches: Sequence[Batch], optimizer: Optimizer) -> Times:
    """Milliseconds of each phase."""
    clock = Clock(batches[0].micro.ids_T.device)
    if side.name == "bf16":
        with torch.no_grad():
            for batch in batches:
                side.log_probs(batch)
        clock.mark(PHASES[0])
    for batch in batches:
        loss = loss_of(side.log_probs(batch), batch)
        clock.mark("forward")
        loss.backward()
        del loss
        clock.mark("backward")
    optimizer.step()
    clock.mark("optimizer")
    side.publish()
    clock.mark("publication")
    return clock.times()


def kernels_of(side: Side, batch: Batch) -> list[str]:
    """What a micro-batch spends its time in, its gradients added to those that are there."""
    warm = [batch] * WARM
    accumulate(side, warm)
    return profile(f"{side.name}, one micro-batch", lambda: accumulate(side, warm[:1]))


def loss_of(logp_N: Tensor, batch: Batch) -> Tensor:
    """A policy gradient: advantages times log-probabilities, over the number of tokens."""
    return -(batch.advantage_N * logp_N).sum() / len(logp_N)


def median_times(runs: Sequence[Times]) -> Times:
    """Phase by phase."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def compare(sides: Sides, batch: Batch) -> Agreement:
    """Raises ContractError when a gradient is not finite or the two sides have nothing to do with each other."""
    decoder = sides.ours.decoder
    logp, grads = [], []
    for side in sides.both:
        decoder.zero_grad(set_to_none=True)
        found = side.log_probs(batch)
        loss_of(found, batch).backward()
        logp.append(found.detach())
        grads.append({n: p.grad for n, p in decoder.named_parameters() if p.grad is not None})
    decoder.zero_grad(set_to_none=True)
    if grads[0].keys() != grads[1].keys():
        raise ContractError(f"gradients of one side only: {sorted(grads[0].keys() ^ grads[1].keys())}")
    for side, some in zip(sides.both, grads, strict=True):
        bad = [name for name, grad in some.items() if not bool(torch.isfinite(grad).all())]
        if bad:
            raise ContractError(
                f"{side.name}: the gradient of {bad[0]} is not finite, and {len(bad) - 1} more"
            )
    whole = cosine(list(grads[0].values()), list(grads[1].values()))
    layers = layer_cosines(grads[0], grads[1])
    worst = min(layers, key=lambda layer: layers[layer])
    if not layers[worst] > BROKEN:
        raise ContractError(
            f"gradients of layer {worst} disagree: cosine {layers[worst]:.4f} between FP8 and BF16"
        )
    return Agreement(float((logp[0] - logp[1]).abs().mean()), whole, layers[worst], worst)


def layer_cosines(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[int, float]:
    """Of each decoder layer's weight gradients (matrices), all of a layer as one vector."""
    members: dict[int, list[str]] = {}
    for name, grad in ours.items():
        words = name.split(".")
        if words[1] == "layers" and grad.dim() > 1:
            members.setdefault(int(words[2]), []).append(name)
    return {i: cosine([ours[n] for n in names], [theirs[n] for n in names]) for i, names in members.items()}


def memory_of(side: Side, batch: Batch, optimizer: Optimizer) -> Memory:
    """Of one micro-batch; zeros where memory isn't counted."""
    device = batch.micro.ids_T.device
    before = allocated(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    loss = loss_of(side.log_probs(batch), batch)
    saved = allocated(device) - before
    loss.backward()
    most = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    optimizer.adam.zero_grad(set_to_none=True)
    return Memory(saved, most)


def floors(side: Side, decoder: Decoder, batches: Sequence[Batch], card: Card) -> Times:
    """Least milliseconds of each phase (`trainer/workload.py`)."""
    model, ours = decoder.spec, side.name == "fp8"
    flow = decoder.flow if ours else bf16_flow()
    found = dict.fromkeys(PHASES[1:] if ours else PHASES, 0.0)
    for batch in batches:
        lengths, targets = batch.packing.lengths, len(batch.micro.targets_N)
        there = workload.forward(model, flow, card, lengths, targets).seconds
        both = workload.forward_backward(model, flow, card, lengths, targets, remade=ours).seconds
        if not ours:
            found[PHASES[0]] += 1e3 * there
        found["forward"] += 1e3 * there
        found["backward"] += 1e3 * (both - there)
    found["optimizer"] = 1e3 * workload.optimizer(model, card).seconds
    found["publication"] = 1e3 * workload.publication(model, flow, card).seconds
    return found


def predicted_saved(side: Side, decoder: Decoder, batch: Batch) -> int:
    """Bytes that a micro-batch keeps until its backward pass, from shapes."""
    model = decoder.spec
    load = Load(batch.rows, len(batch.micro.targets_N))
    keeping = Keeping(decoder.kernels.fused, decoder.checkpointing, decoder.save_fp8)
    ours = footprint.saved_bytes(model, decoder.flow, load, keeping)
    probabilities = footprint.probability_bytes(model, load, keeping)
    if isinstance(side, Ours):
        return ours + probabilities
    layers = batch.rows * sum(
        footprint.layer_bytes_a_token(model, decoder.flow, i, keeping) for i in range(model.num_layers)
    )
    ends = ours - layers if not decoder.checkpointing else 0
    return (
        batch.rows * model.num_layers * saved_bytes_a_token(model, lean=side.baseline.lean)
        + ends
        + probabilities
    )


def wall_ratio(sides: Sides, batches: Sequence[Batch], repeats: int) -> tuple[float, Times]:
    """(BF16 over FP8, milliseconds of each side) of forward and backward over small micro-batches, host time included. The FP8
    side as the trainer runs it by default: captured passes where its decoder has `graphs`."""
    parameters = list(sides.ours.decoder.parameters())
    measured: dict[str, list[float]] = {side.name: [] for side in sides.both}
    for _ in range(repeats + 1):
        for side in sides.both:
            measured[side.name].append(_wall(lambda side=side: accumulate(side, batches)))  # type: ignore[misc]
            for parameter in parameters:
                parameter.grad = None
    times = {name: statistics.median(runs[1:]) for name, runs in measured.items()}
    return times["bf16"] / times["fp8"], times


def accumulate(side: Side, batches: Sequence[Batch]) -> None:
    """Forward and backward of all micro-batches."""
    for batch in batches:
        loss_of(side.log_probs(batch), batch).backward()


def wall_ms(call: Call, repeats: int = 9) -> float:
    """Median milliseconds of a call by the wall, after one that warms up."""
    return statistics.median([_wall(call) for _ in range(repeats + 1)][1:])


def _wall(call: Call) -> float:
    """Milliseconds until the device is done."""
    begun = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun)


def measure_fp8_tflops(kernels: Kernels) -> float:
    """Of a large block-scaled product, as the trainer multiplies: 1x128 against 128x128."""
    size, flow = 8192, fp8_flow()
    x, w = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    codes = kernels.quantize_rows(x, flow.fprop.lhs)
    weight = kernels.pack(quantize(w, flow.fprop.rhs))
    return 2 * size**3 / events_ms(lambda: kernels.linear(codes, weight)) / 1e9


def card_of(ceilings: Ceilings, fp8_tflops: float) -> Card:
    """What this GPU reached in this call."""
    memory = torch.cuda.get_device_properties(0).total_memory / 1e9
    return Card(memory, ceilings.copy_gbps / 1e3, ceilings.bf16_tflops, fp8_tflops)


def goals(model: str, result: Result, small: float | None) -> list[Goal]:
    """Which of the project's goals these figures answer: of `GOAL_MODEL` or a larger one. small: ratio of micro-batches of 512
    rows."""
    if preset(model).num_parameters < preset(GOAL_MODEL).num_parameters:
        return []
    found = [
        Goal("D3a", result.step_ratio, 1.35, "x BF16, forward to publication"),
        Goal("D3b", result.memory_ratio, 0.6, "of BF16's saved activations", higher_is_better=False),
        Goal("D4", result.phase_ratio, 1.7, "x BF16 with its old log-probabilities"),
    ]
    return found if small is None else [*found, Goal("D7", small, 1.0, "x BF16 at 512 rows, by the wall")]
