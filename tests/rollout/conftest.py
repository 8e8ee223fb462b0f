"""Decoders small enough to sample from in milliseconds, with weights large enough that their logits are not flat."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lockstep.kernels.table import select
from lockstep.models.decoder import Decoder
from lockstep.models.tiny import tiny_spec
from lockstep.numerics.flow import Flow, bf16_flow

MakeDecoder = Callable[..., Decoder]


@pytest.fixture(scope="session")
def make_decoder() -> MakeDecoder:
    """A decoder of random weights at version 1."""

    def make(flow: Flow | None = None, *, seed: int = 0, layers: int = 1) -> Decoder:
        spec = tiny_spec(hidden=32, layers=layers, heads=2, kv_heads=1, intermediate=48)
        decoder = Decoder(spec, flow or bf16_flow(), select("reference"))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in decoder.named_parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + float("norm" in name))
        decoder.refresh(1)
        return decoder

    return make
