"""Which tensors are quantized: by role and layer, on both sides alike (field failures 5, 6)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lockstep.errors import ContractError
from lockstep.kernels.table import select
from lockstep.models.decoder import Decoder
from lockstep.models.spec import ModelSpec
from lockstep.models.tiny import tiny_spec
from lockstep.nn.linear import Linear
from lockstep.nn.working import Working
from lockstep.numerics.flow import FlowSpec, build_flows
from lockstep.numerics.formats import BF16
from lockstep.sync.manifest import layout_of
from lockstep.sync.roles import QUANTIZED_ROLES, ROLES, slots


def decoder_of(spec: ModelSpec, flow: FlowSpec) -> Decoder:
    return Decoder(spec, build_flows(flow, spec.num_layers).rollout, select("reference"))


def test_only_linears_of_attention_mlp_and_expert_are_quantized_case_06(wire: SimpleNamespace) -> None:
    assert set(ROLES) - QUANTIZED_ROLES == {"embedding", "norm", "router", "head", "bias"}
    moe = slots(wire.decoder("qwen3_moe"))
    assert {s.role for s in moe} == {"embedding", "norm", "attention", "mlp", "expert", "router", "head"}
    assert all(s.quantized == (s.role in QUANTIZED_ROLES) for s in moe)
    routers = [s for s in moe if s.role == "router"]
    assert [s.name for s in routers] == ["model.layers.0.mlp.gate.weight", "model.layers.2.mlp.gate.weight"]
    dense = slots(wire.decoder("qwen2"))
    assert {s.name.rpartition(".")[0].rpartition(".")[2] for s in dense if s.role == "mlp" and s.quantized} == {
        "gate_proj", "up_proj", "down_proj"
    }, "mlp.gate_proj is not taken for a router"  # fmt: skip
    assert {s.leaf for s in dense if s.role == "bias"} == {"bias"} and sum(
        s.role == "bias" for s in dense
    ) == 6


def test_a_layer_is_kept_in_bf16_by_number_and_no_other_case_05() -> None:
    """Layer 1 as a prefix would match layers 10 and 11."""
    spec = tiny_spec(hidden=16, layers=12, heads=1, kv_heads=1, intermediate=16)
    decoder = decoder_of(spec, FlowSpec("fp8", keep_bf16_layers=(1,)))
    kept = {s.layer for s in slots(decoder) if s.role in QUANTIZED_ROLES and not s.quantized}
    assert kept == {1}
    quantized = {s.layer for s in slots(decoder) if s.quantized}
    assert quantized == set(range(12)) - {1}


def test_the_set_is_what_the_modules_do_case_05(wire: SimpleNamespace) -> None:
    for family in ("llama31", "llama_tied", "qwen2", "qwen3", "qwen3_moe"):
        for flow in (FlowSpec("fp8"), FlowSpec("bf16"), FlowSpec("fp8", keep_last_bf16=1)):
            decoder: Decoder = wire.decoder(family, flow)
            own = {f"{n}.weight" for n, m in decoder.named_modules() if isinstance(m, Linear) and m.fp8}
            held = {n for n, m in decoder.working() if m.working.codes is not None}
            assert layout_of(decoder).quantized == own == held


def test_a_module_that_disagrees_with_its_role_is_refused_case_05(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    module = decoder.get_submodule("model.layers.1.mlp.up_proj")
    module.operand = BF16
    with pytest.raises(
        ContractError, match=r"layers.1.mlp.up_proj.weight: the flow says FP8 .* module is BF16"
    ):
        slots(decoder)


def test_what_has_no_role_is_refused_whatever_its_name_case_06(wire: SimpleNamespace) -> None:
    class Newcomer(Working):
        def __init__(self, like: Linear) -> None:
            super().__init__(like.kernels, like.operand, like.activation)
            self.weight = nn.Parameter(torch.zeros(like.weight.shape))

    decoder: Decoder = wire.decoder("llama31")
    attention = decoder.get_submodule("model.layers.0.self_attn")
    attention.q_proj = Newcomer(attention.q_proj)  # type: ignore[assignment, arg-type]
    with pytest.raises(ContractError, match=r"self_attn.q_proj: a Newcomer in a Attention has no role"):
        slots(decoder)


def test_modules_and_checkpoint_must_have_the_same_tensors(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("llama31")
    del decoder.model.norm
    with pytest.raises(ContractError, match=r"missing \['model.norm.weight'\]"):
        slots(decoder)
