"""Did rollout and trainer agree? The one sentence the report is about.

A step counts as exact only when everything that was logged about it says so: the largest difference is zero, the mean
difference is zero and finite (a maximum can lose a NaN, a sum can't), every token's bits were equal, and there were
tokens at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lockstep.observe.history import History, Points
from lockstep.observe.plots import short


@dataclass(frozen=True)
class Verdict:
    """The sentence, a remark, and the colour of both."""

    kind: Literal["good", "warn", "bad", "plain"]
    text: str
    remark: str = ""


def worst_differences(history: History) -> Points:
    """The largest |dlogp| of every step in which tokens were compared; NaN where any measure of it isn't finite."""
    mean = dict(history.points("mismatch/mean_abs_dlogp"))
    tokens = dict(history.points("mismatch/tokens"))
    found: Points = []
    for step, largest in history.points("mismatch/max_abs_dlogp"):
        if tokens.get(step, 1.0) == 0:
            continue
        measures = (largest, mean.get(step, 0.0))
        found.append((step, max(measures) if all(map(math.isfinite, measures)) else math.nan))
    return found


def verdict(history: History) -> Verdict:
    """In how many of the measured steps both sides agreed bit for bit, and how far they were apart at worst."""
    points = worst_differences(history)
    if not points:
        return Verdict("plain", "The mismatch of rollout and trainer was not measured in this run.")
    share = dict(history.points("mismatch/exact_tokens"))
    exact = sum(value == 0 and share.get(step, 1.0) == 1.0 for step, value in points)
    text = f"Rollout and trainer agreed bit for bit in {exact} of {_steps(len(points))}."
    if exact == len(points):
        return Verdict(
            "good", text, "Every log-probability the trainer computed had the same bits as the rollout's."
        )
    solid = [point for point in points if math.isfinite(point[1])]
    broken = [step for step, value in points if not math.isfinite(value)]
    remarks = []
    if broken:
        remarks.append(f"Not a finite number in {_steps(len(broken))}, first at step {broken[0]}.")
    if solid:
        step, worst = max(solid, key=lambda point: point[1])
        remarks.append(
            f"Largest difference of a token's log-probability: {short(worst)} nats at step {step}."
        )
    return Verdict("bad" if broken else "warn", text, " ".join(remarks))


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"
