"""A resumed run equals an uninterrupted one: weights, metrics, samples and receipts, bit for bit (field failure 65, 26)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.algorithms.spec import AlgorithmSpec
from lockstep.correction.spec import CorrectionSpec
from lockstep.data.spec import DataSpec
from lockstep.errors import RewardError, UserError
from lockstep.numerics.flow import FlowSpec
from lockstep.rewards.spec import RewardSpec
from lockstep.rollout.spec import RolloutSpec
from lockstep.trainer.checkpoint import list_checkpoints
from lockstep.trainer.spec import (
    CheckpointSpec,
    EvalSpec,
    OptimSpec,
    RunSpec,
    UpdateSpec,
    WarmStartSpec,
)

MakeSpec = Callable[..., RunSpec]
Train = Callable[..., Any]
Outcome = Callable[[Path], dict[str, Any]]

FRAGILE = """
from pathlib import Path

LEFT = Path(__file__).with_name("calls_left")

def spread(prompts, completions, completion_ids, **columns):
    if LEFT.exists():
        left = int(LEFT.read_text()) - 1
        LEFT.write_text(str(left))
        if left < 0:
            raise RuntimeError("out of order")
    return [float(sum(ids) % 7) for ids in completion_ids]
"""
EVAL = EvalSpec(
    DataSpec("arithmetic", args={"template": "{a}+{b}=", "holdout": "eval"}), every=2, prompts=2, samples=0
)
KINDS: dict[str, dict[str, Any]] = {
    "fp8": {},
    "fp8, FP8 cache, KL, epochs, warm start": {
        "flow": FlowSpec("fp8", "fp8"),
        "algorithm": AlgorithmSpec("grpo", kl_coef=0.1),
        "update": UpdateSpec(6, mini_batches=2, epochs=2),
        "warm_start": WarmStartSpec(steps=2, batch=4),
    },
    "bf16, cosine, evaluation, dynamic sampling": {
        "flow": FlowSpec("bf16"),
        "optim": OptimSpec(lr=3e-3, warmup_steps=2, schedule="cosine", weight_decay=0.01),
        "algorithm": AlgorithmSpec("dapo"),
        "eval": EVAL,
    },
    "split, corrected": {
        "flow": FlowSpec("fp8-rollout", "fp8"),
        "correction": CorrectionSpec("geometric_token_tis", rollout_rs_threshold=1.05),
    },
}


def fragile(make_spec: MakeSpec, folder: Path, name: str, **sections: Any) -> RunSpec:
    """Six steps that save every second, with a reward function that can be told to fail after some calls."""
    file = folder / "fragile.py"
    if not file.exists():
        file.write_text(FRAGILE)
    options = {
        "rewards": (RewardSpec(f"{file}:spread"),),
        "update": UpdateSpec(6),
        "checkpoint": CheckpointSpec(every=2),
        "rollout": RolloutSpec(2, 3, 6),
        **sections,
    }
    return make_spec(name=name, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_case_65_a_failure_at_any_step_leaves_no_trace(
    make_spec: MakeSpec, train: Train, outcome: Outcome, tmp_path: Path, kind: str
) -> None:
    """The reward fails early on (back to step 0), then half-way (back to step 2), and later once more."""
    calls_left, newest = tmp_path / "calls_left", []
    calls_left.write_text("1000")
    whole = fragile(make_spec, tmp_path, "whole", **KINDS[kind])
    result, _ = train(whole)
    total = 1000 - int(calls_left.read_text())
    broken = fragile(make_spec, tmp_path, "broken", **KINDS[kind])
    for calls in (1, total // 2, total // 3):
        calls_left.write_text(str(calls))
        with pytest.raises(RewardError, match="out of order"):
            train(broken)
        newest.append(list_checkpoints(tmp_path / "broken" / "checkpoints")[-1].name)
    calls_left.unlink()
    assert (
        newest[0] == "step_000000"
        and newest == sorted(newest)
        and newest[-1] in ("step_000002", "step_000004")
    )
    again, metrics = train(broken)
    assert again.digest == result.digest
    assert [m["step"] for m in metrics] == sorted({m["step"] for m in metrics})
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "whole")


def test_case_65_stopping_after_step_4_and_going_on(
    make_spec: MakeSpec, train: Train, outcome: Outcome, tmp_path: Path
) -> None:
    whole = fragile(make_spec, tmp_path, "whole")
    result, _ = train(whole)
    half = fragile(make_spec, tmp_path, "half", update=UpdateSpec(4))
    assert train(half)[0].step == 4
    again, _ = train(replace(half, update=UpdateSpec(6)))
    assert again.digest == result.digest and outcome(tmp_path / "half") == outcome(tmp_path / "whole")


def test_case_26_the_restored_version_is_published_first(
    make_spec: MakeSpec, train: Train, open_trainer: Callable[[RunSpec], Any], tmp_path: Path
) -> None:
    spec = fragile(make_spec, tmp_path, "run", flow=FlowSpec("fp8", "fp8"), update=UpdateSpec(2))
    result, _ = train(spec)
    with open_trainer(replace(spec, update=UpdateSpec(6))) as trainer:
        assert trainer.resume("auto")
        engine = trainer.parts.engine
        assert (engine.version, engine.digest()) == (3, result.digest)
        assert engine.scale_version == trainer.progress.scale_version == trainer.history.version > 1
        assert trainer.step()["mismatch/max_abs_dlogp"] == 0.0


def test_debris_of_a_kill_is_cleared_away(
    make_spec: MakeSpec, train: Train, outcome: Outcome, tmp_path: Path
) -> None:
    """A half-written checkpoint, torn lines, lines of steps after the checkpoint, a half-written model."""
    whole = fragile(make_spec, tmp_path, "whole")
    train(whole)
    torn = fragile(make_spec, tmp_path, "torn", update=UpdateSpec(5))
    train(torn)
    run_dir = tmp_path / "torn"
    partial = run_dir / "checkpoints" / ".partial_step_000006"
    partial.mkdir()
    (partial / "masters.safetensors").write_bytes(b"half")
    (run_dir / ".model.partial-1-abc").mkdir()
    for name in ("metrics.jsonl", "samples.jsonl", "receipts.jsonl"):
        with (run_dir / name).open("a") as file:
            file.write('{"step": 6, "rew')
    train(replace(torn, update=UpdateSpec(6)))
    assert outcome(run_dir) == outcome(tmp_path / "whole")
    assert not partial.exists()


def test_resuming_from_a_named_checkpoint(
    make_spec: MakeSpec, train: Train, outcome: Outcome, tmp_path: Path
) -> None:
    whole = fragile(make_spec, tmp_path, "whole", checkpoint=CheckpointSpec(every=2, keep=4))
    train(whole)
    before = outcome(tmp_path / "whole")
    train(whole, resume=str(tmp_path / "whole" / "checkpoints" / "step_000002"))
    assert outcome(tmp_path / "whole") == before


def test_only_never_writes_over_an_earlier_run(
    make_spec: MakeSpec, train: Train, outcome: Outcome, tmp_path: Path
) -> None:
    """A checkpoint that isn't there is refused and leaves everything; `never` begins again, and ends the same."""
    spec = fragile(make_spec, tmp_path, "run", update=UpdateSpec(2))
    train(spec)
    before = outcome(tmp_path / "run")
    with pytest.raises(UserError, match="not a checkpoint"):
        train(spec, resume=str(tmp_path / "nowhere"))
    assert outcome(tmp_path / "run") == before
    train(replace(spec, update=UpdateSpec(1)), resume="never")
    assert outcome(tmp_path / "run") != before
    train(spec, resume="never")
    assert outcome(tmp_path / "run") == before
    assert [p.name for p in list_checkpoints(tmp_path / "run" / "checkpoints")] == [
        "step_000000",
        "step_000002",
    ]


