"""Which metrics the report plots, and how: a list to read. `plots.py` draws them, `glossary.py` explains them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from lockstep.observe.history import History, Points, finite, smoothed
from lockstep.observe.plots import Plot, Series

MOST_LINES = 8
"""Lines in one chart: as many as there are colours."""


@dataclass(frozen=True)
class Line:
    """One line of a chart: the first of `names` that the run has. A name with brackets matches many, one line each."""

    label: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Chart:
    """One chart of the report."""

    section: str
    title: str
    caption: str
    lines: tuple[Line, ...]
    scale: Literal["linear", "log", "zero-log"] = "linear"
    smooth: bool = False
    dotted: bool = False
    stack: bool = False
    from_zero: bool = False
    percent: bool = False
    """Values are shares and shown times 100."""
    unit: str = ""


CHARTS = (
    Chart("Learning", "Reward", "Mean over the step's samples", (Line("reward", ("reward",)),), smooth=True),
    Chart(
        "Learning",
        "Evaluation",
        "Held-out prompts",
        (
            Line("greedy pass@1", ("eval/greedy_pass@1",)),
            Line("sampled pass@1", ("eval/sampled_pass@1",)),
            Line("", ("eval/mean@<k>",)),
            Line("", ("eval/pass@<k>",)),
        ),
        dotted=True,
        from_zero=True,
    ),
    Chart(
        "Learning",
        "Reward functions",
        "What each gave, before its weight",
        (Line("", ("rewards/<function>/mean",)),),
    ),
    Chart(
        "Learning",
        "Reward spread",
        "Standard deviation within a group",
        (Line("reward_std", ("reward_std",)),),
    ),
    Chart(
        "Learning",
        "Completion length",
        "Tokens",
        (
            Line("mean", ("completions/mean_length",)),
            Line("longest", ("completions/max_length",)),
            Line("shortest", ("completions/min_length",)),
        ),
        from_zero=True,
    ),
    Chart(
        "Learning",
        "Cut off or taught nothing",
        "Completions at the length limit; groups of equal reward",
        (
            Line("cut off", ("completions/clipped_ratio",)),
            Line("equal reward", ("frac_reward_zero_std",)),
        ),
        percent=True,
        from_zero=True,
        unit="%",
    ),
    Chart(
        "Learning",
        "Entropy",
        "Nats a token",
        (Line("entropy", ("policy/entropy", "entropy")),),
        from_zero=True,
    ),
    Chart(
        "Agreement",
        "Mismatch",
        "Trainer's against rollout's log-probabilities, in nats; zero has its own line",
        (
            Line("largest |Δlogp|", ("mismatch/max_abs_dlogp",)),
            Line("99th percentile", ("mismatch/p99_abs_dlogp",)),
            Line("mean |Δlogp|", ("mismatch/mean_abs_dlogp",)),
            Line("KL (k3)", ("mismatch/kl_k3", "rollout_corr/k3_kl")),
            Line("band of the mean", ("controller/band",)),
        ),
        scale="zero-log",
    ),
    Chart(
        "Agreement",
        "Mismatch by position",
        "Mean |Δlogp| of tokens at these positions of a completion, in nats",
        (Line("", ("mismatch/position_<range>",)),),
        scale="zero-log",
    ),
    Chart(
        "Agreement",
        "Effective sample size",
        "Share of the tokens that weighing by trainer over rollout would leave; 1 when they agree",
        (Line("tokens", ("mismatch/ess",)),),
    ),
    Chart(
        "Agreement",
        "Changed codes",
        "FP8 weight codes moved by one optimizer step",
        (Line("changed", ("sync/changed_codes_pct",)),),
        unit="%",
        from_zero=True,
    ),
    Chart(
        "Agreement",
        "Importance weights",
        "Trainer over rollout",
        (
            Line("mean", ("rollout_corr/rollout_is_mean",)),
            Line("largest", ("rollout_corr/rollout_is_max",)),
            Line("smallest", ("rollout_corr/rollout_is_min",)),
            Line("effective sample size", ("rollout_corr/rollout_is_eff_sample_size",)),
        ),
    ),
    Chart("Update", "Gradient norm", "Before clipping", (Line("norm", ("optim/grad_norm",)),), scale="log"),
    Chart("Update", "Learning rate", "", (Line("rate", ("optim/lr",)),), from_zero=True),
    Chart(
        "Update",
        "Clipped tokens",
        "Ratio beyond its bounds",
        (
            Line("low", ("policy/clip_fraction_low",)),
            Line("high", ("policy/clip_fraction_high",)),
        ),
        percent=True,
        from_zero=True,
        unit="%",
    ),
    Chart("Update", "KL to the reference", "Nats a token", (Line("KL", ("policy/kl_to_reference",)),)),
    Chart(
        "Speed and memory",
        "Time",
        "Seconds a step, by phase",
        (Line("", ("time/<phase>_s",)),),
        stack=True,
        unit=" s",
    ),
    Chart(
        "Speed and memory",
        "Memory",
        "Peak, GiB",
        (Line("process", ("memory/rss_gb",)), Line("GPU", ("memory/cuda_gb",))),
        from_zero=True,
    ),
)
"""In the order of the page."""

CORE = (
    "Reward",
    "Evaluation",
    "Completion length",
    "Entropy",
    "Mismatch",
    "Changed codes",
    "Gradient norm",
    "Time",
)
"""Charts whose absence the report mentions."""


def lines_of(chart: Chart, history: History) -> list[tuple[str, Points]]:
    """Label and points of every line that the run has something for."""
    found: list[tuple[str, Points]] = []
    for line in chart.lines:
        if "<" not in line.names[0]:
            points = history.points(*line.names)
            found += [(line.label or _label(line.names[0], line.names[0]), points)] if points else []
            continue
        pattern = re.compile("([^/]+)".join(re.escape(part) for part in re.split(r"<[^>]*>", line.names[0])))
        names = [name for name in history.names if pattern.fullmatch(name)]
        if len(names) > 1 and "eval/mean@k" in names:
            names.remove("eval/mean@k")  # the same as the one that spells its k out
        found += [(_label(name, line.names[0]), history.points(name)) for name in names]
    return found


def _label(name: str, pattern: str) -> str:
    """What tells this metric from the others of its pattern: the bracketed part, for evaluations the whole last part."""
    if name.startswith("eval/"):
        return name.split("/", 1)[1]
    parts = re.split(r"<[^>]*>", pattern)
    return name[len(parts[0]) : len(name) - len(parts[-1])]


def plot_of(chart: Chart, history: History) -> Plot | None:
    """The chart filled with a run's metrics; None when the run has none of them."""
    lines = _phases(lines_of(chart, history)) if chart.stack else lines_of(chart, history)
    if not lines:
        return None
    factor = 100.0 if chart.percent else 1.0
    scaled = [(label, [(step, value * factor) for step, value in points]) for label, points in lines]
    caption = chart.caption
    if len(scaled) > MOST_LINES:
        caption = f"{caption} ({len(scaled) - MOST_LINES} more under All metrics)".strip()
    series: list[Series] = []
    for color, (label, points) in enumerate(scaled[:MOST_LINES], start=1):
        if chart.smooth and len(points) >= 8:
            window = max(3, len(points) // 20)
            series.append(Series(label, points, color, "faint"))
            series.append(Series(f"mean of {window} steps", smoothed(points, window), color))
        else:
            series.append(Series(label, points, color, "dotted" if chart.dotted else "line"))
    scale = chart.scale
    if scale == "log" and not _wide([p for _, points in lines for p in points]):
        scale = "linear"
    return Plot(
        chart.title, caption, series, "stack" if chart.stack else "line", scale, chart.unit, chart.from_zero
    )


def _wide(points: Points) -> bool:
    """Whether positive values span more than a factor of 30, so that a linear scale would hide the small ones."""
    values = [v for v in finite(points) if v > 0]
    return bool(values) and max(values) > 30 * min(values)


def _phases(lines: list[tuple[str, Points]]) -> list[tuple[str, Points]]:
    """Phases of a step, longest first, few enough for the colours, and what the step took beyond them."""
    total = dict(next((points for label, points in lines if label == "step"), []))
    phases = [(label, points) for label, points in lines if label != "step"]
    phases.sort(key=lambda phase: -sum(finite(phase[1])))
    if not phases:
        return [("step", list(total.items()))] if total else []
    shown = phases[: MOST_LINES - 1]
    known: dict[int, float] = {}
    for _, points in shown:
        for step, value in points:
            known[step] = known.get(step, 0.0) + (value if math.isfinite(value) else 0.0)
    rest = [
        (step, max(0.0, seconds - known.get(step, 0.0)))
        for step, seconds in total.items()
        if math.isfinite(seconds)
    ]
    if sum(value for _, value in rest) > 0.005 * sum(finite(list(total.items()))):
        shown = [*shown, ("other", rest)]
    return shown
