"""Training on truncated samples (field failure 37): the ids that were kept are replayed, so a unified flow stays exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lockstep.algorithms.spec import AlgorithmSpec
from lockstep.data.spec import DataSpec
from lockstep.errors import ConfigError
from lockstep.numerics.flow import FlowSpec
from lockstep.rollout.spec import RolloutSpec
from lockstep.trainer.loop import RunResult
from lockstep.trainer.setup import sampling_params
from lockstep.trainer.spec import EvalSpec, RunSpec, UpdateSpec

MakeSpec = Callable[..., RunSpec]
OpenTrainer = Callable[[RunSpec], Any]
Train = Callable[..., tuple[RunResult, list[dict[str, float]]]]
TRUNCATED = RolloutSpec(
    3, 4, 7, temperature=1.1, top_p=0.9, top_k=20, min_p=0.01, truncation="replay", max_kept=20
)


@pytest.mark.parametrize(
    ("flow", "more"),
    [
        (FlowSpec("bf16"), {}),
        (FlowSpec("fp8", "fp8"), {"algorithm": AlgorithmSpec("gspo", entropy_coef=0.01, kl_coef=0.01)}),
        (FlowSpec("fp8", "fp8"), {"kernels": "exact"}),
    ],
    ids=["bf16", "fp8", "fp8 exact"],
)
def test_a_truncated_run_has_no_mismatch_case_37(
    make_spec: MakeSpec, train: Train, flow: FlowSpec, more: dict[str, Any]
) -> None:
    spec = make_spec(flow, rollout=TRUNCATED, update=UpdateSpec(2, max_tokens_per_microbatch=40), **more)
    _, metrics = train(spec)
    for line in metrics:
        assert line["mismatch/max_abs_dlogp"] == 0.0 and line["mismatch/exact_tokens"] == 1.0
        assert abs(line["policy/ratio_mean"] - 1) < 1e-12 and line["optim/grad_norm"] > 0
        assert 0 < line["rollout/kept_mass_min"] < line["rollout/kept_mass_mean"] < 1
        assert math.isfinite(line["policy/entropy"])


def test_without_the_recorded_ids_the_run_would_stop_case_37(
    make_spec: MakeSpec, open_trainer: OpenTrainer
) -> None:
    """The door drops truncated samples that don't say what was kept; scored over the whole vocabulary they'd be off."""
    with open_trainer(make_spec("fp8", rollout=TRUNCATED)) as trainer:
        trainer.begin()
        honest = trainer.parts.engine.generate
        trainer.parts.engine.generate = lambda *a, **k: [
            replace(c, sampling_mask=None) if i == 1 else c for i, c in enumerate(honest(*a, **k))
        ]
        samples, metrics = trainer.sample()
        assert metrics["data/dropped_no_sampling_mask"] == 1
        bare = replace(samples[0].completion, sampling_mask=None)
        micro = trainer.updater.packs.microbatch([replace(samples[0], completion=bare)])
        logp_N, _ = micro.log_probs(trainer.parts.decoder, trainer.scales)
        mask = samples[0].completion.sampling_mask
        assert (logp_N.detach() - micro.rollout_N).exp().tolist() == pytest.approx(
            mask.mass_N.tolist(), rel=1e-4
        )


def test_more_ids_than_are_recorded_are_refused_before_the_run_case_37(
    make_spec: MakeSpec, open_trainer: OpenTrainer
) -> None:
    for rollout, most in (
        (replace(TRUNCATED, max_kept=19), 20),
        (replace(TRUNCATED, top_k=0, max_kept=64), 91),
    ):
        with pytest.raises(
            ConfigError, match=rf"rollout.top_k: .*may keep {most} ids.*raise rollout.max_kept"
        ):
            with open_trainer(make_spec(rollout=rollout)):
                pass
    with open_trainer(make_spec(rollout=replace(TRUNCATED, top_k=0, max_kept=91))) as trainer:
        assert sampling_params(trainer.parts).records


def test_evaluation_records_nothing_case_37(make_spec: MakeSpec, open_trainer: OpenTrainer) -> None:
    data = DataSpec("arithmetic", args={"template": "{a}+{b}=", "holdout": "eval"})
    spec = make_spec(rollout=TRUNCATED, eval=EvalSpec(data, every=1, prompts=2, samples=1, top_p=0.5))
    with open_trainer(spec) as trainer:
        assert sampling_params(trainer.parts).records
        evaluation = sampling_params(trainer.parts, evaluation=True)
        assert evaluation.truncated and not evaluation.records


def test_training_refuses_truncation_unless_it_is_replayed_case_37(make_spec: MakeSpec) -> None:
    for change in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        with pytest.raises(ValueError, match="off by the kept mass.*rollout.truncation"):
            make_spec(rollout=RolloutSpec(3, 4, 7, **change))
        make_spec(rollout=RolloutSpec(3, 4, 7, truncation="replay", **change))


def test_the_policy_for_bad_samples_is_for_training_data_case_44(make_spec: MakeSpec) -> None:
    data = DataSpec("arithmetic", on_bad_sample="stop")
    make_spec(data=data)
    with pytest.raises(ValueError, match="eval.data.on_bad_sample has no effect"):
        make_spec(eval=EvalSpec(data, every=1))
