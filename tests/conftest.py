"""Small random decoders and what runs them, for tests of every package from `kernels/` upwards.

Weights are drawn so that every part matters: attention far from uniform, norms far from one, biases far from zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lockstep.kernels.attention_index import AttentionIndex, Run, build_index
from lockstep.kernels.reference import ReferenceKernels
from lockstep.models.decoder import Decoder
from lockstep.models.spec import ModelSpec, MoESpec, RopeSpec, expected_tensors
from lockstep.nn.context import PackedContext, PagedContext
from lockstep.nn.kv_scales import AmaxCollector, KVScales
from lockstep.nn.routes import Routes
from lockstep.numerics.flow import Flow
from lockstep.numerics.formats import E4M3

# Wavelengths of a head of 16: 6, 32, 167, ...: one is kept, one is blended, the others are stretched.
LLAMA31 = RopeSpec(theta=500_000.0, kind="llama3", factor=8.0, original_max_position=64)
SPECS = {
    "llama31": ModelSpec("llama", 97, 96, 160, 2, 6, 2, 16, rope=LLAMA31, rms_norm_eps=1e-5),
    "llama_tied": ModelSpec("llama", 97, 96, 160, 2, 6, 3, 16, tie_embeddings=True),
    "qwen2": ModelSpec("qwen2", 97, 96, 160, 2, 4, 2, 24, attention_bias=True),
    "qwen3": ModelSpec("qwen3", 97, 96, 160, 2, 4, 1, 32, qk_norm=True, tie_embeddings=True),
    "qwen3_moe": ModelSpec(
        "qwen3_moe", 97, 96, 160, 3, 4, 1, 32, qk_norm=True, moe=MoESpec(6, 2, 72, True, dense_layers=(1,))
    ),
}
"""One small model for each way in which the families differ."""


def random_weights(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of a checkpoint in FP32, at values that BF16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(spec).items():
        x = torch.empty(shape).normal_(generator=generator)
        if name.endswith("norm.weight"):
            x = 1 + 0.3 * x
        elif name.endswith("bias"):
            x = 0.3 * x
        elif "embed_tokens" not in name:
            x = x * shape[-1] ** -0.5
        elif spec.tie_embeddings:
            x = x * 0.2
        tensors[name] = x.bfloat16().float()
    return tensors


def make_decoder(
    spec: ModelSpec,
    flow: Flow,
    *,
    exact: bool = False,
    seed: int = 0,
    weights: dict[str, Tensor] | None = None,
) -> Decoder:
    """A refreshed decoder with the given or random weights."""
    decoder = Decoder(spec, flow, ReferenceKernels(exact=exact))
    decoder.load_state_dict(weights or random_weights(spec, seed), strict=True)
    decoder.refresh(1)
    return decoder


def random_ids(spec: ModelSpec, lengths: Sequence[int], seed: int = 0) -> Tensor:
    """Token ids of sequences of these lengths, side by side."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(spec.vocab_size, (sum(lengths),), generator=generator)


def positions(lengths: Sequence[int]) -> Tensor:
    """Position of every packed row."""
    return torch.cat([torch.arange(n) for n in lengths])


def packed_index(lengths: Sequence[int], group: int) -> AttentionIndex:
    """Sequences side by side, keys beside the queries."""
    runs, start = [], 0
    for n in lengths:
        runs.append(Run(start, n, 0, torch.arange(start, start + n)))
        start += n
    return build_index(runs, group)


def packed_context(
    decoder: Decoder,
    lengths: Sequence[int],
    scales: KVScales | None = None,
    collector: AmaxCollector | None = None,
) -> PackedContext:
    """The attention context of a training forward."""
    group = decoder.spec.num_heads // decoder.spec.num_kv_heads
    return PackedContext(
        positions(lengths), packed_index(lengths, group), decoder.kernels, scales=scales, collector=collector
    )


def packed_hidden(
    decoder: Decoder, ids: Tensor, lengths: Sequence[int], scales: KVScales | None = None
) -> Tensor:
    """Final hidden states of a training forward."""
    return decoder.hidden(ids, packed_context(decoder, lengths, scales))


