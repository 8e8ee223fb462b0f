"""Two processes: what a trainer publishes over a socket is what the other process computes with."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from lockstep.models.decoder import Decoder
from lockstep.nn.kv_scales import KVScales
from lockstep.sync.publish import Publisher
from lockstep.sync.remote import RemoteReceiver
from lockstep.sync.transport import SocketChannel, TransportError, Wait, connect

SCRIPT = Path(__file__).with_name("engine_process.py")
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def engine_module() -> ModuleType:
    """The engine's script as a module: both sides must build the same model."""
    spec = importlib.util.spec_from_file_location("engine_process", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def engine(
    kind: str, family: str, stop_after: int = 0
) -> Iterator[tuple[SocketChannel, Path, subprocess.Popen[bytes]]]:
    """A running engine process with a channel to it, and the folder it writes to."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        address = f"unix:{folder}/s" if kind == "unix" else "tcp:127.0.0.1:0"
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), address, name, family, str(stop_after)],
            env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        )
        try:
            until(lambda: (folder / "address").exists() or process.poll() is not None)
            wait = Wait.begin("connect", 30)
            channel = connect((folder / "address").read_text(), wait, "the engine")
            yield channel, folder, process
            channel.close()
            process.wait(30)
        finally:
            process.kill()
            process.wait(30)


def until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits until something is so."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "the other process is not getting there"
        time.sleep(0.02)


def random_decoder(module: ModuleType, family: str) -> Decoder:
    decoder: Decoder = module.make_decoder(family)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2 + float("norm" in name))
    return decoder


def scales(version: int) -> KVScales:
    k = torch.tensor([[0.01], [0.3]]) / 3 * version
    return KVScales(k, k / 7, version)


@pytest.mark.parametrize(("kind", "family"), [("unix", "qwen3_moe"), ("tcp", "qwen2")])
def test_five_versions_give_the_same_bits_in_both_processes_case_04_20(
    engine_module: ModuleType, kind: str, family: str
) -> None:
    decoder = random_decoder(engine_module, family)
    with engine(kind, family) as (channel, folder, process):
        publisher = Publisher(decoder, RemoteReceiver(decoder, channel, engine_module.SPEC))
        generator = torch.Generator().manual_seed(4)
        seen: list[torch.Tensor] = []
        for version in range(1, 6):
            with torch.no_grad():
                for p in decoder.parameters():
                    p.add_(torch.randn(p.shape, generator=generator) * 0.02)
            receipt = publisher.publish(version, scales=scales(version), must_change=version > 1)
            assert receipt.digest == decoder.digest() and receipt.scale_version == version
            theirs = load_file(folder / f"logits_{version}.safetensors")["logits"]
            assert torch.equal(theirs, engine_module.logits(decoder))
            seen.append(theirs)
        assert all(not torch.equal(a, b) for a, b in pairwise(seen)), "every version is another model"
        assert isinstance(publisher.target, RemoteReceiver)
        publisher.target.close()
        process.wait(30)
        end = json.loads((folder / "end.json").read_text())
        assert end == {"digest": decoder.digest(), "k": scales(5).k.tolist()}


def test_an_engine_process_that_dies_is_named_with_the_phase_case_25(engine_module: ModuleType) -> None:
    decoder = random_decoder(engine_module, "llama")
    with engine("unix", "llama", stop_after=2) as (channel, _, process):
        publisher = Publisher(decoder, RemoteReceiver(decoder, channel, engine_module.SPEC))
        publisher.publish(1, scales=scales(1))
        with pytest.raises(
            TransportError, match=r"phase publication v2: echo: the engine \(lockstep .*\) closed"
        ):
            publisher.publish(2)
        assert process.wait(30) == 7


def test_a_trainer_that_goes_away_ends_the_engine_with_its_name_case_25(engine_module: ModuleType) -> None:
    decoder = random_decoder(engine_module, "llama")
    with engine("unix", "llama") as (channel, folder, process):
        Publisher(decoder, RemoteReceiver(decoder, channel, engine_module.SPEC)).publish(1, scales=scales(1))
        channel.close()
        process.wait(30)
        error = json.loads((folder / "end.json").read_text())["error"]
        assert "waiting for what follows version 1: the trainer closed the connection" in error
