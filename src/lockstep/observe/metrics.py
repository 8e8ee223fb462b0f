"""Numbers of one step: how micro-batches reduce to one value, how long each phase took, how much memory was used.

A metric knows its own reduction, so that splitting a batch into other micro-batches can't change what is logged: means
are weighted and sums are exact (`math.fsum`), hence independent of order and of rank. A non-finite value is never
dropped; it reaches the result, because a NaN that disappears in a `max` is a fault that nobody sees.
`sinks.py` writes the result down.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, SupportsFloat

How = Literal["mean", "sum", "max", "min", "last"]

WALL_CLOCK = ("time/", "memory/")
"""Prefixes of metrics that depend on the machine and the hour; everything else repeats bit for bit."""


def reproducible(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that two runs of the same configuration must share: no wall clock, no memory."""
    return {name: v for name, v in metrics.items() if name != "time" and not name.startswith(WALL_CLOCK)}


@dataclass
class Metric:
    """The values of one metric in one step and the way they become one number."""

    how: How
    values: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, value: float, weight: float) -> None:
        """Take one value. A weight of 0 (a micro-batch without tokens) carries nothing into a mean."""
        if not weight >= 0 or math.isinf(weight):
            raise ValueError(f"a weight is finite and not negative, got {weight}")
        self.values.append(value)
        self.weights.append(weight)

    def result(self) -> float:
        """The reduced value; NaN for a mean whose weights are all zero."""
        if self.how == "mean":
            pairs = [(v, w) for v, w in zip(self.values, self.weights, strict=True) if w > 0]
            total = exact_sum([w for _, w in pairs])
            return exact_sum([v * w for v, w in pairs]) / total if pairs else math.nan
        if self.how == "sum":
            return exact_sum(self.values)
        if self.how == "last":
            return self.values[-1]
        if any(math.isnan(v) for v in self.values):
            return math.nan
        return max(self.values) if self.how == "max" else min(self.values)


def exact_sum(values: list[float]) -> float:
    """The correctly rounded sum, whatever the order; NaN and infinities propagate as IEEE 754 says."""
    if not all(math.isfinite(v) for v in values):
        return sum(v for v in values if not math.isfinite(v))
    try:
        return math.fsum(values)
    except OverflowError:
        return sum(values)


class Accumulator:
    """Metrics of one step, over its micro-batches. Make a new one for every step."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, name: str, value: SupportsFloat, weight: SupportsFloat = 1.0, how: How = "mean") -> None:
        """Take one value of `name`. `weight` matters to a mean only: usually the tokens or sequences behind it.

        Raises ValueError when `name` was added with another reduction, or the weight is negative or not finite.
        """
        metric = self._metrics.setdefault(name, Metric(how))
        if metric.how != how:
            raise ValueError(f"metric {name!r} is reduced by {metric.how}, not by {how}")
        metric.add(float(value), float(weight))

    def merge(self, other: Accumulator) -> None:
        """Take everything another accumulator holds, as when the ranks' accumulators become one."""
        for name, metric in other._metrics.items():
            for value, weight in zip(metric.values, metric.weights, strict=True):
                self.add(name, value, weight, metric.how)

    def result(self) -> dict[str, float]:
        """Every metric's value, in the order in which they first came."""
        return {name: metric.result() for name, metric in self._metrics.items()}


class PhaseTimer:
    """Seconds of one step by phase. Phases never overlap: an inner phase stops the clock of the outer one, so that
    they can be stacked and sum to at most the step.

    `wait` runs at every boundary; on a GPU pass `torch.cuda.synchronize`, since kernels run on after their launch.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.perf_counter, wait: Callable[[], None] | None = None
    ) -> None:
        self._clock, self._wait = clock, wait
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._begin = self._mark = clock()

    def _now(self) -> float:
        if self._wait is not None:
            self._wait()
        return self._clock()

    def _charge(self) -> None:
        """Give the time since the last boundary to the innermost open phase."""
        now = self._now()
        if self._open:
            phase = self._open[-1]
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._mark
        self._mark = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block as `time/<name>_s`; a phase entered twice adds up."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def result(self) -> dict[str, float]:
        """`time/<phase>_s` for each phase and `time/step_s` for everything since the last result; starts anew."""
        assert not self._open, f"phase {self._open[-1]!r} is still open"
        now = self._now()
        times = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        times["time/step_s"] = now - self._begin
        self._seconds = {}
        self._begin = self._mark = now
        return times


def peak_memory(*, reset: bool = True) -> dict[str, float]:
    """`memory/rss_gb`: largest resident size of this process so far. `memory/cuda_gb`: most memory held by tensors on
    the current GPU since the last call (`reset` starts the next count). In GiB; no GPU, no second entry."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"memory/rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    import torch

    if torch.cuda.is_available():
        held = torch.cuda.max_memory_allocated()
        peak["memory/cuda_gb"] = held / 2**30
        if reset and held:
            torch.cuda.reset_peak_memory_stats()
    return peak
