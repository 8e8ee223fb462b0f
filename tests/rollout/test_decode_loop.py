"""Admission into the rows of captured decode steps, without a device: every prompt that gets a row is computed to its end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.models.tiny import tiny_spec
from lockstep.numerics.flow import bf16_flow
from lockstep.rollout.cache import PagedCache
from lockstep.rollout.decode_loop import DecodeLoop
from lockstep.rollout.scheduler import Scheduler, Work
from lockstep.rollout.sequence import Sequence
from lockstep.rollout.types import Request, SamplingParams

FLAG = torch.zeros(1, dtype=torch.int32)
SPEC = tiny_spec(hidden=2, layers=1, heads=1, kv_heads=1, intermediate=2)


class Runner:
    """Computes nothing; `chunks` are the tokens of every forward pass."""

    def __init__(self, budget: int) -> None:
        self.budget, self.chunks = budget, []  # type: int, list[int]

    def forward(self, work: list[Work], scales: None, flag: torch.Tensor) -> list[torch.Tensor]:
        assert flag is FLAG, "the host would wait for the device"
        assert sum(w.count for w in work) <= self.budget
        assert len(self.chunks) < 10_000, "admission doesn't come to an end"
        for item in work:
            item.sequence.computed += item.count
            self.chunks.append(item.count)
        return [torch.zeros(2) for _ in work]


class Loop(DecodeLoop):
    """Enters rows without drawing, and ends a sequence when it is told to."""

    def __init__(self, scheduler: Scheduler, rows: int) -> None:
        self.scheduler, self.scales = scheduler, None
        self.runner = Runner(scheduler.max_batched_tokens)  # type: ignore[assignment]
        self.state = SimpleNamespace(rows=rows, flag=FLAG)  # type: ignore[assignment]
        self.row_of = {}

    def enter(self, ready: list[Sequence]) -> None:
        for sequence in ready:
            assert sequence.computed == len(sequence.tokens)
            sequence.hidden, sequence.decoding = None, True
            self.row_of[sequence] = min(set(range(self.state.rows)) - set(self.row_of.values()))

    def end(self, sequence: Sequence) -> None:
        del self.row_of[sequence]
        sequence.decoding = False
        self.scheduler.finish(sequence)


def loop_of(prompts: list[tuple[int, int]], rows: int, budget: int, pages: int) -> Loop:
    cache = PagedCache(SPEC, bf16_flow(), tokens=4 * pages, page_size=4, device=torch.device("cpu"))
    scheduler = Scheduler(cache, rows, budget)
    for i, (length, samples) in enumerate(prompts):
        scheduler.add(Request(tuple(range(length)), i, samples, SamplingParams(3)))
    return Loop(scheduler, rows)


@pytest.mark.parametrize("samples", [1, 3])
def test_a_prompt_beyond_the_budget_of_a_pass(samples: int) -> None:
    """The last or only one, with every row taken: nothing else waits, and still it has to be computed to its end."""
    loop = loop_of([(100, samples)], rows=1, budget=32, pages=200)
    loop.admit()
    assert loop.runner.chunks == [32, 32, 32, 4]  # type: ignore[attr-defined]
    assert len(loop.row_of) == 1
    for _ in range(samples):
        loop.end(next(iter(loop.row_of)))
        loop.admit()
    assert loop.scheduler.done


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 4)), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(5, 40),
    st.integers(16, 60),
)
@example([(1, 1), (30, 2), (25, 1)], 4, 5, 16)  # a decoding sequence lost its pages to a prompt
def test_every_sequence_gets_its_row(
    prompts: list[tuple[int, int]], rows: int, budget: int, pages: int
) -> None:
    loop = loop_of(prompts, rows, budget, pages)
    for _ in range(sum(samples for _, samples in prompts)):
        loop.admit()
        assert set(loop.scheduler.running) == set(loop.row_of), "nobody is left in the middle of a prompt"
        loop.end(next(iter(loop.row_of)))
    assert loop.scheduler.done and loop.scheduler.cache.free_pages == loop.scheduler.cache.num_pages
