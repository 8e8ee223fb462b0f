"""The receiver: complete or not at all, in order or not at all, and what it holds is what was sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import CapacityError, ContractError
from lockstep.models.decoder import Decoder
from lockstep.nn.kv_scales import KVScales
from lockstep.nn.linear import Linear
from lockstep.nn.working import Working
from lockstep.numerics.flow import FlowSpec
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Request, SamplingParams
from lockstep.sync.budget import weight_bytes
from lockstep.sync.load_plan import LoadPlan
from lockstep.sync.receiver import Receiver
from lockstep.sync.records import Record

FLOWS = [FlowSpec("bf16"), FlowSpec("fp8"), FlowSpec("fp8", "fp8", "pow2"), FlowSpec("fp8", keep_last_bf16=1)]
GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
KV8 = FlowSpec("fp8", "fp8")


def send(
    wire: SimpleNamespace, decoder: Decoder, receiver: Receiver, version: int, base: int, **changes: Any
) -> Any:
    """A whole publication, as it should be but for `changes` of the manifest."""
    manifest = wire.manifest(decoder, version, base, **changes)
    return wire.deliver(receiver, manifest, wire.payloads(decoder))


@pytest.mark.parametrize(
    ("family", "flow"),
    [
        ("llama31", FLOWS[1]),
        ("llama_tied", FLOWS[1]),
        ("qwen3_moe", FLOWS[3]),
        *(("qwen2", f) for f in FLOWS),
    ],
    ids=str,
)
def test_five_versions_arrive_to_the_bit(wire: SimpleNamespace, family: str, flow: FlowSpec) -> None:
    decoder: Decoder = wire.decoder(family, flow)
    receiver: Receiver = wire.receiver(decoder)
    ids, lengths = wire.ids(decoder.spec, [7, 12]), [7, 12]
    for version in range(1, 6):
        wire.nudge(decoder, version)
        decoder.refresh(version)
        echo = send(wire, decoder, receiver, version, version - 1)
        assert (echo.version, echo.digest) == (version, decoder.digest()) and receiver.version == version
        assert receiver.decoder.digest() == decoder.digest()
        assert torch.equal(wire.logits(receiver.decoder, ids, lengths), wire.logits(decoder, ids, lengths))


def test_live_parameters_may_be_rebuilt_in_between_case_01(wire: SimpleNamespace) -> None:
    """Everything a loader might have hung something on is replaced after each publication."""
    decoder: Decoder = wire.decoder("qwen2")
    receiver: Receiver = wire.receiver(decoder)
    for version in range(1, 5):
        wire.nudge(decoder, version)
        decoder.refresh(version)
        send(wire, decoder, receiver, version, version - 1)
        assert receiver.decoder.digest() == decoder.digest()
        for _, module in receiver.decoder.working():
            module.weight = nn.Parameter(torch.zeros(module.weight.shape), requires_grad=False)
        rebuild(receiver.decoder, version % 2)


def rebuild(decoder: Decoder, layer: int) -> None:
    """New modules in a layer, as an engine that fuses or offloads makes them."""
    mlp = decoder.get_submodule(f"model.layers.{layer}.mlp")
    old = mlp.down_proj
    assert isinstance(old, Linear)
    outputs, inputs = old.weight.shape
    mlp.down_proj = Linear(inputs, outputs, bias=False, flow=old.flow, layer=layer, kernels=old.kernels)


def test_a_publication_completes_over_modules_rebuilt_on_its_way_case_01(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    receiver: Receiver = wire.receiver(decoder)
    receiver.begin(wire.manifest(decoder, 1, 0))
    for payload in wire.payloads(decoder):
        receiver.accept(payload)
    rebuild(receiver.decoder, 1)
    assert receiver.commit().digest == decoder.digest() == receiver.decoder.digest()


def test_values_in_the_wrong_places_are_found_case_04(
    wire: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gate and up have one shape; a loader that mixes them up passes every test of shapes."""
    decoder: Decoder = wire.decoder("qwen2")
    receiver: Receiver = wire.receiver(decoder)
    send(wire, decoder, receiver, 1, 0)
    before = wire.state(receiver.decoder)
    wire.nudge(decoder)
    decoder.refresh(2)
    prepare, swap = LoadPlan.prepare, {GATE: UP, UP: GATE}
    there: dict[str, Any] = {}

    def mixed_up(self: LoadPlan, target: Decoder, record: Record) -> Any:
        there[record.name] = prepare(self, target, record)
        return Late(there, swap.get(record.name, record.name))

    def resolved(self: LoadPlan, target: Decoder, values: Any) -> Any:
        late = {n: v.there[v.name] if isinstance(v, Late) else v for n, v in values.items()}
        return install(self, target, late)

    install = LoadPlan.install
    with monkeypatch.context() as patch:
        patch.setattr(LoadPlan, "prepare", mixed_up)
        patch.setattr(LoadPlan, "install", resolved)
        with pytest.raises(ContractError, match=r"v2: every tensor arrived, but .* wrong places"):
            send(wire, decoder, receiver, 2, 1)
    assert wire.state(receiver.decoder) == before
    assert send(wire, decoder, receiver, 2, 1).digest == decoder.digest(), "and it can be sent again"


