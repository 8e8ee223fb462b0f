"""How much memory a run needs, by part and by phase, from shapes alone: before anything is allocated.

    rollout   weights as they are multiplied, KV cache, logits of a decode step, activations of a prefill chunk
    update    masters, gradients, moments, working copies and their transposes, what the backward pass keeps of a micro-batch

The embedded engine keeps its cache during the update, and masters and moments stay during the rollout: one GPU holds both. So do
gradients and activations where training passes are captured, since a graph knows its memory by address.
What the backward pass keeps is told in `models/fused_layer.py`, layer by layer; this file counts it.

Legend: K hidden, N qkv outputs, I intermediate, V vocabulary, T rows. Next: `workload.py`, the same for time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.kernels.attention_form import PAGE, WIDENED
from lockstep.models.spec import ModelSpec, expected_tensors
from lockstep.nn.head import CHUNK, LOGITS_BYTES, stored_rows
from lockstep.numerics.flow import Flow, FlowPair
from lockstep.numerics.formats import BLOCK

GB = 1e9
RESERVE = int(1.5 * GB)
"""CUDA context, captured graphs, scratch memory of libraries. Taken, not derived."""
MASTER, GRADIENT, MOMENTS = 4, 4, 8
"""Bytes a parameter, FP32: master weight, gradient, both AdamW moments."""


@dataclass(frozen=True)
class Part:
    """One kind of memory, and the phases that it is there in."""

    name: str
    nbytes: int
    rollout: bool = True
    update: bool = True


@dataclass(frozen=True)
class Load:
    """What is in flight at most. microbatch_tokens: rows of a forward with gradient; trained_tokens: those that predict a
    trained token. cache_tokens: capacity of the KV cache. running: sequences decoded at once. prefill_tokens: rows of an engine
    step. 0 where there is no such phase. ranks: processes that share moments."""

    microbatch_tokens: int
    trained_tokens: int
    cache_tokens: int = 0
    running: int = 0
    prefill_tokens: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class Keeping:
    """How a backend trains. fused: as `models/fused_layer.py` says; else the reference, which holds dense FP32 weights too.
    checkpointing, save_fp8: see `Decoder`. captured: passes are (`models/trunk_graph.py`), and keep their memory."""

    fused: bool = True
    checkpointing: bool = False
    save_fp8: bool = True
    captured: bool = False


def parts(model: ModelSpec, flows: FlowPair, load: Load, keeping: Keeping) -> list[Part]:
    """Everything that takes memory, largest kinds first named by what they are."""
    count, trainer, rollout = model.num_parameters, flows.trainer, flows.rollout
    found = [
        Part("master weights, FP32", MASTER * count),
        Part("AdamW moments, FP32", -(-MOMENTS * count // load.ranks)),
        Part("gradients, FP32", GRADIENT * count, rollout=keeping.captured),
        Part("working copies" + ("" if flows.unified else ", trainer"), working_bytes(model, trainer)),
    ]
    if not flows.unified:
        found.append(Part("working copies, engine", working_bytes(model, rollout)))
    if keeping.fused and trainer.is_fp8 and trainer.dgrad.is_fp8:
        found.append(Part("transposed codes", transposed_bytes(model, trainer)))
    if not keeping.fused:
        copies = 1 if flows.unified else 2
        found.append(Part("dense FP32 values of the reference", copies * 4 * count))
    if load.cache_tokens:
        found.append(Part("KV cache", load.cache_tokens * cache_bytes_a_token(model, rollout)))
    found.append(
        Part(
            "saved activations of a micro-batch",
            saved_bytes(model, trainer, load, keeping),
            rollout=keeping.captured,
        )
    )
    found += [
        Part(
            "temporaries of a layer's backward",
            backward_bytes(model, trainer, load),
            rollout=keeping.captured,
        ),
        Part("probabilities of a micro-batch", probability_bytes(model, load, keeping), rollout=False),
        Part("logits of a chunk", logits_bytes(model, load, keeping), rollout=False),
    ]
    if load.running:
        logits = 2 * 4 * load.running * model.vocab_size
        found += [
            Part("logits of a decode step", logits, update=False),
            Part("activations of a prefill chunk", prefill_bytes(model, load), update=False),
        ]
        if keeping.fused and rollout.kv_fp8:
            pages = min(WIDENED, -(-load.cache_tokens // PAGE))
            copied = 2 * 2 * pages * PAGE * model.kv_size
            found.append(Part("BF16 copies of FP8 pages for a prefill", copied, update=False))
    if keeping.fused:
        found.append(Part("CUDA context, graphs, workspaces (reserve)", RESERVE))
    return [part for part in found if part.nbytes]


def peak(found: Sequence[Part]) -> dict[str, int]:
    """Bytes of each phase."""
    return {
        "rollout": sum(part.nbytes for part in found if part.rollout),
        "update": sum(part.nbytes for part in found if part.update),
    }


def working_bytes(model: ModelSpec, flow: Flow) -> int:
    """Codes with their scales, also as the library wants them, where the flow says FP8; BF16 elsewhere."""
    total = 0
    for shape, fp8 in _weights(model, flow):
        total += _code_bytes(shape) if fp8 else 2 * math.prod(shape)
    return total


def transposed_bytes(model: ModelSpec, flow: Flow) -> int:
    """What DGrad reads: codes once more, or BF16 values where a block is cut off at an edge."""
    total = 0
    for shape, fp8 in _weights(model, flow):
        if fp8:
            whole = not any(size % BLOCK for size in shape)
            total += _code_bytes(shape) if whole else 2 * math.prod(shape)
    return total


def cache_bytes_a_token(model: ModelSpec, flow: Flow) -> int:
    """Keys and values of one token in all layers."""
    element = 1 if flow.kv_fp8 else flow.activation.itemsize
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * element


def saved_bytes(model: ModelSpec, flow: Flow, load: Load, keeping: Keeping) -> int:
    """Between forward and backward: every layer's share, and rows around the head. `probability_bytes` come on top."""
    rows = load.microbatch_tokens
    layers = [layer_bytes_a_token(model, flow, layer, keeping) for layer in range(model.num_layers)]
    each = 2 * model.hidden_size
    kept = each * model.num_layers + max(layers, default=0) if keeping.checkpointing else sum(layers)
    ends = 3 * each * rows + (each + 6 * 4) * load.trained_tokens
    return rows * kept + ends


