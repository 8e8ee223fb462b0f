"""Short runs of every kind: the mismatch is what the flow promises, step by step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.algorithms.spec import AlgorithmSpec
from lockstep.data.spec import DataSpec
from lockstep.errors import ContractError
from lockstep.launch.local import run_evaluation
from lockstep.numerics.flow import FlowSpec
from lockstep.rollout.spec import RolloutSpec
from lockstep.trainer.loop import RunResult
from lockstep.trainer.spec import EvalSpec, MismatchSpec, OptimSpec, RunSpec, UpdateSpec, WarmStartSpec

MakeSpec = Callable[..., RunSpec]
Train = Callable[..., tuple[RunResult, list[dict[str, float]]]]
EVAL = DataSpec("arithmetic", args={"template": "{a}+{b}=", "holdout": "eval"})
EXACT = {
    "mismatch/max_abs_dlogp": 0.0,
    "mismatch/kl_k1": 0.0,
    "mismatch/kl_k3": 0.0,
    "mismatch/exact_tokens": 1.0,
    "token_mult_prob_error": 1.0,
    "rollout_corr/kl": 0.0,
}


def receipts(spec: RunSpec) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(spec.run_dir) / "receipts.jsonl").read_text().splitlines()]


def assert_exact(metrics: list[dict[str, float]]) -> None:
    for line in metrics:
        if line["step"]:
            assert {name: line[name] for name in EXACT} == EXACT and line["mismatch/tokens"] > 20


@pytest.mark.parametrize(
    ("flow", "more"),
    [
        (FlowSpec("bf16"), {}),
        (FlowSpec("fp8"), {}),
        (FlowSpec("fp8", "fp8"), {}),
        (FlowSpec("bf16", "fp8"), {}),
        (FlowSpec("fp8", "fp8", "pow2", keep_first_bf16=1, wgrad="bf16"), {}),
        (FlowSpec("fp8", "fp8"), {"kernels": "exact"}),
    ],
    ids=str,
)
def test_a_unified_flow_has_no_mismatch_at_any_step(
    make_spec: MakeSpec, train: Train, flow: FlowSpec, more: dict[str, Any]
) -> None:
    rollout = RolloutSpec(3, 4, 7, max_running=5, max_batched_tokens=9, page_size=3, temperature=0.9)
    spec = make_spec(flow, rollout=rollout, update=UpdateSpec(4, max_tokens_per_microbatch=40), **more)
    result, metrics = train(spec)
    assert (result.step, [m["step"] for m in metrics]) == (4, [1, 2, 3, 4])
    assert_exact(metrics)
    assert all(m["sync/changed_codes_pct"] > 0 and m["optim/grad_norm"] > 0 for m in metrics)
    assert all(abs(m["policy/ratio_mean"] - 1) < 1e-12 for m in metrics), "on-policy: the ratio is 1"
    shipped = receipts(spec)
    assert [(r["step"], r["version"]) for r in shipped] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert len({r["digest"] for r in shipped}) == 5 and result.digest == shipped[-1]["digest"]
    versions = [r["scale_version"] for r in shipped]
    assert versions == sorted(versions) and versions[0] == (1 if flow.kv == "fp8" else 0)
    assert len(set(versions)) == len({r["scales_digest"] for r in shipped})


@pytest.mark.parametrize("flow", [FlowSpec("fp8"), FlowSpec("fp8", "fp8"), FlowSpec("bf16")], ids=str)
def test_case_45_at_learning_rate_0_nothing_drifts(make_spec: MakeSpec, train: Train, flow: FlowSpec) -> None:
    evaluation = EvalSpec(EVAL, every=1, prompts=3, samples=0)
    spec = make_spec(flow, optim=OptimSpec(lr=0.0), update=UpdateSpec(4), eval=evaluation)
    _, metrics = train(spec)
    assert [m["step"] for m in metrics] == [0, 1, 2, 3, 4]
    assert_exact(metrics)
    shipped = receipts(spec)
    assert len({r["digest"] for r in shipped}) == 1 and [r["version"] for r in shipped] == [1, 2, 3, 4, 5]
    assert all(r["changed_pct"] == 0.0 for r in shipped[1:])
    greedy = [{k: v for k, v in m.items() if k.startswith("eval/")} for m in metrics]
    assert greedy[0] and all(g == greedy[0] for g in greedy), "the engine's samples don't drift either"


def test_equal_runs_are_equal(
    make_spec: MakeSpec, train: Train, outcome: Callable[[Path], dict[str, Any]]
) -> None:
    ends = []
    for name in ("one", "two"):
        spec = make_spec("fp8", "fp8", name=name, update=UpdateSpec(2))
        ends.append((train(spec)[0].digest, outcome(Path(spec.run_dir))))
    assert ends[0] == ends[1]
    other = make_spec("fp8", "fp8", name="three", update=UpdateSpec(2), seed=4)
    assert train(other)[0].digest != ends[0][0]


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_a_split_flow_measures_its_mismatch_and_goes_on(make_spec: MakeSpec, train: Train, kv: str) -> None:
    _, metrics = train(make_spec("fp8-rollout", kv))
    for m in metrics:
        assert 0 < m["mismatch/mean_abs_dlogp"] <= m["mismatch/max_abs_dlogp"] < 2
        assert m["mismatch/exact_tokens"] < 1 < m["token_mult_prob_error"]
        assert m["mismatch/kl_k3"] > 0 and m["rollout_corr/k3_kl"] == m["mismatch/kl_k3"]


def test_a_split_flow_stops_where_it_is_told_to(make_spec: MakeSpec, train: Train) -> None:
    with pytest.raises(ContractError, match=r"max \|delta logp\| .*allowed is 0"):
        train(make_spec("fp8-rollout", mismatch=MismatchSpec("stop", tolerance=0.0)))
    _, metrics = train(make_spec("fp8-rollout", name="wide", mismatch=MismatchSpec("stop", tolerance=5.0)))
    assert len(metrics) == 3


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo"])
def test_every_algorithm_runs(make_spec: MakeSpec, train: Train, name: Any) -> None:
    _, metrics = train(make_spec(algorithm=AlgorithmSpec(name), update=UpdateSpec(2)))
    assert_exact(metrics)
    assert all(m["optim/applied_steps"] == 1 and m["optim/grad_norm"] > 0 for m in metrics)
    assert all(math.isfinite(v) for m in metrics for v in m.values())


def test_mini_batches_and_epochs(make_spec: MakeSpec, train: Train) -> None:
    _, metrics = train(make_spec("fp8", "fp8", update=UpdateSpec(3, mini_batches=2, epochs=2)))
    for m in metrics:
        assert m["optim/applied_steps"] == 4
        assert m["mismatch/max_abs_dlogp"] == 0.0, "compared before the optimizer moves"
        assert m["policy/ratio_max"] > 1.0, "and later mini-batches are off-policy"


def test_a_reference_policy(make_spec: MakeSpec, train: Train) -> None:
    algorithm = AlgorithmSpec("grpo", kl_coef=0.05, entropy_coef=0.01, overlong_buffer=2)
    result, metrics = train(make_spec("fp8", "fp8", algorithm=algorithm))
    assert_exact(metrics)
    kl = [m["policy/kl_to_reference"] for m in metrics]
    assert kl[0] == 0.0 and all(k > 0 for k in kl[1:]), "the reference is where the run began"
    assert all(m["policy/entropy"] > 0 for m in metrics)
    plain, _ = train(make_spec("fp8", "fp8", name="plain"))
    assert result.digest != plain.digest


def test_dynamic_sampling_draws_again_and_trains_on_groups_that_differ(
    make_spec: MakeSpec, open_trainer: Callable[[RunSpec], Any]
) -> None:
    spec = make_spec(reward="first_group", algorithm=AlgorithmSpec("dapo"))
    with open_trainer(spec) as trainer:
        trainer.begin()
        samples, metrics = trainer.sample()
        assert metrics["data/sampling_rounds"] == 3 and trainer.progress.ordinal == 9
        assert metrics["data/kept_groups"] == 3 == len({s.group for s in samples})
        for group in {s.group for s in samples}:
            assert len({s.reward for s in samples if s.group == group}) > 1
        assert trainer.updater.update(samples, None)["mismatch/max_abs_dlogp"] == 0.0


def test_dynamic_sampling_gives_up_after_four_rounds_and_the_step_moves_nothing(
    make_spec: MakeSpec, train: Train
) -> None:
    spec = make_spec(reward="zero", algorithm=AlgorithmSpec("dapo"), update=UpdateSpec(2))
    _, metrics = train(spec)
    for m in metrics:
        assert (m["data/sampling_rounds"], m["data/kept_groups"], m["optim/applied_steps"]) == (4, 0, 0)
        assert m["sync/changed_codes_pct"] == 0
    assert len({r["digest"] for r in receipts(spec)}) == 1


def test_no_reward_at_all_moves_nothing(make_spec: MakeSpec, train: Train) -> None:
    _, metrics = train(make_spec(reward="nothing", update=UpdateSpec(1)))
    assert metrics[0]["rewards/unscored"] == 12 and metrics[0]["optim/applied_steps"] == 0


def test_equal_rewards_are_no_fault(make_spec: MakeSpec, train: Train) -> None:
    """A model that solves nothing yet gets rewards of 0 in its first step: there is nothing to learn, and no error."""
    _, metrics = train(make_spec(reward="zero", update=UpdateSpec(2)))
    assert [m["optim/grad_norm"] for m in metrics] == [0.0, 0.0]


def test_warm_start_imitates_the_answers(make_spec: MakeSpec, train: Train) -> None:
    spec = make_spec("fp8", "fp8", warm_start=WarmStartSpec(steps=12, batch=8, lr=2e-2), update=UpdateSpec(1))
    _, metrics = train(spec)
    assert_exact(metrics)
    notes = [
        json.loads(line)["text"] for line in (Path(spec.run_dir) / "notes.jsonl").read_text().splitlines()
    ]
    assert any("warm start 12/12" in n for n in notes)
    assert float(notes[0].rpartition(" ")[2]) < 3.0


def test_case_36_temperature_travels_with_the_sample(make_spec: MakeSpec, train: Train) -> None:
    for temperature in (0.5, 1.7):
        rollout = RolloutSpec(2, 3, 5, temperature=temperature)
        _, metrics = train(make_spec(name=f"t{temperature}", rollout=rollout, update=UpdateSpec(2)))
        assert_exact(metrics)


def test_evaluation_by_itself_and_within_a_run(make_spec: MakeSpec, train: Train) -> None:
    evaluation = EvalSpec(EVAL, every=2, prompts=4, samples=2, top_k=5, max_new_tokens=9)
    spec = make_spec("fp8", eval=evaluation)
    _, metrics = train(spec)
    assert [m["step"] for m in metrics if "eval/reward" in m] == [0, 2, 3]
    names = {
        "eval/greedy_pass@1",
        "eval/reward",
        "eval/mean_length",
        "eval/sampled_pass@1",
        "eval/mean@2",
        "eval/pass@2",
    }
    assert names <= metrics[0].keys()
    alone = run_evaluation(spec)
    assert {k: v for k, v in metrics[0].items() if k.startswith("eval/")} == alone
    trained = run_evaluation(spec, str(Path(spec.run_dir) / "model"))
    for name in ("eval/greedy_pass@1", "eval/reward", "eval/mean_length"):
        assert trained[name] == metrics[-1][name], "the exported model is the trained one"


def test_evaluation_by_itself_with_an_fp8_cache(make_spec: MakeSpec) -> None:
    spec = make_spec("fp8", "fp8", eval=EvalSpec(EVAL, every=1, prompts=2, samples=0))
    assert run_evaluation(spec)["eval/mean_length"] > 0
