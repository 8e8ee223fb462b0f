"""Both sides of a training benchmark in one process: the FP8 decoder and the BF16 baseline over the very same masters.

They share masters, gradients, moments and optimizer, so what differs is the working copies and what happens between a batch
and its gradients; and both fit into one GPU. Each has its own rows' view of the same batch.

Next: `training.py`, `step.py`.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.bench.baseline import Baseline
from lockstep.bench.baseline_ops import (
    FusedOperations,
    Operations,
    Packing,
    PlainOperations,
    faster_weight_grad,
    fastest_attention,
)
from lockstep.bench.timing import Call, events_ms
from lockstep.kernels.table import Kernels, device_of
from lockstep.models.build import empty_decoder, sharing_decoder
from lockstep.models.decoder import Decoder
from lockstep.models.spec import ModelSpec
from lockstep.nn.kv_scales import KVScales
from lockstep.numerics.flow import Flow, bf16_flow
from lockstep.rollout.types import Completion, SamplingParams
from lockstep.trainer.microbatch import MicroBatch, make_microbatch

Say = Callable[[str], None]


@dataclass(frozen=True)
class Batch:
    """One micro-batch as both sides read it. advantage_N: a number for each trained token."""

    micro: MicroBatch
    packing: Packing
    advantage_N: Tensor

    @property
    def rows(self) -> int:
        """Rows of the forward pass."""
        return sum(self.packing.lengths)


class Ours:
    """The trainer's own forward, under its flow."""

    name = "fp8"

    def __init__(self, decoder: Decoder, scales: KVScales | None) -> None:
        self.decoder, self.scales = decoder, scales

    def log_probs(self, batch: Batch) -> Tensor:
        """[N], differentiable."""
        return batch.micro.log_probs(self.decoder, self.scales)[0]

    def publish(self) -> None:
        """Working copies from the masters; transposes follow in the next backward pass."""
        self.decoder.refresh(self.decoder.version + 1)


class Theirs:
    """The BF16 baseline."""

    name = "bf16"

    def __init__(self, baseline: Baseline) -> None:
        self.baseline = baseline

    def log_probs(self, batch: Batch) -> Tensor:
        """[N], differentiable."""
        return self.baseline.log_probs(batch.micro, batch.packing)

    def publish(self) -> None:
        """Working copies from the masters."""
        self.baseline.refresh()


Side = Ours | Theirs


@dataclass(frozen=True)
class Sides:
    """Both, and what the baseline chose: its attention, how it sums weight gradients."""

    ours: Ours
    theirs: Theirs
    choices: str

    def capture(self, on: bool) -> None:
        """Captures our training passes; gradients of embedding and head are added in place on both sides."""
        self.ours.decoder.capture(on)
        self.theirs.baseline.decoder.add_in_place(on)

    @contextmanager
    def turn(self, *, captured: bool) -> Iterator[None]:
        """Within, training passes of our side are captured if so asked for; what they hold is given back at the end, since both
        sides' would not fit."""
        self.capture(captured)
        try:
            yield
        finally:
            self.capture(False)
            free()

    @property
    def both(self) -> tuple[Side, Side]:
        """In the order in which they are timed."""
        return self.ours, self.theirs


@torch.no_grad()
def random_masters(
    spec: ModelSpec, flow: Flow, kernels: Kernels, *, seed: int = 0, std: float = 0.02
) -> Decoder:
    """A decoder that can be trained: weights and biases N(0, std), norms near one, published as version 1."""
    device = device_of(kernels)
    decoder = empty_decoder(spec, flow, kernels, device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, std, generator=generator)
    decoder.refresh(1)
    return decoder


def make_sides(
    decoder: Decoder,
    lengths: Sequence[int],
    *,
    scales: KVScales | None = None,
    lean: bool = False,
    timer: Callable[[Call], float] = events_ms,
) -> Sides:
    """The baseline beside a decoder. lengths: of a batch's sequences, for which it chooses its kernels by `timer`."""
    twin = sharing_decoder(decoder, bf16_flow())
    twin.refresh(1)
    if not decoder.kernels.fused:
        return Sides(
            Ours(decoder, scales), Theirs(Baseline(twin, PlainOperations(), lean=lean)), "plain torch"
        )
    operations, choices = choose_operations(decoder.spec, decoder.kernels, lengths, timer)
    return Sides(Ours(decoder, scales), Theirs(Baseline(twin, operations, lean=lean)), choices)


