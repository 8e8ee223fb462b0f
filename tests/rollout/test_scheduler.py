"""The scheduler alone, with a runner that writes token numbers instead of keys: limits hold, nobody starves, and what a
sequence reads back from its pages is its own prefix."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.errors import CapacityError
from lockstep.models.tiny import tiny_spec
from lockstep.numerics.flow import bf16_flow
from lockstep.rollout.cache import PagedCache
from lockstep.rollout.scheduler import Scheduler
from lockstep.rollout.sequence import Sequence
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Request, SamplingParams

SPEC = tiny_spec(hidden=2, layers=1, heads=1, kv_heads=1, intermediate=2)


def make_cache(tokens: int, page_size: int) -> PagedCache:
    cache = PagedCache(SPEC, bf16_flow(), tokens=tokens, page_size=page_size, device=torch.device("cpu"))
    cache.k = cache.k.float()
    return cache


@dataclass(frozen=True)
class Job:
    """A prompt's length, and the length at which each of its samples ends."""

    prompt: int
    outputs: tuple[int, ...]
    max_tokens: int


def token(job: int, sample: int, position: int, prompt: int) -> int:
    """A number that no other place has; prompt tokens are the same for every sample."""
    return position + 1 if position < prompt else 1000 * (job + 1) + 100 * sample + position


def simulate(jobs: list[Job], max_running: int, budget: int, page_size: int, spare: int) -> Scheduler:
    """Runs all jobs to their end, checking every step. `spare`: tokens of cache beyond the longest request."""
    longest = max(job.prompt + job.max_tokens for job in jobs)
    cache = make_cache(longest + spare, page_size)
    scheduler = Scheduler(cache, max_running, budget)
    ends: dict[Sequence, tuple[int, int]] = {}
    for j, job in enumerate(jobs):
        ids = tuple(token(j, 0, p, job.prompt) for p in range(job.prompt))
        added = scheduler.add(Request(ids, j, len(job.outputs), SamplingParams(job.max_tokens)))
        assert [s.sample_index for s in added] == list(range(len(job.outputs)))
        ends |= {s: (j, job.outputs[s.sample_index]) for s in added}
    limit = 20 * sum(job.prompt + n for job in jobs for n in job.outputs) + 50
    while not scheduler.done:
        limit -= 1
        assert limit > 0, "the scheduler doesn't come to an end"
        _step(scheduler, ends)
    assert cache.free_pages == cache.num_pages
    assert all(len(s.output) == length for s, (_, length) in ends.items())
    assert sum(s.preemptions for s in ends) == scheduler.preemptions
    return scheduler


def _step(scheduler: Scheduler, ends: dict[Sequence, tuple[int, int]]) -> None:
    cache, before = scheduler.cache, list(scheduler.running)
    work = scheduler.schedule()
    assert sum(w.count for w in work) <= scheduler.max_batched_tokens
    assert len(scheduler.running) <= scheduler.max_running
    assert len({w.sequence for w in work}) == len(work) and all(w.count > 0 for w in work)
    assert all(w.sequence in scheduler.running for w in work)
    assert not set(scheduler.running) & set(scheduler.waiting)
    survivors = [s for s in before if s in scheduler.running]
    assert scheduler.running[: len(survivors)] == survivors, "the eldest stay in front"
    for item in work:
        sequence = item.sequence
        end = sequence.computed + item.count
        slots = cache.slots(sequence.pages, end)
        assert len(slots) == end
        cache.k[0, slots[sequence.computed :], 0, 0] = torch.tensor(
            sequence.tokens[sequence.computed : end], dtype=torch.float32
        )
        sequence.computed = end
        seen = cache.k[0, slots, 0, 0].tolist()
        assert seen == sequence.tokens[:end], "a sequence reads its own prefix"
        if end == len(sequence.tokens):
            sequence.hidden = torch.zeros(1)
            if sequence.fresh:
                scheduler.prompt_computed(sequence)
    held = {p for s in scheduler.running for p in s.pages} | {
        p for g in scheduler.groups for p in g.pages or ()
    }
    assert cache.free_pages == cache.num_pages - len(held)
    for sequence in [s for s in scheduler.running if s.hidden is not None]:
        job, length = ends[sequence]
        sequence.tokens.append(
            token(job, sequence.sample_index, len(sequence.tokens), sequence.prompt_length)
        )
        sequence.hidden = None
        if len(sequence.output) == length:
            scheduler.finish(sequence)


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        limit = draw(st.integers(1, 9))
        outputs = draw(st.lists(st.integers(1, limit), min_size=1, max_size=4))
        found.append(Job(draw(st.integers(1, 12)), tuple(outputs), limit))
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(jobs(), st.integers(1, 6), st.integers(0, 12), st.integers(1, 7), st.integers(4, 80))
def test_every_request_ends_within_all_limits(
    jobs: list[Job], max_running: int, more: int, page_size: int, spare: int
) -> None:
    simulate(jobs, max_running, max_running + more, page_size, spare)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(jobs(), st.integers(1, 6), st.integers(0, 12), st.integers(1, 7))
