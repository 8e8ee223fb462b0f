"""Sessions: a trainer and an engine with a wire between them end with the same bits, and say so."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lockstep.errors import CapacityError, ContractError
from lockstep.models.decoder import Decoder
from lockstep.nn.kv_scales import KVScales
from lockstep.numerics.flow import FlowSpec, build_flows
from lockstep.observe.sinks import ReceiptsSink
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Request, SamplingParams
from lockstep.sync.handshake import greet_trainer, hello_of
from lockstep.sync.messages import hear, say
from lockstep.sync.publish import Publisher
from lockstep.sync.receipt import Echo
from lockstep.sync.receiver import Receiver
from lockstep.sync.remote import RemoteReceiver
from lockstep.sync.spec import SyncSpec
from lockstep.sync.transport import TransportError, Wait, queue_pair

KV8 = FlowSpec("fp8", "fp8")


def test_receipts_are_the_same_record_either_way_case_20(wire: SimpleNamespace) -> None:
    """Shared memory and a wire, side by side over five versions of the same weights."""
    ours: Decoder = wire.decoder("qwen2", KV8)
    twin: Decoder = wire.decoder("qwen2", KV8)
    receiver: Receiver = wire.receiver(ours)
    shared = Publisher(twin, EmbeddedEngine(twin, RolloutSpec(), cache_tokens=64))
    with wire.session(ours, receiver) as session:
        publisher = Publisher(ours, session.remote)
        for version in range(1, 6):
            wire.nudge(ours, version), wire.nudge(twin, version)
            scales = wire.kv_scales(ours, version) if version in (1, 4) else None
            receipt = publisher.publish(version, scales=scales, must_change=version > 1)
            assert receipt == shared.publish(version, scales=scales, must_change=version > 1)
            assert receipt.digest == ours.digest() == receiver.decoder.digest()
            assert receipt.scale_version == (1 if version < 4 else 4) == receiver.scale_version
            assert receipt.changed_pct > 0 and receipt.tensors == len(list(ours.working()))
    assert session.errors and isinstance(session.errors[0], TransportError), "closed without a goodbye"


def test_the_receipt_is_written_and_both_sides_say_what_is_held_case_20(
    wire: SimpleNamespace, tmp_path: Path
) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    receiver: Receiver = wire.receiver(decoder)
    sink = ReceiptsSink(tmp_path / "receipts.jsonl")
    with wire.session(decoder, receiver) as session:
        receipt = Publisher(decoder, session.remote).publish(1)
        session.remote.close()
    assert session.errors == []
    sink.write(0, receipt.to_dict())
    sink.close()
    (line,) = (json.loads(x) for x in (tmp_path / "receipts.jsonl").read_text().splitlines())
    assert line["digest"] == receiver.decoder.digest() and line["version"] == 1
    assert "published v1" in receipt.line() and receipt.digest[:12] in receipt.line()
    assert session.logged == [f"holds v1, KV scales v0, {receipt.digest[:12]}"]


def test_a_split_flow_ships_the_engines_precision_case_14(wire: SimpleNamespace) -> None:
    """BF16 in the trainer, FP8 in the engine, codes straight from the trainer's masters."""
    flows = build_flows(FlowSpec("fp8-rollout", "fp8"), 2)
    trainer: Decoder = wire.decoder("qwen2", flows.trainer)
    source = Decoder(trainer.spec, flows.rollout, trainer.kernels)
    source.share_masters(trainer)
    receiver: Receiver = wire.receiver(wire.decoder("qwen2", flows.rollout))
    with wire.session(source, receiver) as session:
        publisher = Publisher(trainer, session.remote)
        assert not publisher.unified
        for version in (1, 2):
            wire.nudge(trainer, version)
            receipt = publisher.publish(version, scales=wire.kv_scales(source))
            assert receipt.digest == receiver.decoder.digest() == source.digest() != trainer.digest()
            assert receipt.max_rel_err > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_is_sent_of_weights_that_are_not_finite_case_15(wire: SimpleNamespace, bad: float) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    receiver: Receiver = wire.receiver(decoder)
    with wire.session(decoder, receiver) as session:
        publisher = Publisher(decoder, session.remote)
        publisher.publish(1)
        with torch.no_grad():
            dict(decoder.named_parameters())["model.layers.1.mlp.down_proj.weight"][0, 0] = bad
        with pytest.raises(
            ContractError, match=r"publication v2: model.layers.1.mlp.down_proj.weight: non-finite"
        ):
            publisher.publish(2)
        assert receiver.version == 1 and session.errors == []


