"""What users get wrong, through the command line: one clear line, exit code 2, and nothing half-written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.cli.main import main
from lockstep.config.load import dump
from lockstep.models.tiny import make_tiny
from lockstep.numerics.flow import FlowSpec
from lockstep.trainer.spec import CheckpointSpec, MismatchSpec, RunSpec, UpdateSpec

MakeSpec = Callable[..., RunSpec]
Tree = dict[str, Any]


def cli(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code or 0)


def rows(*lines: Any) -> Callable[[Tree, Path], None]:
    """Points the data at a file with these rows."""

    def change(tree: Tree, folder: Path) -> None:
        file = folder / "rows.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        tree["data"] |= {"source": "jsonl", "path": str(file), "args": {}}

    return change


def put(path: str, value: Any) -> Callable[[Tree, Path], None]:
    """Sets one key."""

    def change(tree: Tree, folder: Path) -> None:
        *sections, last = path.split(".")
        for section in sections:
            tree = tree[section]
        tree[last] = value

    return change


def config_of_model(**changes: Any) -> Callable[[Tree, Path], None]:
    """A copy of the model's folder with another config.json."""

    def change(tree: Tree, folder: Path) -> None:
        source, target = Path(tree["model"]["path"]), folder / "model"
        target.mkdir()
        for file in source.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        config = json.loads((source / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, **changes}))
        tree["model"]["path"] = str(target)

    return change


def truncated_weights(tree: Tree, folder: Path) -> None:
    config_of_model()(tree, folder)
    file = folder / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def reward(use: str) -> Callable[[Tree, Path], None]:
    """Another function of the test's reward file, or another reward altogether."""

    def change(tree: Tree, folder: Path) -> None:
        file = tree["rewards"][0]["use"].rpartition(":")[0]
        tree["rewards"][0]["use"] = use.replace("FILE", file)

    return change


GOOD_ROW = {"prompt": "1+1=", "answer": "2"}
BAD: dict[str, tuple[Callable[[Tree, Path], None], str, str]] = {
    "unknown key": (put("optim.learning_rate", 1.0), "config", "optim.learning_rate: unknown key"),
    "wrong type": (put("rollout.max_new_tokens", "many"), "config", "rollout.max_new_tokens: many is not"),
    "unknown flow": (put("flow.name", "fp4"), "config", "flow.name: fp4 is not allowed"),
    "too many BF16 layers": (
        put("flow.keep_first_bf16", 3),
        "config",
        "3 layers are to stay in BF16, the model has 2",
    ),
    "truncated sampling": (put("rollout.top_p", 0.9), "config", "top_p"),
    "no model": (put("model.path", "nowhere/at/all"), "checkpoint", "nowhere/at/all: there is no model here"),
    "unsupported model": (
        config_of_model(sliding_window=64, use_sliding_window=True),
        "checkpoint",
        "sliding_window",
    ),
    "foreign model": (config_of_model(model_type="gemma2"), "checkpoint", "gemma2"),
    "truncated weights": (truncated_weights, "checkpoint", "model.safetensors"),
    "row without a prompt": (
        rows(GOOD_ROW, {"answer": "3"}),
        "data",
        "rows.jsonl:2: there is no column 'prompt'",
    ),
    "row without an answer": (
        rows(GOOD_ROW, {"prompt": "2+2="}),
        "data",
        "rows.jsonl:2: there is no column 'answer'",
    ),
    "empty dataset": (rows(), "data", "there are no rows"),
    "no such file": (
        put("data", {"source": "jsonl", "path": "none.jsonl"}),
        "data",
        "none.jsonl: the file doesn't exist",
    ),
    "all prompts too long": (put("data.max_prompt_tokens", 2), "data", "no prompt is left"),
    "no such reward": (reward("last_numbr"), "reward", "did you mean last_number?"),
    "no such function": (reward("FILE:spraed"), "reward", "there is no function 'spraed'"),
    "no such reward file": (reward("missing.py:f"), "reward", "missing.py: the file doesn't exist"),
    "prompt beyond the model's positions": (
        rows({"prompt": "1" * 2000, "answer": "1"}),
        "capacity",
        "the model has 1024 positions",
    ),
    "completion beyond the model's positions": (
        put("rollout.max_new_tokens", 1021),
        "capacity",
        "1024 positions",
    ),
    "cache too small": (
        put(
            "rollout",
            {
                "max_new_tokens": 6,
                "cache_tokens": 8,
                "page_size": 4,
                "prompts_per_step": 3,
                "samples_per_prompt": 4,
            },
        ),
        "capacity",
        "a sample may have 10 tokens, the KV cache holds 8 -> raise it to at least 12",
    ),
    "micro-batch too small": (put("update.max_tokens_per_microbatch", 8), "capacity", "raise it to at least"),
}
LATE: dict[str, tuple[Callable[[Tree, Path], None], str, str]] = {
    "reward of the wrong length": (reward("FILE:short"), "reward", "returned 11 scores for 12 completions"),
    "reward that raises": (reward("FILE:broken"), "reward", "raised KeyError: 'no such thing'"),
    "reward that is no number": (reward("FILE:nan"), "reward", "sample 0: nan"),
    "reward without its option": (reward("length"), "reward", "needs the column 'soft'"),
}


