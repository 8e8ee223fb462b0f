"""Buckets: bounded, in layer order, never splitting a record; and the bytes counted before they are allocated."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import CapacityError, ContractError
from lockstep.models.checkpoint import SCALE_SUFFIX
from lockstep.models.decoder import Decoder
from lockstep.nn.working import Working
from lockstep.numerics.flow import FlowSpec
from lockstep.numerics.quantize import Quantized
from lockstep.sync.budget import Budget, bucket_bytes, start_budget, weight_bytes
from lockstep.sync.manifest import layout_of
from lockstep.sync.records import records
from lockstep.sync.roles import slots
from lockstep.sync.stream import cut_buckets, largest_bucket, pack_bucket, payload_limit, plan, unpack_bucket


@given(sizes=st.lists(st.integers(1, 100), max_size=40), limit=st.integers(1, 150))
def test_buckets_are_consecutive_and_bounded_case_10(sizes: list[int], limit: int) -> None:
    buckets = cut_buckets(sizes, limit)
    assert [i for bucket in buckets for i in bucket] == list(range(len(sizes)))
    for bucket in buckets:
        assert len(bucket) >= 1 and (len(bucket) == 1 or sum(sizes[i] for i in bucket) <= limit)
    for first, second in pairwise(buckets):
        assert sum(sizes[i] for i in first) + sizes[second[0]] > limit, "no bucket ends early"


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("limit", [1, 5_000, 40_000, 10**9])
def test_a_weight_and_its_scales_share_a_bucket_case_10(
    wire: SimpleNamespace, family: str, limit: int
) -> None:
    decoder: Decoder = wire.decoder(family)
    layout, places = layout_of(decoder), {s.name: s for s in slots(decoder)}
    seen: list[str] = []
    for entries in plan(layout, limit):
        payload = pack_bucket(records(decoder, [places[e.name] for e in entries]))
        tensors = unpack_bucket(payload)
        names = {n for e in entries for n in ([e.name, e.name + SCALE_SUFFIX] if e.quantized else [e.name])}
        assert set(tensors) == names
        assert len(payload) <= payload_limit(entries, layout)
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        assert size <= largest_bucket(layout, limit) and (size <= limit or len(entries) == 1)
        seen += [e.name for e in entries]
    assert seen == [e.name for e in layout.entries], "layer order"


@pytest.mark.parametrize("flow", [FlowSpec("bf16"), FlowSpec("fp8"), FlowSpec("fp8", scale="pow2")], ids=str)
def test_bytes_and_back(wire: SimpleNamespace, flow: FlowSpec) -> None:
    decoder: Decoder = wire.decoder("qwen2", flow)
    shipped = list(records(decoder))
    tensors = unpack_bucket(pack_bucket(shipped))
    for record in shipped:
        main = tensors[record.name]
        if isinstance(record.value, Quantized):
            assert main.dtype == torch.uint8, "codes travel as bytes"
            assert torch.equal(main, record.value.codes.view(torch.uint8))
            assert torch.equal(tensors[record.name + SCALE_SUFFIX], record.value.scale)
        else:
            assert torch.equal(main, record.value)


@pytest.mark.parametrize("payload", [b"", b"\x80\x04K\x01.", b"x" * 100])
def test_what_is_no_bucket_is_refused(payload: bytes) -> None:
    with pytest.raises(ContractError, match="a bucket can't be read"):
        unpack_bucket(payload)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_the_budget_counts_what_kernels_hold_case_22(toy: SimpleNamespace, family: str, exact: bool) -> None:
    from lockstep.numerics.flow import build_flows

    spec = toy.SPECS[family]
    decoder = toy.make_decoder(spec, build_flows(FlowSpec("fp8"), spec.num_layers).rollout, exact=exact)
    held = 0
    for _, module in decoder.working():
        held += held_bytes(module)
    counted = weight_bytes(layout_of(decoder), decoder.flow, decoder.kernels)
    assert abs(counted - held) < 0.02 * held, "ragged blocks have relatively more scales"


def held_bytes(module: Working) -> int:
    """Every tensor of a working copy, by hand."""
    packed, bias = module.working, getattr(module, "working_bias", None)
    parts = [packed.plain, packed.dense, bias]
    if packed.codes is not None:
        parts += [packed.codes.codes, packed.codes.scale]
    return sum(p.numel() * p.element_size() for p in parts if p is not None)


def test_old_new_and_kv_are_added_up_case_22(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    layout, limit = layout_of(decoder), 20_000
    weights = weight_bytes(layout, decoder.flow, decoder.kernels)
    needed = 2 * weights + bucket_bytes(layout, limit) + 5_000_000

    def budget(have: int) -> Budget:
        return start_budget(layout, decoder.flow, decoder.kernels, bucket=limit, kv=5_000_000, limit=have)

    budget(needed).check("here")
    with pytest.raises(CapacityError, match=r"KV cache 5,000,000") as refusal:
        budget(needed - 1).check("here")
    line = refusal.value.line()
    assert f"weights in use {weights:,}" in line and f"new weights {weights:,}" in line and "a bucket" in line
