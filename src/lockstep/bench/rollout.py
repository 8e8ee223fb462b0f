"""Rollout throughput of the embedded engine on random weights, and vLLM's beside it in the same call.

The same prompts (random token ids), the same lengths (end tokens are ignored), the sampled token's log-probability wanted,
temperature 1, top-p and top-k where asked for. A short pass compiles and captures; the second is measured. Each side makes its
model once a flow and does all works with it. The byte floor is what a decode step must read at the measured copy bandwidth: every
weight once, and each sequence's keys and values once.

Next: `vllm_side.py` for the other engine, `price.py` for what exactness costs, `../rollout/decode_loop.py` for ours.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lockstep.bench.goals import Goal
from lockstep.bench.profile import profile
from lockstep.bench.random_model import random_decoder
from lockstep.bench.shapes import preset
from lockstep.bench.sides import Say
from lockstep.bench.timing import Ceilings
from lockstep.errors import ConfigError, UserError
from lockstep.kernels.attention_form import PAGE
from lockstep.kernels.table import Kernels, select
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
VLLM_TIMEOUT = 480
"""Seconds for the other engine under one flow, its start included."""
GOALS: dict[tuple[str, int, int, int], tuple[tuple[str, str, str, float], ...]] = {
    ("qwen3-8b", 64, 512, 1024): (
        ("C3a", "vllm", "fp8+kv8", 1.4),
        ("C3b", "vllm", "bf16", 1.7),
        ("C5a", "lockstep", "bf16", 1.4),
    ),
    ("qwen3-8b", 256, 512, 2048): (
        ("C4a", "vllm", "fp8+kv8", 1.25),
        ("C4b", "vllm", "bf16", 2.0),
        ("C5b", "lockstep", "bf16", 1.8),
    ),
    ("qwen3-8b", 8, 512, 16384): (("C8", "vllm", "fp8+kv8", 1.2),),
    ("qwen3-0.6b", 256, 256, 512): (("C10a", "vllm", "fp8+kv8", 1.0),),
    ("qwen3-1.7b", 256, 256, 512): (("C10b", "vllm", "fp8+kv8", 1.0),),
}
"""By model and work: id, engine and flow that our fp8+kv8 is held against, and what is wanted. C10 is to be reported: its 1.0 is
no promise."""
WARM_TOKENS = 24
"""Tokens of a completion in the pass that compiles and captures."""
PROFILED_TOKENS = 16
"""Decode steps of a profile."""
PLAIN = SamplingParams(1)
"""From the whole softmax. Lengths are the work's."""


