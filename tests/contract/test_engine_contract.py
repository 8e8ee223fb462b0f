"""The contract that every engine must keep: a token's log-probability is a function of weights, flow and prefix, and so is
the sample, given its noise. Whatever the schedule, the bits are the same, and they are the training forward's."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import CapacityError, ContractError
from lockstep.nn.kv_scales import KVScales
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Completion, Request, VersionSpan
from lockstep.trainer.microbatch import make_microbatch

World = Any
SCHEDULES: dict[str, tuple[RolloutSpec, int]] = {
    "three at a time, prefill in chunks of 5, pages of 7": (
        RolloutSpec(max_running=3, max_batched_tokens=5, page_size=7),
        4096,
    ),
    "pages of one token": (RolloutSpec(page_size=1), 4096),
    "sixteen tokens a step": (RolloutSpec(max_running=15, max_batched_tokens=16), 4096),
}


def by_key(completions: Iterable[Completion]) -> dict[tuple[int, int], Completion]:
    return {(c.prompt_index, c.sample_index): c for c in completions}


def assert_same(first: list[Completion], other: list[Completion]) -> None:
    """Equal as records, and equal in every bit of their log-probabilities."""
    known = by_key(first)
    for key, c in by_key(other).items():
        assert c == known[key]
        bits = [struct.pack("d", p) for p in c.logprobs]
        assert bits == [struct.pack("d", p) for p in known[key].logprobs]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_case_51_no_schedule_changes_a_bit(world: World, schedule: str) -> None:
    engine = world.engine(*SCHEDULES[schedule])
    done = world.generate(engine)
    assert len(done) == len(world.first)
    assert_same(world.first, done)


def test_preemption_changes_no_bit(world: World) -> None:
    engine = world.engine(RolloutSpec(page_size=3, max_batched_tokens=64), world.longest + 12)
    assert_same(world.first, world.generate(engine))
    assert engine.preemptions > 0


def test_one_sequence_at_a_time(world: World) -> None:
    engine = world.engine(RolloutSpec(max_running=1, page_size=5))
    assert_same(world.first, world.generate(engine, world.requests[:1]))


def test_order_of_requests_changes_no_bit(world: World) -> None:
    engine = world.engine(RolloutSpec(max_running=4))
    order = [3, 0, 4, 2, 1]
    done = world.generate(engine, [world.requests[i] for i in order])
    assert [c.prompt_index for c in done] == [100 + i for i in order for _ in range(2)]
    assert_same(world.first, done)


def test_case_45_63_an_engine_used_before_is_like_a_fresh_one(world: World) -> None:
    """Prompts one by one in one engine, other prompts with the same beginning before: nothing stays behind."""
    engine = world.engine()
    for request in world.requests[2:]:
        prompt, params = (*request.prompt_ids, 3, 4), replace(request.params, max_tokens=3)
        world.generate(engine, [replace(request, prompt_ids=prompt, params=params, samples=1)])
        assert_same(world.first, world.generate(engine, [request]))


def test_a_sample_is_the_same_without_its_siblings(world: World) -> None:
    engine = world.engine()
    done = world.generate(engine, [replace(r, samples=1) for r in world.requests])
    assert_same(world.first, done)


def packings(completions: list[Completion]) -> dict[str, list[list[Completion]]]:
    """Several ways to lay samples into micro-batches."""
    return {
        "all": [completions],
        "reversed": [completions[::-1]],
        "interleaved": [completions[::2] + completions[1::2]],
        "halves": [completions[:5], completions[5:]],
        "alone": [[c] for c in completions[::3]],
    }


@pytest.mark.parametrize("share", [True, False], ids=["shared prompts", "repeated prompts"])
def test_log_probabilities_are_the_training_forwards(world: World, share: bool) -> None:
    compared = 0
    for name, batches in packings(world.first).items():
        for batch in batches:
            micro = make_microbatch(batch, world.group, share_prompts=share)
            logp_N, entropy_N = micro.log_probs(world.decoder, world.scales)
            assert torch.equal(logp_N.detach(), micro.rollout_N), name
            assert bool(torch.isfinite(entropy_N).all()) and bool((entropy_N >= 0).all())
            compared += logp_N.numel()
    assert compared > 250


def test_case_64_every_sample_says_what_it_is(world: World) -> None:
    """Version spans that cover it, FP32 log-probabilities that are finite and not positive, and its own parameters."""
    stops = {7, 11}
    assert [(c.prompt_index, c.sample_index) for c in world.first] == [
        (100 + i, j) for i in range(5) for j in range(2)
    ]
    for c, request in zip(world.first, [r for r in world.requests for _ in range(2)], strict=True):
        assert c.spans == (VersionSpan(5, 0, len(c.token_ids)),)
        assert c.scale_version == (1 if world.decoder.flow.kv_fp8 else 0)
        assert (c.prompt_ids, c.params) == (request.prompt_ids, request.params)
        assert len(c.logprobs) == len(c.token_ids) > 0
        assert all(math.isfinite(p) and p <= 0 for p in c.logprobs)
        assert [struct.unpack("f", struct.pack("f", p))[0] for p in c.logprobs] == list(c.logprobs)
        assert all(0 <= t < world.decoder.spec.vocab_size for t in c.token_ids)
        stopped = c.token_ids[-1] in stops & c.params.stop_token_ids
        assert c.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(c.token_ids) == c.params.max_tokens
        assert not set(c.token_ids[:-1]) & c.params.stop_token_ids
    texts = [c.token_ids for c in world.first if c.params.temperature > 0 and len(c.token_ids) > 3]
    assert len(set(texts)) == len(texts), "samples of a prompt differ"
    greedy = {c.token_ids for c in world.first if c.params.temperature == 0}
    assert len(greedy) == 1


def test_seed_and_step_change_the_samples(world: World) -> None:
    engine, request = world.engine(), [replace(world.requests[2], samples=1)]
    drawn = [
        engine.generate(request, seed=s, step=t, expected_version=5)[0]
        for s, t in ((17, 3), (18, 3), (17, 4))
    ]
    assert drawn[0] == by_key(world.first)[(102, 0)]
    assert len({c.token_ids for c in drawn}) == 3


def test_case_21_another_version_than_expected_is_refused(world: World) -> None:
    engine = world.engine()
    assert engine.version == 5
    for version in (4, 6, 0):
        with pytest.raises(ContractError, match=f"version 5.*version {version} "):
            engine.generate(world.requests[:1], seed=0, step=0, expected_version=version)
    assert_same(world.first, world.generate(engine, world.requests[:1]))


def test_case_28_an_fp8_cache_needs_scales_and_says_which_it_uses(world: World) -> None:
    bare = world.make(world.decoder, RolloutSpec(), None, 512)
    if not world.decoder.flow.kv_fp8:
        assert bare.scale_version == 0
        return
    with pytest.raises(ContractError, match="KV scales"):
        world.generate(bare, world.requests[:1])
    newer = KVScales(world.scales.k * 1.5, world.scales.v * 1.5, 9)
    assert bare.set_kv_scales(newer) == bare.scale_version == 9
    done = world.generate(bare, [world.requests[2]])
    assert {c.scale_version for c in done} == {9}
    micro = make_microbatch(done, world.group, share_prompts=True)
    assert torch.equal(micro.log_probs(world.decoder, newer)[0].detach(), micro.rollout_N)


def test_the_digest_is_that_of_the_weights(world: World) -> None:
    assert world.engine().digest() == world.decoder.digest()


def test_what_can_never_fit_is_refused(world: World) -> None:
    engine = world.engine(RolloutSpec(page_size=4), world.longest - 8)
    with pytest.raises(CapacityError, match="can never fit"):
        world.generate(engine)


@pytest.mark.parametrize("world", ["qwen3-fp8-kv8"], indirect=True)
def test_any_schedule_at_all(world: World) -> None:
    """Random limits, page sizes, cache sizes and orders."""

    @settings(max_examples=6, deadline=None, derandomize=True)
    @given(
        st.integers(1, 12),
        st.integers(0, 30),
        st.integers(1, 40),
        st.integers(40, 300),
        st.permutations(range(5)),
    )
    def check(running: int, more: int, page: int, spare: int, order: list[int]) -> None:
        spec = RolloutSpec(max_running=running, max_batched_tokens=running + more, page_size=page)
        some: list[Request] = [world.requests[i] for i in order[:2]]
        assert_same(world.first, world.generate(world.engine(spec, world.longest + spare), some))

    check()