def layer_bytes_a_token(model: ModelSpec, flow: Flow, layer: int, keeping: Keeping) -> int:
    """What one layer keeps for one row; see `models/fused_layer.py`. The reference's autograd keeps every operation's input."""
    hidden, inner = model.hidden_size, _inner(model, layer)
    qkv = model.q_size + 2 * model.kv_size
    out = 2 * model.q_size + 4 * model.num_heads
    if not keeping.fused:
        return 2 * (4 * hidden + 3 * qkv + 5 * inner) + out
    fp8 = flow.fp8_layer(layer)
    gate_up = 4 * inner
    if fp8 and keeping.save_fp8 and not inner % BLOCK:
        gate_up = _row_code_bytes(2 * inner)
    return 4 * hidden + 2 * qkv + out + gate_up + (8 + _row_code_bytes(inner) if fp8 else 0)


def backward_bytes(model: ModelSpec, flow: Flow, load: Load) -> int:
    """Most that is alive while one layer's gradient is computed, beside what was saved: gradients in BF16 and in both forms of
    codes, and one product's weight gradient before it is added."""
    hidden, inner = model.hidden_size, max((_inner(model, i) for i in range(model.num_layers)), default=0)
    row = 9 * hidden + 6 * inner if flow.is_fp8 else 8 * hidden + 8 * inner
    return load.microbatch_tokens * row + 4 * 2 * inner * hidden


def logits_bytes(model: ModelSpec, load: Load, keeping: Keeping) -> int:
    """FP32 logits of a chunk; the reference holds three such tensors. Gradients of logits lie where probabilities lay, or take no
    more once these are gone."""
    if not keeping.fused:
        return 3 * 4 * min(CHUNK, load.trained_tokens) * model.vocab_size
    return min(LOGITS_BYTES, 4 * load.trained_tokens * model.vocab_size)


def probability_bytes(model: ModelSpec, load: Load, keeping: Keeping) -> int:
    """BF16 probabilities that the head stores between forward and backward. Under sampling masks there are none."""
    return 2 * stored_rows(load.trained_tokens, model.vocab_size) * model.vocab_size if keeping.fused else 0


def prefill_bytes(model: ModelSpec, load: Load) -> int:
    """Rows of one layer of the forward pass."""
    inner = max((_inner(model, layer) for layer in range(model.num_layers)), default=0)
    row = 8 * model.hidden_size + 4 * (model.q_size + 2 * model.kv_size) + 2 * model.q_size + 6 * inner
    return load.prefill_tokens * row


def _weights(model: ModelSpec, flow: Flow) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Every tensor's shape, and whether its working copy is FP8 codes."""
    for name, shape in expected_tensors(model).items():
        words = name.split(".")
        linear = len(shape) == 2 and words[1] == "layers" and not name.endswith("mlp.gate.weight")
        yield shape, linear and flow.fp8_layer(int(words[2])) and flow.fprop.rhs.is_fp8


def _code_bytes(shape: tuple[int, ...]) -> int:
    outputs, inputs = shape
    return outputs * inputs + 2 * 4 * -(-outputs // BLOCK) * -(-inputs // BLOCK)


def _row_code_bytes(width: int) -> int:
    return width + 4 * -(-width // BLOCK)


def _inner(model: ModelSpec, layer: int) -> int:
    """Width of the MLP that a row passes through."""
    if model.moe is not None and model.is_sparse(layer):
        return model.moe.intermediate_size * model.moe.experts_per_token
    return model.intermediate_size
