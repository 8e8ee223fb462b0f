"""The evidence experiment: its runs can be stopped anywhere, its probe changes nothing, its task scores what it says."""

from __future__ import annotations

import importlib
import json
import random
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockstep.config.load import load_run
from lockstep.launch.local import run_training
from lockstep.observe.metrics import reproducible

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "mismatch"
SCRIPTS = ("arms", "drive", "figure", "page", "prepare", "probe", "record", "report", "run", "task")
SPREAD = """
def spread(prompts, completions, completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]
"""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The experiment's files as modules, which are gone again after the test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield {name: importlib.import_module(name) for name in SCRIPTS}
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Arguments of the driver for a model of two layers and completions of six tokens."""
    reward = tmp_path / "reward_of_test.py"
    reward.write_text(SPREAD)
    settings = (
        "kernels=reference",
        "model.recipe=tiny",
        "model.args={hidden: 32, layers: 2, heads: 2, kv_heads: 1, intermediate: 48}",
        f"rewards.0.use={reward}:spread",
        "rollout.prompts_per_step=3",
        "rollout.samples_per_prompt=4",
        "rollout.max_new_tokens=6",
        "rollout.max_running=16",
        "rollout.max_batched_tokens=256",
        "update.max_tokens_per_microbatch=512",
        "optim.lr=0.002",
        "eval.every=2",
        "eval.prompts=2",
        "eval.samples=1",
    )
    model, probe = ["--model", str(tmp_path / "tiny")], ["--probe-every", "2"]
    return [*model, "--steps", "4", "--slice", "2", *probe, "--reward", "-1", "--set", *settings]


class Launcher:
    """Runs the scripts in this process; stops runs after each step where asked to. started: run folders, in order."""

    def __init__(self, scripts: dict[str, ModuleType], *, impatient: bool = False) -> None:
        self.scripts, self.impatient = scripts, impatient
        self.started: list[str] = []

    def __call__(self, arguments: list[str], log: Path, until: float) -> int:
        script = self.scripts[Path(arguments[0]).stem]
        found = [a.removeprefix("run_dir=") for a in arguments if a.startswith("run_dir=")]
        self.started += [Path(f).name for f in found]
        extra = ["--until", "0"] if self.impatient and found else []
        return int(script.main([*arguments[1:], *extra]))


def curves(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [dict(reproducible(json.loads(line))) for line in lines]


def test_a_run_that_stops_after_every_step_has_the_curves_of_one_that_doesnt(
    scripts: dict[str, ModuleType], small: list[str], tmp_path: Path
) -> None:
    arms = ["--arms", "exact", "token-tis-mini", "--seeds", "0"]
    whole, cut = Launcher(scripts), Launcher(scripts, impatient=True)
    drive = scripts["drive"].main
    assert drive(["--out", str(tmp_path / "whole"), *arms, *small], whole) == 0
    assert drive(["--out", str(tmp_path / "cut"), *arms, *small], cut) == 0
    one, other = "exact-seed0", "token-tis-mini-seed0"
    assert whole.started == [one, other, one, other]
    assert cut.started == [one, one, other, other, one, one, other, other]
    for name in (one, other):
        ours, theirs = (curves(tmp_path / out / "runs" / name) for out in ("whole", "cut"))
        assert ours == theirs and [row["step"] for row in ours] == [0, 1, 2, 3, 4]
        assert {row["step"] for row in ours if "probe/cosine" in row} == {1, 3}
        newest = f"runs/{name}/checkpoints/step_000004"
        for file in ("masters.safetensors", "optimizer.safetensors"):
            assert (tmp_path / "whole" / newest / file).read_bytes() == (
                tmp_path / "cut" / newest / file
            ).read_bytes()
    exact, split = (curves(tmp_path / "whole" / "runs" / name)[1:] for name in (one, other))
    assert all(row["mismatch/max_abs_dlogp"] == 0 for row in exact)
    assert any(row["mismatch/max_abs_dlogp"] > 0 for row in split)
    assert any(row["optim/grad_norm"] > 0 for row in exact)
    assert drive(["--out", str(tmp_path / "whole"), *arms, *small], whole) == 0
    assert len(whole.started) == 4, "finished runs are not started again"

    record = json.loads((tmp_path / "cut" / "results" / f"{one}.json").read_text())
    assert record["steps"] == record["planned"] == 4
    assert record["curves"]["reward"][0] == [1.0, 2.0, 3.0, 4.0]
    assert record["mean"]["mismatch/mean_abs_dlogp"] == 0


def test_the_probe_changes_no_bit_and_knows_its_own_gradient(
    scripts: dict[str, ModuleType], small: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    drive, launcher = scripts["drive"], Launcher(scripts)
    assert drive.main(["--out", str(out), "--arms", "fp8-rollout", "--seeds", "3", *small], launcher) == 0
    probed = curves(out / "runs" / "fp8-rollout-seed3")
    spec = load_run(out / "runs" / "fp8-rollout-seed3" / "config.yaml", [f"run_dir={tmp_path / 'plain'}"])
    run_training(spec)
    without = [{k: v for k, v in row.items() if not k.startswith("probe/")} for row in probed]
    assert curves(tmp_path / "plain") == without
    found = [row for row in probed if "probe/cosine" in row]
    assert found and all(row["probe/cosine"] == pytest.approx(1.0, abs=1e-12) for row in found)
    assert all(0.5 < row["probe/cosine_weighted"] < 1.0 for row in found)


def test_the_resume_check_tells_equal_runs_from_others(
    scripts: dict[str, ModuleType], small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive, out = scripts["drive"], tmp_path / "out"
    monkeypatch.setattr(drive, "CHECKED", ("exact",))
    assert drive.main(["--out", str(out), "--resume-check", *small], Launcher(scripts)) == 0
    found = json.loads((out / "results" / "resume.json").read_text())
    assert found["exact"]["ran"] and not found["exact"]["differ"]

    def forgetful(arguments: list[str], log: Path, until: float) -> int:
        seed = ["seed=5"] if any("-cut" in a for a in arguments) else []
        return Launcher(scripts)([*arguments[:2], *seed, *arguments[2:]], log, until)

    assert drive.main(["--out", str(out), "--resume-check", *small], forgetful) == 1
    assert "metrics" in json.loads((out / "results" / "resume.json").read_text())["exact"]["differ"]


def test_the_task_scores_right_lines_before_the_first_mistake(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    task = scripts["task"]
    answer = task.answer_of([3, 4, 10, 5])
    assert answer == "3+4=7\n7+10=17\n17+5=22"
    for completion, wanted in (
        (answer, 1.0),
        (answer + "\n", 1.0),
        ("3+4=7\n7+10=17", 2 / 3),
        ("3+4=7\n7+10=18\n17+5=22", 1 / 3),
        ("3+4=7\n7+10=17\n17+5=22\n22+5=27", 2 / 3),
        ("3 + 4 = 7", 0.0),
        ("", 0.0),
    ):
        assert task.right_lines([""], [completion], [[1]], [answer]) == [pytest.approx(wanted)], completion
    files = [tmp_path / f"{n}.jsonl" for n in "abc"]
    for file, held_out in zip(files, (False, False, True), strict=True):
        task.write_rows(file, task.Task(), count=50, seed=1, held_out=held_out)
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [task.is_held_out(row["numbers"]) for row in rows] == [False] * 100 + [True] * 50


def made_up(results: Path, scripts: dict[str, ModuleType], *, exact: float = 0.0) -> None:
    """Results of all arms and seeds, as if they had run on a GPU."""
    record, rng = scripts["record"], random.Random(0)
    for arm in scripts["arms"].ARMS:
        for seed in range(3):
            rows = [{"step": 0, "eval/reward": 0.25, "eval/greedy_pass@1": 0.0}]
            for step in range(1, 101):
                split = arm not in ("exact", "bf16", "exact-mini", "bf16-mini")
                dlogp = 0.01 + 0.001 * rng.random() if split else exact
                rows.append(
                    {
                        "step": step,
                        "reward": 0.3 + 0.004 * step + 0.05 * rng.random(),
                        "policy/entropy": 0.2,
                        "mismatch/mean_abs_dlogp": dlogp,
                        "mismatch/max_abs_dlogp": 40 * dlogp,
                        "mismatch/position_0-3": 2 * dlogp,
                        "mismatch/position_256-1023": 3 * dlogp,
                        "optim/grad_norm": 1.0,
                    }
                )
            run_dir = results.parent / "runs" / f"{arm}-{seed}"
            run_dir.mkdir(parents=True)
            (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (run_dir / "stamp.json").write_text(json.dumps(STAMP))
            about = {"what": "", "overrides": [], "set": []}
            file = results / f"{arm}-seed{seed}.json"
            record.write_record(file, run_dir, arm=arm, seed=seed, planned=100, about=about)


STAMP = {
    "card": "a card",
    "versions": {"torch": "2"},
    "commit": "c",
    "command": "",
    "settings": {},
    "kernels": "hopper",
}


def test_the_page_has_the_results_and_the_goal_waits_for_all_of_them(
    scripts: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, results, page = scripts["report"].main, tmp_path / "results", tmp_path / "docs" / "evidence.md"
    goals = tmp_path / "goals.json"
    arguments = ["--results", str(results), "--page", str(page), "--goals", str(goals)]
    assert report(arguments) == 1 and "has not been run yet" in page.read_text()
    made_up(results, scripts)
    assert report(arguments) == 1 and not goals.exists()
    assert "no resume check on a GPU" in capsys.readouterr().err
    check = {"ran": True, "steps": 4, "differ": [], "stamp": STAMP}
    (results / "resume.json").write_text(json.dumps({"exact": check}))
    assert report(arguments) == 0
    assert json.loads(goals.read_text())["D9"]["value"] == 1.0
    text = page.read_text()
    assert "has not been run yet" not in text and "Not finished" not in text
    row = next(line for line in text.splitlines() if line.startswith("| `exact` | 3 | exactly 0 | exactly 0"))
    assert row
    drawings = sorted(p.name for p in (page.parent / "images").iterdir())
    assert [d for d in drawings if d not in text] == [] and len(drawings) == 4
    for name in drawings:
        ElementTree.parse(page.parent / "images" / name)

    (results / "exact-seed1.json").unlink()
    assert report(arguments) == 1 and "exact: [100, 0, 100] steps" in capsys.readouterr().err
    check["differ"] = ["metrics"]
    (results / "resume.json").write_text(json.dumps({"exact": check}))
    assert report(arguments) == 1 and "**differs** (metrics) from" in page.read_text()


def test_a_run_that_was_not_exact_or_not_resumed_fails_the_goal(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    report, results, goals = scripts["report"].main, tmp_path / "results", tmp_path / "goals.json"
    made_up(results, scripts, exact=1e-6)
    check = {"ran": True, "steps": 4, "differ": [], "stamp": STAMP}
    (results / "resume.json").write_text(json.dumps({"exact": check}))
    assert report(["--results", str(results), "--page", str(tmp_path / "e.md"), "--goals", str(goals)]) == 0
    assert json.loads(goals.read_text())["D9"]["value"] == 0.0


def test_the_page_in_docs_is_the_one_the_results_give(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    assert scripts["report"].main(["--page", str(tmp_path / "evidence.md")]) == 0
    assert (ROOT / "docs" / "evidence.md").read_text() == (tmp_path / "evidence.md").read_text(), (
        "run: python experiments/mismatch/report.py"
    )
