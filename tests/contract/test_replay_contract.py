"""Truncated sampling under the contract (field failure 37): a token's log-probability is that of the truncated distribution, and
the training forward, which normalises over the recorded ids, gives the same bits. Whole models, every kind of flow."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Completion, Request, SamplingParams
from lockstep.trainer.microbatch import make_microbatch
from lockstep.trainer.sample import Expected, defect

World = Any
KINDS = [
    SamplingParams(14, 1.0, top_p=0.9, top_k=20, min_p=0.02, max_kept=20),
    SamplingParams(12, 0.7, top_k=5, max_kept=8),
    SamplingParams(9),
    SamplingParams(9, 1.4, top_p=0.8, max_kept=10_000),
    SamplingParams(8, 1.0, min_p=0.3, max_kept=10_000),
]


@pytest.fixture(scope="module")
def requests(world: World) -> list[Request]:
    """The world's prompts with truncated sampling of every kind, one without."""
    return [replace(r, params=p, samples=3) for r, p in zip(world.requests, KINDS, strict=True)]


@pytest.fixture(scope="module")
def samples(world: World, requests: list[Request]) -> list[Completion]:
    """What an unhurried engine draws."""
    drawn: list[Completion] = world.generate(world.engine(), requests)
    return drawn


@pytest.mark.parametrize("share", [True, False], ids=["shared prompts", "repeated prompts"])
def test_log_probabilities_are_the_training_forwards_case_37(
    world: World, samples: list[Completion], share: bool
) -> None:
    for batch in (samples, samples[::-1], samples[::2] + samples[1::2], *([c] for c in samples[::4])):
        micro = make_microbatch(batch, world.group, share_prompts=share)
        logp_N, entropy_N = micro.log_probs(world.decoder, world.scales)
        assert torch.equal(logp_N.detach(), micro.rollout_N)
        assert bool(torch.isfinite(entropy_N).all()) and float(entropy_N.detach().min()) > -1e-6


def test_the_full_softmax_is_off_by_the_kept_mass_case_37(world: World, samples: list[Completion]) -> None:
    """What the ratio would be without replay: the recorded mass."""
    unrecorded = [replace(c, sampling_mask=None) for c in samples if c.params.truncated]
    micro = make_microbatch(unrecorded, world.group, share_prompts=True)
    logp_N, _ = micro.log_probs(world.decoder, world.scales)
    mass_N = torch.cat([c.sampling_mask.mass_N for c in samples if c.sampling_mask is not None])
    torch.testing.assert_close((logp_N.detach() - micro.rollout_N).exp(), mass_N, rtol=1e-4, atol=1e-6)
    assert float(mass_N.min()) < 0.95 and len(mass_N) > 100


def test_every_schedule_records_the_same_case_37(
    world: World, requests: list[Request], samples: list[Completion]
) -> None:
    for spec, cache in (
        (RolloutSpec(max_running=3, max_batched_tokens=5, page_size=7), 4096),
        (RolloutSpec(page_size=3, max_batched_tokens=64), world.longest + 12),
    ):
        other = world.generate(world.engine(spec, cache), requests)
        assert other == samples, "ids, masses and log-probabilities"
        for a, b in zip(other, samples):
            assert [struct.pack("d", p) for p in a.logprobs] == [struct.pack("d", p) for p in b.logprobs]


def test_samples_keep_the_contract_case_37(world: World, samples: list[Completion]) -> None:
    expected = Expected(
        world.first[0].spans[0].version, samples[0].scale_version, world.decoder.spec.vocab_size
    )
    for c in samples:
        assert defect(c, expected) is None
        assert (c.sampling_mask is not None) == c.params.truncated
        if c.params.top_k:
            assert c.sampling_mask is not None and int(c.sampling_mask.counts_N.max()) <= c.params.top_k
        if c.params.truncated:
            found = defect(replace(c, sampling_mask=None), expected)
            assert found is not None and found.reason == "no_sampling_mask"


def test_a_later_turn_gets_noise_of_its_own_case_59(world: World) -> None:
    """A request for one sample of a conversation: its number and its position are the conversation's."""
    request = replace(world.requests[0], samples=3, params=SamplingParams(6, 1.4))
    first = world.generate(world.engine(), [request])
    for c in first:
        alone = replace(request, samples=1, first_sample=c.sample_index)
        assert world.generate(world.engine(), [alone]) == [c]
        later = world.generate(world.engine(), [replace(alone, first_position=2)])[0]
        assert later.sample_index == c.sample_index and later.token_ids != c.token_ids
