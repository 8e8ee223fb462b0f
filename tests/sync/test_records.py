"""Records: weight and scales as one thing, in checkpoint layout, from the working copies, finite or not at all."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lockstep.errors import ContractError
from lockstep.kernels.reference import PackedWeight, ReferenceKernels
from lockstep.models.checkpoint import SCALE_SUFFIX
from lockstep.models.decoder import Decoder
from lockstep.models.spec import expected_tensors
from lockstep.nn.linear import Linear
from lockstep.numerics.flow import FlowSpec, build_flows
from lockstep.numerics.formats import E4M3
from lockstep.numerics.quantize import Quantized, quantize
from lockstep.sync.manifest import Entry
from lockstep.sync.records import Record, records

QKV = "model.layers.1.self_attn.k_proj"
FAMILIES = ["llama31", "llama_tied", "qwen2", "qwen3", "qwen3_moe"]


class Reordering(ReferenceKernels):
    """A backend that, as device kernels do, keeps weights in an order of its own and works in it in place."""

    def pack(self, weight: Quantized | Tensor) -> PackedWeight:
        packed = super().pack(weight)
        if packed.dense is None or packed.dense.dim() != 2:
            return packed
        order = torch.arange(len(packed.dense)).flip(0)
        packed.dense.copy_(packed.dense[order])
        return replace(packed, dense=packed.dense)

    def linear(self, x_TK: Quantized | Tensor, weight: PackedWeight) -> Tensor:
        return super().linear(x_TK, weight).flip(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_records_are_the_checkpoint_in_its_order_case_10(wire: SimpleNamespace, family: str) -> None:
    decoder: Decoder = wire.decoder(family)
    shipped = list(records(decoder))
    assert [r.name for r in shipped] == list(expected_tensors(decoder.spec))
    masters = dict(decoder.named_parameters())
    for record in shipped:
        tensors = record.tensors()
        if isinstance(record.value, Quantized):
            want = quantize(masters[record.name].detach(), decoder.flow.fprop.rhs)
            assert list(tensors) == [record.name, record.name + "_scale_inv"], "never one without the other"
            assert torch.equal(tensors[record.name].view(torch.uint8), want.codes.view(torch.uint8))
            assert torch.equal(tensors[record.name + "_scale_inv"], want.scale)
        else:
            assert list(tensors) == [record.name]
            assert torch.equal(tensors[record.name], masters[record.name].detach().bfloat16())
        assert record.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())


def test_records_never_come_from_what_kernels_made_of_them_case_03_11(wire: SimpleNamespace) -> None:
    """A backend with an order of its own; forwards in between, so that stacks are made too; five versions."""
    flow = build_flows(FlowSpec("fp8"), 2).rollout
    model: Decoder = wire.decoder("qwen2", flow)
    decoder = Decoder(model.spec, flow, Reordering())
    decoder.load_state_dict(model.state_dict())
    ids = wire.ids(decoder.spec, [5, 9])
    for version in range(1, 6):
        wire.nudge(decoder, version)
        decoder.refresh(version)
        wire.logits(decoder, ids, [5, 9])
        masters = dict(decoder.named_parameters())
        for record in records(decoder):
            if isinstance(record.value, Quantized):
                want = quantize(masters[record.name].detach(), flow.fprop.rhs)
                assert torch.equal(record.value.codes.view(torch.uint8), want.codes.view(torch.uint8))
                assert torch.equal(record.value.scale, want.scale), record.name


def test_the_digest_covers_name_type_shape_and_bytes() -> None:
    x = torch.arange(6, dtype=torch.bfloat16)
    first = Record("a", x)
    h = hashlib.sha256(json.dumps(["a", "torch.bfloat16", [6]]).encode())
    h.update(x.view(torch.uint8).numpy().tobytes())
    assert first.digest() == h.hexdigest()
    others = [
        Record("b", x),
        Record("a", x.view(2, 3)),
        Record("a", x.view(torch.float16)),
        Record("a", x + 1),
    ]
    assert len({first.digest(), *(r.digest() for r in others)}) == 5


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_value_is_refused_by_name_case_15(
    wire: SimpleNamespace, family: str, bad: float
) -> None:
    """In plain values, in scales and in codes, after the quantizer had its chance to notice."""
    for what in ("plain", "scale", "codes"):
        decoder: Decoder = wire.decoder(family)
        modules = dict(decoder.working())
        name = "model.norm.weight" if what == "plain" else f"{QKV}.weight"
        packed = modules[name].working
        if what == "plain":
            assert packed.plain is not None
            packed.plain[3] = bad
        else:
            assert packed.codes is not None
            if what == "scale":
                packed.codes.scale[0, 0] = bad
            else:
                packed.codes.codes.view(torch.uint8)[2, 5] = 0xFF
        with pytest.raises(ContractError, match=rf"{name}(_scale_inv)?: 1 (non-finite|scales that)"):
            list(records(decoder))


def test_a_non_finite_bias_is_refused_by_name_case_15(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    module = decoder.get_submodule(QKV)
    assert isinstance(module, Linear) and module.working_bias is not None
    module.working_bias[1] = float("nan")
    with pytest.raises(ContractError, match=rf"{QKV}.bias: 1 non-finite"):
        list(records(decoder))


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_scale_that_is_not_positive_is_refused_case_15(scale: float) -> None:
    value = quantize(torch.randn(3, 3), build_flows(FlowSpec("fp8"), 1).rollout.fprop.rhs)
    value.scale[0, 0] = scale
    with pytest.raises(ContractError, match="w_scale_inv: 1 scales that are not positive"):
        Record("w", value).check_finite()


def test_a_quantized_role_is_never_sent_in_bf16_case_19(wire: SimpleNamespace) -> None:
    """Somebody's fallback left plain values where the flow says codes; and the reverse."""
    decoder: Decoder = wire.decoder("qwen2")
    module = dict(decoder.working())[f"{QKV}.weight"]
    module.packed = decoder.kernels.pack(module.weight.detach().bfloat16())
    with pytest.raises(
        ContractError, match=rf"{QKV}.weight: role attention is quantized .* not sent in another"
    ):
        list(records(decoder))
    decoder = wire.decoder("qwen2")
    norm = dict(decoder.working())["lm_head.weight"]
    norm.packed = decoder.kernels.pack(quantize(norm.weight, decoder.flow.fprop.rhs))
    with pytest.raises(
        ContractError, match=r"lm_head.weight: role head is not quantized, but its working copy is"
    ):
        list(records(decoder))