@dataclass
class Late:
    """A working copy that is looked up when everything has come."""

    there: dict[str, Any]
    name: str


def change_one(
    name: str, change: Callable[[dict[str, Tensor]], object]
) -> Callable[[dict[str, Tensor]], None]:
    """A change of the bucket that holds `name`."""

    def apply(tensors: dict[str, Tensor]) -> None:
        if name in tensors:
            change(tensors)

    return apply


BREAKS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda t: [t.pop(UP), t.pop(UP + "_scale_inv")], f"{UP}: did not come"),
    "scale missing": (lambda t: t.pop(UP + "_scale_inv"), f"{UP}: codes came without their scales"),
    "codes missing": (lambda t: t.pop(UP), f"{UP}: scales came without their codes"),
    "extra": (lambda t: t.update(k_scale=torch.ones(1)), "k_scale: not in the manifest"),
    "extra scale": (
        lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(1, 1)}),
        "model.norm.weight_scale_inv: not in the manifest",
    ),
    "shape": (
        lambda t: t.update({UP: t[UP].t().contiguous()}),
        rf"{UP}: shape \[96, 160\], expected \[160, 96\]",
    ),
    "type": (lambda t: t.update({UP: t[UP].bfloat16()}), f"{UP}: type torch.bfloat16, expected torch.uint8"),
    "not finite": (lambda t: t[UP][0].fill_(0x7F), f"{UP}: 96 non-finite values"),
    "one bit": (lambda t: t[UP][3, 4:5].bitwise_xor_(1), f"{UP}: its digest is not the manifest's"),
    "a scale's bit": (lambda t: t[UP + "_scale_inv"].mul_(1.0001), f"{UP}: its digest is not the manifest's"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_publication_is_refused_by_name_and_changes_nothing_case_08_18(
    wire: SimpleNamespace, what: str
) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    receiver: Receiver = wire.receiver(decoder)
    send(wire, decoder, receiver, 1, 0)
    before, digest = wire.state(receiver.decoder), receiver.decoder.digest()
    wire.nudge(decoder)
    decoder.refresh(2)
    change, message = BREAKS[what]
    buckets = wire.tampered(wire.payloads(decoder), change_one(UP, change))
    with pytest.raises(ContractError, match=f"publication v2: .*{message}"):
        wire.deliver(receiver, wire.manifest(decoder, 2, 1), buckets)
    assert wire.state(receiver.decoder) == before and receiver.decoder.digest() == digest
    assert wire.deliver(receiver, wire.manifest(decoder, 2, 1), wire.payloads(decoder)).version == 2


def test_every_fault_is_listed_case_18(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    receiver: Receiver = wire.receiver(decoder)
    buckets = wire.payloads(decoder)[1:]
    buckets = wire.tampered(buckets, change_one(UP, lambda t: t.update(stray=t.pop(UP + "_scale_inv"))))
    with pytest.raises(ContractError) as refusal:
        wire.deliver(receiver, wire.manifest(decoder, 1, 0), buckets)
    for part in (
        "stray: not in the manifest",
        f"{UP}: codes came without",
        "embed_tokens.weight: did not come",
    ):
        assert part in str(refusal.value)


def test_a_bucket_that_comes_twice_is_refused_case_18(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    receiver: Receiver = wire.receiver(decoder)
    before = wire.state(receiver.decoder)
    buckets = wire.payloads(decoder)
    with pytest.raises(ContractError, match=r"lm_head.weight: came twice"):
        wire.deliver(receiver, wire.manifest(decoder, 1, 0), [*buckets, buckets[-1]])
    assert wire.state(receiver.decoder) == before


def test_half_a_publication_is_none_case_08(wire: SimpleNamespace) -> None:
    """Before the commit nothing has changed; a new manifest starts anew; a commit without one is refused."""
    decoder: Decoder = wire.decoder("qwen2")
    receiver: Receiver = wire.receiver(decoder)
    before = wire.state(receiver.decoder)
    buckets = wire.payloads(decoder)
    receiver.begin(wire.manifest(decoder, 1, 0))
    for payload in buckets[:-1]:
        receiver.accept(payload)
    assert wire.state(receiver.decoder) == before
    receiver.begin(wire.manifest(decoder, 1, 0))
    receiver.accept(buckets[-1])
    with pytest.raises(ContractError, match="did not come"):
        receiver.commit()
    with pytest.raises(ContractError, match="without a manifest"):
        receiver.commit()
    with pytest.raises(ContractError, match="without a manifest"):
        receiver.accept(buckets[0])
    assert wire.state(receiver.decoder) == before


@pytest.mark.parametrize(
    ("version", "base", "message"),
    [
        (3, 3, r"it follows version 3, but the engine holds version 4"),
        (4, 4, r"version 4 after 4: versions go up by one"),
        (3, 4, r"version 3 after 4"),
        (6, 4, r"version 6 after 4"),
        (5, 0, r"it follows version 0, but the engine holds version 4"),
        (6, 5, r"it follows version 5, but the engine holds version 4"),
    ],
)
def test_versions_never_go_back_or_leave_a_gap_case_21(
    wire: SimpleNamespace, version: int, base: int, message: str
) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    receiver: Receiver = wire.receiver(decoder)
    send(wire, decoder, receiver, 4, 0)
    with pytest.raises(ContractError, match=f"publication v{version}: {message}"):
        receiver.begin(wire.manifest(decoder, version, base))
    assert receiver.version == 4
    assert send(wire, decoder, receiver, 5, 4).version == 5


def test_nothing_remakes_the_weights_from_the_receivers_own_masters_case_21(wire: SimpleNamespace) -> None:
    """Waking up must not load base weights over published ones: there are none to load."""
    decoder: Decoder = wire.decoder("qwen2")
    receiver: Receiver = wire.receiver(decoder)
    send(wire, decoder, receiver, 1, 0)
    bytes_held = sum(p.untyped_storage().nbytes() for p in receiver.decoder.parameters())
    assert bytes_held == 4 * len(list(receiver.decoder.parameters())), "masters take no memory"
    with pytest.raises(ValueError, match="embed_tokens.weight: non-finite"):
        receiver.decoder.refresh(2)


def test_an_engine_samples_under_the_published_version_only_case_21(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("qwen2", KV8)
    receiver: Receiver = wire.receiver(decoder)
    engine = EmbeddedEngine(receiver.decoder, RolloutSpec(), cache_tokens=256)
    receiver.attach(engine)
    requests = [Request((5, 6, 7), 0, 2, SamplingParams(6))]

    def sample(over: EmbeddedEngine, version: int) -> Any:
        return over.generate(requests, seed=1, step=1, expected_version=version)

    with pytest.raises(ContractError, match="holds weight version 0, version 3 was expected"):
        sample(engine, 3)
    decoder.refresh(3)
    send(wire, decoder, receiver, 3, 0)
    here = EmbeddedEngine(decoder, RolloutSpec(), cache_tokens=256)
    here.set_kv_scales(wire.kv_scales(decoder))
    assert sample(engine, 3) == sample(here, 3), "the same samples and log-probabilities, bit for bit"
    receiver.open_session()
    with pytest.raises(ContractError, match="holds weight version 0, version 3 was expected"):
        sample(engine, 3)


@pytest.mark.parametrize("attached", [False, True])
def test_kv_scales_arrive_are_used_and_echoed_case_28_32(wire: SimpleNamespace, attached: bool) -> None:
    decoder: Decoder = wire.decoder("qwen2", KV8)
    receiver: Receiver = wire.receiver(decoder)
    engine = EmbeddedEngine(receiver.decoder, RolloutSpec(), cache_tokens=256)
    if attached:
        receiver.attach(engine)
    scales: KVScales = wire.kv_scales(decoder)
    assert not torch.equal(scales.k, torch.ones_like(scales.k))
    echo = send(wire, decoder, receiver, 1, 0)
    receiver.attach(engine)
    for held in (receiver.scales, engine.scales):
        assert held is not None and held.version == echo.scale_version == 1
        assert torch.equal(held.k, scales.k) and torch.equal(held.v, scales.v)
    newer = wire.kv_scales(decoder, 2)
    send(wire, decoder, receiver, 2, 1, scales=newer)
    assert engine.scales is not None and torch.equal(engine.scales.v, newer.v) and engine.scale_version == 2


def test_stale_or_renamed_kv_scales_are_refused_case_32(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("qwen2", KV8)
    receiver: Receiver = wire.receiver(decoder)
    send(wire, decoder, receiver, 1, 0, scales=wire.kv_scales(decoder, 2))
    with pytest.raises(ContractError, match="KV scales v1 after v2"):
        receiver.begin(wire.manifest(decoder, 2, 1, wire.kv_scales(decoder, 1)))
    other = replace(wire.kv_scales(decoder, 3), version=2)
    with pytest.raises(ContractError, match="KV scales v2 came with other values"):
        receiver.begin(wire.manifest(decoder, 2, 1, other))
    with pytest.raises(ContractError, match="the KV cache is fp8, but no KV scales"):
        receiver.begin(wire.manifest(decoder, 2, 1, kv_scales=None, scale_version=0))


def test_an_engine_that_uses_other_scales_undoes_the_publication_case_32(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("qwen2", KV8)
    receiver: Receiver = wire.receiver(decoder)
    engine = EmbeddedEngine(receiver.decoder, RolloutSpec(), cache_tokens=256)
    receiver.attach(engine)
    send(wire, decoder, receiver, 1, 0)
    before = wire.state(receiver.decoder)
    engine.set_kv_scales = lambda scales: 1  # type: ignore[method-assign]
    with pytest.raises(ContractError, match="uses KV scales v1, v2 were published"):
        send(wire, decoder, receiver, 2, 1, scales=wire.kv_scales(decoder, 2))
    assert wire.state(receiver.decoder) == before and receiver.scale_version == 1 == engine.scale_version


def test_a_manifest_of_another_setup_is_refused_before_any_bucket_case_13(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("qwen2", FlowSpec("fp8", scale="pow2"))
    receiver: Receiver = wire.receiver(wire.decoder("qwen2", FlowSpec("fp8")))
    with pytest.raises(ContractError, match="scale is pow2 in the manifest, fp32 in the engine"):
        receiver.begin(wire.manifest(decoder, 1, 0))


def test_the_budget_is_checked_before_anything_is_allocated_case_22(
    wire: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    tight: Receiver = wire.receiver(decoder, memory_bytes=100_000)
    packed: list[object] = []
    monkeypatch.setattr(LoadPlan, "prepare", lambda *args: packed.append(args))
    with pytest.raises(CapacityError, match=r"100,000 are there: weights in use .* new weights .* a bucket"):
        tight.begin(wire.manifest(decoder, 1, 0))
    with pytest.raises(ContractError, match="without a manifest"):
        tight.accept(wire.payloads(decoder)[0])
    assert packed == []
    with_cache: Receiver = wire.receiver(decoder, memory_bytes=10**7, kv_bytes=10**7)
    with pytest.raises(CapacityError, match="KV cache 10,000,000"):
        with_cache.check_memory(1000)


def test_the_kv_cache_is_counted_until_it_is_there_case_22(
    wire: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured memory: what is free now must hold the new weights, and the cache that comes last."""
    import lockstep.sync.receiver as module

    decoder: Decoder = wire.decoder("qwen2")
    receiver: Receiver = wire.receiver(decoder, memory_bytes=0, kv_bytes=10**9)
    monkeypatch.setattr(module, "free_bytes", lambda device: 5 * 10**8)
    with pytest.raises(CapacityError, match="KV cache 1,000,000,000"):
        receiver.begin(wire.manifest(decoder, 1, 0))
    receiver.attach(EmbeddedEngine(receiver.decoder, RolloutSpec(), cache_tokens=64))
    receiver.begin(wire.manifest(decoder, 1, 0))
    empty = Receiver(Decoder(decoder.spec, decoder.flow, decoder.kernels))
    weights = weight_bytes(empty.layout, decoder.flow, decoder.kernels)
    monkeypatch.setattr(module, "free_bytes", lambda device: weights * 19 // 10)
    receiver.check_memory(1000)
    with pytest.raises(CapacityError, match="weights in use"):
        empty.check_memory(1000)


def test_a_tied_head_follows_its_embedding_case_68(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("llama_tied")
    receiver: Receiver = wire.receiver(decoder)
    send(wire, decoder, receiver, 1, 0)
    head = receiver.decoder.head
    assert isinstance(head, Working) and head is receiver.decoder.model.embed_tokens
    assert head.working.plain is not None and decoder.head.working.plain is not None
    assert torch.equal(head.working.plain, decoder.head.working.plain)
