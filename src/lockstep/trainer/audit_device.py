"""The audit of a flow on a GPU: prompts around every boundary of the kernels, more schedules, whole vocabularies, a long context.

A few thousand elements prove nothing there (a kernel may differ once in a million), so a flow is asked for over a thousand tokens
under every schedule, and each of them is compared with the training forward: its log-probability, and all its logits.

Next: `audit_logits.py` for the logits of a decode step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice

import torch

from lockstep.kernels.attention_form import PAGE
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Completion, Request, SamplingParams
from lockstep.trainer.audit_flow import FlowAudit, Packing, Schedule
from lockstep.trainer.audit_logits import compare_logits, decoded_log_probs, decoded_logits
from lockstep.trainer.audit_report import Check
from lockstep.trainer.microbatch import MicroBatch, make_microbatch

LENGTHS = (5, 64, 300, 777, 1500, 63, 2040, 1)
"""Prompt tokens around pages of 64 and, with what is drawn, chunks of 2048 keys."""
SHARED_PREFIX = 192
"""Tokens that all prompts longer than this begin with: whole pages that they share."""
NEW_TOKENS = 48
SAMPLES = ((PAGE, 16), (512, 12), (1 << 30, 6))
"""Of a prompt of up to so many tokens: together some hundred rows, so that decode steps of every size class occur as rows end."""
LONG, LONG_NEW_TOKENS, LONG_SAMPLES = 16_000, 64, 3
EXCERPTS, EXCERPT_TOKENS = 4, 64
REPEATS = 25
"""Training forwards of the same rows. A race is rare: one that was found late spoiled a third of them."""


def lengthened(prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """These prompts, and prompts of `LENGTHS` made of their tokens."""
    return [*prompts, *(_prompt(prompts, length) for length in LENGTHS)]


def random_prompts(vocabulary: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts of `LENGTHS` of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    count = SHARED_PREFIX + sum(LENGTHS)
    ids = torch.randint(vocabulary, (count,), generator=generator).tolist()
    prompts, start = [], SHARED_PREFIX
    for length in LENGTHS:
        own, start = ids[start : start + length], start + length
        prompts.append(tuple(_with_prefix(ids, own)))
    return prompts


def _prompt(source: Sequence[tuple[int, ...]], length: int) -> tuple[int, ...]:
    stream = list(chain.from_iterable(source))
    offset = length % len(stream)
    return tuple(_with_prefix(list(islice(cycle(stream), SHARED_PREFIX)), _cycled(stream, offset, length)))


def _cycled(stream: Sequence[int], offset: int, length: int) -> list[int]:
    return list(islice(cycle(stream), offset, offset + length))


def _with_prefix(prefix: Sequence[int], own: list[int]) -> list[int]:
    return [*prefix[:SHARED_PREFIX], *own[SHARED_PREFIX:]] if len(own) > SHARED_PREFIX else own


class DeviceAudit(FlowAudit):
    """`FlowAudit` for kernels of a GPU."""

    def ask(self) -> list[Request]:
        """Fewer samples of longer prompts; every third prompt at a lower temperature."""
        asked = []
        for i, prompt in enumerate(self.prompts):
            samples = next(count for longest, count in SAMPLES if len(prompt) <= longest)
            params = SamplingParams(NEW_TOKENS, self.temperature if i % 3 else 0.8 * self.temperature)
            asked.append(Request(prompt, i, samples, params))
        return asked

    def schedules(self) -> list[Schedule]:
        """See `FlowAudit.schedules`."""
        longest = max(len(p) for p in self.prompts) + NEW_TOKENS
        rows = sum(r.samples for r in self.requests)
        everything = sum((r.samples + 1) * (len(r.prompt_ids) + NEW_TOKENS + PAGE) for r in self.requests)
        base = RolloutSpec(max_running=rows, max_batched_tokens=16_384, page_size=PAGE, prefix_cache=False)
        few = replace(base, max_running=5, max_batched_tokens=256, window=3, prefix_cache=True)
        return [
            Schedule("all together", base, everything),
            Schedule("five at a time, prefill in chunks", few, everything),
            Schedule("no CUDA graphs, reversed", replace(base, cuda_graphs=False), everything, reverse=True),
            Schedule("one step a window", replace(base, window=1), everything),
            Schedule("again, in the same engine", base, everything, warm=True),
            Schedule(
                "memory for little more than one (preemption)",
                replace(base, max_running=min(rows, 12)),
                longest + 4 * PAGE,
                must="preemptions",
            ),
            Schedule(
                "prompts from the prefix cache",
                replace(base, prefix_cache=True),
                everything,
                warm=True,
                must="recalled",
            ),
        ]

    def one_by_one(self, schedule: Schedule) -> list[Completion]:
        """In one engine, the longest prompt first, so that its steps are captured once."""
        engine = self.engine(schedule)
        found: list[Completion] = []
        for request in sorted(self.requests, key=lambda r: -len(r.prompt_ids)):
            found += self._drawn(engine, [request])
        return sorted(found, key=lambda c: (c.prompt_index, c.sample_index))

    def excerpts(self) -> list[tuple[int, ...]]:
        """A few, and their beginnings: the tape holds every operation of the forward pass."""
        return [p[:EXCERPT_TOKENS] for p in self.prompts[-EXCERPTS:]]

    def further_checks(self, samples: list[Completion], culprit: str) -> Iterator[Check]:
        """The forward that training differentiates, the same one many times, whole vocabularies, the long context."""
        yield self.with_gradient(samples, culprit)
        yield self.repeated(samples, culprit)
        yield from self.whole_vocabularies(samples, culprit)
        yield from self.long_context(culprit)

    def with_gradient(self, samples: list[Completion], culprit: str) -> Check:
        """The forward pass that keeps what a backward pass needs; layers keep their input only."""
        micro = self.packed(samples)
        held, self.decoder.checkpointing = self.decoder.checkpointing, True
        with torch.enable_grad():
            logp_N = micro.log_probs(self.decoder, self.scales)[0].detach()
        self.decoder.checkpointing = held
        different = int((logp_N != micro.rollout_N).sum())
        name, count = "training forward, with gradient", logp_N.numel()
        return Check(self.name, name, count, different, culprit if different else "", rows=count)

    @torch.no_grad()
    def repeated(self, samples: list[Completion], culprit: str) -> Check:
        """One pack, scored again and again."""
        micro, different = self.packed(samples), 0
        for _ in range(REPEATS):
            different += int((micro.log_probs(self.decoder, self.scales)[0] != micro.rollout_N).sum())
        compared = REPEATS * micro.rollout_N.numel()
        name = f"training forward, {REPEATS} times"
        return Check(self.name, name, compared, different, culprit if different else "")

    def packed(self, samples: list[Completion]) -> MicroBatch:
        """All samples side by side, prompts shared."""
        return make_microbatch(
            samples, self.group, share_prompts=True, kernels=self.decoder.kernels, device=self.decoder.device
        )

    @torch.no_grad()
    def whole_vocabularies(self, samples: list[Completion], culprit: str) -> Iterator[Check]:
        """The samples decoded again, token by token: every logit of every step against the training forward's, and the step's
        log-probabilities against the engine's."""
        logits_NV = decoded_logits(self.decoder, samples, self.scales)
        micro = self.packed(samples)
        logp_N = decoded_log_probs(logits_NV, micro)
        different = int((logp_N != micro.rollout_N).sum())
        name = "decode steps of their own: log-probabilities"
        yield Check(self.name, name, logp_N.numel(), different, culprit if different else "")
        hidden_TK = micro.hidden(self.decoder, self.scales)
        different = compare_logits(self.decoder, hidden_TK[micro.rows_N], logits_NV)
        name = "decode steps, all logits: training forward"
        yield Check(
            self.name, name, logits_NV.numel(), different, culprit if different else "", len(logits_NV)
        )

    def long_context(self, culprit: str) -> Iterator[Check]:
        """Samples of one long prompt: prefilled at once and in chunks, and scored."""
        room = self.decoder.spec.max_position - LONG_NEW_TOKENS - 1
        prompt = tuple(_cycled(list(chain.from_iterable(self.prompts)), 0, min(LONG, room)))
        params = SamplingParams(LONG_NEW_TOKENS, self.temperature)
        requests = [Request(prompt, 0, LONG_SAMPLES, params)]
        tokens = LONG_SAMPLES * (len(prompt) + LONG_NEW_TOKENS + PAGE)
        base = RolloutSpec(
            max_running=LONG_SAMPLES,
            max_batched_tokens=len(prompt) + LONG_SAMPLES,
            page_size=PAGE,
            prefix_cache=False,
        )
        first = self.generate(Schedule("", base, tokens), requests)[0]
        one = replace(base, max_running=1, max_batched_tokens=4096, cuda_graphs=False)
        schedule = Schedule(f"context of {len(prompt):,}, one by one, in chunks", one, tokens)
        yield self.same_schedule(schedule, first, requests, culprit)
        yield self.same_log_probs(Packing(f"context of {len(prompt):,}", [first]), culprit)

    def _drawn(self, engine: EmbeddedEngine, requests: Sequence[Request]) -> list[Completion]:
        return engine.generate(requests, seed=self.seed, step=0, expected_version=1)