def test_a_refused_resume_leaves_the_configuration_file_alone(
    make_spec: MakeSpec, train: Train, tmp_path: Path
) -> None:
    spec = fragile(make_spec, tmp_path, "run", update=UpdateSpec(2))
    train(spec, config_yaml="optim: {lr: 2.0e-3}\n")
    with pytest.raises(UserError):
        train(replace(spec, optim=OptimSpec(lr=1.0)), config_yaml="optim: {lr: 1.0}\n")
    assert (tmp_path / "run" / "config.yaml").read_text() == "optim: {lr: 2.0e-3}\n"


def test_a_kill_between_the_first_evaluation_and_the_first_checkpoint(
    make_spec: MakeSpec,
    train: Train,
    open_trainer: Callable[[RunSpec], Any],
    outcome: Outcome,
    tmp_path: Path,
) -> None:
    whole = fragile(make_spec, tmp_path, "whole", eval=EVAL, update=UpdateSpec(2))
    train(whole)
    killed = replace(whole, run_dir=str(tmp_path / "killed"))
    with open_trainer(killed) as trainer:
        trainer.save = lambda: None
        trainer.begin()
    train(killed)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


def test_a_kill_before_the_first_checkpoint_leaves_one_receipt(
    make_spec: MakeSpec,
    train: Train,
    open_trainer: Callable[[RunSpec], Any],
    outcome: Outcome,
    tmp_path: Path,
) -> None:
    whole = fragile(make_spec, tmp_path, "whole", update=UpdateSpec(2))
    train(whole)
    killed = replace(whole, run_dir=str(tmp_path / "killed"))
    with open_trainer(killed) as trainer:
        trainer.save = lambda: None
        trainer.begin()
    train(killed)
    lines = [
        json.loads(x)["version"] for x in (tmp_path / "killed" / "receipts.jsonl").read_text().splitlines()
    ]
    assert lines == [1, 2, 3]
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