@dataclass(frozen=True)
class Work:
    """What is asked for: prompts of a length, one completion each, of a length."""

    prompts: int
    prompt_tokens: int
    new_tokens: int

    @classmethod
    def parse(cls, text: str) -> Work:
        """Of text such as 64x512+1024. Raises ConfigError."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)\+([1-9]\d*)", text.strip())
        if match is None:
            raise ConfigError(
                f"{text!r} is no work",
                where="--work",
                fix="PROMPTSxPROMPT_TOKENS+NEW_TOKENS, as in 64x512+1024",
            )
        return cls(*map(int, match.groups()))

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
    """One engine under one configuration. floor_tokens_s: what the byte floor would allow for decoding alone; host_us_step:
    time in which the host worked, by decode step (it is hidden as long as a step takes longer)."""

    engine: str
    flow: str
    work: str
    seconds: float
    tokens_s: float
    floor_tokens_s: float = 0.0
    preemptions: int = 0
    host_us_step: float = 0.0

    def line(self) -> str:
        """For a terminal."""
        own = ""
        if self.floor_tokens_s:
            share = 100 * self.tokens_s / self.floor_tokens_s
            own = f", {share:.0f} % of the byte floor, host busy {self.host_us_step:.0f} us a step"
        return f"{self.engine:12} {self.flow:8} {self.work:22} {self.seconds:8.2f} s {self.tokens_s:10,.0f} tokens/s{own}"


def run_rollout(
    ceilings: Ceilings,
    model: str,
    works: Sequence[Work],
    flows: Sequence[str],
    *,
    vllm: bool,
    told: Say | None = None,
    params: SamplingParams = PLAIN,
) -> Iterator[Throughput]:
    """Under every flow, ours and then, if asked for, vLLM. told: gets the profile of our decode steps. params: how tokens are
    drawn."""
    spec = preset(model)
    for name in flows:
        yield from ours(ceilings, spec, works, name, told=told, params=params)
        if vllm:
            yield from theirs(spec, works, name, params)


def ours(
    ceilings: Ceilings,
    spec: ModelSpec,
    works: Sequence[Work],
    name: str,
    kernels: Kernels | None = None,
    label: str = "lockstep",
    told: Say | None = None,
    params: SamplingParams = PLAIN,
) -> Iterator[Throughput]:
    """The embedded engine; leaves the GPU empty."""
    decoder = random_decoder(spec, FLOWS[name](), kernels or select("hopper"), torch.device("cuda"))
    for work in works:
        yield _ours(ceilings, decoder, work, name, label, params)
        gc.collect()
        if told is not None:
            torch.cuda.empty_cache()  # the next engine asks the GPU what is free
            for line in decode_profile(decoder, work, params):
                told(line)
            gc.collect()
        torch.cuda.empty_cache()
    del decoder
    gc.collect()
    torch.cuda.empty_cache()


def _ours(
    ceilings: Ceilings, decoder: Decoder, work: Work, name: str, label: str, params: SamplingParams
) -> Throughput:
    engine = _engine(decoder, work)
    prompts = work.ids(decoder.spec.vocab_size)
    seconds, drawn, host = 0.0, 0, 0.0
    for attempt, new_tokens in enumerate((min(WARM_TOKENS, work.new_tokens), work.new_tokens)):
        asked = _requests(prompts, replace(params, max_tokens=new_tokens))
        engine.steps, engine.waited = 0, 0.0
        torch.cuda.synchronize()
        begun = time.perf_counter()
        completions = engine.generate(asked, seed=attempt, step=attempt, expected_version=1)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        drawn = sum(len(c.token_ids) for c in completions)
        host = (seconds - engine.waited) / max(engine.steps, 1) * 1e6
    floor = floor_seconds(decoder, work, ceilings.copy_gbps)
    return Throughput(
        label, name, work.name, seconds, drawn / seconds, drawn / floor, engine.preemptions, round(host, 1)
    )


def decode_profile(decoder: Decoder, work: Work, params: SamplingParams = PLAIN) -> list[str]:
    """Where decode steps spend their time half-way through the work. Prompts are as long as sequences are then, and all but their
    last token come from the prefix cache, so that hardly anything else is in it."""
    keys = (work.prompt_tokens + work.new_tokens // 2) // PAGE * PAGE + 1
    longer = Work(work.prompts, keys, PROFILED_TOKENS)
    engine = _engine(decoder, longer, prefix_cache=True)
    asked = _requests(longer.ids(decoder.spec.vocab_size), replace(params, max_tokens=PROFILED_TOKENS))

    def generate() -> None:
        engine.generate(asked, seed=0, step=0, expected_version=1)

    generate()
    return profile(f"{PROFILED_TOKENS} steps of {work.prompts} rows at {keys} keys", generate)


def _engine(decoder: Decoder, work: Work, *, prefix_cache: bool = False) -> EmbeddedEngine:
    """One that holds all of the work, if there is memory for it."""
    rollout = RolloutSpec(
        max_running=work.prompts,
        max_batched_tokens=max(16384, work.prompts),
        page_size=PAGE,
        prefix_cache=prefix_cache,
    )
    tokens = work.prompts * (work.prompt_tokens + work.new_tokens + 2 * PAGE)
    engine = EmbeddedEngine(decoder, rollout, cache_tokens=min(tokens, _free_tokens(decoder)))
    if decoder.flow.kv_fp8:
        engine.set_kv_scales(flat_scales(decoder))
    return engine


def _requests(prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Request]:
    return [Request(tuple(p), i, 1, params) for i, p in enumerate(prompts)]


def _free_tokens(decoder: Decoder) -> int:
    """Tokens of keys and values that fit beside the model, with room for one pass's activations."""
    spec = decoder.spec
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * (1 if decoder.flow.kv_fp8 else 2)
    free, _ = torch.cuda.mem_get_info()
    return max(int((free - 6e9) / token), 1) // PAGE * PAGE


def theirs(
    spec: ModelSpec, works: Sequence[Work], name: str, params: SamplingParams = PLAIN
) -> list[Throughput]:
    """vLLM in a process of its own. Raises UserError with its last lines when it fails."""
    job = {
        "model": hf_shape(spec), "works": [asdict(w) for w in works], "flow": name, "warm": WARM_TOKENS,
        "top_p": params.top_p, "top_k": params.top_k,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.bench.vllm_side"],
        env=os.environ | {"LOCKSTEP_VLLM_JOB": json.dumps(job)},
        capture_output=True,
        text=True,
        timeout=VLLM_TIMEOUT,
        check=False,
    )
    marked = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or len(marked) != len(works):
        last = " | ".join((done.stderr or done.stdout).strip().splitlines()[-4:])
        raise UserError("vLLM did not finish", where=f"bench rollout, {name}", why=last)
    found = []
    for work, line in zip(works, marked, strict=True):
        result = json.loads(line.removeprefix("RESULT "))
        speed = result["tokens"] / result["seconds"]
        found.append(Throughput(f"vllm {result['version']}", name, work.name, result["seconds"], speed))
    return found


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


def goals(found: Sequence[Throughput], model: str, works: Sequence[Work]) -> list[Goal]:
    """Which of the project's goals these figures answer."""
    return [goal for work in works for goal in _goals(found, model, work)]


def _goals(found: Sequence[Throughput], model: str, work: Work) -> Iterator[Goal]:
    speed = {(t.engine.split()[0], t.flow): t.tokens_s for t in found if t.work == work.name}
    best = speed.get(("lockstep", "fp8+kv8"))
    if best is None:
        return
    for id, engine, flow, goal in GOALS.get((model, work.prompts, work.prompt_tokens, work.new_tokens), ()):
        other = speed.get((engine, flow))
        if other is not None:
            unit = "x vLLM, same call" if engine == "vllm" else "x our bf16"
            yield Goal(id, best / other, goal, f"{unit} ({flow})")
