"""KV scales from a forward over prompts: before the first rollout, and for engines that can only calibrate themselves.

Both routes of the field are here (NeMo RL and FP8-RL). The trainer's decoder gives maxima of its own keys and values; the
engine's decoder gives those of the engine's flow, which in a split run computes them in another precision. In a unified run it
is one decoder, and the scales are the same bits.

The calibration forward keeps keys and values in BF16, since there are no scales yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lockstep.errors import ContractError
from lockstep.kernels.attention_index import Run
from lockstep.kernels.table import Kernels
from lockstep.models.decoder import Decoder
from lockstep.nn.context import AttentionContext
from lockstep.nn.kv_scales import AmaxCollector, KVMaxima, KVScales
from lockstep.nn.packed import packed_context
from lockstep.numerics.formats import ScaleKind
from lockstep.rollout.engine import EmbeddedEngine

ROWS = 2048
"""Rows of one forward; a longer prompt has one of its own."""


def calibrate_from_engine(
    engine: EmbeddedEngine,
    prompts: Sequence[tuple[int, ...]],
    *,
    headroom: float,
    kind: ScaleKind,
    version: int,
) -> KVScales:
    """Scales under which `headroom` times the keys and values of these prompts fit, as the *engine* computes them, in its flow
    and under the weights it holds. Raises ContractError when one isn't finite."""
    return measure_kv(engine.decoder, prompts).scales(headroom=headroom, kind=kind, version=version)


def measure_kv(decoder: Decoder, prompts: Sequence[tuple[int, ...]]) -> KVMaxima:
    """Absolute maxima of a decoder's keys and values over whole prompts. Raises ContractError when one isn't finite."""
    spec = decoder.spec
    device = decoder.device
    collector = AmaxCollector(spec.num_layers, spec.num_kv_heads, device)
    group = spec.query_group
    decoder.model.rope.reserve(max(map(len, prompts)), device)
    try:
        with torch.no_grad():
            for some in _batches(prompts):
                decoder.hidden(*prompt_context(some, group, decoder.kernels, collector, device))
    except ValueError as error:  # a quantized layer further up met what such a key made of the attention
        collector.read()
        raise ContractError(f"KV calibration: {error}") from error
    return collector.read()


def prompt_context(
    prompts: Sequence[tuple[int, ...]],
    group: int,
    kernels: Kernels,
    collector: AmaxCollector,
    device: torch.device | None = None,
) -> tuple[Tensor, AttentionContext]:
    """(ids, context) of a forward over whole prompts that gathers KV maxima; `group` is the number of query heads for each KV
    head."""
    runs, start = [], 0
    for prompt in prompts:
        runs.append(Run(start, len(prompt), 0, torch.arange(start, start + len(prompt))))
        start += len(prompt)
    positions = torch.cat([torch.arange(len(p)) for p in prompts]).to(device)
    context = packed_context(positions, kernels.index(runs, group, device), kernels, collector=collector)
    return torch.tensor([t for p in prompts for t in p], device=device), context


def _batches(prompts: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Prompts in order, as many at a time as fit into a forward."""
    some: list[tuple[int, ...]] = []
    for prompt in prompts:
        if some and sum(map(len, some)) + len(prompt) > ROWS:
            yield some
            some = []
        some.append(prompt)
    if some:
        yield some
