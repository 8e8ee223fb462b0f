"""The update: cutting a batch otherwise changes neither loss nor gradient, and advantages are those of what is trained on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.algorithms import merge_metrics
from lockstep.algorithms.spec import AlgorithmSpec
from lockstep.errors import ContractError
from lockstep.numerics.flow import FlowPair, bf16_flow
from lockstep.trainer import setup
from lockstep.trainer.spec import RunSpec, UpdateSpec

MakeSpec = Callable[..., RunSpec]
OpenTrainer = Callable[[RunSpec], Any]


def gradient_of(
    trainer: Any, samples: list[Any], budget: int, share: bool
) -> tuple[torch.Tensor, dict[str, float], int]:
    """Gradient and metrics of one mini-batch under a micro-batch budget."""
    updater, metrics = trainer.updater, {}
    updater.packs.spec = replace(updater.packs.spec, max_tokens_per_microbatch=budget, share_prompts=share)
    trainer.parts.decoder.zero_grad(set_to_none=True)
    parts = updater.gradients(samples, None, None, metrics)
    found = {k: v.result() for k, v in merge_metrics(parts).items()}
    grad = torch.cat(
        [p.grad.flatten().double() for p in trainer.parts.decoder.parameters() if p.grad is not None]
    )
    return grad, found, int(metrics["data/microbatches"])


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_case_42_cutting_into_micro_batches_changes_nothing(
    make_spec: MakeSpec, open_trainer: OpenTrainer, monkeypatch: pytest.MonkeyPatch, algorithm: Any
) -> None:
    """In FP32 throughout, so that only the cut can make a difference: token, sequence and constant denominators."""
    flow = replace(bf16_flow(), activation=torch.float32)
    monkeypatch.setattr(setup, "make_flows", lambda spec, model: FlowPair(flow, flow))
    spec = make_spec("bf16", algorithm=AlgorithmSpec(algorithm, dynamic_sampling=False, entropy_coef=0.01))
    with open_trainer(spec) as trainer:
        trainer.begin()
        samples, _ = trainer.sample()
        assert len(samples) == 12
        whole, metrics, bins = gradient_of(trainer, samples, 4096, True)
        assert bins == 1 and float(whole.norm()) > 1e-4
        for budget, share in ((4096, False), (40, True), (13, True), (30, False), (13, False)):
            grad, other, cut = gradient_of(trainer, samples, budget, share)
            assert cut > 1 or budget == 4096
            assert float((grad - whole).norm() / whole.norm()) < 1e-5, (budget, share)
            assert other.keys() == metrics.keys()
            assert all(math.isclose(other[k], metrics[k], rel_tol=1e-5, abs_tol=1e-7) for k in metrics)


@pytest.mark.parametrize("flow", ["bf16", "fp8"])
def test_low_precision_gradients_hardly_depend_on_the_cut(
    make_spec: MakeSpec, open_trainer: OpenTrainer, flow: str
) -> None:
    with open_trainer(make_spec(flow)) as trainer:
        trainer.begin()
        samples, _ = trainer.sample()
        whole, metrics, _ = gradient_of(trainer, samples, 4096, True)
        for budget, share in ((4096, False), (30, True), (13, False)):
            grad, other, _ = gradient_of(trainer, samples, budget, share)
            assert float(torch.cosine_similarity(grad, whole, dim=0)) > 0.995
            assert other == pytest.approx(metrics, rel=1e-9, abs=1e-12), "the forward pass has the same bits"


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_sharing_prompts_changes_no_log_probability(
    make_spec: MakeSpec, open_trainer: OpenTrainer, kv: str
) -> None:
    with open_trainer(make_spec("fp8", kv)) as trainer:
        trainer.begin()
        samples, _ = trainer.sample()
        found = []
        for share in (True, False):
            trainer.updater.packs.spec = replace(trainer.updater.packs.spec, share_prompts=share)
            logp = trainer.updater.old_log_probs(samples, trainer.scales)
            found.append(torch.cat([logp[id(s)] for s in samples]))
        rollout = torch.tensor([p for s in samples for p in s.completion.logprobs])
        assert torch.equal(found[0], rollout) and torch.equal(found[1], rollout)


def test_mini_batches_are_whole_groups_in_order(make_spec: MakeSpec, open_trainer: OpenTrainer) -> None:
    with open_trainer(make_spec()) as trainer:
        trainer.begin()
        samples, _ = trainer.sample()
        for count in (1, 2, 3, 7):
            trainer.updater.spec = UpdateSpec(mini_batches=count)
            batches = trainer.updater.mini_batches(samples)
            assert [s for b in batches for s in b] == samples and len(batches) == min(count, 3)
            groups = [{s.group for s in b} for b in batches]
            assert sum(map(len, groups)) == 3 and max(map(len, groups)) - min(map(len, groups)) <= 1


def test_case_41_a_rejected_sample_moves_no_sibling(make_spec: MakeSpec, open_trainer: OpenTrainer) -> None:
    """One sample of each group gets no reward: advantages are those of the three others."""
    spec = make_spec(reward="partly", algorithm=AlgorithmSpec("grpo", advantage="group_mean"))
    with open_trainer(spec) as trainer:
        trainer.begin()
        samples, metrics = trainer.sample()
    assert metrics["rewards/unscored"] == 3 and len(samples) == 9
    for group in {s.group for s in samples}:
        members = [s for s in samples if s.group == group]
        mean = sum(s.reward for s in members) / 3
        assert [s.advantage for s in members] == pytest.approx([s.reward - mean for s in members], abs=1e-6)
        assert all(s.completion.sample_index != 1 for s in members)


def test_a_unified_flow_stops_at_the_first_differing_bit(
    make_spec: MakeSpec, open_trainer: OpenTrainer
) -> None:
    """Log-probabilities moved by one unit in the last place stop the run before the optimizer moves."""
    with open_trainer(make_spec()) as trainer:
        trainer.begin()
        samples, _ = trainer.sample()
        c = samples[5].completion
        moved = float(torch.nextafter(torch.tensor(c.logprobs[2]), torch.tensor(-9.0)))
        samples[5].completion = replace(c, logprobs=(*c.logprobs[:2], moved, *c.logprobs[3:]))
        before = [p.detach().clone() for p in trainer.parts.decoder.parameters()]
        with pytest.raises(ContractError, match=r"disagree.*\(1 differ\), allowed is 0;"):
            trainer.updater.update(samples, None)
        assert all(torch.equal(p, q) for p, q in zip(before, trainer.parts.decoder.parameters()))


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(
    make_spec: MakeSpec, open_trainer: OpenTrainer
) -> None:
    with open_trainer(make_spec(update=UpdateSpec(steps=2, max_tokens_per_microbatch=60))) as trainer:
        trainer.begin()
        first = next(iter(trainer.parts.decoder.parameters()))
        hook = first.register_hook(lambda grad: grad * float("nan"))
        metrics = trainer.step()
        assert metrics["optim/skipped_steps"] == 1 and metrics["optim/applied_steps"] == 0
        assert metrics["sync/changed_codes_pct"] == 0 and math.isnan(metrics["optim/grad_norm"])
        hook.remove()
        metrics = trainer.step()
        assert metrics["optim/applied_steps"] == 1 and metrics["sync/changed_codes_pct"] > 0
        assert metrics["mismatch/max_abs_dlogp"] == 0.0
