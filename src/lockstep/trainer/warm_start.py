"""Supervised warm start: a few steps of imitation on the task's own answers, in the same flow as what follows."""

from __future__ import annotations

import torch

from lockstep.data.order import permutation
from lockstep.data.sft import targets
from lockstep.data.tokenize import encode_prompt, encode_target
from lockstep.errors import ConfigError
from lockstep.observe.logger import RunLogger
from lockstep.rollout.types import Completion, SamplingParams
from lockstep.trainer.optimizer import Optimizer
from lockstep.trainer.setup import Parts
from lockstep.trainer.spec import OptimSpec


def warm_start(parts: Parts, logger: RunLogger) -> None:
    """Trains the decoder on (prompt, answer) pairs, the loss being the mean -log p over answer tokens."""
    spec = parts.spec.warm_start
    if spec.steps == 0:
        return
    examples = _examples(parts)
    optimizer = Optimizer(
        parts.decoder.named_parameters(), OptimSpec(lr=spec.lr, warmup_steps=spec.warmup_steps), spec.steps
    )
    size = min(spec.batch, len(examples))
    loss = 0.0
    for step in range(spec.steps):
        parts.decoder.refresh(0)
        per_epoch = max(len(examples) // size, 1)
        order = permutation(parts.spec.seed, step // per_epoch, len(examples))
        start = step % per_epoch * size
        chosen = [examples[int(i)] for i in order[start : start + size]]
        micro = parts.microbatch(chosen, share_prompts=False)
        logp_N, _ = micro.log_probs(parts.decoder, None)
        objective = -logp_N.mean()
        objective.backward()
        optimizer.step()
        loss = float(objective.detach())
        if (step + 1) % 50 == 0 or step + 1 == spec.steps:
            logger.note(f"warm start {step + 1}/{spec.steps}: loss {loss:.4f}")


def _examples(parts: Parts) -> list[Completion]:
    spec = parts.spec.warm_start
    if not parts.stop_ids:
        raise ConfigError("the model has no end token to imitate", where="warm_start")
    data = spec.data or parts.spec.data
    params = SamplingParams(parts.spec.rollout.max_new_tokens)
    found = []
    for target in targets(data, parts.spec.seed):
        prompt = encode_prompt(parts.tokenizer, target.prompt, data.chat_template_args)
        ids = encode_target(parts.tokenizer, target.completion, parts.stop_ids[0])
        zeros = tuple(torch.zeros(len(ids)).tolist())
        found.append(Completion(tuple(prompt), target.index, 0, tuple(ids), zeros, "stop", (), 0, params))
    return found
