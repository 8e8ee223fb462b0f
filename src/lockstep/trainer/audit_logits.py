"""All logits of decode steps: samples are decoded again over a paged cache, their tokens given, and whole rows of logits kept.

The engine itself keeps a token and its log-probability. That these are the replayed step's ties the two together; that the
logits are the training forward's leaves no element of the vocabulary uncompared.

Shapes: R samples, N tokens of all samples in order, V vocabulary. Next: `../rollout/decode_state.py`, the engine's own step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.kernels.attention_form import CHUNK, PAGE
from lockstep.models.decoder import Decoder
from lockstep.nn.device_context import DevicePages
from lockstep.nn.kv_scales import KVScales
from lockstep.rollout.device_cache import DeviceCache
from lockstep.rollout.runner import Runner
from lockstep.rollout.scheduler import Work
from lockstep.rollout.sequence import Group
from lockstep.rollout.sequence import Sequence as Sample
from lockstep.rollout.types import Completion, Request
from lockstep.trainer.microbatch import MicroBatch

PREFILL_TOKENS = 16_384
COMPARED_ROWS = 256
"""Rows of logits compared at a time."""


@torch.no_grad()
def decoded_logits(decoder: Decoder, completions: Sequence[Completion], scales: KVScales | None) -> Tensor:
    """[N, V] FP32: the logits that each token was drawn from, before any temperature. The first of a sample comes from prefill,
    every other from a step with one query a sample."""
    from lockstep.kernels.triton import steps
    from lockstep.kernels.triton.attention import DecodeIndex

    device, kernels = decoder.device, decoder.kernels
    lengths = [len(c.prompt_ids) + len(c.token_ids) for c in completions]
    cache = DeviceCache(
        decoder.spec,
        decoder.flow,
        tokens=sum(-(-n // PAGE) * PAGE for n in lengths),
        page_size=PAGE,
        device=device,
    )
    decoder.model.rope.reserve(max(lengths), device)
    samples = [_sample(c) for c in completions]
    table_RP = torch.zeros(len(samples), -(-max(lengths) // PAGE), dtype=torch.int32)
    for i, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        assert cache.grow(sample.pages, length), "the cache was sized for all"
        table_RP[i, : len(sample.pages)] = torch.tensor(sample.pages, dtype=torch.int32)
    table_RP = table_RP.to(device)

    def logits_of(hidden_TK: Tensor) -> Tensor:
        return kernels.raw_logits(hidden_TK, decoder.head.working)  # type: ignore[attr-defined, no-any-return]

    counts = torch.tensor([len(c.token_ids) for c in completions])
    first = (counts.cumsum(0) - counts).to(device)  # where each sample's logits begin
    tokens_SR = torch.zeros(int(counts.max()), len(samples), dtype=torch.int64)
    for i, c in enumerate(completions):
        tokens_SR[: len(c.token_ids), i] = torch.tensor(c.token_ids)
    tokens_SR, counts_R = tokens_SR.to(device), counts.to(device)
    out = torch.empty(int(counts.sum()), decoder.spec.vocab_size, device=device)
    out[first] = logits_of(_prefilled(Runner(decoder, cache), samples, scales))
    position_R = torch.tensor([len(c.prompt_ids) for c in completions], device=device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    longest = -(-max(lengths) // CHUNK) * CHUNK
    for step in range(len(tokens_SR) - 1):
        alive = step + 1 < counts_R
        slots, keys = steps.prepare(position_R, table_RP, alive.int(), cache.spare)
        index = DecodeIndex(keys, table_RP, longest)
        context = DevicePages(position_R, slots, index, cache.k, cache.v, scales, flag)
        logits_RV = logits_of(decoder.hidden(tokens_SR[step], context))  # type: ignore[arg-type]
        out[(first + step + 1)[alive]] = logits_RV[alive]
        position_R = position_R + alive
    assert not bool(flag), "a key or value was not finite"
    return out


def _sample(completion: Completion) -> Sample:
    request = Request(completion.prompt_ids, completion.prompt_index, 1, completion.params)
    return Sample(Group(request, 1), completion.sample_index, list(completion.prompt_ids))


def _prefilled(runner: Runner, samples: list[Sample], scales: KVScales | None) -> Tensor:
    """Last hidden state [R, K] of every prompt, some at a time."""
    hidden: list[Tensor] = []
    some: list[Work] = []
    for sample in samples:
        if sum(w.count for w in some) + len(sample.tokens) > PREFILL_TOKENS:
            hidden += runner.forward(some, scales)
            some = []
        some.append(Work(sample, len(sample.tokens)))
    return torch.stack(hidden + runner.forward(some, scales))


@torch.no_grad()
def decoded_log_probs(logits_NV: Tensor, micro: MicroBatch) -> Tensor:
    """[N] FP32: log p of the tokens of a micro-batch, as the engine takes it from these logits."""
    from lockstep.kernels.triton import head

    normalizer_N = head.log_normalizer(logits_NV, micro.temperature_N)
    return head.target_log_prob(logits_NV, micro.temperature_N, normalizer_N, micro.targets_N)


@torch.no_grad()
def compare_logits(decoder: Decoder, hidden_NK: Tensor, logits_NV: Tensor) -> int:
    """Logits of these hidden states that have other bits than those given."""
    different = torch.zeros((), dtype=torch.int64, device=hidden_NK.device)
    kernels = decoder.kernels
    for hidden, known in zip(hidden_NK.split(COMPARED_ROWS), logits_NV.split(COMPARED_ROWS), strict=True):
        logits = kernels.raw_logits(hidden, decoder.head.working)  # type: ignore[attr-defined]
        different += (logits.view(torch.int32) != known.view(torch.int32)).sum()
    return int(different)
