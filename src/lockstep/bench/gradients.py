"""How far FP8 turns a gradient: cosine with the BF16 flow's on real weights and real text, layer by layer.

Both flows run through this project's decoder, over the same masters and the same tokens; the loss is the mean over tokens of
-log p. A layer's weight gradients are one vector. Two figures, which answer two questions:

    alone    every layer gets the BF16 flow's own input and the BF16 flow's own gradient: what this layer's FP8 products do
    flow     each flow from the embedding to the loss and back: a layer's gradient then also carries what all other layers did
             to its input and to the gradient that reaches it

Next: `sft.py`, whether it matters in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.bench.corpus import load_corpus
from lockstep.bench.goals import Goal
from lockstep.bench.sides import Say, cosine
from lockstep.bench.training import layer_cosines
from lockstep.kernels.table import Kernels, device_of
from lockstep.models.build import empty_decoder, sharing_decoder
from lockstep.models.checkpoint import load_config
from lockstep.models.decoder import Decoder
from lockstep.models.fused_layer import Step
from lockstep.nn.packed import packed_context
from lockstep.nn.rows import take_rows
from lockstep.numerics.flow import Flow, bf16_flow
from lockstep.rollout.types import Completion
from lockstep.trainer.microbatch import MicroBatch, make_microbatch
from lockstep.trainer.setup import load_masters

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Cosines:
    """Of one flow with BF16: of every layer in the flow and alone, of all parameters together; the losses of both."""

    layers: dict[int, float]
    alone: dict[int, float]
    whole: float
    loss: float
    loss_bf16: float

    @property
    def worst(self) -> int:
        """The layer that differs most."""
        return min(self.layers, key=lambda layer: self.layers[layer])

    def lines(self) -> list[str]:
        """For a terminal."""
        lines = [f"loss {self.loss:.5f}, in BF16 {self.loss_bf16:.5f}", "layer    alone     flow"]
        lines += [f"{i:5}  {self.alone[i]:.5f}  {self.layers[i]:.5f}" for i in sorted(self.layers)]
        lines.append(f"worst  {min(self.alone.values()):.5f}  {self.layers[self.worst]:.5f}")
        return [*lines, f"all parameters, flow: {self.whole:.5f}"]

    def records(self) -> list[dict[str, Any]]:
        """For the result file."""
        rows: list[dict[str, Any]] = [
            {"layer": i, "alone": self.alone[i], "flow": c} for i, c in sorted(self.layers.items())
        ]
        return [*rows, {"whole": self.whole, "loss": self.loss, "loss_bf16": self.loss_bf16}]


def run_gradients(
    folder: Path, flow: Flow, kernels: Kernels, *, count: int, length: int, save_fp8: bool, say: Say
) -> Cosines:
    """Over `count` held-out sequences of the corpus."""
    decoder = load_decoder(folder, flow, kernels)
    decoder.save_fp8 = save_fp8
    texts = load_corpus(folder, decoder.spec, length)[1][:count]
    say(f"{len(texts)} sequences of {length} tokens")
    twin = sharing_decoder(decoder, bf16_flow())
    twin.refresh(1)
    loss, ours = gradient(decoder, texts)
    loss_bf16, theirs = gradient(twin, texts)
    whole = cosine(list(ours.values()), [theirs[name] for name in ours])
    return Cosines(layer_cosines(ours, theirs), layers_alone(decoder, twin, texts), whole, loss, loss_bf16)


def load_decoder(folder: Path, flow: Flow, kernels: Kernels) -> Decoder:
    """A checkpoint's weights as masters, published as version 1."""
    decoder = empty_decoder(load_config(folder), flow, kernels, device_of(kernels))
    load_masters(decoder, folder)
    decoder.refresh(1)
    return decoder


def gradient(decoder: Decoder, texts: Sequence[Completion]) -> tuple[float, dict[str, Tensor]]:
    """(mean -log p, gradient of every parameter), one sequence at a time; nothing is left in `.grad`."""
    decoder.zero_grad(set_to_none=True)
    tokens, total = sum(len(t.token_ids) for t in texts), 0.0
    for text in texts:
        loss = loss_sum(decoder, [text]) / tokens
        loss.backward()
        total += float(loss.detach())
    grads = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    decoder.zero_grad(set_to_none=True)
    return total, grads


def loss_sum(decoder: Decoder, texts: Sequence[Completion]) -> Tensor:
    """Sum of -log p over all tokens, differentiable."""
    return -_packed(decoder, texts).log_probs(decoder, None)[0].sum()


def layers_alone(ours: Decoder, theirs: Decoder, texts: Sequence[Completion]) -> dict[int, float]:
    """Cosine of each layer's weight gradients where both flows get what reaches the layer in `theirs`. One pack of rows."""
    micro = _packed(ours, texts)
    there, here = _layers(theirs, micro), _layers(ours, micro)
    state: State = (theirs.model.embed_tokens(micro.ids_T).detach(),)
    if ours.kernels.fused:
        state = (*state, torch.zeros_like(state[0]))
    inputs, outputs = [], []
    for layer in there:
        inputs.append(tuple(x.detach().requires_grad_() for x in state))
        outputs.append(layer(inputs[-1]))
        state = outputs[-1]
    last = tuple(x.detach().requires_grad_() for x in state)
    rows = take_rows(theirs.model.norm(sum(last[1:], last[0])), micro.rows_N)
    logp_N, _ = theirs.head.log_probs(rows, micro.targets_N, micro.temperature_N)
    grads = torch.autograd.grad(-logp_N.mean(), last)
    found = {}
    for i in reversed(range(len(there))):
        weights = [[p for p in d.model.layers[i].parameters() if p.dim() > 1] for d in (theirs, ours)]
        at = inputs[i]
        expected = torch.autograd.grad(outputs.pop(), [*at, *weights[0]], grads)
        made = torch.autograd.grad(here[i](tuple(x.detach() for x in at)), weights[1], grads)
        found[i] = cosine(made, expected[len(at) :])
        grads = tuple(expected[: len(at)])
    return found


def _layers(decoder: Decoder, micro: MicroBatch) -> list[Callable[[State], State]]:
    """Every layer as a function of what goes along the residual stream: h, and on a backend that fuses what is to be added."""
    decoder.model.rope.reserve(micro.length, micro.positions_T.device)
    context: Any = packed_context(micro.positions_T, micro.index, decoder.kernels)
    cos_sin = decoder.model.rope.at(micro.positions_T)

    def fused(number: int) -> Callable[[State], State]:
        step = Step.of(decoder, number, context)
        return lambda state: step.apply(state[0], state[1])

    def plain(layer: Any) -> Callable[[State], State]:
        return lambda state: (layer(state[0], context, cos_sin),)

    layers = enumerate(decoder.model.layers)
    return [fused(i) if decoder.kernels.fused else plain(layer) for i, layer in layers]


def _packed(decoder: Decoder, texts: Sequence[Completion]) -> MicroBatch:
    kernels = decoder.kernels
    return make_microbatch(
        texts, decoder.spec.query_group, share_prompts=False, kernels=kernels, device=device_of(kernels)
    )


def goals(found: Cosines) -> list[Goal]:
    """Which of the project's goals this answers."""
    return [
        Goal("D6a", found.layers[found.worst], 0.995, "gradient cosine of the worst layer"),
        Goal("D6c", min(found.alone.values()), 0.995, "gradient cosine of the worst layer by itself"),
    ]
