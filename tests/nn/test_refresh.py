"""Refresh and digest of whole decoders: a backend may write in place and tell fingerprints, and nothing else changes by it."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import ContractError
from lockstep.kernels.reference import PackedWeight, ReferenceKernels
from lockstep.kernels.renew import Renewed, Source, renew
from lockstep.models.decoder import BETWEEN, Decoder
from lockstep.nn.linear import Linear
from lockstep.nn.working import refresh
from lockstep.numerics.fingerprint import Fingerprint, fingerprint
from lockstep.numerics.flow import Flow, bf16_flow, fp8_flow
from lockstep.numerics.quantize import quantize
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Request, SamplingParams
from lockstep.sync.load_plan import release_masters

FLOWS = {"bf16": bf16_flow(), "fp8": fp8_flow(), "fp8-pow2": fp8_flow(scale="pow2", keep_bf16=frozenset({0}))}


class InPlaceKernels(ReferenceKernels):
    """Writes into the working copies that are there, all at once, and tells their fingerprints, as a device backend does."""

    def __init__(self) -> None:
        super().__init__()
        self.told = True
        self.read = 0

    def refresh(self, sources: Iterable[Source]) -> Iterator[Renewed]:
        return iter([self._written(s, renew(s, self.pack)) for s in list(sources)])

    def fingerprints(self, held: Sequence[tuple[Tensor, Tensor | None]]) -> list[Fingerprint]:
        self.read += len(held)
        return super().fingerprints(held)

    def _written(self, source: Source, made: Renewed) -> Renewed:
        packed, held = made.packed, source.held
        if held is not None:
            for old, new in zip(tensors(held), tensors(packed)):  # a bias has no dense values
                old.copy_(new)
            held.version.count += 1
            packed = held
        values = packed.plain if packed.codes is None else packed.codes.codes
        assert values is not None
        found = fingerprint(values, None if packed.codes is None else packed.codes.scale)
        return made._replace(packed=packed, fingerprint=found if self.told else None)


def tensors(packed: PackedWeight) -> list[Tensor]:
    """Everything in a packed weight."""
    codes = [] if packed.codes is None else [packed.codes.codes.view(torch.uint8), packed.codes.scale]
    return codes + [t for t in (packed.plain, packed.dense) if t is not None]


def two(toy: SimpleNamespace, family: str, flow: Flow) -> tuple[Decoder, Decoder]:
    """The same weights on the reference and on the backend above, never refreshed."""
    made = [Decoder(toy.SPECS[family], flow, kernels) for kernels in (ReferenceKernels(), InPlaceKernels())]
    for decoder in made:
        decoder.load_state_dict(toy.random_weights(decoder.spec))
    return made[0], made[1]


@torch.no_grad()
def nudge(decoder: Decoder, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in decoder.parameters():
        p.add_(torch.randn(p.shape, generator=generator) * 1e-2)


@pytest.mark.parametrize("family", ["llama_tied", "qwen2", "qwen3_moe"])
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
def test_in_place_or_anew_is_the_same_decoder(toy: SimpleNamespace, flow: Flow, family: str) -> None:
    anew, in_place = two(toy, family, flow)
    ids = toy.random_ids(anew.spec, (9, 4))
    places: list[int] = []
    for version in (1, 2, 3):
        records = [d.refresh(version) for d in (anew, in_place)]
        assert records[0] == records[1]
        assert torch.equal(*(toy.logits(d, ids, (9, 4)) for d in (anew, in_place)))
        assert anew.digest() == in_place.digest() and anew.version == in_place.version == version
        now = [h.value.data_ptr() for _, m in in_place.working() for h in m.held()]
        assert not places or now == places
        places = now
        for decoder in (anew, in_place):
            nudge(decoder, version)


@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
def test_nothing_keeps_what_was_replaced(toy: SimpleNamespace, flow: Flow) -> None:
    """Neither weights that were stacked, nor masters that were dropped: on a GPU they are most of the memory."""
    _, decoder = two(toy, "qwen2", flow)
    for _ in range(2):  # the second time, records of the first are recognized
        for name, module in decoder.working():
            module.refresh(name)
    decoder.version = 1
    linears = [linear for p in decoder.projections() for linear in p.linears if len(p.linears) > 1]
    dense = [linear.working.dense for linear in linears]
    singly = {x.data_ptr() for x in dense if x is not None}
    assert len(singly) == len(linears) and alive(singly)
    ids = toy.random_ids(decoder.spec, (9, 4))
    logits, digest = toy.logits(decoder, ids, (9, 4)), decoder.digest()
    del dense
    decoder.stack()
    assert not alive(singly)
    masters = {p.data_ptr() for p in decoder.parameters()}
    assert alive(masters)
    release_masters(decoder)
    assert not alive(masters)
    assert torch.equal(toy.logits(decoder, ids, (9, 4)), logits) and decoder.digest() == digest


def alive(pointers: set[int]) -> list[Tensor]:
    """Tensors at these addresses that something still refers to."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    return [x for x in found if x.data_ptr() in pointers]


