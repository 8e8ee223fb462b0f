"""One decoder layer, forward and backward, FP8 against the BF16 baseline; and its linear layers alone.

The layer is timed as the trainer runs it: one autograd function from (residual stream, what is to be added) to the same pair,
gradients of both and of every weight. Weights are neither made nor transposed here: that happens once a weight version.

Linears alone: the twelve products (forward, gradient of the input, gradient of the weight), and what FP8 adds around them. Most
codes are written by kernels that run anyway (norm, SwiGLU, their gradients), so a quantization costs what such a kernel takes
longer than its BF16 form; where the layer quantizes in a pass of its own, regroups, or runs a norm again for its codes, it
costs that pass. `separate` is the same with every quantization in a pass of its own.

Legend: T rows, K inputs, N outputs. Next: `training.py` for a whole model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.bench.goals import Goal
from lockstep.bench.profile import profile
from lockstep.bench.results import rounded
from lockstep.bench.shapes import preset
from lockstep.bench.sides import Batch, Clock, Say, Sides, cosine, make_sides, random_batch, random_masters
from lockstep.bench.timing import Call, events_ms
from lockstep.errors import ContractError
from lockstep.kernels.fused import FusedKernels
from lockstep.kernels.table import Kernels
from lockstep.models.decoder import DecoderLayer
from lockstep.models.fused import weight_of
from lockstep.models.fused_layer import Step, parameters_of
from lockstep.nn.linear import Projection
from lockstep.nn.mlp import MLP
from lockstep.nn.packed import packed_context
from lockstep.numerics.flow import Flow
from lockstep.numerics.formats import Operand
from lockstep.trainer import workload
from lockstep.trainer.workload import Card

GOAL_MODEL = "qwen3-8b"
BROKEN = 0.95
Pair = tuple[Tensor, Tensor]
Layer = Callable[[Tensor, Tensor], Pair]


@dataclass(frozen=True)
class Linears:
    """Milliseconds of a layer's linear layers. added: what FP8 adds around the products as the layer does it; separate: with
    every quantization in a pass of its own."""

    fp8_products: float
    bf16_products: float
    added: float
    separate: float

    @property
    def ratio(self) -> float:
        """BF16 over FP8, quantization as the layer does it."""
        return self.bf16_products / (self.fp8_products + self.added)

    @property
    def separate_ratio(self) -> float:
        """The same with separate passes."""
        return self.bf16_products / (self.fp8_products + self.separate)

    def line(self) -> str:
        """For a terminal."""
        return (
            f"linears alone: products {self.bf16_products:.3f} ms BF16, {self.fp8_products:.3f} FP8 "
            f"({self.bf16_products / self.fp8_products:.3f}x); FP8 adds {self.added:.3f} ms in the layer: {self.ratio:.3f}x; "
            f"in separate passes {self.separate:.3f} ms: {self.separate_ratio:.3f}x"
        )


@dataclass(frozen=True)
class Result:
    """Milliseconds of "forward" and "backward" of each side, the least of both, and cosines of all gradients."""

    rows: int
    times: dict[str, dict[str, float]]
    floors: dict[str, float]
    cosine: float
    linears: Linears

    @property
    def ratio(self) -> float:
        """BF16 over FP8."""
        return sum(self.times["bf16"].values()) / sum(self.times["fp8"].values())

    def lines(self) -> list[str]:
        """For a terminal."""
        lines = [f"gradient cosine with BF16 {self.cosine:.5f}"]
        for side, times in self.times.items():
            total = sum(times.values())
            lines.append(
                f"{side:5} forward {times['forward']:8.3f} ms, backward {times['backward']:8.3f} ms, together {total:8.3f} ms, "
                f"floor {self.floors[side]:.3f} ms ({100 * self.floors[side] / total:.0f} %)"
            )
        return [*lines, f"layer, {self.rows} rows: {self.ratio:.3f}x", self.linears.line()]

    def records(self) -> list[dict[str, Any]]:
        """For the result file."""
        found: list[dict[str, Any]] = [
            {
                "side": side,
                **{name: rounded(ms) for name, ms in times.items()},
                "floor_ms": rounded(self.floors[side]),
            }
            for side, times in self.times.items()
        ]
        x = self.linears
        return [
            *found,
            {"rows": self.rows, "ratio": rounded(self.ratio), "gradient_cosine": self.cosine},
            {
                "linears_fp8_ms": rounded(x.fp8_products),
                "linears_bf16_ms": rounded(x.bf16_products),
                "added_ms": rounded(x.added),
                "separate_ms": rounded(x.separate),
                "ratio": rounded(x.ratio),
                "separate_ratio": rounded(x.separate_ratio),
            },
        ]


def run_layer(
    kernels: Kernels,
    model: str,
    flow: Flow,
    lengths: Sequence[int],
    card: Card,
    *,
    iterations: int,
    save_fp8: bool,
    deterministic: bool,
    profiled: bool,
    say: Say,
) -> Result:
    """One layer of a model shape over packed sequences of these lengths."""  # fmt: skip
    spec = replace(preset(model), num_layers=1, vocab_size=1024, bos_id=None, eos_ids=(), pad_id=None)
    decoder = random_masters(spec, flow, kernels)
    decoder.save_fp8, decoder.deterministic = save_fp8, deterministic
    batch = random_batch(decoder, lengths)
    sides = make_sides(decoder, lengths)
    say(sides.choices)
    layers, parameters = layers_of(sides, batch)
    generator = torch.Generator("cuda").manual_seed(0)
    h, delta, grad_h, grad_delta = (
        torch.randn(batch.rows, spec.hidden_size, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(4)
    )
    grads = (grad_h * 1e-3, grad_delta * 1e-3)
    found = [gradients(layer, (h, delta), grads, parameters) for layer in layers.values()]
    alike = cosine(found[0], found[1])
    del found
    if not alike > BROKEN:
        raise ContractError(f"gradients of FP8 and BF16 disagree: cosine {alike:.4f}")
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in layers}
    for _ in range(iterations + 3):
        for name, layer in layers.items():
            measured[name].append(_timed(layer, (h, delta), grads, parameters))
    times = {
        name: {phase: statistics.median(run[phase] for run in runs[3:]) for phase in runs[0]}
        for name, runs in measured.items()
    }
    if profiled:
        for name, layer in layers.items():
            lines = profile(name, partial(_timed, layer, (h, delta), grads, parameters))
            say("\n".join(lines))
    linears = time_linears(sides, (h, delta), grads)
    floors = {
        "fp8": _floor(sides, flow, card, lengths, remade=True),
        "bf16": _floor(sides, sides.theirs.baseline.decoder.flow, card, lengths, remade=False),
    }
    return Result(batch.rows, times, floors, alike, linears)


def layers_of(sides: Sides, batch: Batch) -> tuple[dict[str, Layer], list[Tensor]]:
    """The first layer of each side as a function, and the masters that it trains."""
    decoder = sides.ours.decoder
    layer = _first(decoder.model.layers)
    positions, packing = batch.micro.positions_T, batch.packing
    for side in (decoder, sides.theirs.baseline.decoder):
        side.model.rope.reserve(packing.longest, positions.device)
    context: Any = packed_context(positions, batch.micro.index, decoder.kernels, scales=sides.ours.scales)
    step = Step.of(decoder, 0, context)
    baseline = sides.theirs.baseline.layers[0]
    functions: dict[str, Layer] = {
        "fp8": step.apply,
        "bf16": lambda h, delta: baseline(h, delta, positions, packing),
    }
    return functions, list(parameters_of(layer))


def gradients(layer: Layer, inputs: Pair, grads: Pair, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Of both inputs and all parameters."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = layer(leaves[0], leaves[1])
    return list(torch.autograd.grad(out, [*leaves, *parameters], grads))


def _timed(layer: Layer, inputs: Pair, grads: Pair, parameters: Sequence[Tensor]) -> dict[str, float]:
    h, delta = (x.detach().requires_grad_() for x in inputs)
    clock = Clock(h.device)
    out = layer(h, delta)
    clock.mark("forward")
    torch.autograd.backward(out, grads)
    clock.mark("backward")
    times = clock.times()
    for parameter in parameters:
        parameter.grad = None
    return times


@dataclass(frozen=True)
class _Product:
    """One projection with its operands: x and dy in BF16, and in the forms that FP8 products take."""

    projection: Projection
    weight_NK: Tensor
    x_TK: Tensor
    grad_TN: Tensor


def time_linears(
    sides: Sides, inputs: Pair, grads: Pair, timer: Callable[[Call], float] = events_ms
) -> Linears:
    """See the top of this file."""
    layer = _first(sides.ours.decoder.model.layers)
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(mlp, MLP)
    kernels: Any = attention.o_proj.kernels
    h, delta = inputs
    rows, dtype = len(h), h.dtype

    def noise(columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, device=h.device, dtype=dtype) * scale

    baseline = sides.theirs.baseline.layers[0]
    products = []
    projections = (attention.qkv, attention.o_proj.alone, mlp.gate_up, mlp.down_proj.alone)
    for projection, theirs in zip(projections, baseline.products, strict=True):
        n, k = theirs.weight_NK.shape
        products.append(_Product(projection, theirs.weight_NK, noise(k), noise(n, 1e-3)))
    fp8 = bf16 = separate = 0.0
    for product in products:
        ours, apart, theirs_ms = _time_product(product, kernels, timer)
        fp8, separate, bf16 = fp8 + ours, separate + apart, bf16 + theirs_ms
    around = _around(layer, kernels, products, (h, delta), grads)
    added = sum(timer(call) for call in around[0]) - sum(timer(call) for call in around[1])
    return Linears(fp8, bf16, added, separate)


def _time_product(
    product: _Product, kernels: FusedKernels, timer: Callable[[Call], float]
) -> tuple[float, float, float]:
    """Milliseconds of the three products in FP8, of their quantization in separate passes, of the three in BF16."""
    first = product.projection.linears[0]
    rows_of, columns_of = first.flow.fprop.lhs, first.flow.wgrad.rhs
    weight, x, grad, w = weight_of(product.projection), product.x_TK, product.grad_TN, product.weight_NK
    x8 = kernels.quantize_rows(x, rows_of)
    grad_rows, grad_columns = kernels.quantize_both(grad, rows_of)
    x_columns = kernels.regroup(x8, columns_of)
    assert grad_rows is not None and grad_columns is not None
    fp8: list[Call] = [
        lambda: kernels.linear(x8, weight),
        lambda: kernels.linear_dgrad(grad_rows, weight),
        lambda: kernels.linear_wgrad(grad_columns, x_columns),
    ]
    codes: list[Call] = [
        lambda: kernels.quantize_rows(x, rows_of),
        lambda: kernels.quantize_both(grad, rows_of),
        lambda: kernels.regroup(x8, columns_of),
    ]
    bf16: list[Call] = [
        lambda: torch.mm(x, w.t()),
        lambda: torch.mm(grad, w),
        lambda: torch.mm(grad.t(), x, out_dtype=torch.float32),
    ]
    ours, apart, theirs = (sum(timer(call) for call in calls) for calls in (fp8, codes, bf16))
    return ours, apart, theirs


def _around(
    layer: DecoderLayer, kernels: Any, products: Sequence[_Product], inputs: Pair, grads: Pair
) -> tuple[list[Call], list[Call]]:
    """What the layer runs beside products to make their operands: in FP8, and in BF16 the same kernels' plain forms."""
    qkv, o, _, down = products
    first = layer.self_attn.o_proj
    rows_of, columns_of = first.flow.fprop.lhs, first.flow.wgrad.rhs
    h, delta = inputs
    norm = layer.input_layernorm
    weight = norm.working.plain
    gates = torch.randn(len(h), 2 * down.x_TK.shape[1], device=h.device, dtype=h.dtype)
    y8, inverse = kernels.quantize_rows(down.x_TK, rows_of), torch.ones(len(h), device=h.device)
    dy = down.x_TK * 1e-3

    def normed(added: Tensor | None, wanted: Operand | None) -> Call:
        return lambda: kernels.add_norm(h, added, weight, norm.eps, wanted)

    def both(grad: Tensor) -> Call:
        return lambda: kernels.quantize_both(grad, rows_of)

    def columns(x: Tensor, inverse_T: Tensor | None = None, weight_K: Tensor | None = None) -> Call:
        return lambda: kernels.columns_of(x, rows_of, columns_of, inverse_T=inverse_T, weight_K=weight_K)

    def quantized(x: Tensor) -> Call:
        return lambda: kernels.quantize_rows(x, rows_of)

    fp8: list[Call] = [
        *([normed(delta, rows_of)] * 2),
        quantized(o.x_TK),
        lambda: kernels.swiglu_rows(gates, rows_of),
        both(grads[1]),
        both(grads[0]),
        both(qkv.grad_TN),
        lambda: kernels.swiglu_grad(dy, gates, rows_of),
        *([columns(h, inverse, weight)] * 2),
        columns(o.x_TK),
        lambda: kernels.regroup(y8, columns_of),
    ]
    bf16: list[Call] = [
        *([normed(delta, None)] * 2),
        lambda: kernels.swiglu_rows(gates, None),
        lambda: kernels.swiglu_grad(dy, gates, None),
    ]
    return fp8, bf16


def _first(layers: Any) -> DecoderLayer:
    layer = layers[0]
    assert isinstance(layer, DecoderLayer)
    return layer


def _floor(sides: Sides, flow: Flow, card: Card, lengths: Sequence[int], *, remade: bool) -> float:
    found = workload.forward_backward(sides.ours.decoder.spec, flow, card, lengths, 0, remade=remade)
    return 1e3 * found.seconds


def goals(model: str, result: Result) -> list[Goal]:
    """Which of the project's goals these figures answer."""
    if model != GOAL_MODEL or result.rows < 16_000:
        return []
    return [
        Goal("D2a", result.ratio, 1.4, "x BF16, one layer"),
        Goal("D2b", result.linears.ratio, 1.42, "x BF16, its linears"),
    ]
