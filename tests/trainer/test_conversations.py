"""Conversations of several turns, from the engine to the optimizer: sampled tokens have the trainer's bits in a unified flow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.data.turns import Conversation, Conversations
from lockstep.numerics.flow import FlowSpec
from lockstep.rollout.types import Completion, SamplingParams
from lockstep.trainer.microbatch import make_microbatch
from lockstep.trainer.sample import Expected, Sample, admit
from lockstep.trainer.spec import RunSpec, UpdateSpec

MakeSpec = Callable[..., RunSpec]
OpenTrainer = Callable[[RunSpec], Any]
KEEPS_ONE = (
    "{{ bos_token }}{% for m in messages %}{% if not (m.role == 'assistant' and loop.index0 < messages | length - 4) %}"
    "{{ '<' + m.role + '>' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""A template that forgets all but the last two answers."""


def play(trainer: Any, chats: Conversations, params: SamplingParams, turns: int) -> list[Conversation]:
    """Six conversations in two groups, answered by the engine, each turn of all of them in one batch."""
    talks = [
        chats.start([{"role": "user", "content": f"{g}+2="}], prompt_index=g, sample_index=s)
        for g in range(2)
        for s in range(3)
    ]
    for turn in range(turns):
        completions = trainer.parts.engine.generate(
            [t.request(params) for t in talks], seed=1, step=0, expected_version=trainer.progress.version
        )
        for talk, completion in zip(talks, completions, strict=True):
            talk.take(completion)
            if turn + 1 < turns:
                talk.add({"role": "user", "content": f"{turn}?"})
    return talks


def to_samples(trainer: Any, talks: list[Conversation]) -> list[Sample]:
    """What passes the door, with a reward for each conversation that its segments share."""
    example = trainer.parts.stream.take(0, 1)[0].example
    progress = trainer.progress
    expected = Expected(progress.version, progress.scale_version, trainer.parts.model_spec.vocab_size)
    completions, dropped = admit([c for t in talks for c in t.samples()], expected, "stop")
    assert not dropped
    samples = [Sample(c, example, c.prompt_index, trainer.parts.text) for c in completions]
    for sample in samples:
        sample.advantage = (-1.0, 0.25, 0.75)[sample.completion.sample_index]
    return samples


PLAIN = SamplingParams(5, 1.2, stop_token_ids=frozenset({2}))
TRUNCATED = replace(PLAIN, top_p=0.9, top_k=12, min_p=0.01, max_kept=12)


@pytest.mark.parametrize("params", [PLAIN, TRUNCATED], ids=["full softmax", "truncated"])
@pytest.mark.parametrize("flow", [FlowSpec("bf16"), FlowSpec("fp8", "fp8")], ids=str)
def test_turns_train_with_the_bits_they_were_sampled_with_case_59(
    make_spec: MakeSpec, open_trainer: OpenTrainer, flow: FlowSpec, params: SamplingParams
) -> None:
    with open_trainer(make_spec(flow)) as trainer:
        trainer.begin()
        chats = Conversations(trainer.parts.tokenizer, trainer.parts.stop_ids)
        samples = to_samples(trainer, play(trainer, chats, params, turns=3))
        assert len(samples) == 6 and all(s.completion.loss_mask is not None for s in samples)
        assert chats.metrics() == {"data/segments": 6.0, "data/rewritten_history": 0.0}
        texts = [trainer.parts.tokenizer.decode(s.completion.token_ids) for s in samples]
        assert all(t.count("<user>") == 2 for t in texts)
        before = [p.detach().clone() for p in trainer.parts.decoder.parameters()]
        metrics = trainer.updater.update(samples, trainer.scales)
        moved = any(not torch.equal(p, q) for p, q in zip(before, trainer.parts.decoder.parameters()))
    assert metrics["mismatch/max_abs_dlogp"] == 0.0 and metrics["mismatch/exact_tokens"] == 1.0
    assert metrics["mismatch/tokens"] == sum(s.completion.trained_tokens for s in samples)
    assert moved and math.isfinite(metrics["optim/grad_norm"])
    assert all(s.max_abs_dlogp == 0.0 for s in samples)


def test_segments_of_a_rewritten_history_train_too_case_60(
    make_spec: MakeSpec, open_trainer: OpenTrainer
) -> None:
    """Prompts differ within a group; micro-batches keep their budget all the same."""
    with open_trainer(make_spec("fp8", update=UpdateSpec(1, max_tokens_per_microbatch=90))) as trainer:
        trainer.begin()
        trainer.parts.tokenizer.chat_template = KEEPS_ONE
        chats = Conversations(trainer.parts.tokenizer, trainer.parts.stop_ids)
        talks = play(trainer, chats, PLAIN, turns=4)
        samples = to_samples(trainer, talks)
        counts = chats.metrics()
        assert counts["data/rewritten_history"] == 6 and counts["data/segments"] == 12 == len(samples)
        assert sum(s.completion.trained_tokens for s in samples) == sum(t.sampled_tokens for t in talks)
        for members in trainer.updater.packs.pack(samples, {}):
            rows = make_microbatch(
                [samples[i].completion for i in members], trainer.parts.group, share_prompts=True
            )
            assert len(rows.ids_T) <= 90
        assert sorted(i for m in trainer.updater.packs.pack(samples, {}) for i in m) == list(range(12))
        metrics = trainer.updater.update(samples, trainer.scales)
    assert metrics["mismatch/max_abs_dlogp"] == 0.0 and metrics["data/microbatches"] > 1
    assert metrics["mismatch/tokens"] == sum(s.completion.trained_tokens for s in samples)


def test_retokenized_turns_would_be_caught_case_59(make_spec: MakeSpec, open_trainer: OpenTrainer) -> None:
    """A sample whose ids aren't those that were sampled stops a unified flow, if only one of them differs."""
    with open_trainer(make_spec("fp8")) as trainer:
        trainer.begin()
        chats = Conversations(trainer.parts.tokenizer, trainer.parts.stop_ids)
        samples = to_samples(trainer, play(trainer, chats, PLAIN, turns=2))
        c: Completion = samples[0].completion
        samples[0].completion = replace(c, token_ids=(c.token_ids[0] ^ 1, *c.token_ids[1:]))
        micro = make_microbatch([s.completion for s in samples], trainer.parts.group, share_prompts=True)
        logp_N, _ = micro.log_probs(trainer.parts.decoder, None)
    assert not torch.equal(logp_N.detach(), micro.rollout_N)
