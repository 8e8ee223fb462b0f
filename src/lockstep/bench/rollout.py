"""Rollout throughput of the embedded engine on random weights, and vLLM's beside it in the same call.

The same prompts (random token ids), the same lengths (end tokens are ignored), the sampled token's log-probability wanted,
temperature 1. A first pass compiles and captures; the second is measured. The byte floor is what a decode step must read at
the measured copy bandwidth: every weight once, and each sequence's keys and values once.

Next: `vllm_side.py` for the other engine, `../rollout/decode_loop.py` for ours.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lockstep.bench.goals import Goal
from lockstep.bench.random_model import random_decoder
from lockstep.bench.shapes import preset
from lockstep.bench.timing import Ceilings
from lockstep.errors import UserError
from lockstep.kernels.table import select
from lockstep.models.decoder import Decoder
from lockstep.models.hf_config import write_config
from lockstep.models.spec import ModelSpec
from lockstep.nn.kv_scales import KVScales
from lockstep.numerics.flow import Flow, bf16_flow, fp8_flow
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Request, SamplingParams

FLOWS: dict[str, Callable[[], Flow]] = {
    "fp8+kv8": lambda: fp8_flow(kv_fp8=True),
    "fp8": fp8_flow,
    "bf16": bf16_flow,
}
VLLM_TIMEOUT = 420
"""Seconds for one configuration of the other engine, its start included."""


@dataclass(frozen=True)
class Work:
    """What is asked for: prompts of a length, one completion each, of a length."""

    prompts: int
    prompt_tokens: int
    new_tokens: int

    @property
    def name(self) -> str:
        return f"{self.prompts} x ({self.prompt_tokens} + {self.new_tokens})"

    def ids(self, vocabulary: int) -> list[list[int]]:
        """The prompts; both engines get these."""
        draw = random.Random(0)
        return [
            [draw.randrange(1000, vocabulary - 1000) for _ in range(self.prompt_tokens)]
            for _ in range(self.prompts)
        ]


@dataclass(frozen=True)
class Throughput:
    """One engine under one configuration. floor_tokens_s: what the byte floor would allow for decoding alone."""

    engine: str
    flow: str
    work: str
    seconds: float
    tokens_s: float
    floor_tokens_s: float = 0.0
    preemptions: int = 0

    def line(self) -> str:
        """For a terminal."""
        share = (
            f", {100 * self.tokens_s / self.floor_tokens_s:.0f} % of the byte floor"
            if self.floor_tokens_s
            else ""
        )
        return f"{self.engine:9} {self.flow:8} {self.work:22} {self.seconds:8.2f} s {self.tokens_s:10,.0f} tokens/s{share}"


def run_rollout(
    ceilings: Ceilings,
    model: str,
    work: Work,
    flows: Sequence[str],
    *,
    vllm: bool,
    say: Callable[[str], None],
) -> list[Throughput]:
    """Ours under every flow, then vLLM under those that it has, if asked for."""
    spec = preset(model)
    found = []
    for name in flows:
        found.append(ours(ceilings, spec, work, name))
        say(found[-1].line())
    for name in flows if vllm else ():
        found.append(theirs(spec, work, name))
        say(found[-1].line())
    return found


def ours(ceilings: Ceilings, spec: ModelSpec, work: Work, name: str) -> Throughput:
    """The embedded engine; leaves the GPU empty."""
    device = torch.device("cuda")
    decoder = random_decoder(spec, FLOWS[name](), select("hopper"), device)
    rollout = RolloutSpec(
        max_running=work.prompts,
        max_batched_tokens=max(16384, work.prompts),
        page_size=64,
        prefix_cache=False,
    )
    tokens = work.prompts * (work.prompt_tokens + work.new_tokens + 128)
    engine = EmbeddedEngine(decoder, rollout, cache_tokens=tokens)
    if decoder.flow.kv_fp8:
        engine.set_kv_scales(flat_scales(decoder))
    params = SamplingParams(work.new_tokens)
    asked = [Request(tuple(p), i, 1, params) for i, p in enumerate(work.ids(spec.vocab_size))]
    seconds, drawn = 0.0, 0
    for attempt in range(2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        completions = engine.generate(asked, seed=attempt, step=attempt, expected_version=1)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        drawn = sum(len(c.token_ids) for c in completions)
    floor = floor_seconds(decoder, work, ceilings.copy_gbps)
    result = Throughput(
        "lockstep", name, work.name, seconds, drawn / seconds, drawn / floor, engine.preemptions
    )
    del engine, decoder
    gc.collect()
    torch.cuda.empty_cache()
    return result


def theirs(spec: ModelSpec, work: Work, name: str) -> Throughput:
    """vLLM in a process of its own. Raises UserError with its last lines when it fails."""
    job = {"model": hf_shape(spec), "work": asdict(work), "flow": name}
    environment = os.environ | {"LOCKSTEP_VLLM_JOB": json.dumps(job)}
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.bench.vllm_side"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=VLLM_TIMEOUT,
        check=False,
    )
    marked = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not marked:
        last = " | ".join((done.stderr or done.stdout).strip().splitlines()[-4:])
        raise UserError("vLLM did not finish", where=f"bench rollout, {name}", why=last)
    result = json.loads(marked[-1].removeprefix("RESULT "))
    return Throughput(
        f"vllm {result['version']}", name, work.name, result["seconds"], result["tokens"] / result["seconds"]
    )


def flat_scales(decoder: Decoder) -> KVScales:
    """KV scales for random weights, where any will do."""
    shape = (decoder.spec.num_layers, decoder.spec.num_kv_heads)
    return KVScales(torch.full(shape, 0.05), torch.full(shape, 0.03), 1)


def floor_seconds(decoder: Decoder, work: Work, copy_gbps: float) -> float:
    """Time to read what decoding reads: weights once a step, keys and values of every sequence once a step."""
    spec, flow = decoder.spec, decoder.flow
    embedding = decoder.model.embed_tokens.working.nbytes
    weights = sum(m.working.nbytes for _, m in decoder.working()) - (0 if spec.tie_embeddings else embedding)
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * (1 if flow.kv_fp8 else 2)
    keys = sum(work.prompt_tokens + i for i in range(work.new_tokens)) * work.prompts
    return (weights * work.new_tokens + token * keys) / (copy_gbps * 1e9)


def hf_shape(spec: ModelSpec) -> dict[str, Any]:
    """config.json of the shape, as other engines read it."""
    return dict(write_config(spec))


def goals(found: Sequence[Throughput], model: str, work: Work) -> list[Goal]:
    """Which of the project's goals these figures answer."""
    if model != "qwen3-8b":
        return []
    ids = {(64, 512, 1024): ("C3", "C5a"), (256, 512, 2048): ("C4", "C5b"), (8, 512, 16384): ("C8", "")}
    key = (work.prompts, work.prompt_tokens, work.new_tokens)
    return list(_goals(found, *ids[key])) if key in ids else []


def _goals(found: Sequence[Throughput], rivals: str, own: str) -> Iterator[Goal]:
    speed = {(t.engine.split()[0], t.flow): t.tokens_s for t in found}
    best = speed.get(("lockstep", "fp8+kv8"))
    if best is None:
        return
    wanted = {"C3": (1.4, 1.7), "C4": (1.25, 2.0), "C8": (1.2, 0.0)}[rivals]
    for letter, flow, goal in zip("ab", ("fp8+kv8", "bf16"), wanted, strict=True):
        other = speed.get(("vllm", flow))
        if other is not None and goal:
            yield Goal(rivals + (letter if wanted[1] else ""), best / other, goal, "x vLLM, same call")
    bf16 = speed.get(("lockstep", "bf16"))
    if own and bf16 is not None:
        yield Goal(own, best / bf16, {"C5a": 1.4, "C5b": 1.8}[own], "x our bf16")
