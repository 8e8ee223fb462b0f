"""Ten configurations with a mistake each: one clear line on stderr, exit code 2, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli.main import main

ROOT = Path(__file__).parents[2]
GOOD = {
    "model": "model: {path: models/tiny, recipe: tiny}",
    "data": "data: {source: arithmetic}",
    "rewards": "rewards: [{use: last_number}]",
}
BAD = {
    "unknown key": ("optim: {lrr: 1e-5}", "optim.lrr: unknown key, value 1e-05 -> did you mean optim.lr?"),
    "unknown section": (
        "optimizer: {lr: 1}",
        "optimizer: unknown key, value {'lr': 1} -> did you mean optim?",
    ),
    "not a number": ("optim: {lr: small}", "optim.lr: small is not a number"),
    "not a choice": (
        "flow: {kv: fp16}",
        "flow.kv: fp16 is not allowed (allowed: bf16, fp8) -> did you mean bf16?",
    ),
    "negative": ("update: {steps: -1}", "update: steps can't be negative"),
    "missing section": ("data:", "data: null is not a section of keys and values"),
    "missing key": ("rewards: [{weight: 2}]", "rewards.0.use: missing (expected text)"),
    "equal keys": (
        "seed: 1\nseed: 2",
        "line 5: key 'seed' is given twice -> remove this one or the one in line 4",
    ),
    "bad syntax": ("optim: {lr: 1", "line 5, column 1: not valid YAML"),
    "keys at odds": ("eval: {every: 5}", "eval.every is set but eval.data is missing"),
}


def write(name: str, folder: Path) -> Path:
    text, _ = BAD[name]
    kept = [line for key, line in GOOD.items() if not text.startswith(f"{key}:")]
    file = folder / "run.yaml"
    file.write_text("\n".join([*kept, text]) + "\n", encoding="utf-8")
    return file


@pytest.mark.parametrize("name", BAD)
def test_one_clear_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(name, tmp_path)
    with pytest.raises(SystemExit) as e:
        main(["train", str(file)])
    out, err = capsys.readouterr()
    assert (e.value.code, out) == (2, "")
    assert err.startswith(f"error: config: {file}: ") and err.count("\n") == 1
    assert BAD[name][1] in err


@pytest.mark.parametrize("name", ["unknown key", "keys at odds"])
def test_as_a_process(name: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lockstep", "train", str(write(name, tmp_path))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.startswith("error: config: ")
        and done.stderr.count("\n") == 1
        and BAD[name][1] in done.stderr
    )
    assert not list(tmp_path.glob("runs*"))
