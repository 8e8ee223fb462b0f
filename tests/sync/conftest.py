"""A trainer's decoder and its engine: embedded, unified or split; or behind a wire, by hand or in a session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from lockstep.kernels.table import select
from lockstep.models.decoder import Decoder
from lockstep.models.tiny import tiny_spec
from lockstep.nn.kv_scales import KVScales
from lockstep.numerics.flow import Flow, FlowSpec, build_flows
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.spec import RolloutSpec
from lockstep.sync.manifest import Manifest, layout_of, with_digests
from lockstep.sync.publish import Publisher
from lockstep.sync.receipt import Echo
from lockstep.sync.receiver import Receiver
from lockstep.sync.records import records
from lockstep.sync.remote import RemoteReceiver, serve
from lockstep.sync.roles import slots
from lockstep.sync.spec import SyncSpec
from lockstep.sync.stream import pack_bucket, plan
from lockstep.sync.transport import queue_pair

MakePublisher = Callable[..., Publisher]
QUICK = SyncSpec(
    bucket_bytes=20_000, handshake_timeout_s=10, publish_timeout_s=20, idle_timeout_s=20, memory_bytes=2**30
)
"""Small buckets and short deadlines."""


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


def nudge(decoder: Decoder, seed: int = 0, size: float = 0.02) -> None:
    """What an optimizer does: every master moves a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in decoder.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * size)


def kv_scales(decoder: Decoder, version: int = 1) -> KVScales | None:
    """Scales of no round number, where the flow has an FP8 cache."""
    if not decoder.flow.kv_fp8:
        return None
    shape = (decoder.spec.num_layers, decoder.spec.num_kv_heads)
    x = torch.arange(1, shape[0] * shape[1] + 1, dtype=torch.float32).view(shape) / 7
    return KVScales(x + version, x / 3 + version, version)


def manifest_of(
    decoder: Decoder, version: int, base: int, scales: KVScales | None = None, **changes: Any
) -> Manifest:
    """The manifest of what a decoder holds; `changes` falsify it."""
    scales = kv_scales(decoder) if scales is None else scales
    digests = {r.name: r.digest() for r in records(decoder)}
    fields = {
        "version": version,
        "base": base,
        "scale_version": 0 if scales is None else scales.version,
        "layout": with_digests(layout_of(decoder), digests),
        "kv_scales": scales,
        "digest": decoder.digest(),
        "bucket_bytes": QUICK.bucket_bytes,
    }
    return Manifest(**{**fields, **changes})


def payloads(decoder: Decoder) -> list[bytes]:
    """The buckets of what a decoder holds."""
    places = {s.name: s for s in slots(decoder)}
    buckets = plan(layout_of(decoder), QUICK.bucket_bytes)
    return [pack_bucket(records(decoder, [places[e.name] for e in bucket])) for bucket in buckets]


def tampered(buckets: list[bytes], change: Callable[[dict[str, Tensor]], None]) -> list[bytes]:
    """The buckets after `change` had every tensor of each of them in its hands."""
    out = []
    for bucket in buckets:
        tensors = dict(load(bucket))
        change(tensors)
        out.append(save({n: t.contiguous() for n, t in tensors.items()}))
    return out


def deliver(receiver: Receiver, manifest: Manifest, buckets: list[bytes]) -> Echo:
    """A publication by hand."""
    receiver.begin(manifest)
    for bucket in buckets:
        receiver.accept(bucket)
    return receiver.commit()


def state(decoder: Decoder) -> dict[str, Any]:
    """The very objects a decoder computes with, and its version."""
    held: dict[str, Any] = {name: id(module.packed) for name, module in decoder.working()}
    held |= {f"{n}.bias": id(getattr(m, "working_bias", None)) for n, m in decoder.working()}
    return {**held, "version": decoder.version}


@dataclass
class Session:
    """A running session: the trainer's end, the receiver, and what its thread met."""

    remote: RemoteReceiver
    receiver: Receiver
    logged: list[str] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)


@contextmanager
def session(
    decoder: Decoder, receiver: Receiver, spec: SyncSpec = QUICK, **options: Any
) -> Iterator[Session]:
    """An engine in a thread, and a trainer that has shaken hands with it; `options` are those of `serve`."""
    here, there = queue_pair()
    logged: list[str] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            serve(there, receiver, spec, log=logged.append, **options)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield Session(RemoteReceiver(decoder, here, spec), receiver, logged, errors)
    finally:
        here.close()
        thread.join(10)


@pytest.fixture
def wire(toy: SimpleNamespace) -> SimpleNamespace:
    """The functions above, by name, and `decoder(family, flow)` and `receiver(decoder)`."""

    def decoder(family: str = "qwen2", flow: FlowSpec | Flow | None = None, seed: int = 0) -> Decoder:
        spec = toy.SPECS[family]
        if not isinstance(flow, Flow):
            flow = build_flows(flow or FlowSpec("fp8"), spec.num_layers).rollout
        return toy.make_decoder(spec, flow, seed=seed)

    def receiver(like: Decoder, **options: Any) -> Receiver:
        """Over a decoder of the same shape and flow, with other weights."""
        other = toy.make_decoder(like.spec, like.flow, exact=like.kernels.exact, seed=77)
        return Receiver(other, **{"memory_bytes": 2**30, **options})

    return SimpleNamespace(
        decoder=decoder,
        receiver=receiver,
        nudge=nudge,
        kv_scales=kv_scales,
        manifest=manifest_of,
        payloads=payloads,
        tampered=tampered,
        deliver=deliver,
        state=state,
        session=session,
        QUICK=QUICK,
        logits=toy.logits,
        ids=toy.random_ids,
    )
