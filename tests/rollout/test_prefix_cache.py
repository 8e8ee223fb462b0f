"""The prefix cache: what it remembers, what it forgets, and that no bit depends on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.models.decoder import Decoder
from lockstep.models.tiny import tiny_spec
from lockstep.nn.kv_scales import KVScales
from lockstep.numerics.flow import bf16_flow, fp8_flow
from lockstep.rollout.cache import PagedCache
from lockstep.rollout.calibration import measure_kv
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.prefix_cache import PrefixCache, PrefixKey
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Completion, Request, SamplingParams

MakeDecoder = Callable[..., Decoder]
KEY = PrefixKey(1, 1, 0)


def make_cache(pages: int, size: int) -> PagedCache:
    spec = tiny_spec(hidden=2, layers=1, heads=1, kv_heads=1, intermediate=2)
    device = torch.device("cpu")
    cache = PagedCache(
        spec, bf16_flow(), tokens=pages * size, page_size=size, device=device, prefix=PrefixCache(size)
    )
    cache.renew(KEY)
    return cache


def compute(cache: PagedCache, tokens: list[int]) -> list[int]:
    """A block table that holds `tokens`, remembered."""
    pages = cache.recall(tokens)
    assert cache.grow(pages, len(tokens))
    cache.remember(tokens, pages)
    return pages


def test_whole_pages_are_found_again_and_one_token_is_left() -> None:
    cache = make_cache(8, 4)
    tokens = list(range(10, 20))
    first = compute(cache, tokens)
    whole = first[:2]
    cache.release(first)
    assert cache.free_pages == 8, "what is remembered is free"
    assert cache.recall(tokens) == whole and cache.free_pages == 6
    assert cache.recall([*tokens[:8], 99]) == whole, "another ending"
    assert cache.recall(tokens[:8]) == whole[:1], "the last token is always computed"
    assert cache.recall(tokens[:7]) == whole[:1]
    assert cache.recall(tokens[:4]) == [] == cache.recall([]) == cache.recall([9, *tokens])
    assert cache.recall([*tokens[:4], 9, *tokens[5:]]) == whole[:1], "up to the first page that differs"


def test_equality_is_of_tokens_and_their_place() -> None:
    """The same page of tokens after another beginning is another page."""
    cache = make_cache(12, 2)
    one = compute(cache, [1, 2, 7, 8, 5])
    two = compute(cache, [3, 4, 7, 8, 5])
    assert not set(one) & set(two)
    assert cache.recall([1, 2, 7, 8, 6]) == one[:2] and cache.recall([3, 4, 7, 8, 6]) == two[:2]
    assert cache.recall([7, 8, 1]) == []


def test_pages_are_evicted_when_needed_the_end_of_the_oldest_prompt_first() -> None:
    cache = make_cache(6, 2)
    tables = {name: compute(cache, [name, name, name + 1, name + 1, 0]) for name in (10, 20)}
    kept = {name: table[:2] for name, table in tables.items()}
    for table in tables.values():
        cache.release(table)
    fresh: list[int] = []
    assert cache.grow(fresh, 4) and not set(fresh) & {p for t in kept.values() for p in t}, (
        "blank pages first"
    )
    assert cache.recall([10, 10, 11, 11, 0]) == kept[10]
    cache.release(list(kept[10]))
    assert cache.grow(fresh, 6) and cache.recall([20, 20, 21, 21, 0]) == kept[20][:1], (
        "the end of the least used"
    )
    cache.release(kept[20][:1])
    assert cache.grow(fresh, 12), "all of them, when nothing else is left"
    assert cache.free_pages == 0 and not cache.grow(fresh, 13)
    assert cache.recall([10, 10, 11, 11, 0]) == []


def test_what_lies_below_a_forgotten_page_is_not_found() -> None:
    """A page's number is given out again; a child of its old content must not appear below the new one."""
    cache = make_cache(3, 2)
    table = compute(cache, [1, 1, 2, 2, 3, 3])
    assert cache.prefix is not None
    cache.release([table[0]])
    assert cache.prefix.evict() == table[0]
    cache._references[table[0]] = 1
    cache.remember([5, 5], [table[0]])
    assert cache.recall([5, 5, 2, 2, 3, 3]) == [table[0]]
    assert cache.recall([1, 1, 2, 2, 3, 3]) == []


def test_case_63_another_version_drops_everything() -> None:
    for other in (PrefixKey(2, 1, 0), PrefixKey(1, 2, 0), PrefixKey(1, 1, 1)):
        cache = make_cache(4, 2)
        cache.release(compute(cache, [1, 2, 3, 4, 5]))
        cache.renew(KEY)
        cache.release(found := cache.recall([1, 2, 3, 4, 5]))
        assert cache.free_pages == 4 and found == []
        assert cache.prefix is not None and cache.prefix.parked == 2
        cache.renew(other)
        assert cache.prefix.parked == 0 and cache.free_pages == 4
        assert cache.recall([1, 2, 3, 4, 5]) == []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(6, 20), st.integers(0, 10_000))
