"""Rows of a reasoning-gym task. The only file of this package that imports reasoning_gym.

Some tasks iterate over sets, so that their questions depend on Python's hash seed, which differs between processes: a
resumed run would train on other questions. They are therefore generated in a process of their own with a fixed hash seed
(`main` below), which gets its request as JSON and answers in JSON lines. Each row carries its whole entry
for the task's own scorer, as a Python literal: JSON would turn tuples into lists, and two tasks then score a right answer
as wrong. Next: `rows.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from lockstep.data.prompt import nearest
from lockstep.errors import DataError

DEFAULT_SIZE = 500


def gym_rows(task: str, size: int, seed: int, config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with `prompt`, `answer` (may be None: some tasks have no single one), `task`, `task_config` and `task_entry`.

    DataError for an unknown task or configuration.
    """
    request = json.dumps({"task": task, "config": {**config, "size": size, "seed": seed}})
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from lockstep.data.gym import main; main()"],
        input=request,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8"},
    )
    where = f"reasoning_gym task {task}"
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise DataError("the task could not be generated", where=where, why=f"exit code {done.returncode}")
    for number, line in enumerate(lines):
        row = json.loads(line)
        if "error" in row:
            raise DataError(row["error"], where=where, why=row["why"], fix=row["fix"])
        yield f"{where}, entry {number}", row


def generate(task: str, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows, in the process that generates them; an error is a row too."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        fix = "pip install 'lockstep-rl[gym]'"
        yield {"error": "source reasoning_gym needs reasoning_gym", "why": "it is not installed", "fix": fix}
        return
    if task == "composite":
        yield {"error": "is not supported", "why": "it mixes other tasks", "fix": "name one of those"}
        return
    if task not in DATASETS:
        fix = nearest(task, sorted(DATASETS)) or "see reasoning-gym's list"
        yield {"error": "there is no such task", "why": "", "fix": fix}
        return
    try:
        dataset = reasoning_gym.create_dataset(task, **config)
    except (TypeError, ValueError, AssertionError) as error:
        why = f"{type(error).__name__}: {error}"
        yield {"error": "the configuration is refused", "why": why, "fix": "correct data.args.config"}
        return
    for number in range(len(dataset)):
        entry = plain(dataset[number])
        yield {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "task": task,
            "task_config": json.dumps(config),
            "task_entry": repr(entry),
        }


def plain(value: Any) -> Any:
    """The same value from Python's own types only (numpy's strings and numbers become plain ones).

    ValueError for anything that a Python literal can't express.
    """
    if isinstance(value, dict):
        return {plain(k): plain(v) for k, v in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(plain(item) for item in value)
    if value is None or isinstance(value, bool):
        return value
    for scalar in (int, float, str):
        if isinstance(value, scalar):
            return scalar(value)
    if type(value).__module__ == "numpy":
        return plain(value.tolist())
    raise ValueError(f"an entry holds {value!r:.60}, which can't be written down")


def main() -> None:
    """Read the request from stdin, write rows to stdout; whatever the library prints goes to stderr."""
    out, sys.stdout = sys.stdout, sys.stderr
    request = json.load(sys.stdin)
    for row in generate(request["task"], request["config"]):
        out.write(json.dumps(row) + "\n")
