"""A process that is killed (SIGKILL, no chance to clean up) and started again ends where an undisturbed one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.cli.main import main
from lockstep.config.load import dump
from lockstep.numerics.flow import FlowSpec
from lockstep.rewards.spec import RewardSpec
from lockstep.rollout.spec import RolloutSpec
from lockstep.trainer.spec import CheckpointSpec, RunSpec, UpdateSpec

MakeSpec = Callable[..., RunSpec]
Outcome = Callable[[Path], dict[str, Any]]

TALKING = """
from pathlib import Path

LOG = Path(__file__).with_name("calls")

def spread(prompts, completions, completion_ids, **columns):
    scores = [float(sum(ids) % 7) for ids in completion_ids]
    with LOG.open("a") as log:
        log.write("scored\\n")
    return scores
"""


def long_spec(make_spec: MakeSpec, folder: Path, name: str) -> RunSpec:
    """Four steps, each with a long rollout (32 engine steps) and a long update (three optimizer steps)."""
    reward = folder / "talking.py"
    reward.write_text(TALKING)
    return make_spec(
        FlowSpec("fp8", "fp8"),
        name=name,
        rewards=(RewardSpec(f"{reward}:spread"),),
        rollout=RolloutSpec(3, 4, 32, ignore_eos=True),
        update=UpdateSpec(4, mini_batches=3, max_tokens_per_microbatch=80),
        checkpoint=CheckpointSpec(every=2),
    )


def write(spec: RunSpec, folder: Path) -> Path:
    file = folder / f"{Path(spec.run_dir).name}.yaml"
    file.write_text(dump(spec))
    return file


def cli(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code or 0)


def steps_in(run_dir: Path) -> list[int]:
    """Complete lines of metrics.jsonl."""
    file = run_dir / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line)["step"] for line in text[: text.rfind("\n") + 1].splitlines()]


def kill_when(config: Path, ready: Callable[[], bool]) -> None:
    """Starts the run as a process of its own and kills it as soon as `ready` says so."""
    root = Path(__file__).parents[2]
    threads = str(torch.get_num_threads())
    env = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": threads}
    command = [sys.executable, "-m", "lockstep", "train", str(config)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not ready():
            assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
            assert time.monotonic() < deadline, "the run doesn't get there"
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()


def test_case_65_killed_twice_in_a_rollout_and_in_an_update(
    make_spec: MakeSpec, outcome: Outcome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = long_spec(make_spec, tmp_path, "whole")
    assert cli("train", str(write(whole, tmp_path))) == 0
    last_line = capsys.readouterr().out.splitlines()[-1]
    calls, run_dir = tmp_path / "calls", tmp_path / "killed"
    calls.unlink()
    config = write(long_spec(make_spec, tmp_path, "killed"), tmp_path)

    def scored() -> int:
        return calls.read_text().count("\n") if calls.exists() else 0

    kill_when(config, lambda: steps_in(run_dir)[-1:] == [1])
    assert scored() == 1, "step 1 was written and nothing of step 2 scored: the kill fell into its rollout"

    def updating() -> bool:
        if scored() < 3:
            return False
        time.sleep(0.03)
        return True

    calls.unlink()
    kill_when(config, updating)
    assert steps_in(run_dir) == [1, 2], (
        "rewards of step 3 are there, its metrics are not: the kill fell into its update"
    )
    assert cli("train", str(config), "--resume", "auto") == 0
    out = capsys.readouterr().out
    notes = [
        json.loads(line)["text"].split(",")[0] for line in (run_dir / "notes.jsonl").read_text().splitlines()
    ]
    assert notes == ["resumed from step_000000", "resumed from step_000002"]
    assert outcome(run_dir) == outcome(tmp_path / "whole")
    assert out.splitlines()[-1].split(";")[0] == last_line.split(";")[0], "the same weights are reported"