@example([Job(6, (1, 1), 1), Job(6, (1, 1), 1)], 2, 12, 3)
def test_every_request_ends_in_the_smallest_cache(
    jobs: list[Job], max_running: int, more: int, page_size: int
) -> None:
    simulate(jobs, max_running, max_running + more, page_size, 0)


def test_shared_prompts_that_fill_the_cache_make_room() -> None:
    """Two groups end at their first token; their prompts, kept for the samples to come, hold every page."""
    simulate([Job(6, (1, 1), 2), Job(6, (1, 1), 2)], max_running=2, budget=64, page_size=4, spare=8)


def test_a_prompt_is_computed_once_for_its_group() -> None:
    cache = make_cache(400, 4)
    scheduler = Scheduler(cache, 8, 64)
    scheduler.add(Request(tuple(range(1, 11)), 0, 5, SamplingParams(3)))
    computed = 0
    while not scheduler.done:
        work = scheduler.schedule()
        computed += sum(w.count for w in work)
        for item in work:
            item.sequence.computed += item.count
            item.sequence.hidden = torch.zeros(1)
            if item.sequence.fresh:
                scheduler.prompt_computed(item.sequence)
        for sequence in [s for s in scheduler.running if s.hidden is not None]:
            sequence.tokens.append(7)
            sequence.hidden = None
            if len(sequence.output) == 3:
                scheduler.finish(sequence)
    assert computed == 10 + 5 * 2, "the prompt once; each sample's tokens but the last"
    assert cache.free_pages == cache.num_pages and scheduler.preemptions == 0


def test_pressure_preempts_and_the_youngest_first() -> None:
    scheduler = simulate([Job(3, (9,), 9), Job(4, (9,), 9)], 2, 8, 1, 0)
    assert scheduler.preemptions > 0
    scheduler = simulate([Job(3, (9,), 9), Job(4, (9,), 9)], 2, 8, 1, 40)
    assert scheduler.preemptions == 0


def test_a_request_that_can_never_fit_is_refused_with_numbers() -> None:
    scheduler = Scheduler(make_cache(20, 4), 2, 8)
    with pytest.raises(CapacityError) as error:
        scheduler.add(Request(tuple(range(15)), 0, 1, SamplingParams(6)))
    line = error.value.line()
    assert "15 prompt and 6 new tokens" in line and "6 pages of 4 tokens" in line and "has 5" in line
    assert "rollout.cache_tokens to at least 24" in line
    assert scheduler.done, "nothing of it was queued"
    scheduler.add(Request(tuple(range(15)), 0, 1, SamplingParams(5)))


def test_a_token_budget_that_was_left_open() -> None:
    """It is the backend's, and every running sequence can decode."""
    assert RolloutSpec().batched_tokens(gpu=False) == 1024 and RolloutSpec().batched_tokens(gpu=True) == 8192
    assert RolloutSpec(max_running=2000).batched_tokens(gpu=False) == 2000
    assert RolloutSpec(max_batched_tokens=77).batched_tokens(gpu=True) == 77
    for wrong in (-1, 63):
        with pytest.raises(ValueError, match="at least max_running"):
            RolloutSpec(max_batched_tokens=wrong)
