"""The audit of one flow: samples under several schedules, their scores under several packings, operations row by row.

`FlowAudit` is sized for a CPU; `audit_device.py` asks more of a GPU. Next: `audit_tape.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lockstep.models.decoder import Decoder
from lockstep.nn.kv_scales import AmaxCollector, KVScales
from lockstep.rollout.calibration import prompt_context
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Completion, Request, SamplingParams
from lockstep.trainer.audit_report import Check
from lockstep.trainer.audit_tape import Tape
from lockstep.trainer.microbatch import make_microbatch

PROMPTS, SAMPLES, NEW_TOKENS = 4, 3, 12


@dataclass(frozen=True)
class Schedule:
    """How an engine is driven. reverse: requests in reverse order. warm: twice, the second time over a filled prefix cache.
    must: what has to have happened for the comparison to mean anything: a counter of the engine."""

    name: str
    rollout: RolloutSpec
    cache_tokens: int
    reverse: bool = False
    warm: bool = False
    must: Literal["", "preemptions", "recalled"] = ""


@dataclass(frozen=True)
class Packing:
    """How samples are laid side by side in the training forward: `batches` of them, prompts of a group shared or repeated."""

    name: str
    batches: list[list[Completion]]
    share: bool = True


class FlowAudit:
    """All checks of one flow. scales: KV scales, where it has FP8 keys and values."""

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        prompts: Sequence[tuple[int, ...]],
        scales: KVScales | None,
        *,
        seed: int = 0,
        temperature: float = 1.0,
    ) -> None:
        self.name, self.decoder, self.prompts, self.seed = name, decoder, list(prompts), seed
        self.group, self.temperature = decoder.spec.query_group, temperature
        self.scales = None if scales is None else scales.to(decoder.device)
        self.requests = self.ask()

    def ask(self) -> list[Request]:
        """What the engine is asked for, under every schedule."""
        params = SamplingParams(NEW_TOKENS, self.temperature)
        return [Request(p, i, SAMPLES, params) for i, p in enumerate(self.prompts)]

    def schedules(self) -> list[Schedule]:
        """The first one is what the others are compared with."""
        longest = max(len(p) for p in self.prompts) + NEW_TOKENS
        everything = PROMPTS * (SAMPLES + 1) * (longest + 64)
        base = RolloutSpec(max_running=PROMPTS * SAMPLES)
        few = replace(base, max_running=3, max_batched_tokens=5)
        return [
            Schedule("all together", base, everything),
            Schedule("three at a time, prefill in chunks", few, everything),
            Schedule("pages of 7 tokens", replace(base, page_size=7), everything),
            Schedule(
                "memory for little more than one (preemption)", replace(base, page_size=4), longest + 12
            ),
        ]

    def packings(self, samples: list[Completion]) -> list[Packing]:
        """The training forwards that score the samples."""
        return [
            Packing("prompts shared", [samples]),
            Packing("prompts repeated", [samples], share=False),
            Packing("reversed order", [samples[::-1]], share=False),
            Packing("each sample alone", [[c] for c in samples]),
        ]

    def checks(self) -> Iterator[Check]:
        """Operations first, so that what fails later has a name."""
        operation = self.operations()
        yield operation
        culprit = operation.culprit
        schedules = self.schedules()
        first = self.generate(schedules[0], self.requests)[0]  # without the engine, whose cache is large
        for schedule in schedules:
            yield self.same_schedule(schedule, first, self.requests, culprit)
        yield self.same_samples("samples: one prompt by one", first, self.one_by_one(schedules[0]), culprit)
        for packing in self.packings(first):
            yield self.same_log_probs(packing, culprit)
        yield from self.further_checks(first, culprit)

    def further_checks(self, samples: list[Completion], culprit: str) -> Iterator[Check]:
        """What a kind of machine adds."""
        yield from ()

    def engine(self, schedule: Schedule) -> EmbeddedEngine:
        """An engine of this schedule."""
        engine = EmbeddedEngine(self.decoder, schedule.rollout, cache_tokens=schedule.cache_tokens)
        if self.scales is not None:
            engine.set_kv_scales(self.scales)
        return engine

    def generate(
        self, schedule: Schedule, requests: Sequence[Request]
    ) -> tuple[list[Completion], EmbeddedEngine]:
        """Samples under one schedule, in the order of prompts, and the engine that drew them."""
        engine = self.engine(schedule)
        asked = list(requests)[::-1] if schedule.reverse else list(requests)
        for _ in range(2 if schedule.warm else 1):
            found = engine.generate(asked, seed=self.seed, step=0, expected_version=1)
        return sorted(found, key=lambda c: (c.prompt_index, c.sample_index)), engine

    def one_by_one(self, schedule: Schedule) -> list[Completion]:
        """The same samples, each prompt alone with the engine."""
        return [c for request in self.requests for c in self.generate(schedule, [request])[0]]

    def same_schedule(
        self, schedule: Schedule, first: list[Completion], requests: Sequence[Request], culprit: str
    ) -> Check:
        """Samples of another schedule against the first one's."""
        name = f"samples: {schedule.name}"
        other, engine = self.generate(schedule, requests)
        if schedule.must and not getattr(engine, schedule.must):
            return Check(self.name, name, 0, 0, f"the engine counted no {schedule.must}")
        return self.same_samples(name, first, other, culprit)

    def same_samples(
        self, name: str, first: list[Completion], other: list[Completion], culprit: str
    ) -> Check:
        """Token ids and log-probabilities of both."""
        pairs = list(zip(first, other, strict=True))
        compared = sum(len(a.token_ids) for a, _ in pairs)
        different = 0
        for a, b in pairs:
            same = sum(
                x == y
                for x, y in zip(zip(a.token_ids, a.logprobs), zip(b.token_ids, b.logprobs), strict=False)
            )
            different += max(len(a.token_ids), len(b.token_ids)) - same
        return Check(self.name, name, compared, different, culprit if different else "")

    @torch.no_grad()
    def same_log_probs(self, packing: Packing, culprit: str) -> Check:
        """The training forward's log-probabilities against the rollout's."""
        compared = different = 0
        for completions in packing.batches:
            micro = make_microbatch(
                completions,
                self.group,
                share_prompts=packing.share,
                kernels=self.decoder.kernels,
                device=self.decoder.device,
            )
            logp_N, _ = micro.log_probs(self.decoder, self.scales)
            compared += logp_N.numel()
            different += int((logp_N != micro.rollout_N).sum())
        name = f"training forward, {packing.name}"
        return Check(self.name, name, compared, different, culprit if different else "", rows=compared)

    def excerpts(self) -> list[tuple[int, ...]]:
        """Prompts whose every operation is compared."""
        return self.prompts

    @torch.no_grad()
    def operations(self) -> Check:
        """Every operation's rows: prompts side by side against each prompt, and each first token, alone."""
        prompts = self.excerpts()
        together = self.record(prompts)
        names: list[str] = []
        counts: list[Tensor] = []
        compared = 0
        starts = torch.tensor([0, *map(len, prompts)]).cumsum(0).tolist()
        pieces = [(s, p) for s, p in zip(starts, prompts, strict=False)]
        for start, tokens in [*pieces, *((s, p[:1]) for s, p in pieces)]:
            rows = slice(start, start + len(tokens))
            for (name, many), (_, alone) in zip(together, self.record([tokens]), strict=True):
                names.append(name)
                counts.append((many[rows] != alone).sum())
                compared += alone.numel()
        bad = torch.stack(counts).tolist()
        culprit = next((name for name, count in zip(names, bad, strict=True) if count), "")
        return Check(self.name, "operations, row by row", compared, sum(bad), culprit)

    def record(self, prompts: Sequence[tuple[int, ...]]) -> list[tuple[str, Tensor]]:
        """(name, value by row) of every operation of a forward pass, in order."""
        decoder, device = self.decoder, self.decoder.device
        collector = AmaxCollector(decoder.spec.num_layers, decoder.spec.num_kv_heads, device)
        decoder.model.rope.reserve(max(map(len, prompts)), device)
        ids, context = prompt_context(prompts, self.group, decoder.kernels, collector, device)
        context.scales = self.scales  # type: ignore[attr-defined]
        with Tape(decoder.kernels, context) as tape:
            hidden = decoder.hidden(ids, context)
            logits = decoder.head.logits(hidden, torch.ones(len(hidden), device=device))
            tape.note("log_normalizer (output head)", decoder.kernels.log_normalizer(logits))
        return tape.values
