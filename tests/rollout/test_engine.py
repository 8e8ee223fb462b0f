"""The embedded engine's own manners: when a completion ends, what is refused, what is left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lockstep.errors import CapacityError
from lockstep.models.decoder import Decoder
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Completion, Request, SamplingParams

MakeDecoder = Callable[..., Decoder]
PROMPT = (8, 9, 10, 11)


def generate(
    decoder: Decoder,
    params: SamplingParams,
    *,
    samples: int = 6,
    seed: int = 0,
    prompt: tuple[int, ...] = PROMPT,
) -> list[Completion]:
    engine = EmbeddedEngine(decoder, RolloutSpec(), cache_tokens=2048, detokenize=spell)
    return engine.generate([Request(prompt, 0, samples, params)], seed=seed, step=0, expected_version=1)


def spell(ids: list[int]) -> str:
    """Token 7 is a, 8 is b, ..., as in a character tokenizer."""
    return "".join(chr(97 + i - 7) if i >= 7 else "_" for i in ids)


def test_length_ends_a_completion(make_decoder: MakeDecoder) -> None:
    for c in generate(make_decoder(), SamplingParams(9)):
        assert (len(c.token_ids), len(c.logprobs), c.finish_reason) == (9, 9, "length")


def test_a_stop_token_ends_a_completion_and_is_kept(make_decoder: MakeDecoder) -> None:
    free = generate(make_decoder(), SamplingParams(30))
    stops = frozenset({free[0].token_ids[4], free[1].token_ids[9]})
    stopped = generate(make_decoder(), SamplingParams(30, stop_token_ids=stops))
    for a, b in zip(free, stopped):
        end = next((i + 1 for i, t in enumerate(a.token_ids) if t in stops), None)
        assert b.token_ids == a.token_ids[:end] and b.logprobs == a.logprobs[:end]
        assert b.finish_reason == ("length" if end is None else "stop")
    assert any(c.finish_reason == "stop" for c in stopped)


def test_stop_at_the_last_possible_token_is_a_stop(make_decoder: MakeDecoder) -> None:
    last = generate(make_decoder(), SamplingParams(5), samples=1)[0].token_ids[-1]
    (c,) = generate(make_decoder(), SamplingParams(5, stop_token_ids=frozenset({last})), samples=1)
    assert c.finish_reason == "stop"


def test_a_stop_string_may_span_tokens(make_decoder: MakeDecoder) -> None:
    free = generate(make_decoder(), SamplingParams(24))
    text = spell(list(free[0].token_ids))
    stop = text[10:13]
    stopped = generate(make_decoder(), SamplingParams(24, stop=(stop, "never")))
    for a, b in zip(free, stopped):
        place = spell(list(a.token_ids)).find(stop)
        end = None if place < 0 else place + len(stop)
        assert b.token_ids == a.token_ids[:end]
        assert b.finish_reason == ("length" if place < 0 else "stop")
    assert stopped[0].finish_reason == "stop"


def test_a_stop_string_in_the_prompt_does_not_count(make_decoder: MakeDecoder) -> None:
    (c,) = generate(make_decoder(), SamplingParams(6, stop=("bcde",)), samples=1)
    assert spell(list(PROMPT)) == "bcde"
    assert c.finish_reason == "length" or "bcde" in spell(list(c.token_ids))


def test_padding_and_end_tokens_are_ordinary_until_said_otherwise(make_decoder: MakeDecoder) -> None:
    """Nothing in the engine knows a padding id: it may stand in a prompt, and changes it."""
    plain = generate(make_decoder(), SamplingParams(6), prompt=PROMPT)
    padded = generate(make_decoder(), SamplingParams(6), prompt=(0, 0, *PROMPT))
    assert [c.logprobs for c in plain] != [c.logprobs for c in padded]
    assert padded[0].prompt_ids == (0, 0, *PROMPT)


def test_greedy_ignores_the_seed_and_sampling_does_not(make_decoder: MakeDecoder) -> None:
    greedy = [generate(make_decoder(), SamplingParams(12, 0.0), seed=s) for s in (0, 1)]
    assert [c.token_ids for c in greedy[0]] == [c.token_ids for c in greedy[1]]
    assert len({c.token_ids for c in greedy[0]}) == 1
    sampled = [generate(make_decoder(), SamplingParams(12), seed=s) for s in (0, 1)]
    everything = [c.token_ids for run in sampled for c in run]
    assert len(set(everything)) == len(everything), "every sample has noise of its own"


def test_a_request_that_never_fits_is_refused_and_the_engine_goes_on(make_decoder: MakeDecoder) -> None:
    engine = EmbeddedEngine(make_decoder(), RolloutSpec(page_size=4), cache_tokens=24)
    good, bad = Request(PROMPT, 0, 2, SamplingParams(8)), Request(PROMPT, 1, 1, SamplingParams(21))
    with pytest.raises(CapacityError, match=r"4 prompt and 21 new tokens .*7 pages of 4 tokens.* has 6"):
        engine.generate([good, bad], seed=0, step=0, expected_version=1)
    assert len(engine.generate([good], seed=0, step=0, expected_version=1)) == 2


def test_order_progress_and_nothing_to_do(make_decoder: MakeDecoder) -> None:
    seen: list[tuple[int, int]] = []
    engine = EmbeddedEngine(make_decoder(), RolloutSpec(max_running=2), cache_tokens=512)
    requests = [Request(PROMPT, 7, 2, SamplingParams(9)), Request(PROMPT[:2], 3, 3, SamplingParams(2))]
    done = engine.generate(
        requests, seed=0, step=0, expected_version=1, progress=lambda a, b: seen.append((a, b))
    )
    assert [(c.prompt_index, c.sample_index) for c in done] == [(7, 0), (7, 1), (3, 0), (3, 1), (3, 2)]
    assert seen[-1] == (5, 5) and seen == sorted(seen)
    assert engine.generate([], seed=0, step=0, expected_version=1) == []
    assert engine.cache.free_pages == engine.cache.num_pages


def test_prompts_that_fill_the_cache_do_not_stall(make_decoder: MakeDecoder) -> None:
    """Two groups of two, two running, one new token: the shared prompts hold every page when the leaders are done."""
    engine = EmbeddedEngine(
        make_decoder(), RolloutSpec(page_size=4, max_running=2, max_batched_tokens=64), cache_tokens=16
    )
    requests = [Request((3, 4, 5, 6, 7, 8), i, 2, SamplingParams(1)) for i in range(2)]
    assert len(engine.generate(requests, seed=0, step=0, expected_version=1)) == 4
