"""How large the KV cache of a run is: as asked for, what a step may need, or what a GPU has left; the samples are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.data.spec import DataSpec
from lockstep.models.spec import PRESETS
from lockstep.numerics.flow import FlowSpec, build_flows
from lockstep.rewards.spec import RewardSpec
from lockstep.rollout.spec import RolloutSpec
from lockstep.trainer import footprint, setup
from lockstep.trainer.cache_size import SPARE, CacheSize, cache_size, keeping_of, load_of
from lockstep.trainer.spec import EvalSpec, ModelSource, RunSpec, UpdateSpec

MODEL = PRESETS["qwen3-1.7b"]
SPEC = RunSpec(
    ModelSource("m"),
    DataSpec("arithmetic"),
    (RewardSpec("last_number"),),
    flow=FlowSpec("fp8", "fp8"),
    rollout=RolloutSpec(32, 8, 2048, max_running=256),
    update=UpdateSpec(10, max_tokens_per_microbatch=8192),
)
FLOWS = build_flows(SPEC.flow, MODEL.num_layers)
MakeSpec = Callable[..., RunSpec]


def size(spec: RunSpec, gigabytes: float | None, prompt: int = 1024) -> CacheSize:
    return cache_size(
        spec, MODEL, FLOWS, prompt, fused=True, memory=None if gigabytes is None else gigabytes * 1e9
    )


def with_rollout(**options: Any) -> RunSpec:
    return replace(SPEC, rollout=replace(SPEC.rollout, **options))


def test_as_asked_for() -> None:
    assert size(with_rollout(cache_tokens=777), 1.0) == CacheSize(777, 777)
    tokens = int(3e9) // footprint.cache_bytes_a_token(MODEL, FLOWS.rollout)
    assert size(with_rollout(cache_gb=3.0), 1.0) == CacheSize(tokens, tokens)


def test_what_a_step_may_need() -> None:
    """Each sequence that runs at once, in whole pages and one more."""
    pages = (1024 + 2048) // 64 + 1
    assert size(SPEC, None) == CacheSize(256 * pages * 64, 256 * pages * 64)
    assert size(with_rollout(max_running=100), None).tokens == 100 * pages * 64
    assert size(with_rollout(prompts_per_step=2), None).tokens == 16 * pages * 64, "no more than there are"
    evaluated = replace(with_rollout(prompts_per_step=2), eval=EvalSpec(SPEC.data, 1, prompts=10, samples=4))
    assert size(evaluated, None).tokens == 40 * pages * 64
    longer = replace(evaluated, eval=replace(evaluated.eval, max_new_tokens=4096))
    assert size(longer, None).tokens == 40 * ((1024 + 4096) // 64 + 1) * 64


@pytest.mark.parametrize("gigabytes", [60, 70, 80, 90])
def test_what_a_gpu_has_left(gigabytes: float) -> None:
    """Everything together takes what there is but for a spare part, within a page."""
    found = size(SPEC, gigabytes)
    load = load_of(SPEC, 1024, found.tokens, fused=True)
    parts = footprint.parts(MODEL, FLOWS, load, keeping_of(SPEC, MODEL, load, fused=True))
    peak, page = max(footprint.peak(parts).values()), 64 * footprint.cache_bytes_a_token(MODEL, FLOWS.rollout)
    assert found.tokens < found.wanted and found.tokens % 64 == 0
    assert (1 - SPARE) * gigabytes * 1e9 - page <= peak <= (1 - SPARE) * gigabytes * 1e9
    assert found.note == (
        f"KV cache: {found.tokens:,} tokens, all that the GPU has left, of {found.wanted:,} that a step's sequences may need; "
        "some may have to wait"
    )


def test_enough_is_enough_and_too_little_is_not_the_cache() -> None:
    for gigabytes in (141, 30):
        found = size(SPEC, gigabytes)
        assert found.tokens == found.wanted and found.note is None


def test_a_smaller_cache_gives_the_same_samples(
    make_spec: MakeSpec, train: Any, outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"rollout": RolloutSpec(3, 4, 9, page_size=4), "update": UpdateSpec(2)}
    plenty, spec = (make_spec(name=name, **options) for name in ("a", "b"))
    train(plenty)
    sizes: list[CacheSize] = []

    def little(*args: Any, **kwargs: Any) -> CacheSize:
        sizes.append(cache_size(*args, **{**kwargs, "memory": 1e12}))
        return CacheSize(sizes[0].wanted // 5 // 4 * 4, sizes[0].wanted)

    monkeypatch.setattr(setup, "cache_size", little)
    train(spec)
    assert sizes[0].wanted > 12 * 9
    told = (Path(spec.run_dir) / "notes.jsonl").read_text()
    assert "KV cache: 48 tokens, all that the GPU has left, of 240" in told
    assert outcome(Path(spec.run_dir)) == outcome(Path(plenty.run_dir))
