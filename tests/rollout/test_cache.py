"""Pages are counted right, whatever is grown, shared, forked and released, and nobody writes into another's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lockstep.models.tiny import tiny_spec
from lockstep.numerics.flow import bf16_flow, fp8_flow
from lockstep.rollout.cache import PagedCache

SPEC = tiny_spec(hidden=8, layers=2, heads=1, kv_heads=1, intermediate=8)
CPU = torch.device("cpu")


def make_cache(tokens: int, page_size: int, *, fp8: bool = False) -> PagedCache:
    flow = fp8_flow(kv_fp8=True) if fp8 else bf16_flow()
    return PagedCache(SPEC, flow, tokens=tokens, page_size=page_size, device=CPU)


@dataclass(eq=False)
class Table:
    """A block table and the tokens it must hold. A writer may append; a reader keeps what it was given."""

    pages: list[int]
    tokens: list[int]
    writer: bool


class Pages(RuleBasedStateMachine):
    """Any order of operations of any number of holders, against a plain list of tokens for each."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(tokens=24, page_size=3)
        self.held: list[Table] = []
        self.written = 0

    def write(self, table: Table, count: int) -> None:
        """Appends `count` new tokens to a table that has room for them, in both stores and all layers."""
        start = len(table.tokens)
        table.tokens += [(self.written + i) % 250 + 1 for i in range(count)]
        self.written += count
        slots = self.cache.slots(table.pages, len(table.tokens))[start:]
        values = torch.tensor(table.tokens[start:], dtype=torch.bfloat16)[None, :, None, None]
        self.cache.k[:, slots], self.cache.v[:, slots] = values, -values

    @rule(target=tables, count=st.integers(1, 10))
    def begin(self, count: int) -> Table:
        table = Table([], [], True)
        if self.cache.grow(table.pages, count):
            self.write(table, count)
        self.held.append(table)
        return table

    @rule(table=tables, count=st.integers(0, 7))
    def append(self, table: Table, count: int) -> None:
        before, free = list(table.pages), self.cache.free_pages
        if not table.writer:
            return
        if self.cache.grow(table.pages, len(table.tokens) + count):
            self.write(table, count)
        else:
            assert (table.pages, self.cache.free_pages) == (before, free), "a refusal must change nothing"

    @rule(target=tables, table=tables)
    def share(self, table: Table) -> Table:
        reader = Table(self.cache.share(table.pages), list(table.tokens), False)
        self.held.append(reader)
        return reader

    @rule(target=tables, table=tables, data=st.data())
    def fork(self, table: Table, data: st.DataObject) -> Table:
        count = data.draw(st.integers(0, len(table.tokens)))
        free, needs_copy = self.cache.free_pages, count % 3 != 0
        pages = self.cache.fork(table.pages, count)
        if pages is None:
            assert needs_copy and free == 0 == self.cache.free_pages
            fork = Table([], [], True)
        else:
            assert free - self.cache.free_pages == needs_copy, (
                "a fork costs the partial page and nothing else"
            )
            assert pages[: count // 3] == table.pages[: count // 3]
            fork = Table(pages, table.tokens[:count], True)
        self.held.append(fork)
        return fork

    @rule(table=consumes(tables))
    def release(self, table: Table) -> None:
        self.cache.release(table.pages)
        assert table.pages == []
        self.held.remove(table)

    @invariant()
    def no_page_is_lost_or_held_by_nobody(self) -> None:
        used = {page for table in self.held for page in table.pages}
        assert self.cache.free_pages == self.cache.num_pages - len(used)

    @invariant()
    def everybody_reads_their_own_tokens(self) -> None:
        for table in self.held:
            slots = self.cache.slots(table.pages, len(table.tokens))
            assert len(slots) == len(table.tokens)
            expected = torch.tensor(table.tokens, dtype=torch.bfloat16)
            for layer in range(SPEC.num_layers):
                assert torch.equal(self.cache.k[layer, slots, 0, 0], expected)
                assert torch.equal(self.cache.v[layer, slots, 0, 7], -expected)

    def teardown(self) -> None:
        for table in self.held:
            self.cache.release(table.pages)
        assert self.cache.free_pages == self.cache.num_pages


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=25, stateful_step_count=25, deadline=None, derandomize=True)


@pytest.mark.parametrize("fp8", [False, True])
def test_fork_copies_the_partial_page(fp8: bool) -> None:
    cache = make_cache(16, 4, fp8=fp8)
    pages: list[int] = []
    assert cache.grow(pages, 6)
    slots = cache.slots(pages, 6)
    values = torch.arange(1, 7, dtype=torch.float32)[None, :, None, None].to(cache.k.dtype)
    raw, raw_values = (x.view(torch.uint8) if fp8 else x for x in (cache.k, values))
    raw[:, slots] = raw_values
    forked = cache.fork(pages, 6)
    assert forked is not None and forked[0] == pages[0] and forked[1] != pages[1]
    raw[:, cache.slots(forked, 6)[5:]] = raw_values[:, :1]
    assert cache.k[1, slots, 0, 0].float().tolist() == [1, 2, 3, 4, 5, 6]
    assert cache.k[1, cache.slots(forked, 6), 0, 0].float().tolist() == [1, 2, 3, 4, 5, 1]


def test_a_page_released_twice_is_noticed() -> None:
    cache = make_cache(8, 4)
    pages: list[int] = []
    assert cache.grow(pages, 4)
    stale = list(pages)
    cache.release(pages)
    with pytest.raises(AssertionError, match="twice"):
        cache.release(stale)


@pytest.mark.parametrize(("tokens", "page_size", "pages"), [(16, 4, 4), (17, 4, 5), (1, 64, 1), (5, 1, 5)])
def test_capacity_is_rounded_up_to_pages(tokens: int, page_size: int, pages: int) -> None:
    cache = make_cache(tokens, page_size)
    assert cache.num_pages == cache.free_pages == pages
    assert cache.nbytes == 2 * SPEC.num_layers * pages * page_size * SPEC.num_kv_heads * SPEC.head_dim * 2
    assert make_cache(tokens, page_size, fp8=True).nbytes * 2 == cache.nbytes
