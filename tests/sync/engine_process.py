"""An engine in a process of its own, for test_processes.py: serves one session and writes down what it holds.

    python engine_process.py ADDRESS FOLDER FAMILY STOP_AFTER

FOLDER gets `address` when it listens, `logits_N.safetensors` after each commit, and `end.json`. At version STOP_AFTER it dies
without a word; 0 never.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lockstep.errors import ContractError, UserError
from lockstep.kernels.attention_index import Run, build_index
from lockstep.kernels.table import select
from lockstep.models.decoder import Decoder
from lockstep.models.spec import ModelSpec, MoESpec
from lockstep.nn.context import PackedContext
from lockstep.numerics.flow import FlowSpec, build_flows
from lockstep.sync.receipt import Echo
from lockstep.sync.receiver import Receiver
from lockstep.sync.remote import serve
from lockstep.sync.spec import SyncSpec
from lockstep.sync.transport import Listener, Wait

SPEC = SyncSpec(30_000, handshake_timeout_s=30, publish_timeout_s=30, idle_timeout_s=30, memory_bytes=2**30)


MODELS = {
    "llama": ModelSpec("llama", 61, 40, 136, 2, 2, 1, 20, tie_embeddings=True),
    "qwen2": ModelSpec("qwen2", 61, 40, 136, 2, 2, 1, 20, attention_bias=True),
    "qwen3_moe": ModelSpec("qwen3_moe", 61, 40, 136, 2, 2, 1, 20, qk_norm=True, moe=MoESpec(4, 2, 30, True)),
}


def make_decoder(family: str) -> Decoder:
    """The model of the test, its masters undefined."""
    return Decoder(MODELS[family], build_flows(FlowSpec("fp8", "fp8"), 2).rollout, select("reference"))


@torch.no_grad()
def logits(decoder: Decoder) -> torch.Tensor:
    """Of every position of one fixed sequence."""
    count, group = 11, decoder.spec.num_heads // decoder.spec.num_kv_heads
    index = build_index([Run(0, count, 0, torch.arange(count))], group)
    context = PackedContext(torch.arange(count), index, decoder.kernels)
    hidden = decoder.hidden(torch.arange(3, 3 + count), context)
    return decoder.head.logits(hidden, torch.ones(count))


def main(address: str, folder: Path, family: str, stop_after: int) -> None:
    torch.set_num_threads(1)
    receiver = Receiver(make_decoder(family), memory_bytes=SPEC.memory_bytes)
    listener = Listener(address)
    end: dict[str, Any] = {}

    def on_commit(echo: Echo) -> None:
        save_file({"logits": logits(receiver.decoder)}, folder / f"logits_{echo.version}.safetensors")
        if echo.version == stop_after:
            os._exit(7)

    try:
        (folder / "partial").write_text(listener.address)
        (folder / "partial").rename(folder / "address")
        channel = listener.accept(Wait.begin("connect", 30), "the trainer")
        serve(channel, receiver, SPEC, on_commit=on_commit, log=lambda line: None)
        assert receiver.scales is not None
        end = {"digest": receiver.decoder.digest(), "k": receiver.scales.k.tolist()}
    except (UserError, ContractError) as error:
        end = {"error": str(error)}
    listener.close()
    (folder / "end.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
