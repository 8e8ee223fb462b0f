"""The device engine against the contract: schedules, CUDA graphs, preemption, shared prompts and the packed forward agree
in every bit. Random models of real layer shapes, few layers; needs a Hopper GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.errors import CapacityError, ContractError
from lockstep.kernels.attention_index import Run
from lockstep.models.spec import PRESETS
from lockstep.nn.kv_scales import KVScales
from lockstep.numerics.flow import Flow, bf16_flow, fp8_flow
from lockstep.rollout.types import Completion, Request, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

REQUESTS = [
    (5, 4, 40),
    (64, 3, 60),
    (300, 2, 100),
    (777, 1, 50),
    (1500, 2, 64),
    (63, 4, 33),
    (2040, 2, 40),
    (1, 3, 20),
]
"""(prompt tokens, samples, new tokens): around pages of 64 and chunks of 2048 keys."""


@pytest.fixture(scope="module")
def kernels() -> Any:
    from lockstep.kernels.table import select

    return select("hopper")


def requests(vocabulary: int) -> list[Request]:
    draw = random.Random(0)
    return [
        Request(
            tuple(draw.randrange(vocabulary) for _ in range(length)),
            i,
            samples,
            SamplingParams(new, temperature=1.0 if i % 3 else 0.8),
        )
        for i, (length, samples, new) in enumerate(REQUESTS)
    ]


def scales_of(decoder: Any, device: torch.device) -> KVScales | None:
    if not decoder.flow.kv_fp8:
        return None
    shape = (decoder.spec.num_layers, decoder.spec.num_kv_heads)
    return KVScales(torch.full(shape, 0.05, device=device), torch.full(shape, 0.03, device=device), 1)


def engine(decoder: Any, rows: int, tokens: int, **options: Any) -> Any:
    from lockstep.rollout.engine import EmbeddedEngine
    from lockstep.rollout.spec import RolloutSpec

    spec = RolloutSpec(max_running=rows, page_size=64, **{"max_batched_tokens": 16384, **options})
    made = EmbeddedEngine(decoder, spec, cache_tokens=tokens)
    scales = scales_of(decoder, decoder.device)
    if scales is not None:
        made.set_kv_scales(scales)
    return made


@torch.no_grad()
def scored(decoder: Any, kernels: Any, completions: list[Completion], together: int) -> torch.Tensor:
    """Log-probabilities of every drawn token by the packed forward, `together` samples at a time."""
    from lockstep.nn.device_context import DevicePacked

    device, found = decoder.device, []
    for first in range(0, len(completions), together):
        ids: list[int] = []
        runs, positions, rows, targets, temperature = [], [], [], [], []
        for c in completions[first : first + together]:
            sequence, start = [*c.prompt_ids, *c.token_ids[:-1]], len(ids)
            runs.append(Run(start, len(sequence), 0, torch.arange(start, start + len(sequence))))
            positions.append(torch.arange(len(sequence)))
            ids += sequence
            rows += range(start + len(c.prompt_ids) - 1, start + len(sequence))
            targets += c.token_ids
            temperature += [c.params.score_temperature] * len(c.token_ids)
        position = torch.cat(positions).to(device)
        decoder.model.rope.reserve(int(position.max()) + 1, device)
        index = kernels.index(runs, decoder.spec.num_heads // decoder.spec.num_kv_heads, device)
        hidden = decoder.hidden(
            torch.tensor(ids).to(device), DevicePacked(position, index, scales_of(decoder, device))
        )
        logp, _ = decoder.head.log_probs(
            hidden[torch.tensor(rows).to(device)],
            torch.tensor(targets).to(device),
            torch.tensor(temperature).to(device),
        )
        found.append(logp)
    return torch.cat(found).cpu()


def by_sample(completions: list[Completion]) -> list[tuple[Any, ...]]:
    ordered = sorted(completions, key=lambda c: (c.prompt_index, c.sample_index))
    return [(c.token_ids, c.logprobs) for c in ordered]


@pytest.mark.parametrize(
    "flow", [fp8_flow(kv_fp8=True), fp8_flow(), bf16_flow()], ids=["fp8+kv8", "fp8", "bf16"]
)
@pytest.mark.parametrize("preset, layers", [("qwen3-8b", 2), ("qwen2.5-7b", 2), ("smollm2-135m", 4)])
def test_schedules_graphs_and_training_forward_agree_case_51(
    preset: str, layers: int, flow: Flow, kernels: Any
) -> None:
    from lockstep.bench.random_model import random_decoder

    spec = replace(PRESETS[preset], num_layers=layers)
    decoder = random_decoder(spec, flow, kernels, torch.device("cuda"))
    asked = requests(spec.vocab_size)
    first = engine(decoder, 32, 40000).generate(asked, seed=1, step=0, expected_version=1)
    assert sum(len(c.token_ids) for c in first) == sum(s * n for _, s, n in REQUESTS)
    tight = engine(decoder, 7, 9000, max_batched_tokens=700, window=3)
    assert by_sample(tight.generate(asked, seed=1, step=0, expected_version=1)) == by_sample(first)
    eager = engine(decoder, 12, 40000, cuda_graphs=False)
    assert by_sample(eager.generate(asked[::-1], seed=1, step=0, expected_version=1)) == by_sample(first)
    rollout = torch.tensor([p for c in first for p in c.logprobs])
    for together in (1, 5, len(first)):
        assert torch.equal(scored(decoder, kernels, first, together), rollout), together


def test_a_key_that_is_not_finite_ends_a_generation_and_nothing_of_it_stays(kernels: Any) -> None:
    from lockstep.bench.random_model import random_decoder

    spec = replace(PRESETS["smollm2-135m"], num_layers=2)
    decoder = random_decoder(spec, fp8_flow(kv_fp8=True), kernels, torch.device("cuda"))
    asked = requests(spec.vocab_size)[:4]
    expected = engine(decoder, 8, 20000).generate(asked, seed=1, step=0, expected_version=1)
    broken = engine(decoder, 8, 20000, prefix_cache=True, max_batched_tokens=256)
    weight = decoder.model.layers[1].input_layernorm.working.plain
    assert weight is not None
    honest = weight.clone()
    weight.fill_(3e38)
    with pytest.raises(ContractError, match="non-finite key or value"):
        broken.generate(asked, seed=1, step=0, expected_version=1)
    weight.copy_(honest)
    found = broken.generate(asked, seed=1, step=0, expected_version=1)
    assert by_sample(found) == by_sample(expected)


def test_preemption_changes_no_bit(kernels: Any) -> None:
    from lockstep.bench.random_model import random_decoder

    spec = replace(PRESETS["qwen3-0.6b"], num_layers=2)
    decoder = random_decoder(spec, fp8_flow(kv_fp8=True), kernels, torch.device("cuda"))
    draw = random.Random(3)
    asked = [
        Request(tuple(draw.randrange(1000) for _ in range(60)), i, 1, SamplingParams(300)) for i in range(12)
    ]
    roomy = engine(decoder, 12, 12 * 512).generate(asked, seed=2, step=0, expected_version=1)
    tight = engine(decoder, 12, 2000)
    assert by_sample(tight.generate(asked, seed=2, step=0, expected_version=1)) == by_sample(roomy)
    assert tight.preemptions > 0


def test_a_prompt_longer_than_a_pass_with_every_row_taken(kernels: Any) -> None:
    """Nothing else waits for a row, and the rest of the prompt has to be computed nevertheless."""
    from lockstep.bench.random_model import random_decoder

    spec = replace(PRESETS["qwen3-0.6b"], num_layers=2)
    decoder = random_decoder(spec, fp8_flow(kv_fp8=True), kernels, torch.device("cuda"))
    asked = [r for r in requests(spec.vocab_size) if len(r.prompt_ids) in (777, 1500)]
    roomy = engine(decoder, 8, 16384).generate(asked, seed=4, step=0, expected_version=1)
    one = engine(decoder, 1, 4096, max_batched_tokens=256)
    assert by_sample(one.generate(asked, seed=4, step=0, expected_version=1)) == by_sample(roomy)


TRUNCATED = [
    SamplingParams(40, 0.8, top_k=5),
    SamplingParams(60, 1.0, top_p=0.9, top_k=2000, max_kept=2000),
    SamplingParams(50),
    SamplingParams(33, 1.2, min_p=0.02, top_p=0.95, top_k=300, max_kept=300),
    SamplingParams(30, 0.0, top_k=20, max_kept=20),
    SamplingParams(45, 1.0, top_k=7, max_kept=7),
]


@torch.no_grad()
def test_truncated_draws_are_captured_too_case_37(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by step with the host in between, in windows, captured or not, under any schedule: the same tokens, log-probabilities
    and kept ids, and the training forward has the same bits over what was recorded."""
    from lockstep.bench.random_model import random_decoder
    from lockstep.nn.packed import packed_context
    from lockstep.nn.sampling_mask import SamplingMask
    from lockstep.rollout.engine import EmbeddedEngine

    spec = replace(PRESETS["qwen3-0.6b"], num_layers=2)
    decoder = random_decoder(spec, fp8_flow(kv_fp8=True), kernels, torch.device("cuda"))
    draw = random.Random(5)
    asked = [
        Request(tuple(draw.randrange(1000) for _ in range(40 + 30 * i)), i, 3, p)
        for i, p in enumerate(TRUNCATED)
    ]

    def all_of(found: list[Completion]) -> list[tuple[Any, ...]]:
        ordered = sorted(found, key=lambda c: (c.prompt_index, c.sample_index))
        return [(c.token_ids, c.logprobs, c.sampling_mask) for c in ordered]

    windows = engine(decoder, 32, 20000)
    first = windows.generate(asked, seed=1, step=0, expected_version=1)
    assert windows.state is not None and windows.state.truncated is not None, "it went through windows"
    for rows, options in ((7, {"max_batched_tokens": 100, "window": 3}), (32, {"cuda_graphs": False})):
        other = engine(decoder, rows, 20000, **options)
        assert all_of(other.generate(asked[::-1], seed=1, step=0, expected_version=1)) == all_of(first)
    plain = engine(decoder, 32, 20000)
    full = [replace(r, params=SamplingParams(30)) for r in asked]
    before = plain.generate(full, seed=1, step=0, expected_version=1)
    assert by_sample(windows.generate(full, seed=1, step=0, expected_version=1)) == by_sample(before)
    assert all_of(windows.generate(asked, seed=1, step=0, expected_version=1)) == all_of(first)
    with monkeypatch.context() as patch:
        patch.setattr(EmbeddedEngine, "_loops", lambda self, requests: False)
        assert all_of(
            engine(decoder, 32, 20000).generate(asked, seed=1, step=0, expected_version=1)
        ) == all_of(first)
    for c in first:
        recorded = c.params.records
        assert (c.sampling_mask is not None) == recorded
        ids = torch.tensor([*c.prompt_ids, *c.token_ids[:-1]])
        index = kernels.index([Run(0, len(ids), 0, torch.arange(len(ids)))], spec.query_group, decoder.device)
        positions = torch.arange(len(ids), device=decoder.device)
        context = packed_context(positions, index, kernels, scales=scales_of(decoder, decoder.device))
        hidden = decoder.hidden(ids.to(decoder.device), context)[len(c.prompt_ids) - 1 :]
        mask = c.sampling_mask if recorded else None
        assert mask is None or isinstance(mask, SamplingMask)
        temperature = torch.full((len(c.token_ids),), c.params.score_temperature, device=decoder.device)
        targets = torch.tensor(c.token_ids, device=decoder.device)
        logp, _ = decoder.head.log_probs(hidden, targets, temperature, mask)
        assert torch.equal(logp.cpu(), torch.tensor(c.logprobs)), c.params
        if mask is not None:
            kept = [part.tolist() for part in mask.ids_M.split(mask.counts_N.tolist())]
            assert all(token in some for token, some in zip(c.token_ids, kept, strict=True))