def test_records_say_what_changed(toy: SimpleNamespace) -> None:
    decoder = toy.make_decoder(toy.SPECS["qwen2"], fp8_flow())
    name = "model.layers.1.self_attn.k_proj"
    module = decoder.get_submodule(name)
    assert isinstance(module, Linear) and module.bias is not None and module.working_bias is not None
    codes, bias = module.working.codes, module.working_bias.clone()
    assert codes is not None
    with torch.no_grad():
        module.weight[:5] *= -1.3
        module.bias[2] += 1
    record = {r.name: r for r in decoder.refresh(2)}[f"{name}.weight"]
    want = quantize(module.weight, module.operand)
    changed = int((want.codes.view(torch.uint8) != codes.codes.view(torch.uint8)).sum())
    assert record.changed == changed + 1 and int((module.working_bias != bias).sum()) == 1
    assert record.numel == module.weight.numel() + module.bias.numel()
    assert record.nbytes == module.working.nbytes + module.working_bias.nbytes
    master = module.weight.detach()
    error = float((want.dequantize() - master).abs().max()) / float(master.abs().max())
    assert record.max_rel == error


def test_a_zero_that_changes_its_sign_has_changed(toy: SimpleNamespace) -> None:
    """So that a publication of no change and one of equal digest are the same."""
    decoder = toy.make_decoder(toy.SPECS["llama_tied"], bf16_flow())
    norm = decoder.model.norm
    for value, changed in ((0.0, 1), (-0.0, 1), (-0.0, 0)):
        before = decoder.digest()
        with torch.no_grad():
            norm.weight[3] = value
        assert sum(r.changed for r in decoder.refresh(2)) == changed
        assert (decoder.digest() == before) is (changed == 0)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.layers.0.self_attn.v_proj.bias"]
)
def test_a_failed_refresh_leaves_no_version(toy: SimpleNamespace, name: str) -> None:
    for decoder in two(toy, "qwen2", fp8_flow()):
        decoder.refresh(1)
        engine = EmbeddedEngine(decoder, RolloutSpec(), cache_tokens=64)
        request = [Request((1, 2), 0, 1, SamplingParams(2))]
        assert engine.generate(request, seed=0, step=0, expected_version=1)
        parameter = dict(decoder.named_parameters())[name]
        good = parameter.detach().clone()
        with torch.no_grad():
            parameter.view(-1)[1] = torch.inf
        with pytest.raises(ValueError, match=f"{name}: non-finite value"):
            decoder.refresh(2)
        assert decoder.version == BETWEEN
        for version in (1, 2):
            with pytest.raises(ContractError, match="holds weight version -1"):
                engine.generate(request, seed=0, step=0, expected_version=version)
        with torch.no_grad():
            parameter.copy_(good)
        decoder.refresh(3)
        assert engine.generate(request, seed=0, step=0, expected_version=3)


def test_a_first_refresh_that_fails_leaves_no_working_copy_behind(toy: SimpleNamespace) -> None:
    _, decoder = two(toy, "llama_tied", fp8_flow())
    with torch.no_grad():
        decoder.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        decoder.refresh(1)
    assert all(module.packed is None for _, module in decoder.working())


def test_fingerprints_that_a_refresh_told_are_not_read_again(toy: SimpleNamespace) -> None:
    _, decoder = two(toy, "qwen2", fp8_flow())
    kernels = decoder.kernels
    assert isinstance(kernels, InPlaceKernels)
    decoder.refresh(1)
    digest = decoder.digest()
    assert kernels.read == 0
    kernels.told = False
    decoder.refresh(2)
    assert decoder.digest() == digest and kernels.read == sum(m.parts for _, m in decoder.working())