def logits(decoder: Decoder, ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """Logits of every row, FP32, at temperature 1."""
    with torch.no_grad():
        return decoder.head.logits(packed_hidden(decoder, ids, lengths), torch.ones(len(ids)))


def calibrate(decoder: Decoder, ids: Tensor, lengths: Sequence[int], headroom: float = 1.0) -> KVScales:
    """KV scales from a forward over these rows."""
    collector = AmaxCollector(decoder.spec.num_layers, decoder.spec.num_kv_heads)
    with torch.no_grad():
        decoder.hidden(ids, packed_context(decoder, lengths, collector=collector))
    return collector.scales(headroom=headroom, kind="fp32", version=1)


@dataclass(frozen=True)
class Chunk:
    """Rows `start .. end` of sequence number `sequence`, computed in one engine step."""

    sequence: int
    start: int
    end: int


def schedule(lengths: Sequence[int], seed: int, largest: int) -> list[list[Chunk]]:
    """Engine steps that compute all rows in chunks of random size, sequences joining and pausing at random."""
    generator = torch.Generator().manual_seed(seed)
    done, steps = [0] * len(lengths), []
    while any(d < n for d, n in zip(done, lengths)):
        order = torch.randperm(len(lengths), generator=generator).tolist()
        step = []
        for i in order:
            if done[i] < lengths[i] and torch.rand((), generator=generator) < 0.8:
                size = int(torch.randint(1, largest + 1, (), generator=generator))
                end = min(lengths[i], done[i] + size)
                step.append(Chunk(i, done[i], end))
                done[i] = end
        if step:
            steps.append(step)
    return steps


def decode_schedule(lengths: Sequence[int]) -> list[list[Chunk]]:
    """Token by token, all sequences that still have one."""
    return [[Chunk(i, t, t + 1) for i, n in enumerate(lengths) if t < n] for t in range(max(lengths))]


def random_slots(lengths: Sequence[int], page: int, seed: int) -> tuple[list[Tensor], int]:
    """(slots of each sequence in pages scattered over a store with twice as many, slots of the store)."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // page) for n in lengths]
    pages = torch.randperm(2 * sum(counts), generator=generator)
    slots = []
    for n, own in zip(lengths, pages[: sum(counts)].split(counts)):
        slots.append((own[:, None] * page + torch.arange(page)).flatten()[:n])
    return slots, 2 * sum(counts) * page


@torch.no_grad()
def paged_hidden(
    decoder: Decoder,
    ids: Tensor,
    lengths: Sequence[int],
    steps: Sequence[Sequence[Chunk]],
    scales: KVScales | None = None,
    *,
    page: int = 16,
    seed: int = 0,
    routes: list[tuple[Tensor, Routes]] | None = None,
) -> Tensor:
    """Final hidden states computed step by step over a store of scattered pages that starts full of rubbish; `routes` gets the
    rows of every step with their experts."""
    spec, group = decoder.spec, decoder.spec.num_heads // decoder.spec.num_kv_heads
    slots, size = random_slots(lengths, page, seed)
    shape = (spec.num_layers, size, spec.num_kv_heads, spec.head_dim)
    rubbish = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100
    dtype = E4M3 if scales is not None else decoder.flow.activation
    k_store, v_store = rubbish.to(dtype), rubbish.neg().to(dtype)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    out = torch.full((len(ids), spec.hidden_size), torch.nan, dtype=decoder.flow.activation)
    for step in steps:
        runs: list[Run] = []
        rows = torch.cat(
            [torch.arange(starts[c.sequence] + c.start, starts[c.sequence] + c.end) for c in step]
        )
        count = 0
        for c in step:
            runs.append(Run(count, c.end - c.start, c.start, slots[c.sequence][: c.end]))
            count += c.end - c.start
        context = PagedContext(
            torch.cat([torch.arange(c.start, c.end) for c in step]),
            torch.cat([slots[c.sequence][c.start : c.end] for c in step]),
            build_index(runs, group),
            decoder.kernels,
            k_store,
            v_store,
            scales,
        )
        if routes is not None:
            context.routes = Routes()
            routes.append((rows, context.routes))
        out[rows] = decoder.hidden(ids[rows], context)
    return out


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    """The functions above, by name."""
    return SimpleNamespace(
        SPECS=SPECS,
        Chunk=Chunk,
        random_weights=random_weights,
        make_decoder=make_decoder,
        random_ids=random_ids,
        positions=positions,
        packed_index=packed_index,
        packed_context=packed_context,
        packed_hidden=packed_hidden,
        logits=logits,
        calibrate=calibrate,
        schedule=schedule,
        decode_schedule=decode_schedule,
        random_slots=random_slots,
        paged_hidden=paged_hidden,
    )
