"""The loss mask: what is masked out is context and nothing else. Gradients against a float64 loss in which masked tokens are
zeroed, for every algorithm; denominators and comparisons over trained tokens only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lockstep.algorithms import resolve
from lockstep.algorithms.spec import AlgorithmSpec, Recipe
from lockstep.numerics.flow import FlowPair, bf16_flow
from lockstep.rollout.spec import RolloutSpec
from lockstep.trainer import setup
from lockstep.trainer.microbatch import make_microbatch
from lockstep.trainer.spec import MismatchSpec, RunSpec, UpdateSpec

MakeSpec = Callable[..., RunSpec]
OpenTrainer = Callable[[RunSpec], Any]
LIMIT = 9
FLOAT32 = replace(bf16_flow(), activation=torch.float32)


def masked(samples: list[Any], seed: int = 0, shift: float = 0.4) -> None:
    """Takes about half of each sample's tokens out of the loss, NaN for their log-probabilities, and moves the others', so that
    importance ratios are not 1 and bounds take effect."""
    generator = torch.Generator().manual_seed(seed)
    for sample in samples:
        c = sample.completion
        mask = (torch.rand(len(c.token_ids), generator=generator) < 0.5).tolist()
        mask[int(torch.randint(len(mask), (), generator=generator))] = True
        moved = torch.tensor(c.logprobs) + shift * (torch.rand(len(mask), generator=generator) - 0.5)
        values = [min(p, 0.0) if m else math.nan for p, m in zip(moved.tolist(), mask)]
        sample.completion = replace(c, loss_mask=tuple(mask), logprobs=tuple(values))
    assert any(not all(s.completion.trained) for s in samples)


def gradient(
    trainer: Any, samples: list[Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, dict[str, float]]:
    """The gradient that one update hands to the optimizer, and the update's metrics."""
    found: list[Tensor] = []
    step = trainer.optimizer.step

    def record() -> Any:
        found.append(flat(trainer))
        return step()

    monkeypatch.setattr(trainer.optimizer, "step", record)
    metrics = trainer.updater.update(samples, trainer.scales)
    monkeypatch.undo()
    assert len(found) == 1
    return found[0], metrics


def flat(trainer: Any) -> Tensor:
    return torch.cat([p.grad.flatten().double() for p in trainer.parts.decoder.parameters()])


def token_losses(logp: Tensor, old: Tensor, mask: Tensor, advantage: float, recipe: Recipe) -> Tensor:
    """The loss of a sample's tokens in float64, straight from the papers, masked ones zeroed."""
    log_ratio = torch.where(mask, logp - old, 0.0)
    low, high = 1 - recipe.clip_low, 1 + recipe.clip_high
    if recipe.loss == "reinforce":
        loss = -advantage * logp
    elif recipe.loss == "cispo":
        loss = -log_ratio.exp().detach().clamp(low, high) * advantage * logp
    elif recipe.loss == "clip":
        ratio = log_ratio.exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    else:
        ratio = (log_ratio.sum() / mask.sum()).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage).expand(len(mask))
    return torch.where(mask, loss, 0.0)


def reference(trainer: Any, samples: list[Any], recipe: Recipe) -> Tensor:
    """The same gradient from a forward over all tokens, one sample at a time."""
    trainer.parts.decoder.zero_grad(set_to_none=True)
    counts = [sum(s.completion.trained) for s in samples]
    total = torch.zeros((), dtype=torch.float64)
    for sample, count in zip(samples, counts):
        c = sample.completion
        whole = make_microbatch([replace(c, loss_mask=None)], trainer.parts.group, share_prompts=False)
        logp = whole.log_probs(trainer.parts.decoder, None)[0].double()
        old = torch.tensor(c.logprobs, dtype=torch.float32).double()
        loss = token_losses(logp, old, torch.tensor(c.trained), sample.advantage, recipe).sum()
        share = {
            "token": 1 / sum(counts),
            "sequence": 1 / (len(samples) * count),
            "constant": 1 / (len(samples) * LIMIT),
        }
        total = total + share[recipe.denominator] * loss
    total.backward()
    return flat(trainer)