def choose_operations(
    spec: ModelSpec, kernels: Any, lengths: Sequence[int], timer: Callable[[Call], float]
) -> tuple[Operations, str]:
    """The fastest on this GPU for these lengths: (operations, what was measured)."""
    device = device_of(kernels)
    packing, rows = Packing.of(lengths, device), sum(lengths)

    def heads(count: int) -> Tensor:
        return torch.randn(rows, count, spec.head_dim, device=device, dtype=torch.bfloat16)

    attention, times = fastest_attention(
        heads(spec.num_heads), heads(spec.num_kv_heads), heads(spec.num_kv_heads), packing, timer
    )
    grad, x = (
        torch.randn(rows, n, device=device, dtype=torch.bfloat16)
        for n in (2 * spec.intermediate_size, spec.hidden_size)
    )
    in_fp32, sums = faster_weight_grad(grad, x, timer)
    told = ", ".join(f"{name} {there:.3f} + {back:.3f} ms" for name, (there, back) in times.items())
    told_sums = ", ".join(f"{name} {ms:.3f} ms" for name, ms in sums.items())
    chosen = "fp32 output" if in_fp32 else "bf16, widened"
    text = f"attention {attention.name} ({told}); weight gradients {chosen} ({told_sums})"
    return FusedOperations(kernels, attention, sum_in_fp32=in_fp32), text


def random_batch(decoder: Decoder, lengths: Sequence[int], *, seed: int = 0) -> Batch:
    """Sequences of random tokens; all but the first token of each are trained, so a sequence of n + 1 tokens has n rows."""
    draw = random.Random(seed)
    vocabulary = decoder.spec.vocab_size
    completions = []
    for i, length in enumerate(lengths):
        ids = tuple(draw.randrange(vocabulary) for _ in range(length + 1))
        logprobs = (0.0,) * length
        params = SamplingParams(length)
        completions.append(Completion(ids[:1], i, 0, ids[1:], logprobs, "length", (), 0, params))
    return batch_of(completions, decoder, [draw.gauss(0.0, 1.0) for _ in completions])


def batch_of(completions: Sequence[Completion], decoder: Decoder, advantages: Sequence[float]) -> Batch:
    """Completions side by side, no prompt shared; one advantage each."""
    kernels = decoder.kernels
    device = device_of(kernels)
    micro = make_microbatch(
        completions, decoder.spec.query_group, share_prompts=False, kernels=kernels, device=device
    )
    lengths = [len(c.prompt_ids) + len(c.token_ids) - 1 for c in completions]
    advantage = torch.tensor(advantages, device=device)[micro.sample_N]
    return Batch(micro, Packing.of(lengths, device), advantage)


class Clock:
    """Times between marks: by device events on a GPU, so that gaps in which it waits for the host count, else by the wall."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []
        self.mark("")

    def mark(self, name: str) -> None:
        """The end of what came since the last mark."""
        if not self.gpu:
            self.marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((name, event))

    def times(self) -> dict[str, float]:
        """Milliseconds by name, summed where a name was given several times."""
        if self.gpu:
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        for (_, before), (name, after) in zip(self.marks, self.marks[1:], strict=False):
            ms = float(before.elapsed_time(after)) if self.gpu else 1e3 * (after - before)
            found[name] = found.get(name, 0.0) + ms
        return found


def free() -> None:
    """Gives memory that nobody holds any more back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def allocated(device: torch.device) -> int:
    """Bytes of tensors on a GPU; 0 elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def cosine(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Of two lists of tensors, each as one vector, in float64."""
    products = [
        torch.stack([(x.double() * y.double()).sum(), x.double().square().sum(), y.double().square().sum()])
        for x, y in zip(a, b, strict=True)
    ]
    dot, first, second = torch.stack(products).sum(0).tolist()
    return float(dot / (first * second) ** 0.5) if first and second else float("nan")
