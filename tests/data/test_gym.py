"""reasoning-gym tasks: reproducible across processes, whole entries, clear refusals."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.data import gym
from lockstep.data.example import load
from lockstep.data.spec import DataSpec
from lockstep.errors import DataError


def test_plain_values_survive_as_literals() -> None:
    value = {
        "t": (1, [2, {3}]),
        5: None,
        "s": np.str_("x"),
        "n": np.int64(3),
        "f": 0.5,
        "b": True,
        "a": np.ones(2),
    }
    wanted = {"t": (1, [2, {3}]), 5: None, "s": "x", "n": 3, "f": 0.5, "b": True, "a": [1.0, 1.0]}
    result = gym.plain(value)
    assert result == wanted and ast.literal_eval(repr(result)) == wanted
    assert type(result["s"]) is str and type(result["n"]) is int
    with pytest.raises(ValueError, match="can't be written down"):
        gym.plain({"x": object()})


def answering(monkeypatch: pytest.MonkeyPatch, *rows: dict[str, Any], code: int = 0) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=code, stdout=text))


def test_errors_of_the_generating_process(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = DataSpec("reasoning_gym", args={"task": "chain_sum"})
    answering(monkeypatch, {"error": "there is no such task", "why": "", "fix": "did you mean chain_sum?"})
    with pytest.raises(
        DataError, match=r"reasoning_gym task chain_sum: there is no such task -> did you mean"
    ):
        load(spec)
    answering(monkeypatch, code=1)
    with pytest.raises(DataError, match=r"could not be generated \(exit code 1\)"):
        load(spec)


def test_a_task_without_a_single_answer_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"prompt": "q", "answer": None, "task": "rush_hour", "task_config": "{}", "task_entry": "{}"}
    answering(monkeypatch, row)
    (example,) = load(DataSpec("reasoning_gym", args={"task": "rush_hour", "chat": True}))
    assert example.columns == {"task": "rush_hour", "task_config": "{}", "task_entry": "{}", "answer": None}
    assert example.prompt == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "no task is named"),
        ({"task": "gcd", "size": 0}, "size is 0"),
        ({"task": "gcd", "config": {"seed": 3}}, "seed is data.seed"),
    ],
)
def test_refuses(args: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        load(DataSpec("reasoning_gym", args=args))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    (row,) = gym.generate("gcd", {})
    assert "not installed" in row["why"] and "lockstep-rl[gym]" in row["fix"]


@pytest.mark.slow
def test_questions_do_not_depend_on_the_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    spec = DataSpec("reasoning_gym", args={"task": "isomorphic_strings", "size": 5})  # it iterates over sets
    seen = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        seen.append(load(spec, seed=7))
    assert seen[0] == seen[1]
    assert json.loads(seen[0][0].columns["task_config"]) == {"size": 5, "seed": 7}
    with pytest.raises(DataError, match="did you mean chain_sum"):
        load(DataSpec("reasoning_gym", args={"task": "chain_sums"}))
    with pytest.raises(DataError, match=r"configuration is refused.*min_termz"):
        load(DataSpec("reasoning_gym", args={"task": "chain_sum", "config": {"min_termz": 1}}))