def test_pages_hold_what_the_cache_says_they_hold(size: int, pages: int, seed: int) -> None:
    """Random prompts over two letters come and go; every page of every block table has its own tokens' beginning in it."""
    draw = random.Random(seed)
    cache = make_cache(pages, size)
    content: dict[int, tuple[int, ...]] = {}
    running: list[tuple[list[int], list[int]]] = []
    found = 0
    for _ in range(120):
        if running and (draw.random() < 0.45 or len(running) > 3):
            tokens, table = running.pop(draw.randrange(len(running)))
            cache.release(table)
        else:
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 3 * size + 2))]
            table = cache.recall(tokens)
            found += len(table)
            assert len(table) * size < len(tokens)
            for number, page in enumerate(table):
                assert content[page] == tuple(tokens[: (number + 1) * size]), (
                    "a recalled page holds the beginning"
                )
            if not cache.grow(table, len(tokens)):
                cache.release(table)
                continue
            for number, page in enumerate(table):
                content[page] = tuple(tokens[: (number + 1) * size])
            cache.remember(tokens, table)
            running.append((tokens, table))
        for tokens, table in running:
            for number, page in enumerate(table):
                whole = tuple(tokens[: (number + 1) * size])
                assert content[page] == whole, "nobody else wrote into it"
        held = {p for _, table in running for p in table}
        assert cache.free_pages == pages - len(held)
    for _, table in running:
        cache.release(table)
    assert cache.free_pages == pages
    assert found > 0 or size > 2


def prompts(count: int = 5) -> list[tuple[int, ...]]:
    """A common beginning of 21 tokens and endings of their own."""
    generator = torch.Generator().manual_seed(5)
    common = torch.randint(8, 60, (21,), generator=generator).tolist()
    return [
        (*common, *torch.randint(8, 60, (3 + 4 * i,), generator=generator).tolist()) for i in range(count)
    ]


def generate(engine: EmbeddedEngine, version: int = 1, step: int = 0) -> list[Completion]:
    requests = [Request(p, i, 3, SamplingParams(7)) for i, p in enumerate(prompts())]
    return engine.generate(requests, seed=1, step=step, expected_version=version)


def engines(decoder: Decoder, scales: KVScales | None, **options: int) -> list[EmbeddedEngine]:
    """One with and one without the prefix cache."""
    found = []
    for on in (True, False):
        engine = EmbeddedEngine(
            decoder, RolloutSpec(prefix_cache=on, page_size=4, **options), cache_tokens=600
        )
        if scales is not None:
            engine.set_kv_scales(scales)
        found.append(engine)
    return found


def scales_of(decoder: Decoder, headroom: float = 1.5, version: int = 1) -> KVScales | None:
    if not decoder.flow.kv_fp8:
        return None
    return measure_kv(decoder, prompts()).scales(headroom=headroom, kind="fp32", version=version)


FLOWS = {
    "bf16": bf16_flow(),
    "fp8+kv8": fp8_flow(kv_fp8=True),
    "fp8+kv8+attn8": fp8_flow(kv_fp8=True, attention_fp8=True),
}


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("limits", [{}, {"max_running": 2, "max_batched_tokens": 9}], ids=["wide", "narrow"])
def test_the_same_bits_with_and_without(make_decoder: MakeDecoder, flow: str, limits: dict[str, int]) -> None:
    decoder = make_decoder(FLOWS[flow], layers=2)
    cached, plain = engines(decoder, scales_of(decoder), **limits)
    for step in range(3):
        assert generate(cached, step=step) == generate(plain, step=step)
    assert plain.recalled == 0
    alone = sum((len(p) - 1) // 4 * 4 for p in prompts())
    assert cached.recalled >= 2 * alone, (
        "every whole page of every prompt, in the second and third generation"
    )


def test_a_cache_too_small_for_all_prompts_still_gives_the_same_bits(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(fp8_flow(kv_fp8=True), layers=2)
    scales = scales_of(decoder)
    assert scales is not None
    engine = EmbeddedEngine(decoder, RolloutSpec(page_size=4, max_running=4), cache_tokens=72)
    engine.set_kv_scales(scales)
    _, plain = engines(decoder, scales)
    for step in range(3):
        assert generate(engine, step=step) == generate(plain, step=step)
    assert engine.recalled > 0 and engine.preemptions > 0


def test_case_63_new_weights_or_scales_are_never_served_from_old_pages(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(fp8_flow(kv_fp8=True), layers=2)
    scales = scales_of(decoder)
    assert scales is not None
    engine, _ = engines(decoder, scales)
    first = generate(engine)

    def fresh() -> list[Completion]:
        held = engine.scales
        assert held is not None
        return generate(engines(decoder, held)[1], decoder.version)

    with torch.no_grad():  # an optimizer step, and the publication of version 2
        for name, p in decoder.named_parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    decoder.refresh(2)
    second = generate(engine, 2)
    assert second == fresh() and [c.logprobs for c in second] != [c.logprobs for c in first]

    recalled = engine.recalled
    engine.set_kv_scales(replace(scales, k=scales.k * 1.7, v=scales.v * 1.7, version=2))
    third = generate(engine, 2)
    assert third == fresh() and [c.logprobs for c in third] != [c.logprobs for c in second]
    assert {c.scale_version for c in third} == {2}

    with torch.no_grad():  # working copies remade under the same number, as between mini-batches
        for p in decoder.parameters():
            p.mul_(1.05)
    decoder.refresh(2)
    assert generate(engine, 2) == fresh()
    assert engine.recalled - recalled < 2 * sum(len(p) for p in prompts()), (
        "nothing but what one generation shares"
    )
