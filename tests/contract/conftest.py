"""What the contract suite runs over: engines, and small random models in every kind of flow.

An engine joins by a line in `ENGINES`: a function from (decoder, options, KV scales) to something that implements
`rollout.types.Engine`. Nothing in the tests knows more of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lockstep.kernels.table import select
from lockstep.models.decoder import Decoder
from lockstep.models.tiny import tiny_spec
from lockstep.nn.kv_scales import AmaxCollector, KVScales
from lockstep.numerics.flow import FlowSpec, build_flows
from lockstep.rollout.calibration import prompt_context
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Completion, Engine, Request, SamplingParams

MakeEngine = Callable[..., Engine]
SEED, STEP, VERSION = 17, 3, 5


def embedded(decoder: Decoder, spec: RolloutSpec, scales: KVScales | None, cache_tokens: int) -> Engine:
    """The engine in this process, over the decoder itself."""
    engine = EmbeddedEngine(decoder, spec, cache_tokens=cache_tokens)
    if scales is not None:
        engine.set_kv_scales(scales)
    return engine


ENGINES: dict[str, MakeEngine] = {"embedded": embedded}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "hidden": 48, "intermediate": 80, "head_dim": 16, "heads": 4, "kv_heads": 2},
    "qwen2": {"family": "qwen2", "hidden": 64, "intermediate": 136, "heads": 2, "kv_heads": 1, "tied": False},
    "qwen3": {"family": "qwen3", "hidden": 32, "intermediate": 64, "head_dim": 24, "heads": 3, "kv_heads": 3},
}

CASES: dict[str, tuple[str, FlowSpec, str]] = {
    "llama-bf16": ("llama", FlowSpec("bf16"), "reference"),
    "qwen2-fp8": ("qwen2", FlowSpec("fp8"), "reference"),
    "qwen3-fp8-kv8": ("qwen3", FlowSpec("fp8", "fp8"), "reference"),
    "llama-fp8-kv8-pow2": ("llama", FlowSpec("fp8", "fp8", "pow2"), "reference"),
    "qwen3-bf16-kv8": ("qwen3", FlowSpec("bf16", "fp8"), "reference"),
    "qwen3-fp8-pow2-exact": ("qwen3", FlowSpec("fp8", scale="pow2"), "exact"),
    "qwen2-fp8-kv8-exact": ("qwen2", FlowSpec("fp8", "fp8", keep_first_bf16=1), "exact"),
    "qwen3-fp8-kv8-attn8": ("qwen3", FlowSpec("fp8", "fp8", attention="fp8"), "reference"),
    "llama-bf16-kv8-attn8-exact": ("llama", FlowSpec("bf16", "fp8", "pow2", attention="fp8"), "exact"),
    "llama-bf16-exact": ("llama", FlowSpec("bf16"), "exact"),
}


def random_decoder(model: str, flow: FlowSpec, kernels: str, seed: int) -> Decoder:
    """Weights large enough that the distribution is not flat, biases and norms included."""
    spec = tiny_spec(layers=2, **MODELS[model])
    decoder = Decoder(spec, build_flows(flow, 2).rollout, select(kernels))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2 + float("norm" in name))
    decoder.refresh(VERSION)
    return decoder


def requests_for(decoder: Decoder, seed: int) -> list[Request]:
    """Short and long prompts (one crosses a step of 64 keys, one ends on it), four temperatures, stop tokens."""
    generator = torch.Generator().manual_seed(seed)
    stops = frozenset({7, 11})
    kinds = [
        SamplingParams(14, 1.0, stop_token_ids=stops),
        SamplingParams(18, 0.7, stop_token_ids=stops),
        SamplingParams(8, 1.4),
        SamplingParams(7, 0.0),
        SamplingParams(12, 1.0, top_k=9, top_p=0.9),
    ]
    lengths = [3, 1, 21, 64, 70]
    prompts = [torch.randint(0, decoder.spec.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    return [
        Request(tuple(prompt), 100 + i, 2, params) for i, (prompt, params) in enumerate(zip(prompts, kinds))
    ]


@dataclass
class World:
    """A model, its requests, and the samples that an unhurried engine with a large cache gave for them."""

    decoder: Decoder
    scales: KVScales | None
    make: MakeEngine
    requests: list[Request]
    first: list[Completion] = field(default_factory=list)

    def engine(self, spec: RolloutSpec | None = None, cache_tokens: int = 4096) -> Engine:
        """A fresh engine over the same weights."""
        return self.make(self.decoder, spec or RolloutSpec(), self.scales, cache_tokens)

    def generate(self, engine: Engine, requests: list[Request] | None = None) -> list[Completion]:
        """Samples of the requests (all of them by default)."""
        wanted = self.requests if requests is None else requests
        return engine.generate(wanted, seed=SEED, step=STEP, expected_version=VERSION)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(len(r.prompt_ids) + r.params.max_tokens for r in self.requests)

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.decoder.spec.num_heads // self.decoder.spec.num_kv_heads


def calibrate(decoder: Decoder, requests: list[Request], flow: FlowSpec) -> KVScales:
    """Scales from the prompts, version 1."""
    collector = AmaxCollector(decoder.spec.num_layers, decoder.spec.num_kv_heads)
    group = decoder.spec.num_heads // decoder.spec.num_kv_heads
    with torch.no_grad():
        decoder.hidden(*prompt_context([r.prompt_ids for r in requests], group, decoder.kernels, collector))
    return collector.scales(headroom=flow.kv_headroom, kind=flow.scale, version=1)


@pytest.fixture(scope="module", params=list(ENGINES))
def make_engine(request: pytest.FixtureRequest) -> MakeEngine:
    """How to make the engine under test."""
    return ENGINES[request.param]


@pytest.fixture(scope="module", params=list(CASES))
def world(request: pytest.FixtureRequest, make_engine: MakeEngine) -> World:
    """One case with its first samples."""
    model, flow, kernels = CASES[request.param]
    decoder = random_decoder(model, flow, kernels, seed=len(request.param))
    requests = requests_for(decoder, seed=1)
    scales = calibrate(decoder, requests, flow) if decoder.flow.kv_fp8 else None
    found = World(decoder, scales, make_engine, requests)
    found.first = found.generate(found.engine())
    return found