def test_a_working_copy_that_was_exchanged_is_read(toy: SimpleNamespace) -> None:
    anew, decoder = two(toy, "qwen2", fp8_flow())
    for one in (anew, decoder):
        one.refresh(1)
        module = one.get_submodule("model.layers.1.mlp.down_proj")
        assert isinstance(module, Linear)
        before = one.digest()
        old, module.packed = module.packed, one.kernels.pack(quantize(module.weight * 1.5, module.operand))
        assert one.digest() != before
        module.packed = old
        assert one.digest() == before
    assert isinstance(decoder.kernels, InPlaceKernels) and decoder.kernels.read == 1
    assert anew.digest() == decoder.digest()


def test_what_is_known_of_a_working_copy_stays_until_it_is_another(toy: SimpleNamespace) -> None:
    _, decoder = two(toy, "qwen2", fp8_flow())
    decoder.refresh(1)
    before = [m.held() for _, m in decoder.working()]
    nudge(decoder, 1)
    decoder.refresh(2)
    now = [m.held() for _, m in decoder.working()]
    assert all(a is b for x, y in zip(before, now, strict=True) for a, b in zip(x, y, strict=True))
    linear = decoder.get_submodule("model.layers.1.self_attn.q_proj")
    assert isinstance(linear, Linear) and linear.working_bias is not None
    weight, bias = linear.held()
    linear.working_bias = linear.working_bias.clone()
    assert linear.held()[0] is weight and linear.held()[1].value is linear.working_bias is not bias.value
    linear.packed = replace(linear.working)
    assert linear.held()[0] is not weight


def test_modules_are_met_in_the_order_of_their_names_in_the_model(toy: SimpleNamespace) -> None:
    _, decoder = two(toy, "qwen2", fp8_flow())
    decoder.refresh(1)
    met: list[str] = []
    modules = ((met.append(name) or name, module) for name, module in decoder.working())
    records = refresh(modules)
    assert met == [name for name, _ in decoder.working()] == [r.name for r in records]
    assert [n for n, _ in decoder.named_modules() if f"{n}.weight" in met] == [
        n.removesuffix(".weight") for n in met
    ]


def test_the_digest_sees_names_types_and_biases(toy: SimpleNamespace) -> None:
    decoder = toy.make_decoder(toy.SPECS["qwen2"], fp8_flow())
    found = {decoder.digest()}
    layer = decoder.model.layers[0]
    q, k, v = (layer.self_attn.get_submodule(n) for n in ("q_proj", "k_proj", "v_proj"))
    k.packed, v.packed = v.packed, k.packed
    found.add(decoder.digest())
    k.packed, v.packed = v.packed, k.packed
    codes, bias = q.working.codes, q.working_bias
    q.packed = PackedWeight(None, codes.codes.view(torch.uint8), None)
    found.add(decoder.digest())
    q.packed = PackedWeight(replace(codes, scale=codes.scale * 2), None, None)
    found.add(decoder.digest())
    q.packed, q.working_bias = PackedWeight(codes, None, None), bias + 1
    found.add(decoder.digest())
    q.working_bias = bias
    assert decoder.digest() in found and len(found) == 5


@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
def test_weights_that_share_an_input_are_views_of_one_stack(toy: SimpleNamespace, flow: Flow) -> None:
    decoder = toy.make_decoder(toy.SPECS["llama31"], flow)
    for projection in decoder.projections():
        stack, parts = projection.stacked(), [linear.working for linear in projection.linears]
        assert stack is not None and stack is projection.stacked(), "made once"
        if len(parts) > 1:
            assert all(part.stack is stack for part in parts)
            assert torch.equal(stack.dense, torch.cat([part.dense for part in parts]))
    qkv = decoder.model.layers[1].self_attn.qkv
    old = qkv.stacked()
    with torch.no_grad():
        qkv.linears[1].weight.mul_(2)
    qkv.linears[1].refresh("k")
    new = qkv.stacked()
    assert new is not old and torch.equal(
        new.dense, torch.cat([linear.working.dense for linear in qkv.linears])
    )
    assert not torch.equal(new.dense, old.dense)
