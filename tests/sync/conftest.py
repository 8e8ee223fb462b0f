"""A trainer's decoder and an embedded engine, unified or split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lockstep.kernels.table import select
from lockstep.models.decoder import Decoder
from lockstep.models.tiny import tiny_spec
from lockstep.numerics.flow import FlowSpec, build_flows
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.spec import RolloutSpec
from lockstep.sync.publish import Publisher

MakePublisher = Callable[..., Publisher]


@pytest.fixture
def make_publisher() -> MakePublisher:
    """A publisher over random weights, nothing published yet."""

    def make(flow: FlowSpec | None = None, *, family: str = "llama", tied: bool = True) -> Publisher:
        spec = tiny_spec(hidden=40, layers=2, heads=2, kv_heads=1, intermediate=136, family=family, tied=tied)  # type: ignore[arg-type]
        flows = build_flows(flow or FlowSpec("fp8"), 2)
        trainer = Decoder(spec, flows.trainer, select("reference"))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, p in trainer.named_parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.2 + float("norm" in name))
        rollout = trainer
        if not flows.unified:
            rollout = Decoder(spec, flows.rollout, select("reference"))
            rollout.share_masters(trainer)
        return Publisher(trainer, EmbeddedEngine(rollout, RolloutSpec(), cache_tokens=256))

    return make