def test_no_fallback_precision_goes_over_the_wire_case_19(
    wire: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantizing one tensor fails after the refresh, and something put BF16 in its place."""
    decoder: Decoder = wire.decoder("qwen2")
    receiver: Receiver = wire.receiver(decoder)
    module = dict(decoder.working())["model.layers.0.mlp.up_proj.weight"]
    with wire.session(decoder, receiver) as session:
        publisher = Publisher(decoder, session.remote)
        publisher.publish(1)
        refresh = type(decoder).refresh

        def fall_back(self: Decoder, version: int) -> object:
            done = refresh(self, version)
            module.packed = self.kernels.pack(module.weight.detach().bfloat16())
            return done

        monkeypatch.setattr(type(decoder), "refresh", fall_back)
        with pytest.raises(ContractError, match=r"layers.0.mlp.up_proj.weight: role mlp is quantized"):
            publisher.publish(2)
        assert receiver.version == 1


def test_what_the_engine_refuses_reaches_the_trainer_and_the_session_goes_on_case_18(
    wire: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lockstep.sync.remote as module

    decoder: Decoder = wire.decoder("qwen2")
    receiver: Receiver = wire.receiver(decoder)
    pack = module.pack_bucket
    with wire.session(decoder, receiver) as session:
        publisher = Publisher(decoder, session.remote)
        publisher.publish(1)
        held = receiver.decoder.digest()
        with monkeypatch.context() as patch:
            patch.setattr(
                module, "pack_bucket", lambda records: pack([r for r in records if "up_proj" not in r.name])
            )
            wire.nudge(decoder, 1)
            with pytest.raises(
                ContractError, match=r"refused: publication v2: .*0.mlp.up_proj.weight: did not come"
            ):
                publisher.publish(2)
        assert receiver.version == 1 and receiver.decoder.digest() == held
        receipt = publisher.publish(2)
        assert receipt.digest == receiver.decoder.digest() != held
    assert any(line.startswith("refused: publication v2") for line in session.logged)


@pytest.mark.parametrize("field", ["version", "scale_version", "digest", "scales_digest"])
def test_an_echo_that_is_not_what_was_sent_stops_the_run_case_04_28_32(
    wire: SimpleNamespace, field: str
) -> None:
    """A scripted engine that takes everything and says something else."""
    decoder: Decoder = wire.decoder("qwen2", KV8)
    here, there = queue_pair()
    wait = Wait.begin("test", 10)

    def engine() -> None:
        greet_trainer(there, hello_of(decoder), wait, lambda size: None)
        manifest = hear(there, wait, "manifest")["manifest"]
        say(there, "go", wait)
        while there.receive(wait, 2**30)[0] == "bucket":
            pass
        truth = {"version": 1, "scale_version": 1, "digest": manifest["digest"], "scales_digest": "x"}
        truth["scales_digest"] = remote_scales
        say(there, "echo", wait, **{**truth, field: 9 if "version" in field else "0" * 64})

    scales: KVScales = wire.kv_scales(decoder)
    from lockstep.sync.manifest import scales_digest

    remote_scales = scales_digest(scales)
    thread = threading.Thread(target=engine)
    thread.start()
    publisher = Publisher(decoder, RemoteReceiver(decoder, here, wire.QUICK))
    with pytest.raises(ContractError, match="publication v1: .* echoes"):
        publisher.publish(1, scales=scales)
    thread.join()


def test_an_fp8_cache_is_not_published_without_scales_case_28(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("qwen2", KV8)
    with wire.session(decoder, wire.receiver(decoder)) as session:
        with pytest.raises(ContractError, match="the KV cache is fp8, but no KV scales"):
            Publisher(decoder, session.remote).publish(1)


def test_a_lost_publication_is_noticed_case_21(wire: SimpleNamespace) -> None:
    """The trainer's end believes that the engine has version 2."""
    decoder: Decoder = wire.decoder("qwen2")
    receiver: Receiver = wire.receiver(decoder)
    with wire.session(decoder, receiver) as session:
        publisher = Publisher(decoder, session.remote)
        publisher.publish(1)
        session.remote.version = 2
        with pytest.raises(ContractError, match="it follows version 2, but the engine holds version 1"):
            publisher.publish(3)
        session.remote.version = 1
        with pytest.raises(ContractError, match="version 3 after 1: versions go up by one"):
            publisher.publish(3)


def test_on_resume_the_restored_version_comes_first_case_26(wire: SimpleNamespace) -> None:
    """The engine outlives a trainer that died at version 3; the next one goes on from 2 and calls other weights 3."""
    decoder: Decoder = wire.decoder("qwen2", KV8)
    receiver: Receiver = wire.receiver(decoder)
    engine = EmbeddedEngine(receiver.decoder, RolloutSpec(), cache_tokens=64)
    receiver.attach(engine)
    with wire.session(decoder, receiver) as session:
        publisher = Publisher(decoder, session.remote)
        for version in (1, 2, 3):
            wire.nudge(decoder, version)
            publisher.publish(version, scales=wire.kv_scales(decoder, version))
    resumed: Decoder = wire.decoder("qwen2", KV8, seed=5)
    with wire.session(resumed, receiver) as session:
        assert receiver.version == 0 and engine.scale_version == 0, "nothing of the dead run is served"
        publisher = Publisher(resumed, session.remote)
        receipt = publisher.publish(2, scales=wire.kv_scales(resumed, 1))
        assert (receiver.version, engine.version, engine.scale_version) == (2, 2, 1)
        assert receipt.digest == resumed.digest() == engine.digest()
        wire.nudge(resumed, 9)
        assert publisher.publish(3).digest == engine.digest()


def test_an_engine_that_waits_in_vain_says_for_what_case_25_26(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    spec = SyncSpec(20_000, 10, 10, idle_timeout_s=0.3, memory_bytes=2**30)
    with wire.session(decoder, wire.receiver(decoder), spec) as session:
        Publisher(decoder, session.remote).publish(4)
        for _ in range(100):
            if session.errors:
                break
            threading.Event().wait(0.05)
    (error,) = session.errors
    assert "waiting for what follows version 4: the trainer is missing" in str(error)


@pytest.mark.parametrize("stage", ["manifest", "buckets", "echo"])
def test_an_engine_that_stops_in_the_middle_is_named_with_the_phase_case_25(
    wire: SimpleNamespace, stage: str
) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    here, there = queue_pair()
    wait = Wait.begin("test", 10)

    def engine() -> None:
        greet_trainer(there, hello_of(decoder), wait, lambda size: None)
        hear(there, wait, "manifest")
        if stage == "manifest":
            return
        say(there, "go", wait)
        while stage == "echo" and there.receive(wait, 2**30)[0] == "bucket":
            pass

    thread = threading.Thread(target=engine)
    thread.start()
    spec = SyncSpec(5_000, 10, publish_timeout_s=0.5)
    publisher = Publisher(decoder, RemoteReceiver(decoder, here, spec))
    phase = {"manifest": "answer to the manifest", "buckets": r"bucket \d+ of \d+", "echo": "echo"}[stage]
    with pytest.raises(TransportError, match=rf"phase publication v1: {phase}: the engine \(.*\) is missing"):
        publisher.publish(1)
    thread.join()


def test_a_trainer_that_stops_in_the_middle_is_named_with_the_phase_case_25(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    receiver: Receiver = wire.receiver(decoder)
    spec = SyncSpec(20_000, 10, publish_timeout_s=0.4, memory_bytes=2**30)
    with wire.session(decoder, receiver, spec) as session:
        wait = Wait.begin("test", 10)
        say(session.remote.channel, "manifest", wait, manifest=wire.manifest(decoder, 1, 0).to_json())
        hear(session.remote.channel, wait, "go")
        session.remote.channel.send("bucket", wire.payloads(decoder)[0], wait)
        for _ in range(100):
            if session.errors:
                break
            threading.Event().wait(0.05)
    assert "publication v1: bucket 2 of " in str(session.errors[0]) and "the trainer is missing" in str(
        session.errors[0]
    )
    assert receiver.version == 0


def test_the_kv_cache_is_made_last_and_gets_the_scales_case_22(wire: SimpleNamespace) -> None:
    """The hook of the first commit makes the engine; what it draws is what the trainer's own engine draws."""
    decoder: Decoder = wire.decoder("qwen2", KV8)
    receiver: Receiver = wire.receiver(decoder)
    engines: list[EmbeddedEngine] = []

    def make_engine(echo: Echo) -> None:
        if not engines:
            assert receiver.version == echo.version == 1, "weights are in place"
            engines.append(EmbeddedEngine(receiver.decoder, RolloutSpec(), cache_tokens=256))
            receiver.attach(engines[0])

    here = EmbeddedEngine(decoder, RolloutSpec(), cache_tokens=256)
    requests = [Request((5, 6, 7, 8), 3, 2, SamplingParams(8)), Request((9, 1), 4, 1, SamplingParams(8, 0.7))]
    with wire.session(decoder, receiver, on_commit=make_engine) as session:
        publisher = Publisher(decoder, session.remote)
        for version in (1, 2, 3):
            wire.nudge(decoder, version)
            scales = wire.kv_scales(decoder, version)
            publisher.publish(version, scales=scales)
            here.set_kv_scales(scales)
            drawn = [
                e.generate(requests, seed=2, step=version, expected_version=version) for e in (here, *engines)
            ]
            assert len(drawn) == 2 and drawn[0] == drawn[1]


def test_a_hook_that_fails_is_told_to_the_trainer_case_22(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("qwen2")

    def no_room(echo: Echo) -> None:
        raise CapacityError("no room for the KV cache")

    with wire.session(decoder, wire.receiver(decoder), on_commit=no_room) as session:
        with pytest.raises(CapacityError, match="refused: no room for the KV cache"):
            Publisher(decoder, session.remote).publish(1)
    assert isinstance(session.errors[0], CapacityError)
