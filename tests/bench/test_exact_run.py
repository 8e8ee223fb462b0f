"""What counts as an exact run, and what the goal asks for."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.bench.exact_run import ExactRun, even_ids, goal, read_run
from lockstep.cli.train_exact import specs_of
from lockstep.data.spec import DataSpec
from lockstep.errors import ConfigError, DataError
from lockstep.models.spec import PRESETS
from lockstep.numerics.flow import FlowSpec
from lockstep.rewards.spec import RewardSpec
from lockstep.trainer.spec import ModelSource, RunSpec, UpdateSpec

GOOD = ExactRun("smollm2-135m", "fp8+kv8", "hopper", True, 50, 1000, 0, 0.0, 50, 3.0, 0.5, 0.1)
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(PRESETS["qwen3-1.7b"].to_hf()))
    return RunSpec(
        ModelSource(str(tmp_path / "m")),
        DataSpec("arithmetic"),
        (RewardSpec("last_number"),),
        run_dir=str(tmp_path / "run"),
        flow=FlowSpec("fp8", "fp8"),
        update=UpdateSpec(2, checkpointing=True),
    )


def write(spec: RunSpec, *steps: dict[str, float]) -> None:
    folder = Path(spec.run_dir)
    folder.mkdir(exist_ok=True)
    good = {
        "mismatch/tokens": 10.0,
        "mismatch/max_abs_dlogp": 0.0,
        "mismatch/exact_tokens": 1.0,
        "sync/changed_codes_pct": 0.5,
        "data/microbatches": 2.0,
        "time/step_s": 0.25,
    }
    rows: list[dict[str, Any]] = [{"step": 0, "eval/reward": 1.0}]
    rows += [{"step": i + 1, **good, **step} for i, step in enumerate(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_is_read_from_its_metrics(spec: RunSpec) -> None:
    write(
        spec,
        {},
        {"mismatch/max_abs_dlogp": 0.125, "mismatch/exact_tokens": 0.9, "time/uncaptured_microbatches": 1.0},
        {"sync/changed_codes_pct": 0.0, "time/uncaptured_microbatches": 1.5},
    )
    run = read_run(spec, kernels="hopper")
    assert run == ExactRun("qwen3-1.7b", "fp8+kv8", "hopper", True, 3, 30, 1, 0.125, 2, 2.0, 1.5, 0.25)
    assert not run.exact and "1 steps DIFFER" in run.line() and "(1.5 not captured)" in run.line()
    assert read_run(spec, kernels="hopper", broken=True).inexact == 2, "the step that ended a run counts"
    write(spec)
    none = read_run(spec, kernels="hopper", broken=True)
    assert (none.steps, none.inexact, none.max_abs_dlogp) == (0, 1, None) and "unknown" in none.line()
    json.dumps(asdict(none), allow_nan=False)
    with pytest.raises(DataError, match="left no metrics"):
        read_run(replace(spec, run_dir=spec.run_dir + "x"), kernels="hopper")


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 49},
        {"inexact": 1},
        {"moved": 3},
        {"microbatches": 1.0},
        {"checkpointing": False},
        {"kernels": "reference"},
    ],
    ids=str,
)
def test_a_run_that_shows_nothing_is_not_exact(change: dict[str, Any]) -> None:
    assert GOOD.exact and not replace(GOOD, **change).exact


def test_the_goal_wants_both_models() -> None:
    other = replace(GOOD, model="qwen3-1.7b")
    assert goal([GOOD, other]).value == 1.0
    assert goal([GOOD]).value == goal([GOOD, replace(other, inexact=1)]).value == 0.0


def test_settings_belong_to_the_file_before_them() -> None:
    first, second = (str(CONFIGS / f"{n}-h100.yaml") for n in ("smollm2-addition", "random-1.7b"))
    specs = specs_of([first, "seed=5", "model.path=/x", second])
    assert [s.seed for s in specs] == [5, 0] and specs[0].model.path == "/x"
    assert all(s.kernels == "hopper" and s.update.checkpointing and s.update.steps == 50 for s in specs)
    with pytest.raises(ConfigError, match="'seed=5' stands before any configuration"):
        specs_of(["seed=5", first])


def test_the_reward_differs_between_samples() -> None:
    assert even_ids([], [], [[2, 4], [1, 2], [3], []], answer=["", "", "", ""]) == [1.0, 0.5, 0.0, 0.0]