@pytest.mark.parametrize("denominator", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "reinforce_pp"])
def test_masked_tokens_have_no_gradient_and_no_share_of_the_denominator_case_59(
    make_spec: MakeSpec,
    open_trainer: OpenTrainer,
    monkeypatch: pytest.MonkeyPatch,
    name: Any,
    denominator: Any,
) -> None:
    algorithm = AlgorithmSpec(name, denominator=denominator, advantage="group_mean", dynamic_sampling=False)
    recipe = resolve(algorithm)
    with monkeypatch.context() as patch:
        patch.setattr(setup, "make_flows", lambda spec, model: FlowPair(FLOAT32, FLOAT32))
        spec = make_spec(
            "bf16",
            algorithm=algorithm,
            rollout=RolloutSpec(3, 4, LIMIT),
            mismatch=MismatchSpec("warn"),
            update=UpdateSpec(1, max_tokens_per_microbatch=40),
        )
        with open_trainer(spec) as trainer:
            trainer.begin()
            samples, _ = trainer.sample()
            masked(samples)
            expected = reference(trainer, samples, recipe)
            trainer.parts.decoder.zero_grad(set_to_none=True)
            got, metrics = gradient(trainer, samples, monkeypatch)
    assert metrics["data/microbatches"] > 1 and float(expected.norm()) > 1e-3
    assert float((got - expected).norm() / expected.norm()) < 1e-5
    assert metrics["mismatch/tokens"] == sum(sum(s.completion.trained) for s in samples)
    assert 0 < metrics["mismatch/max_abs_dlogp"] <= 0.2 + 1e-6, "only tokens that were sampled are compared"


def test_the_gradient_is_transformers_in_float64_case_59(
    make_spec: MakeSpec, open_trainer: OpenTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An independent model: transformers' Llama in float64, the loss zeroed at masked positions."""
    algorithm = AlgorithmSpec("grpo", denominator="token", advantage="group_mean")
    with monkeypatch.context() as patch:
        patch.setattr(setup, "make_flows", lambda spec, model: FlowPair(FLOAT32, FLOAT32))
        spec = make_spec("bf16", algorithm=algorithm, mismatch=MismatchSpec("warn"), update=UpdateSpec(1))
        with open_trainer(spec) as trainer:
            trainer.begin()
            samples, _ = trainer.sample()
            masked(samples, shift=0.0)
            got, _ = gradient(trainer, samples, monkeypatch)
            names = [n for n, _ in trainer.parts.decoder.named_parameters()]
    gradients = []
    for zeroed in (True, False):
        model = AutoModelForCausalLM.from_pretrained(spec.model.path, dtype=torch.float64)
        loss = torch.zeros((), dtype=torch.float64)
        trained = 0
        for s in samples:
            c = s.completion
            ids = torch.tensor([[*c.prompt_ids, *c.token_ids]])
            log_p = model(ids).logits[0, len(c.prompt_ids) - 1 : -1].log_softmax(-1)
            logp = log_p.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
            mask = torch.tensor(c.trained) | (not zeroed)
            loss = loss - s.advantage * (logp * mask).sum()
            trained += int(mask.sum())
        (loss / trained).backward()
        parameters = dict(model.named_parameters())
        gradients.append(torch.cat([parameters[n].grad.flatten() for n in names]))
    error = [float((got - g).norm() / g.norm()) for g in gradients]
    assert error[0] < 1e-2 < 0.2 < error[1], (
        "attention probabilities are rounded to BF16, which is all that is left"
    )


@pytest.mark.parametrize("flow", ["bf16", "fp8"])
def test_masked_tokens_are_still_the_context_case_59(
    make_spec: MakeSpec, open_trainer: OpenTrainer, flow: str
) -> None:
    """Trained tokens have the bits that they have with everything trained, and the rollout's."""
    with open_trainer(make_spec(flow)) as trainer:
        trainer.begin()
        samples, _ = trainer.sample()
        whole = [s.completion for s in samples]
        masked(samples, shift=0.0)
        some = [s.completion for s in samples]
        a, b = (make_microbatch(c, trainer.parts.group, share_prompts=True) for c in (whole, some))
        trained = torch.tensor([t for c in some for t in c.trained])
        all_N, some_N = (m.log_probs(trainer.parts.decoder, None)[0].detach() for m in (a, b))
    assert torch.equal(a.ids_T, b.ids_T), "every token is computed"
    assert 0 < len(some_N) == int(trained.sum()) < len(all_N)
    assert torch.equal(some_N, all_N[trained]) and torch.equal(some_N, b.rollout_N)
    assert b.sample_N.bincount().tolist() == [c.trained_tokens for c in some]
    assert not bool(b.rollout_N.isnan().any())


def test_records_and_lengths_count_what_they_say(make_spec: MakeSpec, open_trainer: OpenTrainer) -> None:
    with open_trainer(make_spec("fp8", algorithm=AlgorithmSpec(overlong_buffer=2))) as trainer:
        trainer.begin()
        samples, _ = trainer.sample()
        plain = [trainer.record(s).mean_logp for s in samples]
        masked(samples, shift=0.0)
        trainer.set_advantages(samples)
        for sample, mean in zip(samples, plain):
            c, record = sample.completion, trainer.record(sample)
            known = [p for p in c.logprobs if not math.isnan(p)]
            assert record.mean_logp == pytest.approx(sum(known) / len(known)) and record.tokens == len(
                c.token_ids
            )
            assert math.isfinite(sample.advantage)
            assert mean == record.mean_logp or not all(c.trained)