def test_a_model_of_another_shape_than_asked_for(
    make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny(tmp_path / "tiny", hidden=32, layers=1)

    def ask_for_two_layers(tree: Tree, _: Path) -> None:
        args = {"hidden": 32, "layers": 2}
        tree["model"] = {"path": str(tmp_path / "tiny"), "recipe": "tiny", "args": args}

    assert cli("train", str(config_with(make_spec(), ask_for_two_layers, tmp_path))) == 2
    assert_one_line(capsys, "checkpoint", "another shape than model.args ask for")


def config_with(spec: RunSpec, change: Callable[[Tree, Path], None], folder: Path) -> Path:
    tree = yaml.safe_load(dump(spec))
    change(tree, folder)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def assert_one_line(capsys: pytest.CaptureFixture[str], kind: str, text: str) -> None:
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.endswith("\n"), err
    assert err.startswith(f"error: {kind}: ") and text in err, err
    assert "Traceback" not in err and len(err) < 500


@pytest.mark.parametrize("name", BAD)
def test_refused_before_anything_is_made(
    make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    change, kind, text = BAD[name]
    spec = make_spec()
    file = config_with(spec, change, tmp_path)
    before = set(tmp_path.rglob("*"))
    assert cli("train", str(file)) == 2
    assert_one_line(capsys, kind, text)
    assert set(tmp_path.rglob("*")) == before, "nothing was written"


@pytest.mark.parametrize("name", LATE)
def test_refused_in_the_first_step(
    make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Known only when the first completions are there: no step is recorded, no model and no checkpoint is left."""
    change, kind, text = LATE[name]
    spec = make_spec(checkpoint=CheckpointSpec(every=1))
    file = config_with(spec, change, tmp_path)
    assert cli("train", str(file)) == 2
    assert_one_line(capsys, kind, text)
    run_dir = Path(spec.run_dir)
    assert not (run_dir / "metrics.jsonl").exists() and not (run_dir / "model").exists()
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["step_000000"]


def test_damaged_foreign_and_changed_checkpoints(
    make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = make_spec(update=UpdateSpec(2), checkpoint=CheckpointSpec(every=2))
    file = config_with(spec, lambda tree, folder: None, tmp_path)
    assert cli("train", str(file)) == 0
    capsys.readouterr()
    newest = Path(spec.run_dir) / "checkpoints" / "step_000002"
    assert cli("train", str(file), "optim.lr=1e-9") == 2
    assert_one_line(capsys, "checkpoint", "optim.lr was 0.002 when the checkpoint was made and is 1e-09 now")
    assert cli("train", str(file), "--resume", str(tmp_path)) == 2
    assert_one_line(capsys, "checkpoint", "not a checkpoint")
    masters = newest / "masters.safetensors"
    masters.write_bytes(masters.read_bytes()[:-64])
    assert cli("train", str(file), "update.steps=3") == 2
    assert_one_line(capsys, "checkpoint", "masters.safetensors")


def test_a_folder_in_use(
    make_spec: MakeSpec,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    read_metrics: Callable[[Path], Any],
) -> None:
    """Steps without a checkpoint can't be continued, and aren't written over unasked."""
    spec = make_spec(update=UpdateSpec(1))
    file = config_with(spec, lambda tree, folder: None, tmp_path)
    assert cli("train", str(file)) == 0
    capsys.readouterr()
    before = read_metrics(Path(spec.run_dir))
    assert cli("train", str(file)) == 2
    assert_one_line(capsys, "checkpoint", "the folder holds 1 steps of a run but no checkpoint to go on from")
    assert read_metrics(Path(spec.run_dir)) == before
    assert cli("train", str(file), "--resume", "never") == 0
    assert read_metrics(Path(spec.run_dir)) == before


def test_a_broken_contract_is_exit_code_3(
    make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = make_spec(FlowSpec("fp8-rollout"), mismatch=MismatchSpec("stop", tolerance=0.0))
    file = config_with(spec, lambda tree, folder: None, tmp_path)
    assert cli("train", str(file)) == 3
    assert_one_line(capsys, "contract", "rollout and trainer disagree")
    warned = config_with(replace(spec, mismatch=MismatchSpec()), lambda tree, folder: None, tmp_path)
    assert cli("train", str(warned), f"run_dir={tmp_path / 'warned'}", "update.steps=1") == 0
