"""The products of one decoder layer and what prepares their inputs, in FP8 and in BF16: is FP8 worth it for this model, here?

    FP8    norm + codes -> qkv,  codes -> o,  norm + codes -> gate_up,  swiglu + codes -> down      exact dispatch
    BF16   norm -> qkv,                o,     norm -> gate_up,          swiglu -> down              cuBLAS

Attention is left out: it is the same on both sides. BF16 gets the library's products, which are faster than those that obey the
row law, so the ratio does not flatter FP8. Small models lose in codes what they win in products (case 72: "FP8 rollout no
faster").

Legend: M rows, K inputs, N outputs. Next: `doctor.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lockstep.bench.shapes import LinearShape, layer_linears
from lockstep.bench.timing import Call, events_ms, graph_ms
from lockstep.kernels.in_turns import copies_for
from lockstep.kernels.reference import PackedWeight, ReferenceKernels
from lockstep.numerics.formats import BLOCK, square_blocks
from lockstep.numerics.quantize import Quantized, quantize

DECODE_BATCH = 64
TRAINING_ROWS = 16_384
WORTH = 1.05
"""Ratio from which FP8 is called worth it: less is lost in the spread between runs."""

Timer = Callable[[Sequence[Call]], float]
"""Milliseconds of one of these calls, which are equal but for where their operands lie."""


@dataclass(frozen=True)
class LayerCalls:
    """What is timed: products, and the preparation of their inputs, one call for each copy of the weights."""

    fp8_products: Sequence[Call]
    fp8_inputs: Sequence[Call]
    bf16_products: Sequence[Call]
    bf16_inputs: Sequence[Call]


@dataclass(frozen=True)
class LayerTimes:
    """Milliseconds for `rows` rows."""

    rows: int
    fp8_products: float
    fp8_inputs: float
    bf16_products: float
    bf16_inputs: float

    @property
    def ratio(self) -> float:
        """BF16 over FP8, codes included: above 1 FP8 is faster."""
        return (self.bf16_products + self.bf16_inputs) / (self.fp8_products + self.fp8_inputs)

    @property
    def products_ratio(self) -> float:
        """The same for the products alone."""
        return self.bf16_products / self.fp8_products

    @property
    def codes_ms(self) -> float:
        """What making the codes adds to the preparation of the inputs."""
        return self.fp8_inputs - self.bf16_inputs

    def line(self) -> str:
        """For a terminal."""
        total = self.fp8_products + self.fp8_inputs
        return (
            f"{self.rows:>6} rows: {self.ratio:.2f}x ({self.products_ratio:.2f}x for the products alone; codes take "
            f"{self.codes_ms:.4f} of {total:.4f} ms)"
        )


@dataclass(frozen=True)
class Verdict:
    """Of one model on this machine."""

    model: str
    decode: LayerTimes
    training: LayerTimes

    def line(self) -> str:
        """The verdict, and what to do where FP8 doesn't pay."""
        decode, training = self.decode.ratio, self.training.ratio
        figures = f"{decode:.2f}x in decode ({self.decode.rows} rows), {training:.2f}x in training ({self.training.rows} rows)"
        if decode >= WORTH and training >= WORTH:
            return f"FP8 is worth it here: {figures}"
        if decode < WORTH and training < WORTH:
            return f"FP8 is not worth it here: {figures}; flow bf16 is as exact, and no slower"
        where, other = ("decode", "training") if decode >= WORTH else ("training", "decode")
        return f"FP8 is worth it here for {where} only: {figures}; it gains nothing in {other}"


def judge(
    model: str, calls: Callable[[str, int], LayerCalls], decode_timer: Timer, training_timer: Timer
) -> Verdict:
    """Times a layer at decode and at training size."""
    times = []
    for rows, timer in ((DECODE_BATCH, decode_timer), (TRAINING_ROWS, training_timer)):
        work = calls(model, rows)
        parts = (work.fp8_products, work.fp8_inputs, work.bf16_products, work.bf16_inputs)
        times.append(LayerTimes(rows, *(timer(part) for part in parts)))
    return Verdict(model, *times)


