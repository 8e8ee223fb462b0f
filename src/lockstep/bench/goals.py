"""`benchmarks/results/goals.json`: what was promised, what was measured, on what.

One entry a goal, under an id that the project's plan gives it:

    {"C7a": {"value": 0.87, "goal": 0.85, "unit": "of copy bandwidth", "higher_is_better": true,
             "card": "...", "versions": {...}, "commit": "...", "command": "..."}}

Entries are written by the command that measured them, merged with what other commands wrote. A goal that is passed or failed
has value 1 or 0 and goal 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.bench.machine import Stamp
from lockstep.bench.results import FOLDER, write_json
from lockstep.errors import DataError

GOALS = FOLDER / "goals.json"


@dataclass(frozen=True)
class Goal:
    """A measured value and what it should reach."""

    id: str
    value: float
    goal: float
    unit: str
    higher_is_better: bool = True

    @property
    def reached(self) -> bool:
        """Whether the value is at least as good as the goal."""
        return self.value >= self.goal if self.higher_is_better else self.value <= self.goal

    def line(self) -> str:
        """For a terminal."""
        word = "reached" if self.reached else "missed"
        return f"goal {self.id}: {self.value:.4g} {self.unit}, goal {self.goal:.4g}: {word}"


def passed(id: str, ok: bool) -> Goal:
    """The goal of something that holds or doesn't."""
    return Goal(id, float(ok), 1.0, "pass")


def write_goals(goals: Sequence[Goal], stamp: Stamp, path: Path = GOALS) -> None:
    """Adds or replaces these goals in the file, atomically. Raises DataError when the file holds something else."""
    entries = read_goals(path)
    for goal in goals:
        entries[goal.id] = {
            "value": goal.value,
            "goal": goal.goal,
            "unit": goal.unit,
            "higher_is_better": goal.higher_is_better,
            "card": stamp.card,
            "versions": dict(stamp.versions),
            "commit": stamp.commit,
            "command": stamp.command,
        }
    write_json(path, {id: entries[id] for id in sorted(entries, key=_order)})


def read_goals(path: Path = GOALS) -> dict[str, Any]:
    """All entries; none when there is no file yet."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError("is no JSON", where=str(path), why=str(error), fix="mend or remove it") from error
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise DataError("holds no goals", where=str(path), fix="mend or remove it")
    return found


def _order(id: str) -> tuple[str, int, str]:
    """C2 before C10, C7a before C7b."""
    match = re.fullmatch(r"(\D*)(\d*)(.*)", id)
    assert match is not None
    return match[1], int(match[2] or 0), match[3]
