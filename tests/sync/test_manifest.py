"""Manifests: what they say, that they survive JSON, and what two layouts disagree about."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ContractError
from lockstep.models.decoder import Decoder
from lockstep.nn.kv_scales import KVScales
from lockstep.numerics.flow import FlowSpec
from lockstep.sync.manifest import Layout, Manifest, check_scales, layout_from_json, layout_of
from lockstep.sync.records import records

KV8 = FlowSpec("fp8", "fp8")


def through_json(data: Any) -> Any:
    return json.loads(json.dumps(data, allow_nan=False))


@pytest.mark.parametrize("family", ["llama_tied", "qwen2", "qwen3_moe"])
def test_every_tensor_is_described_case_08(wire: SimpleNamespace, family: str) -> None:
    decoder: Decoder = wire.decoder(family)
    layout = layout_of(decoder)
    shipped = {r.name: r for r in records(decoder)}
    assert [e.name for e in layout.entries] == list(shipped)
    for entry in layout.entries:
        main = shipped[entry.name].main
        assert entry.shape == tuple(main.shape) and f"torch.{entry.dtype}" == str(main.dtype)
        assert layout.nbytes(entry) == shipped[entry.name].nbytes
    assert (layout.scale, layout.block) == ("fp32", (128, 128))


@pytest.mark.parametrize(("family", "tied"), [("llama_tied", True), ("llama31", False)])
def test_ties_are_recorded_case_68(wire: SimpleNamespace, family: str, tied: bool) -> None:
    layout = layout_of(wire.decoder(family))
    assert layout.ties == ((("lm_head.weight", "model.embed_tokens.weight"),) if tied else ())
    assert ("lm_head.weight" in {e.name for e in layout.entries}) is not tied


@pytest.mark.parametrize("flow", [FlowSpec("bf16"), FlowSpec("fp8", scale="pow2"), KV8], ids=str)
def test_json_and_back(wire: SimpleNamespace, flow: FlowSpec) -> None:
    decoder: Decoder = wire.decoder("qwen2", flow)
    manifest: Manifest = wire.manifest(decoder, 7, 6)
    back = Manifest.from_json(through_json(manifest.to_json()))
    assert replace(back, kv_scales=None) == replace(manifest, kv_scales=None)
    assert (back.kv_scales is None) == (flow.kv == "bf16")


@given(st.lists(st.floats(2.0**-149, 2.0**127, width=32), min_size=1, max_size=8))
def test_kv_scales_survive_json_to_the_bit_case_28(values: list[float]) -> None:
    x = torch.tensor([values], dtype=torch.float32)
    layout = Layout("a", "fp32", None, "bfloat16", "bf16", "fp8", (1, len(values)), (), ())
    sent = Manifest(1, 0, 3, layout, KVScales(x, x.flip(1), 3), "", 1)
    got = Manifest.from_json(through_json(sent.to_json())).kv_scales
    assert got is not None and got.version == 3
    assert torch.equal(got.k, x) and torch.equal(got.v, x.flip(1))


def test_differences_name_both_sides_case_05_13(wire: SimpleNamespace) -> None:
    fp8, kept, pow2 = (
        layout_of(wire.decoder("qwen2", f))
        for f in (FlowSpec("fp8"), FlowSpec("fp8", keep_first_bf16=1), FlowSpec("fp8", scale="pow2"))
    )
    assert fp8.differences(fp8, "here", "there") == []
    (found,) = fp8.differences(kept, "here", "there")
    assert (
        "quantized here but not there: model.layers.0.self_attn.q_proj.weight" in found
        and "layers.1" not in found
    )
    assert any(d.startswith("scale is fp32 here, pow2 there") for d in fp8.differences(pow2, "here", "there"))
    fewer = replace(fp8, entries=fp8.entries[1:])
    assert fp8.differences(fewer, "here", "there") == ["only here: model.embed_tokens.weight"]
    assert fewer.differences(fp8, "here", "there") == ["only there: model.embed_tokens.weight"]
    other = replace(fp8.entries[0], shape=(1, 2), role="head")
    both = fp8.differences(replace(fp8, entries=(other, *fp8.entries[1:])), "here", "there")
    assert [d.split(" is ")[0] for d in both] == ["role of " + other.name, "shape of " + other.name]


def test_digests_are_no_part_of_a_layout_difference(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    manifest: Manifest = wire.manifest(decoder, 1, 0)
    assert manifest.layout.differences(layout_of(decoder), "a", "b") == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("version", "7", "version is '7'"),
        ("version", True, "version is True"),
        ("base", -1, "base is -1"),
        ("extra", 1, r"unknown \['extra'\]"),
        ("layout", None, r"the layout can't be read: missing"),
        ("kv_scales", {"k": [[1.0]]}, "KV scales can't be read"),
    ],
)
def test_a_broken_manifest_is_refused(wire: SimpleNamespace, key: str, value: Any, message: str) -> None:
    data = wire.manifest(wire.decoder("qwen2"), 1, 0).to_json()
    with pytest.raises(ContractError, match=message):
        Manifest.from_json(through_json({**data, key: value}))


@pytest.mark.parametrize(
    "change",
    [
        {"role": "wing"},
        {"dtype": "float9"},
        {"shape": [0, 3]},
        {"shape": [3]},
        {"quantized": 1},
        {"more": 1},
        {"name": 3},
    ],
)
def test_a_broken_entry_is_refused(wire: SimpleNamespace, change: dict[str, Any]) -> None:
    data = through_json(asdict(layout_of(wire.decoder("qwen2"))))
    entry = next(e for e in data["entries"] if e["quantized"])
    entry |= change
    with pytest.raises(ContractError):
        layout_from_json(data)


def test_a_tensor_named_twice_is_refused_case_18(wire: SimpleNamespace) -> None:
    data = through_json(asdict(layout_of(wire.decoder("qwen2"))))
    data["entries"].append(data["entries"][3])
    with pytest.raises(ContractError, match=f"twice: {data['entries'][3]['name']}"):
        layout_from_json(data)


def test_kv_scales_are_there_exactly_with_an_fp8_cache_case_28_32(wire: SimpleNamespace) -> None:
    with_cache, without = layout_of(wire.decoder("qwen2", KV8)), layout_of(wire.decoder("qwen2"))
    good = wire.kv_scales(wire.decoder("qwen2", KV8))
    check_scales(good, with_cache)
    check_scales(None, without)
    with pytest.raises(ContractError, match="KV cache is fp8, but no KV scales"):
        check_scales(None, with_cache)
    with pytest.raises(ContractError, match="KV cache is bf16, but there are KV scales"):
        check_scales(good, without)
    with pytest.raises(ContractError, match="layer 1, head 0 is nan"):
        broken = good.k.clone()
        broken[1, 0] = float("nan")
        check_scales(KVScales(broken, good.v, 1), with_cache)