def judge_here(model: str) -> Verdict:
    """On this GPU: decode within a CUDA graph over rotated weights, training by events."""
    from lockstep.kernels.hopper import HopperKernels

    kernels = HopperKernels()
    return judge(model, partial(layer_calls, kernels), graph_ms, lambda calls: events_ms(calls[0]))


def layer_calls(kernels: ReferenceKernels, model: str, rows: int) -> LayerCalls:
    """The work of a layer with random weights; as many copies as outgrow the L2, one for training size."""
    shapes = layer_linears(model)
    fp8_bytes = sum(shape.inputs * shape.outputs for shape in shapes)
    copies = copies_for(fp8_bytes) if rows <= 1024 else 1
    packed, plain = zip(*(_weights(kernels, shapes, seed) for seed in range(copies)), strict=True)
    inputs = _Inputs.random(shapes, rows)
    codes = inputs.codes()
    values = [_random(rows, shape.inputs) for shape in shapes]
    return LayerCalls(
        [partial(_fp8_products, kernels, codes, weights) for weights in packed],
        [inputs.codes],
        [partial(_bf16_products, values, weights) for weights in plain],
        [inputs.values],
    )


@dataclass(frozen=True)
class _Inputs:
    """What a layer's products are made from: residual stream and its update [M, K], attention's output, gate and up."""

    hidden: Tensor
    delta: Tensor
    attended: Tensor
    gate_up: Tensor
    weight: Tensor

    @classmethod
    def random(cls, shapes: Sequence[LinearShape], rows: int) -> _Inputs:
        qkv, o, _, down = shapes
        hidden, delta = (_random(rows, qkv.inputs) for _ in range(2))
        ones = torch.ones(qkv.inputs, dtype=torch.bfloat16, device="cuda")
        return cls(hidden, delta, _random(rows, o.inputs), _random(rows, 2 * down.inputs), ones)

    def codes(self) -> list[Quantized]:
        from lockstep.kernels.triton.norm import rms_norm
        from lockstep.kernels.triton.quantize import quantize_rows
        from lockstep.kernels.triton.swiglu import swiglu

        hidden, first = rms_norm(self.hidden, self.weight, 1e-6, delta_TK=self.delta, fp8=True)
        attended = quantize_rows(self.attended, pow2=False)
        _, second = rms_norm(hidden, self.weight, 1e-6, delta_TK=self.delta, fp8=True)
        product = swiglu(self.gate_up, fp8=True)
        pairs = (first, attended, second, product)
        return [Quantized(pair[0], pair[1], (1, BLOCK)) for pair in pairs]

    def values(self) -> None:
        from lockstep.kernels.triton.norm import rms_norm
        from lockstep.kernels.triton.swiglu import swiglu

        hidden, _ = rms_norm(self.hidden, self.weight, 1e-6, delta_TK=self.delta, fp8=False)
        rms_norm(hidden, self.weight, 1e-6, delta_TK=self.delta, fp8=False)
        swiglu(self.gate_up, fp8=False)


def _weights(
    kernels: ReferenceKernels, shapes: Sequence[LinearShape], seed: int
) -> tuple[list[PackedWeight], list[Tensor]]:
    generator = torch.Generator("cuda").manual_seed(seed)
    packed, plain = [], []
    for shape in shapes:
        w = torch.randn(shape.outputs, shape.inputs, generator=generator, device="cuda") * 0.02
        packed.append(kernels.pack(quantize(w, square_blocks("fp32"))))
        plain.append(w.bfloat16())
    return packed, plain


def _fp8_products(
    kernels: ReferenceKernels, inputs: Sequence[Quantized], weights: Sequence[PackedWeight]
) -> None:
    for x, w in zip(inputs, weights, strict=True):
        kernels.linear(x, w)


def _bf16_products(inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    for x, w in zip(inputs, weights, strict=True):
        torch.mm(x, w.t())


def _random(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
