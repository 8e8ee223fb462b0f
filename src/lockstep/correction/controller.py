"""Keeps the mismatch in its band: a state machine from the metrics of a step to at most one action.

In a split flow the two sides never agree, so "is this mismatch safe?" needs a reference. It is measured, not guessed: a run's
own first steps are its normal level, above the *floor* that one side has against itself (0 here; an engine whose result
depends on the batch has more). The band is

    limit = floor + band * (median of the first steps - floor),   never above `ceiling` where that is set,

and after `patience` steps in a row above it something is done, one thing at a time, cheapest first:

    tighten       a stronger correction: the updates suffer less from what stays wrong
    recalibrate   new KV scales with the next publication
    keep_layers   the named layers' linears leave FP8, on both sides
    republish     the same weights once more, under a new version
    stop          the run ends, and says what was tried

When the step's metrics blame the KV scales (values saturate, or maxima have moved since calibration), recalibration goes to
the front: the other actions would treat a symptom. After an action its cool-down passes unjudged, then `patience` steps decide
whether the next one is due. `patience` steps in band end the episode, and the next one starts from the top.

The machine is pure: it holds numbers, not parts of a run. `trainer/control.py` carries out what it orders and reports what
became of it; `state` goes into every checkpoint, so that a resumed run decides the same.

Next: `../trainer/control.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from lockstep.correction.controller_spec import Action, ControllerSpec

CODES: dict[Action, int] = {"tighten": 1, "recalibrate": 2, "keep_layers": 3, "republish": 4, "stop": 5}
"""Values of `controller/action`; 0 is a step without one."""
MEAN = "mismatch/mean_abs_dlogp"


@dataclass(frozen=True)
class Order:
    """An action that is due, and why: `metric` was `value` at `step`, `limit` was allowed, for the `steps`-th step in a row.
    `evidence` is what changed the order of actions, or empty."""

    action: Action
    step: int
    metric: str
    value: float
    limit: float
    steps: int
    evidence: str = ""

    def reason(self) -> str:
        """For people."""
        row = "" if self.steps == 1 else f", {self.steps} steps in a row"
        blame = f"; {self.evidence}" if self.evidence else ""
        return f"{self.metric} is {self.value:.3g}, its band ends at {self.limit:.3g}{row}{blame}"


@dataclass
class State:
    """Everything the machine remembers, as plain data."""

    floor: dict[str, float] = field(default_factory=dict)
    """Metric -> what one side has against itself; empty until measured."""
    first: dict[str, list[float]] = field(default_factory=dict)
    """Metric -> its values in the first steps."""
    outside: int = 0
    """Steps in a row out of band since the last action."""
    inside: int = 0
    """Steps in a row in band."""
    waiting: int = 0
    """Steps of a cool-down still to pass."""
    tried: list[str] = field(default_factory=list)
    """Actions of this episode, carried out or passed over."""
    kept_layers: list[int] = field(default_factory=list)
    """Layers whose linears an action has put in BF16."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """Every action carried out since the run began: step, action, reason, what was done."""


class Controller:
    """Watches one run. Call `observe` once a step, and `report` what became of each order."""

    def __init__(self, spec: ControllerSpec) -> None:
        self.spec = spec
        self.state = State()

    @property
    def measured(self) -> bool:
        """Whether the floor is known."""
        return bool(self.state.floor)

    def measure_floor(self, itself: Mapping[str, float]) -> None:
        """Takes the mismatch of one side against itself, as metrics, for the floor. What isn't finite counts as 0."""
        values = {name: itself.get(name, 0.0) for name in self.spec.metrics}
        self.state.floor = {n: v if math.isfinite(v) else 0.0 for n, v in values.items()}

    def limit(self, metric: str) -> float:
        """Where the band of a metric ends; infinite while the normal level isn't known."""
        first = self.state.first.get(metric, [])
        found = math.inf
        if len(first) >= self.spec.baseline_steps:
            floor = self.state.floor.get(metric, 0.0)
            found = floor + self.spec.band * max(median(first) - floor, 0.0)
        return min(found, self.spec.ceiling) if metric == MEAN and self.spec.ceiling else found

    def observe(self, step: int, metrics: Mapping[str, float]) -> Order | None:
        """Takes the metrics of a finished step and returns the action that is due. A step in which nothing was compared
        changes nothing."""
        values: dict[str, float] = {name: metrics[name] for name in self.spec.metrics if name in metrics}
        if not values:
            return None
        state, limits = self.state, {name: self.limit(name) for name in values}
        wrong = {n: v for n, v in values.items() if not (v <= limits[n] and math.isfinite(v))}
        self._learn(values)
        if state.waiting:
            state.waiting -= 1
            state.outside = 0
            state.inside = 0 if wrong else state.inside + 1
        elif wrong:
            state.outside, state.inside = state.outside + 1, 0
        else:
            state.outside, state.inside = 0, state.inside + 1
        if state.inside >= self.spec.patience:
            state.tried = []
        urgent = any(not math.isfinite(v) for v in wrong.values())
        if not state.outside or (state.outside < self.spec.patience and not urgent):
            return None
        worst = max(wrong, key=lambda n: _excess(wrong[n], limits[n]))
        return self._next(Order("stop", step, worst, wrong[worst], limits[worst], state.outside), metrics)

    def report(self, order: Order, done: str | None, metrics: Mapping[str, float]) -> Order | None:
        """What became of an order: `done` says in words what was carried out, None that this run has no use for it; then the
        next action is returned, if there is one left."""
        self.state.tried.append(order.action)
        if done is None:
            return self._next(order, metrics)
        self.state.history.append(
            {"step": order.step, "action": order.action, "reason": order.reason(), "done": done}
        )
        self.state.outside, self.state.inside = 0, 0
        self.state.waiting = self.spec.wait(order.action)
        return None

    def metrics(self, order: Order | None) -> dict[str, float]:
        """The controller's own metrics of a step, after an `order` that was carried out, or None."""
        found = {
            "controller/action": float(CODES[order.action] if order else 0),
            "controller/out_of_band": float(order.steps if order else self.state.outside),
        }
        limit = self.limit(MEAN)
        return found | (
            {"controller/band": limit} if MEAN in self.spec.metrics and math.isfinite(limit) else {}
        )

    def done(self, action: Action) -> int:
        """How often an action was carried out since the run began."""
        return sum(entry["action"] == action for entry in self.state.history)

    def told(self) -> str:
        """What was tried, for the message of a run that stops."""
        tried = [
            f"step {e['step']} {e['action']} ({e['done']})"
            for e in self.state.history
            if e["action"] != "stop"
        ]
        return "tried: " + ", ".join(tried) if tried else "nothing else could be tried"

    def to_dict(self) -> dict[str, Any]:
        """The state, for a checkpoint."""
        return asdict(self.state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores a state. Raises TypeError when it isn't one."""
        self.state = State(**state)

    def _learn(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            first = self.state.first.setdefault(name, [])
            if len(first) < self.spec.baseline_steps and math.isfinite(value):
                first.append(value)

    def _next(self, order: Order, metrics: Mapping[str, float]) -> Order | None:
        """The first action in order that this episode hasn't tried."""
        blame = self._blame(metrics)
        ladder = [a for a in self.spec.actions if a not in self.state.tried]
        if blame and "recalibrate" in ladder:
            ladder.remove("recalibrate")
            ladder.insert(0, "recalibrate")
        else:
            blame = ""
        if not ladder:
            return None
        return Order(ladder[0], order.step, order.metric, order.value, order.limit, order.steps, blame)

    def _blame(self, metrics: Mapping[str, float]) -> str:
        """What speaks against the KV scales."""
        bounds = (
            ("kv/saturation_pct", self.spec.kv_saturation_pct),
            ("kv/scale_drift", self.spec.kv_scale_drift),
        )
        found = [
            f"{n} is {metrics[n]:.3g}, allowed is {limit:g}"
            for n, limit in bounds
            if _beyond(metrics, n, limit)
        ]
        return " and ".join(found)


def _beyond(metrics: Mapping[str, float], name: str, limit: float) -> bool:
    return name in metrics and not metrics[name] <= limit


def _excess(value: float, limit: float) -> float:
    """How far out of band, for comparing metrics; what isn't finite is furthest."""
    return value / limit if math.isfinite(value) and limit > 0 else math.inf
