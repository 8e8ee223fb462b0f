"""The metrics of a run, by name: what the report's numbers and plots are made from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.observe.jsonl import step_of
from lockstep.observe.sinks import metrics_of

Points = list[tuple[int, float]]
"""(step, value) in ascending steps; a value may be non-finite."""


class History:
    """All lines of metrics.jsonl. Raises DataError for a line without a step."""

    def __init__(self, lines: Iterable[Mapping[str, Any]]) -> None:
        self._lines = [
            (step_of(line, Path("metrics.jsonl")), line.get("time"), metrics_of(line)) for line in lines
        ]

    @cached_property
    def steps(self) -> list[int]:
        """The steps written down; 0 is the evaluation before training."""
        return [step for step, _, _ in self._lines]

    @cached_property
    def names(self) -> list[str]:
        """Every metric that occurs, in the order of first occurrence."""
        return list(dict.fromkeys(name for _, _, metrics in self._lines for name in metrics))

    def points(self, *names: str) -> Points:
        """Where and what the first of `names` that occurs at all was."""
        name = next((n for n in names if n in self.names), None)
        return [(step, metrics[name]) for step, _, metrics in self._lines if name in metrics] if name else []

    def last_time(self) -> float | None:
        """Wall clock of the last line, seconds since 1970."""
        times = [moment for _, moment, _ in self._lines if isinstance(moment, (int, float))]
        return float(times[-1]) if times else None


def finite(points: Sequence[tuple[int, float]]) -> list[float]:
    """The values that are finite."""
    return [value for _, value in points if math.isfinite(value)]


def smoothed(points: Points, window: int) -> Points:
    """Mean of the last `window` finite values at each step; steps without any yet are left out."""
    result: Points = []
    recent: list[float] = []
    for step, value in points:
        if math.isfinite(value):
            recent.append(value)
            del recent[:-window]
        if recent:
            result.append((step, sum(recent) / len(recent)))
    return result
