"""Publication: both sides hold one version of the same weights, made from one source, and the receipt tells the truth."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch

from lockstep.errors import ContractError
from lockstep.nn.kv_scales import KVScales
from lockstep.nn.linear import Linear
from lockstep.numerics.fingerprint import fingerprint
from lockstep.numerics.flow import FlowSpec
from lockstep.numerics.quantize import quantize
from lockstep.sync.publish import Publisher

MakePublisher = Callable[..., Publisher]
UNIFIED = [
    FlowSpec("bf16"),
    FlowSpec("fp8"),
    FlowSpec("fp8", scale="pow2"),
    FlowSpec("fp8", keep_last_bf16=1),
]
SPLIT = FlowSpec("fp8-rollout")


def nudge(publisher: Publisher, name: str, by: float = 0.05) -> None:
    """What an optimizer does to one master."""
    with torch.no_grad():
        dict(publisher.trainer.named_parameters())[name].add_(by)


@pytest.mark.parametrize("flow", UNIFIED, ids=str)
def test_in_a_unified_flow_the_codes_are_the_same_object(
    make_publisher: MakePublisher, flow: FlowSpec
) -> None:
    publisher = make_publisher(flow)
    publisher.publish(1)
    assert publisher.unified
    theirs = dict(publisher.engine.decoder.working())
    for name, module in publisher.trainer.working():
        assert module.working is theirs[name].working, "nothing is copied"


@pytest.mark.parametrize("flow", [*UNIFIED, SPLIT, FlowSpec("fp8-rollout", scale="pow2")], ids=str)
def test_case_14_every_copy_comes_straight_from_the_master(
    make_publisher: MakePublisher, flow: FlowSpec
) -> None:
    publisher = make_publisher(flow)
    publisher.publish(1)
    masters = dict(publisher.trainer.named_parameters())
    for decoder in (publisher.trainer, publisher.engine.decoder):
        quantized = 0
        for name, module in decoder.working():
            source = masters[name].detach()
            if module.working.codes is None:
                plain = module.working.plain
                assert plain is not None and torch.equal(plain, source.bfloat16())
                continue
            quantized += 1
            want = quantize(source, decoder.flow.fprop.rhs)
            held = module.working.codes
            assert torch.equal(held.codes.view(torch.uint8), want.codes.view(torch.uint8))
            assert torch.equal(held.scale, want.scale)
        linears = [m for m in decoder.modules() if isinstance(m, Linear) and m.fp8]
        assert quantized == len(linears) and (quantized > 0) == decoder.flow.is_fp8


def test_a_split_flow_shares_masters_and_nothing_else(make_publisher: MakePublisher) -> None:
    publisher = make_publisher(SPLIT)
    publisher.publish(1)
    trainer, engine = publisher.trainer, publisher.engine.decoder
    ours, theirs = dict(trainer.named_parameters()), dict(engine.named_parameters())
    assert ours.keys() == theirs.keys() and all(ours[n] is theirs[n] for n in ours)
    assert trainer.digest() != engine.digest()
    nudge(publisher, "model.layers.0.mlp.up_proj.weight")
    before = engine.digest()
    publisher.publish(2, must_change=True)
    assert engine.digest() != before and (engine.version, trainer.version) == (2, 2)


@pytest.mark.parametrize("flow", [FlowSpec("bf16"), FlowSpec("fp8"), SPLIT], ids=str)
def test_the_receipt_says_what_the_engine_holds(make_publisher: MakePublisher, flow: FlowSpec) -> None:
    publisher = make_publisher(flow)
    receipt = publisher.publish(1)
    held = dict(publisher.engine.decoder.working())
    assert (receipt.version, receipt.tensors, receipt.scale_version) == (1, len(held), 0)
    assert receipt.bytes == sum(m.working.nbytes for m in held.values())
    assert receipt.digest == publisher.engine.digest() == publisher.engine.decoder.digest()
    assert receipt.changed_pct == 100.0
    assert (receipt.max_rel_err == 0.0) == (flow.name == "bf16")
    assert receipt.max_rel_err < 0.04, "half a step of e4m3 below the largest value"


def test_the_digest_is_over_names_codes_scales_and_plain_values(make_publisher: MakePublisher) -> None:
    publisher = make_publisher(FlowSpec("fp8"), family="qwen2")
    publisher.publish(1)
    h = hashlib.sha256()
    for name, module in publisher.trainer.working():
        h.update(name.encode())
        codes, bias = module.working.codes, getattr(module, "working_bias", None)
        main = module.working.plain if codes is None else codes.codes
        for value, scale in ((main, None if codes is None else codes.scale), (bias, None)):
            if value is not None:
                first, second = fingerprint(value, scale)
                what = str(value.dtype) if scale is None else "codes"
                h.update(f" {what} {list(value.shape)} {first:016x}{second:016x}\n".encode())
    assert publisher.engine.digest() == h.hexdigest()


def test_equal_weights_have_equal_digests_and_only_they(make_publisher: MakePublisher) -> None:
    one, two = make_publisher(FlowSpec("fp8")), make_publisher(FlowSpec("fp8"))
    assert one.publish(1).digest == two.publish(4).digest, "the version is not part of the weights"
    nudge(two, "model.layers.1.post_attention_layernorm.weight")
    assert one.publish(2).digest != two.publish(5).digest
    assert make_publisher(FlowSpec("fp8", scale="pow2")).publish(1).digest != one.engine.digest(), (
        "field failure 13"
    )


def test_a_bias_is_part_of_the_digest(make_publisher: MakePublisher) -> None:
    publisher = make_publisher(FlowSpec("fp8"), family="qwen2")
    before = publisher.publish(1).digest
    nudge(publisher, "model.layers.0.self_attn.q_proj.bias")
    assert publisher.publish(2).digest != before


def test_changed_percent_counts_codes(make_publisher: MakePublisher) -> None:
    publisher = make_publisher(FlowSpec("fp8"))
    publisher.publish(1)
    assert publisher.publish(2).changed_pct == 0.0
    name = "model.layers.1.mlp.down_proj.weight"
    module = dict(publisher.trainer.working())[name]
    codes = module.working.codes
    assert codes is not None
    before = codes.codes.view(torch.uint8).clone()
    with torch.no_grad():
        module.weight[:3, :5] *= -1.5
    receipt = publisher.publish(3, must_change=True)
    after = module.working.codes
    assert after is not None
    changed = int((after.codes.view(torch.uint8) != before).sum())
    total = sum(m.weight.numel() for _, m in publisher.trainer.working())
    assert changed > 0 and receipt.changed_pct == pytest.approx(100 * changed / total)


def test_case_66_a_step_that_moves_nothing_is_an_error(make_publisher: MakePublisher) -> None:
    publisher = make_publisher()
    publisher.publish(1)
    with pytest.raises(ContractError, match="not one of"):
        publisher.publish(2, must_change=True)
    nudge(publisher, "model.norm.weight", 1e-9)
    with pytest.raises(ContractError, match="not one of"):
        publisher.publish(3, must_change=True)
    nudge(publisher, "model.norm.weight", 0.1)
    assert publisher.publish(4, must_change=True).changed_pct > 0


@pytest.mark.parametrize("flow", [FlowSpec("bf16"), FlowSpec("fp8"), SPLIT], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.o_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_case_15_a_non_finite_weight_is_named(
    make_publisher: MakePublisher, flow: FlowSpec, value: float, name: str
) -> None:
    publisher = make_publisher(flow)
    publisher.publish(1)
    with torch.no_grad():
        dict(publisher.trainer.named_parameters())[name].view(-1)[5] = value
    with pytest.raises(ContractError, match=f"publication v2: {name}"):
        publisher.publish(2)


def test_case_15_a_non_finite_bias_is_named(make_publisher: MakePublisher) -> None:
    publisher = make_publisher(FlowSpec("fp8"), family="qwen2")
    with torch.no_grad():
        dict(publisher.trainer.named_parameters())["model.layers.0.self_attn.k_proj.bias"][1] = float("nan")
    with pytest.raises(ContractError, match="k_proj"):
        publisher.publish(1)


@pytest.mark.parametrize("tied", [True, False])
def test_case_68_a_tied_head_is_one_tensor(make_publisher: MakePublisher, tied: bool) -> None:
    publisher = make_publisher(tied=tied)
    receipt = publisher.publish(1)
    names = [name for name, _ in publisher.trainer.working()]
    assert len(names) == len(set(names)) == receipt.tensors
    assert ("lm_head.weight" in names) is not tied
    assert (publisher.engine.decoder.head is publisher.engine.decoder.model.embed_tokens) is tied
    nudge(publisher, "model.embed_tokens.weight")
    publisher.publish(2, must_change=True)
    head = publisher.engine.decoder.head.working.plain
    embedding = publisher.engine.decoder.model.embed_tokens.working.plain
    assert head is not None and embedding is not None
    assert torch.equal(head, embedding) is tied, "a tied head follows its embedding"


def test_case_08_a_tensor_that_does_not_arrive_stops_the_publication(
    make_publisher: MakePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make_publisher()
    decoder = publisher.engine.decoder
    everything = decoder.refresh
    monkeypatch.setattr(
        decoder, "refresh", lambda v: [r for r in everything(v) if "layers.1.mlp.up" not in r.name]
    )
    with pytest.raises(ContractError, match=r"missing \['model.layers.1.mlp.up_proj.weight'\]"):
        publisher.publish(1)


def test_case_21_an_engine_that_reports_another_version_stops_the_publication(
    make_publisher: MakePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make_publisher(SPLIT)
    monkeypatch.setattr(publisher.engine.decoder, "refresh", publisher.trainer.refresh)
    with pytest.raises(ContractError, match="reports version 0"):
        publisher.publish(1)


@pytest.mark.parametrize(
    "flow", [FlowSpec("fp8", "fp8"), FlowSpec("bf16", "fp8"), FlowSpec("fp8-rollout", "fp8")], ids=str
)
def test_case_28_32_scales_travel_with_the_weights_and_are_echoed(
    make_publisher: MakePublisher, monkeypatch: pytest.MonkeyPatch, flow: FlowSpec
) -> None:
    publisher = make_publisher(flow)
    scales = KVScales(torch.ones(2, 1), torch.ones(2, 1), 1)
    assert publisher.publish(1, scales=scales).scale_version == 1 == publisher.engine.scale_version
    assert publisher.publish(2).scale_version == 1, "they stay until there are newer ones"
    newer = KVScales(torch.ones(2, 1), torch.ones(2, 1), 2)
    monkeypatch.setattr(type(publisher.engine), "set_kv_scales", lambda self, s: self.scale_version)
    with pytest.raises(ContractError, match="KV scales v2"):
        publisher.publish(3, scales=newer)