def test_more_ids_than_are_recorded_end_a_generation(kernels: Any) -> None:
    from lockstep.bench.random_model import random_decoder

    spec = replace(PRESETS["qwen3-0.6b"], num_layers=2)
    decoder = random_decoder(spec, fp8_flow(kv_fp8=True), kernels, torch.device("cuda"))
    asked = [Request((1, 2, 3), 0, 2, SamplingParams(20, top_p=0.99, max_kept=3))]
    with pytest.raises(CapacityError, match="truncation keeps .*at most 3 are recorded"):
        engine(decoder, 4, 4096).generate(asked, seed=5, step=0, expected_version=1)


def test_a_row_stops_at_its_stop_token_and_at_its_limit(kernels: Any) -> None:
    from lockstep.bench.random_model import random_decoder

    spec = replace(PRESETS["qwen3-0.6b"], num_layers=2)
    decoder = random_decoder(spec, fp8_flow(kv_fp8=True), kernels, torch.device("cuda"))
    free = engine(decoder, 4, 4096).generate(
        [Request((1, 2, 3), 0, 4, SamplingParams(50))], seed=5, step=0, expected_version=1
    )
    stop = free[0].token_ids[20]
    at = free[0].token_ids.index(stop)
    params = SamplingParams(50, stop_token_ids=frozenset({stop}))
    stopped = engine(decoder, 4, 4096).generate(
        [Request((1, 2, 3), 0, 4, params)], seed=5, step=0, expected_version=1
    )
    assert stopped[0].token_ids == free[0].token_ids[: at + 1]
    assert stopped[0].logprobs == free[0].logprobs[: at + 1]
    assert stopped[0].finish_reason == "stop"
    assert all(c.finish_reason == ("stop" if stop in c.token_ids else "length") for c in stopped)
