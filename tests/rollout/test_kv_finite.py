"""A key or value that isn't finite never becomes a plausible code: the engine looks once a step, before a token is drawn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lockstep.errors import ContractError
from lockstep.models.decoder import Decoder
from lockstep.nn.kv_scales import AmaxCollector
from lockstep.numerics.flow import fp8_flow
from lockstep.rollout.calibration import measure_kv
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Request, SamplingParams

MakeDecoder = Callable[..., Decoder]
PROMPTS = [(9, 20, 31, 8), (44, 10)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("step", [1, 4])
def test_case_17_an_engine_step_with_a_key_that_is_not_finite_is_its_last(
    make_decoder: MakeDecoder, value: float, step: int
) -> None:
    decoder = make_decoder(fp8_flow(kv_fp8=True), layers=2)
    engine, other = (EmbeddedEngine(decoder, RolloutSpec(), cache_tokens=512) for _ in range(2))
    for one in (engine, other):
        one.set_kv_scales(measure_kv(decoder, PROMPTS).scales(headroom=2.0, kind="fp32", version=1))
    honest, calls = decoder.kernels.rope, 0

    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        out = honest(x, cos, sin)
        if calls == 4 * step:  # the keys of the second layer
            out[-1, 0, 2] = value
        return out

    decoder.kernels.rope = rope  # type: ignore[method-assign]
    requests = [Request(p, i, 2, SamplingParams(8)) for i, p in enumerate(PROMPTS)]
    with pytest.raises(ContractError, match="layer 1: non-finite key in KV head 0"):
        engine.generate(requests, seed=0, step=0, expected_version=1)
    assert engine.steps == step - 1 and calls == 4 * step
    # Nothing of it is left: neither pages that somebody holds nor a prefix that was computed from it.
    decoder.kernels.rope = honest  # type: ignore[method-assign]
    assert engine.cache.free_pages == engine.cache.num_pages
    again, fresh = (e.generate(requests, seed=1, step=1, expected_version=1) for e in (engine, other))
    assert again == fresh


def test_the_engine_reads_its_flag_once_a_step(
    make_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make_decoder(fp8_flow(kv_fp8=True), layers=3)
    engine = EmbeddedEngine(decoder, RolloutSpec(), cache_tokens=512)
    engine.set_kv_scales(measure_kv(decoder, PROMPTS).scales(headroom=2.0, kind="fp32", version=1))
    reads: list[int] = []
    honest = AmaxCollector.read
    monkeypatch.setattr(AmaxCollector, "read", lambda self: reads.append(1) or honest(self))
    requests = [Request(p, i, 2, SamplingParams(5)) for i, p in enumerate(PROMPTS)]
    engine.generate(requests, seed=0, step=0, expected_version=1)
    assert 0 < len(reads) <= engine.steps


def test_calibration_over_prompts_is_one_forward_after_another(make_decoder: MakeDecoder) -> None:
    """Maxima of all prompts together are the largest of each alone, whatever shares a forward."""
    decoder = make_decoder(fp8_flow(kv_fp8=True), layers=2)
    generator = torch.Generator().manual_seed(2)
    prompts = [
        tuple(torch.randint(8, 60, (n,), generator=generator).tolist()) for n in (900, 3, 700, 800, 12)
    ]
    together = measure_kv(decoder, prompts)
    alone = [measure_kv(decoder, [p]) for p in prompts]
    assert torch.equal(together.k, torch.stack([m.k for m in alone]).amax(0))
    assert torch.equal(together.v, torch.stack([m.v for m in alone]).amax(0))
