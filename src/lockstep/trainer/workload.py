"""How long a step must take at least, phase by phase, from operations and bytes and what a card can do.

A phase's time is that of its products at the tensor cores' rate, plus that of the bytes which the kernels around them move at
copy bandwidth; a decode step is bounded by the larger of the two. Nothing is added for launches, the host, or attention's own
pace, so a measured time is longer: by how much is what `lockstep bench train` prints.

Legend: K hidden, N qkv outputs, I intermediate, V vocabulary. Next: `../config/plan.py`, which prints it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.models.spec import ModelSpec
from lockstep.nn.head import stored_rows
from lockstep.numerics.flow import Flow
from lockstep.trainer.footprint import cache_bytes_a_token, working_bytes


@dataclass(frozen=True)
class Card:
    """What a GPU can do: an H100 as measured with `lockstep bench`. copy_tbps: bytes read plus written."""

    memory_gb: float = 80.0
    copy_tbps: float = 3.0
    bf16_tflops: float = 720.0
    fp8_tflops: float = 1100.0

    def products(self, flops: float, *, fp8: bool) -> float:
        """Seconds of products."""
        return flops / (self.fp8_tflops if fp8 else self.bf16_tflops) / 1e12

    def moves(self, nbytes: float) -> float:
        """Seconds of reading and writing."""
        return nbytes / self.copy_tbps / 1e12


@dataclass(frozen=True)
class Phase:
    """Least time of one phase, and what it is made of: products of linear layers, attention, head, and bytes moved."""

    name: str
    seconds: float
    linear: float = 0.0
    attention: float = 0.0
    head: float = 0.0
    memory: float = 0.0


def layer_linears_flops(model: ModelSpec) -> float:
    """Operations of the linear layers of all decoder layers for one row, forward."""
    attention = model.hidden_size * (model.q_size + 2 * model.kv_size) + model.q_size * model.hidden_size
    total = 0
    for layer in range(model.num_layers):
        inner, experts = model.intermediate_size, 1
        if model.moe is not None and model.is_sparse(layer):
            inner, experts = model.moe.intermediate_size, model.moe.experts_per_token
        total += attention + 3 * model.hidden_size * inner * experts
    return 2.0 * total


def attention_flops(model: ModelSpec, lengths: Sequence[int]) -> float:
    """Operations of causal attention over whole sequences, all layers, forward."""
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    return 4.0 * model.num_layers * model.num_heads * model.head_dim * pairs


def forward(model: ModelSpec, flow: Flow, card: Card, lengths: Sequence[int], targets: int) -> Phase:
    """A pass without gradient that scores `targets` tokens: what recomputing old log-probabilities takes."""
    rows = sum(lengths)
    linear = card.products(layer_linears_flops(model) * rows, fp8=flow.is_fp8)
    attention = card.products(attention_flops(model, lengths), fp8=False)
    head = card.products(2.0 * targets * model.hidden_size * model.vocab_size, fp8=False)
    memory = card.moves(rows * model.num_layers * _moved(model, fp8=flow.is_fp8)[0])
    return _phase("forward", linear, attention, head, memory)


def forward_backward(
    model: ModelSpec,
    flow: Flow,
    card: Card,
    lengths: Sequence[int],
    targets: int,
    *,
    together: int | None = None,
    remade: bool = True,
) -> Phase:
    """Forward, and backward with both gradients of every product. together: targets of a micro-batch, all where it isn't said;
    logits of those whose probabilities aren't stored are computed twice. remade: norm and SwiGLU outputs are made again rather
    than kept."""
    rows = sum(lengths)
    linear = card.products(3 * layer_linears_flops(model) * rows, fp8=flow.is_fp8)
    attention = card.products(3.5 * attention_flops(model, lengths), fp8=False)
    together = max(together or targets, 1)
    again = 1.0 - stored_rows(together, model.vocab_size) / together
    head_flops = (6.0 + 2.0 * again) * targets * model.hidden_size * model.vocab_size
    head = card.products(head_flops, fp8=False)
    there, back, remaking = _moved(model, fp8=flow.is_fp8)
    memory = card.moves(rows * model.num_layers * (there + back + (remaking if remade else 0)))
    return _phase("forward and backward", linear, attention, head, memory)


def optimizer(model: ModelSpec, card: Card, ranks: int = 1) -> Phase:
    """AdamW: reads four FP32 tensors and writes three, on each of so many ranks for its share; clipping reads and writes the
    share's gradients, and their norm reads all."""
    tensors = 9 / ranks + 1
    return _phase("optimizer", 0.0, 0.0, 0.0, card.moves(tensors * 4 * model.num_parameters))


def publication(model: ModelSpec, flow: Flow, card: Card) -> Phase:
    """Working copies from the masters, compared with the old ones; then the transposes."""
    copies = working_bytes(model, flow)
    turned = 2 * copies if flow.is_fp8 else 0
    return _phase("publication", 0.0, 0.0, 0.0, card.moves(4 * model.num_parameters + 2 * copies + turned))


def rollout(
    model: ModelSpec,
    flow: Flow,
    card: Card,
    *,
    prompts: int,
    samples: int,
    prompt: int,
    new: int,
    running: int,
) -> Phase:
    """Prefill of every prompt once, then decode in waves of `running` sequences: a step reads all weights and the keys and values
    so far."""
    first = forward(model, flow, card, [prompt] * prompts, prompts)
    total = prompts * samples
    waves, left = divmod(total, running)
    seconds = memory = 0.0
    token = cache_bytes_a_token(model, flow)
    row_flops = layer_linears_flops(model)
    head_flops = 2.0 * model.hidden_size * model.vocab_size
    weights = working_bytes(model, flow)
    if not model.tie_embeddings:
        weights -= 2 * model.vocab_size * model.hidden_size
    for width in [running] * waves + [left] * bool(left):
        read = new * weights + token * width * sum(prompt + i for i in range(new))
        compute = card.products(row_flops * width * new, fp8=flow.is_fp8)
        compute += card.products(head_flops * width * new, fp8=False)
        seconds += max(card.moves(read), compute)
        memory += card.moves(read)
    return Phase("rollout", first.seconds + seconds, first.linear, first.attention, first.head, memory)


def _phase(name: str, linear: float, attention: float, head: float, memory: float) -> Phase:
    return Phase(name, linear + attention + head + memory, linear, attention, head, memory)


def _moved(model: ModelSpec, *, fp8: bool) -> tuple[float, float, float]:
    """Bytes that kernels beside products move for one row of one layer: forward, backward, and for what is made again."""
    hidden, inner, out = model.hidden_size, model.intermediate_size, model.q_size
    if model.moe is not None:
        inner = model.moe.intermediate_size * model.moe.experts_per_token
    qkv = out + 2 * model.kv_size
    if fp8:
        there = 14 * hidden + 4 * qkv + 11 * inner + 3 * out
        back = 24 * hidden + 10 * qkv + 10 * inner
        return there, back, 6 * hidden + 4 * qkv + 3 * out
    there, back = 16 * hidden + 4 * qkv + 6 * inner, 16 * hidden + 6 * qkv + 10 * inner
    return there, back, 8 * hidden + 4 * qkv + 6 * inner
