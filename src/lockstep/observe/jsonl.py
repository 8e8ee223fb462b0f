"""Line files: one JSON object a line, safe against being killed at any moment.

A line counts once its newline is on disk, so a torn last line is no data and is cut away when the file is opened
again. Non-finite numbers have no spelling in JSON; they are written as the strings "NaN", "Infinity" and "-Infinity",
which every JSON reader accepts and `number` turns back. Cutting a file writes the kept lines beside it and renames.
`sinks.py` builds the run's files on `LineFile`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

from lockstep.errors import DataError, UserError

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Spelling of a non-finite number -> its value."""


def spell(value: Any) -> Any:
    """`value` with every non-finite float, at any depth, replaced by its string."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): spell(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [spell(item) for item in value]
    return value


def number(value: Any) -> float | None:
    """The float that a JSON value stands for, None when it isn't a number."""
    if isinstance(value, str):
        return NON_FINITE.get(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


def encode(record: Mapping[str, Any]) -> str:
    """One line without its newline: keys in the given order, text as UTF-8 except lone surrogates, which stay escaped."""
    line = json.dumps(spell(record), ensure_ascii=False, allow_nan=False)
    if any("\ud800" <= ch <= "\udfff" for ch in line):
        line = json.dumps(spell(record), allow_nan=False)
    return line


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete records of a file, in order; none when it doesn't exist. A torn last line is left out.

    Raises DataError for a complete line that is no JSON object.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for index, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError("this line is no JSON", where=f"{path}:{index}", why=str(error)) from error
            if not isinstance(record, dict):
                raise DataError("this line is no JSON object", where=f"{path}:{index}")
            yield record


def repair(path: Path) -> dict[str, Any] | None:
    """Cut away what follows the last newline (a line whose writing was interrupted); the last complete record."""
    if not path.exists():
        return None
    end, last = 0, b""
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            end, last = end + len(line), line
        file.truncate(end)
    return json.loads(last) if last else None


def sync_folder(folder: Path) -> None:
    """Force a folder's entries (a new file, a rename) to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class LineFile:
    """A file of records in the order of their steps, that can be cut back to a step.

    `order` says which step may follow the last: a later one (`rising`), the same or a later one (`repeating`), or any
    (`free`). So whoever finds an old run in the folder either cuts it back (`truncate`) or is refused.
    """

    def __init__(self, path: Path, *, order: Literal["rising", "repeating", "free"] = "rising") -> None:
        self.path, self._order = path, order
        last = repair(path)
        self.last_step: int | None = None if last is None else step_of(last, path)
        self._file: IO[str] | None = None

    def append(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write the records of a step, each with its step in front, and force them to disk.

        Raises UserError when the file already holds this step or a later one.
        """
        last = step - 1 if self.last_step is None else self.last_step
        refused = {"rising": step <= last, "repeating": step < last, "free": False}
        if refused[self._order]:
            raise UserError(
                f"step {step} can't follow step {last}",
                where=str(self.path),
                why="the file holds an earlier run, and one step is written once",
                fix="resume that run, or choose another run_dir",
            )
        lines = "".join(encode({"step": step, **record}) + "\n" for record in records)
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8", newline="\n")
            sync_folder(self.path.parent)
        self._file.write(lines)
        self._file.flush()
        os.fsync(self._file.fileno())
        self.last_step = step

    def truncate(self, step: int) -> int:
        """Drop every record of a later step; how many there were. Kept lines stay byte for byte. All or nothing: the
        kept lines are written beside the file, forced to disk and renamed over it."""
        self.close()
        repair(self.path)
        if not self.path.exists():
            return 0
        dropped, kept_last = 0, None
        beside = self.path.with_name(self.path.name + ".new")
        with self.path.open("rb") as old, beside.open("wb") as new:
            for line in old:
                at = step_of(json.loads(line), self.path)
                if at > step:
                    dropped += 1
                    continue
                new.write(line)
                kept_last = at
            new.flush()
            os.fsync(new.fileno())
        os.replace(beside, self.path)
        sync_folder(self.path.parent)
        self.last_step = kept_last
        return dropped

    def close(self) -> None:
        """Let go of the file; a later append opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def step_of(record: Mapping[str, Any], path: Path) -> int:
    """The record's step. Raises DataError when it has none: such a line can be neither kept nor dropped."""
    step = record.get("step")
    if not isinstance(step, int):
        raise DataError("a record without an integer `step`", where=str(path), fix="remove the line")
    return step
