"""What an engine owes to its FP8 keys and values: the scales it was given and no others, said aloud with every sample; and the
same bits from a prefix cache as from a computation."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.errors import ContractError
from lockstep.nn.kv_scales import KVScales
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Completion
from lockstep.trainer.microbatch import make_microbatch

World = Any
KV8 = [
    "qwen3-fp8-kv8",
    "llama-fp8-kv8-pow2",
    "qwen2-fp8-kv8-exact",
    "qwen3-fp8-kv8-attn8",
    "llama-bf16-kv8-attn8-exact",
]


def bits(completions: list[Completion]) -> list[tuple[Any, ...]]:
    """Everything a sample is, log-probabilities as bytes."""
    return [
        (c.prompt_index, c.sample_index, c.token_ids, struct.pack(f"{len(c.logprobs)}d", *c.logprobs))
        for c in completions
    ]


def test_a_prefix_cache_changes_no_bit_case_63(world: World) -> None:
    """The same requests again in an engine that has their prompts, longer ones, and an engine that doesn't keep any."""
    limits = RolloutSpec(page_size=7, max_batched_tokens=64)
    cached, plain = world.engine(limits), world.engine(replace(limits, prefix_cache=False))
    for _ in range(2):
        assert bits(world.generate(cached)) == bits(world.first)
    longer = [replace(r, prompt_ids=(*r.prompt_ids, 5), samples=1) for r in world.requests]
    assert bits(world.generate(cached, longer)) == bits(world.generate(plain, longer))


@pytest.mark.parametrize("world", KV8, indirect=True)
def test_stale_scales_are_refused_case_32(world: World) -> None:
    """An engine doesn't sample under other scales than those expected, doesn't go back, and gives no number twice."""
    engine, request = world.engine(), world.requests[:1]
    old, newer = world.scales, replace(world.scales, k=world.scales.k * 1.25, version=2)

    def sample(expected: int | None) -> list[Completion]:
        return engine.generate(request, seed=1, step=1, expected_version=5, expected_scale_version=expected)

    before = sample(1)
    assert sample(None) == before and {c.scale_version for c in before} == {1}
    with pytest.raises(ContractError, match="uses KV scales v1, v2 was expected"):
        sample(2)
    assert engine.set_kv_scales(newer) == 2 == engine.scale_version
    with pytest.raises(ContractError, match="uses KV scales v2, v1 was expected"):
        sample(1)
    with pytest.raises(ContractError, match="stale KV scales: v1 was given, v2 is in use"):
        engine.set_kv_scales(old)
    with pytest.raises(ContractError, match="two different KV scales are called v2"):
        engine.set_kv_scales(replace(old, version=2))
    assert engine.set_kv_scales(newer) == 2, "the same again is no harm"
    after = sample(2)
    assert {c.scale_version for c in after} == {2} and bits(after) != bits(before)


@pytest.mark.parametrize("world", KV8, indirect=True)
def test_scales_that_can_not_be_right_are_refused_case_28(world: World) -> None:
    engine, scales = world.engine(), world.scales
    for bad in (
        replace(scales, k=scales.k[:, :0], version=2),
        replace(scales, v=scales.v[:1], version=2),
        replace(scales, v=scales.v * 0, version=2),
        replace(scales, k=scales.k / 0, version=2),
        replace(scales, k=scales.k.double(), version=2),
        replace(scales, version=0),
    ):
        with pytest.raises(ContractError, match="KV scales"):
            engine.set_kv_scales(bad)
    assert engine.scale_version == 1
    assert bits(world.generate(engine, world.requests[:1])) == bits(world.first[:2])


@pytest.mark.parametrize("world", ["llama-bf16", "qwen2-fp8"], indirect=True)
def test_a_bf16_cache_takes_no_scales_case_32(world: World) -> None:
    engine, spec = world.engine(), world.decoder.spec
    ones = torch.ones(spec.num_layers, spec.num_kv_heads)
    with pytest.raises(ContractError, match="BF16 KV cache"):
        engine.set_kv_scales(KVScales(ones, ones, 1))
    assert engine.scale_version == 0
    with pytest.raises(ContractError, match="uses KV scales v0, v1 was expected"):
        engine.generate(world.requests, seed=0, step=0, expected_version=5, expected_scale_version=1)


@pytest.mark.parametrize("world", KV8, indirect=True)
def test_prefill_decode_and_training_agree_however_much_saturates_case_29(world: World) -> None:
    """Scales as small as a percentile gives them: chunks, pages and the training forward still have the same bits."""
    tight = KVScales(world.scales.k * 0.15, world.scales.v * 0.15, 2)
    found = []
    for spec in (RolloutSpec(), RolloutSpec(page_size=5, max_running=2, max_batched_tokens=7)):
        engine = world.engine(spec)
        engine.set_kv_scales(tight)
        found.append(world.generate(engine, world.requests[2:]))
    assert bits(found[0]) == bits(found[1]) != bits(world.first[4:])
    for share in (True, False):
        micro = make_microbatch(found[0], world.group, share_prompts=share)
        with torch.no_grad():
            logp_N, _ = micro.log_probs(world.decoder, tight)
        assert torch.equal(logp_N, micro.rollout_N)
