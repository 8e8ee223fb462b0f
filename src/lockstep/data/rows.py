"""Rows of any source, each with its place for error messages, in the layout used here.

A row is a plain dict, checked later by whoever uses it (`example.py` for prompts, `sft.py` for targets). The source file of
each kind is imported where it is used, since each brings a library of its own. Next: `example.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from lockstep.data.arithmetic import arithmetic_rows
from lockstep.data.gym import DEFAULT_SIZE, gym_rows
from lockstep.data.hub import dataset_rows
from lockstep.data.parquet import parquet_rows
from lockstep.data.prompt import nearest
from lockstep.data.spec import DataSpec
from lockstep.data.verl import from_verl
from lockstep.errors import DataError

Row = tuple[str, dict[str, Any]]
"""Where it is (file and line), and its columns."""


def read_rows(spec: DataSpec, seed: int) -> Iterator[Row]:
    """The rows of the source, at most `spec.limit`. Raises DataError."""
    rows = _source(spec, spec.seed if spec.seed is not None else seed)
    layout = spec.args.get("layout", "plain")
    if layout not in ("plain", "verl"):
        raise DataError(f"layout is {layout!r}", where="data.args.layout", fix="plain or verl")
    for where, values in islice(rows, spec.limit):
        yield where, from_verl(values, where) if layout == "verl" else values


def _source(spec: DataSpec, seed: int) -> Iterator[Row]:
    if spec.source == "arithmetic":
        return arithmetic_rows(spec, seed)
    if spec.source == "reasoning_gym":
        return _gym(spec, seed)
    if spec.source == "dataset":
        a = spec.args
        return dataset_rows(spec.path, a.get("name"), a.get("split", "train"), a.get("revision"))
    path = Path(spec.path).expanduser()
    if not path.is_file():
        folder = [str(p.name) for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            "the file doesn't exist",
            where=spec.path,
            why=f"looked for {path.absolute()}",
            fix=nearest(path.name, folder),
        )
    return jsonl_rows(path) if spec.source == "jsonl" else parquet_rows(path)


def _gym(spec: DataSpec, seed: int) -> Iterator[Row]:
    task, size, config = (
        spec.args.get("task"),
        spec.args.get("size", DEFAULT_SIZE),
        spec.args.get("config") or {},
    )
    if not isinstance(task, str) or not task:
        raise DataError("no task is named", where="data.args.task", fix="name one, such as chain_sum")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise DataError(f"size is {size!r}", where="data.args.size", fix="a whole number from 1 on")
    if not isinstance(config, dict) or {"size", "seed"} & set(config):
        fix = "a section of the task's own settings; size is data.args.size, seed is data.seed"
        raise DataError(f"config is {config!r:.80}", where="data.args.config", fix=fix)
    return gym_rows(task, min(size, spec.limit or size), seed, config)


def jsonl_rows(path: Path) -> Iterator[Row]:
    """One JSON object a line; blank lines are skipped. DataError with file and line for anything else."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if not line.strip():
                    continue
                values = json.loads(line)
            except UnicodeDecodeError as error:
                raise DataError("not UTF-8 text", where=where, why=str(error)) from error
            except ValueError as error:
                raise DataError(
                    "not JSON", where=where, why=str(error), fix="write one JSON object a line"
                ) from error
            if not isinstance(values, dict):
                raise DataError(
                    f"a {type(values).__name__}, not an object",
                    where=where,
                    fix="write one JSON object a line",
                )
            yield where, values
