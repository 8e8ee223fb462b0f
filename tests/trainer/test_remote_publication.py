"""A run whose every version also goes over a wire: same receipts, and a resumed run is followed from its first publication."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.models.decoder import Decoder
from lockstep.numerics.flow import FlowSpec
from lockstep.sync.publish import Publisher
from lockstep.sync.receiver import Receiver
from lockstep.sync.remote import RemoteReceiver, serve
from lockstep.sync.spec import SyncSpec
from lockstep.sync.transport import queue_pair
from lockstep.trainer.spec import CheckpointSpec, RunSpec, UpdateSpec

MakeSpec = Callable[..., RunSpec]
Train = Callable[..., Any]
SPEC = SyncSpec(10_000, 20, 20, 20, memory_bytes=2**30)


@contextmanager
def followed(trainer: Any, receiver: Receiver, versions: list[int]) -> Iterator[None]:
    """The trainer publishes to this receiver, served by a thread."""
    here, there = queue_pair()
    options: dict[str, Any] = {
        "on_commit": lambda echo: versions.append(echo.version),
        "log": lambda line: None,
    }
    thread = threading.Thread(target=serve, args=(there, receiver, SPEC), kwargs=options)
    thread.start()
    remote = RemoteReceiver(trainer.parts.decoder, here, SPEC)
    trainer.publisher = Publisher(trainer.parts.decoder, remote)
    yield
    remote.close()
    thread.join(20)


def test_a_run_over_a_wire_and_its_resumption_case_20_26(
    make_spec: MakeSpec, train: Train, open_trainer: Callable[[RunSpec], Any], tmp_path: Path
) -> None:
    sections = {"flow": FlowSpec("fp8", scale="pow2"), "checkpoint": CheckpointSpec(every=2, export_hf=False)}
    whole = make_spec(name="whole", update=UpdateSpec(4), **sections)
    result, _ = train(whole)
    spec = make_spec(name="wired", update=UpdateSpec(4), **sections)
    versions: list[int] = []
    receiver: Receiver | None = None
    for steps in (3, 4):  # the first run goes beyond its checkpoint of step 2, the second one back to it
        with open_trainer(replace(spec, update=UpdateSpec(steps))) as trainer:
            decoder = trainer.parts.decoder
            if receiver is None:
                receiver = Receiver(Decoder(decoder.spec, decoder.flow, decoder.kernels))
            with followed(trainer, receiver, versions):
                last = trainer.run("auto")
            assert receiver.decoder.digest() == last.digest
    assert versions == [1, 2, 3, 4, 3, 4, 5], (
        "version 3 is what step 2 published: restored, and shipped first"
    )
    assert last.digest == result.digest
    assert (tmp_path / "wired" / "receipts.jsonl").read_bytes() == (
        tmp_path / "whole" / "receipts.jsonl"
    ).read_bytes()