def test_a_decoder_that_was_never_refreshed_has_no_records(wire: SimpleNamespace) -> None:
    model: Decoder = wire.decoder("qwen2")
    fresh = Decoder(model.spec, model.flow, model.kernels)
    with pytest.raises(ContractError, match=r"embed_tokens.weight: has no working copy"):
        list(records(fresh))


ENTRY = Entry("w", "mlp", (130, 140), "float8_e4m3fn", True)


def parts() -> dict[str, Tensor]:
    """What arrives for a quantized tensor of 130 x 140: four ragged blocks."""
    value = quantize(torch.randn(130, 140), build_flows(FlowSpec("fp8"), 1).rollout.fprop.rhs)
    return {"w": value.codes.view(torch.uint8), "w" + SCALE_SUFFIX: value.scale}


def entry_for(tensors: dict[str, Tensor]) -> Entry:
    """The entry with the digest of these parts."""
    value = Quantized(tensors["w"].view(E4M3), tensors["w" + SCALE_SUFFIX], (128, 128))
    return replace(ENTRY, digest=Record("w", value).digest())


def test_reading_gives_the_record_back() -> None:
    tensors = parts()
    record = Record.read(entry_for(tensors), (128, 128), tensors)
    assert isinstance(record.value, Quantized) and record.value.codes.dtype == E4M3
    assert torch.equal(record.value.codes.view(torch.uint8), tensors["w"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("w_scale_inv"), "w: codes came without their scales"),
        (lambda t: t.pop("w"), "w: scales came without their codes"),
        (lambda t: t.update(w=t["w"].t().contiguous()), r"w: shape \[140, 130\], expected \[130, 140\]"),
        (lambda t: t.update(w=t["w"].bfloat16()), "w: type torch.bfloat16, expected torch.uint8"),
        (
            lambda t: t.update(w_scale_inv=t["w_scale_inv"].flatten()),
            r"w_scale_inv: shape \[4\], expected \[2, 2\]",
        ),
        (lambda t: t.update(w_scale_inv=t["w_scale_inv"].double()), "w_scale_inv: type torch.float64"),
        (lambda t: t["w_scale_inv"].fill_(float("nan")), "w_scale_inv: 4 scales that are not positive"),
        (lambda t: t["w"][0, :2].fill_(0x7F), "w: 2 non-finite values"),
        (lambda t: t["w"][0, :2].add_(1), "w: its digest is not the manifest's"),
        (lambda t: t["w_scale_inv"].mul_(2), "w: its digest is not the manifest's"),
    ],
)
def test_what_arrives_broken_is_refused_by_name_case_03_08_18(change: object, message: str) -> None:
    tensors = parts()
    tensors["w"][0, :2] = 0x11
    entry = entry_for(tensors)
    change(tensors)  # type: ignore[operator]
    with pytest.raises(ContractError, match=message):
        Record.read(entry, (128, 128), tensors)
