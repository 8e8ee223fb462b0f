"""Plots as inline SVG, drawn by hand: no library, no script needed to see them.

Colours are CSS classes (`c1` .. `c8`), so that one drawing serves light and dark. Values that aren't finite get a cross
at the top edge instead of a gap. The scale for mismatches keeps zero apart: a logarithm has no zero, and a run that is
exact must not look like one that is nearly so. `charts.py` says what is plotted, `page.py` holds the styles.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

WIDTH, HEIGHT = 420, 220
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 12, 26
FLOOR, CEILING = HEIGHT - BOTTOM, TOP
MOST_POINTS = 500
"""Longer series are thinned to about this many points, minima and maxima kept."""
EXTREME = 1e290
"""Values beyond this, or nearer to zero than its inverse, are drawn as if they were there."""
MOST_COLUMNS = 120
"""Longer stacks are averaged into this many columns."""


@dataclass(frozen=True)
class Series:
    """One line: (step, value) in ascending steps."""

    label: str
    points: Sequence[tuple[float, float]]
    color: int = 1
    style: Literal["line", "faint", "dotted"] = "line"
    """`faint` stands behind a smoothed line; `dotted` marks every point, for values that aren't there at each step."""


@dataclass(frozen=True)
class Plot:
    """What one drawing shows."""

    title: str
    caption: str
    series: Sequence[Series]
    kind: Literal["line", "stack"] = "line"
    scale: Literal["linear", "log", "zero-log"] = "linear"
    unit: str = ""
    from_zero: bool = False
    """The vertical axis begins at zero even when the values are far from it."""


def short(value: float) -> str:
    """A number in four digits and at most about eight characters; `NaN`, `inf`, `0` stay what they are."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 999.95e12 or size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    for least, scale, suffix in (
        (999.95e9, 1e12, "T"),
        (999.95e6, 1e9, "G"),
        (999.95e3, 1e6, "M"),
        (9999.5, 1e3, "k"),
    ):
        if size >= least:
            return f"{value / scale:.4g}{suffix}"
    return f"{value:.4g}"


@dataclass(frozen=True)
class Axis:
    """A vertical scale: ticks as (height in the drawing, label), and the height of any value."""

    ticks: list[tuple[float, str]]
    low: float = 0.0
    high: float = 1.0
    logarithmic: bool = False
    zero_at: float | None = None
    """Height at which exact zeros are drawn when the scale has no zero of its own."""
    floor: float = FLOOR

    def height(self, value: float) -> float:
        """Where a finite value is drawn."""
        if self.zero_at is not None and value == 0:
            return self.zero_at
        position = math.log10(value) if self.logarithmic else value
        position = min(max(position, self.low), self.high)
        return self.floor - (position - self.low) / (self.high - self.low) * (self.floor - CEILING)


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers that cover low..high at steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    return [i * step for i in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def linear_axis(values: Sequence[float], from_zero: bool) -> Axis:
    """Round ticks around the values. Zero is included when it's near, or asked for."""
    bounded = [min(max(value, -EXTREME), EXTREME) for value in values]
    low, high = (min(bounded), max(bounded)) if bounded else (0.0, 1.0)
    if low >= 0 and (from_zero or low < 0.4 * high):
        low = 0.0
    if high - low < max(1e-12 * max(abs(high), abs(low)), 1 / EXTREME):
        pad = abs(high) * 0.1 if abs(high) > 1 / EXTREME else 1.0
        low, high = (0.0 if low >= 0 and low - pad < 0 else low - pad), high + pad
    ticks = nice_ticks(low, high)
    axis = Axis([], ticks[0], ticks[-1])
    return Axis(
        [(axis.height(t), short(0.0 if abs(t) < 1e-12 * abs(ticks[-1]) else t)) for t in ticks],
        ticks[0],
        ticks[-1],
    )


def log_axis(values: Sequence[float]) -> Axis:
    """Decades for the positive values; exact zeros lie on a line of their own below them. Only zeros: only that line."""
    positive = [v for v in values if v > 0]
    if not positive:
        return Axis([(FLOOR - 1.0, "0")], zero_at=FLOOR - 1.0)
    low, high = (
        max(math.floor(math.log10(min(positive))), -290),
        min(math.ceil(math.log10(max(positive))), 290),
    )
    low = min(low, 289)
    high = max(high, low + 1)
    zeros = len(positive) < len(values)
    axis = Axis([], low, high, True, FLOOR - 1.0 if zeros else None, FLOOR - 26.0 if zeros else FLOOR)
    stride = math.ceil((high - low) / 5)
    ticks = [
        (axis.height(10.0**e), f"1e{e}" if not -2 <= e <= 3 else short(10.0**e))
        for e in range(low, high + 1, stride)
    ]
    return Axis(([(FLOOR - 1.0, "0")] if zeros else []) + ticks, low, high, True, axis.zero_at, axis.floor)


@dataclass(frozen=True)
class Steps:
    """The horizontal scale."""

    low: float
    high: float

    def across(self, step: float) -> float:
        """Where a step is drawn."""
        return LEFT + (step - self.low) / (self.high - self.low) * (WIDTH - RIGHT - LEFT)

    def ticks(self) -> list[int]:
        """Whole steps worth a label."""
        found = [
            round(t) for t in nice_ticks(self.low, self.high) if self.low <= t <= self.high and t == round(t)
        ]
        return found or [round((self.low + self.high) / 2)]


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most about `most` points: of each bucket the smallest, the largest and every non-finite value."""
    if len(points) <= most:
        return list(points)
    buckets = most // 2
    kept: list[tuple[float, float]] = []
    for b in range(buckets):
        bucket = points[b * len(points) // buckets : (b + 1) * len(points) // buckets]
        solid = [p for p in bucket if math.isfinite(p[1])]
        chosen = {min(solid, key=lambda p: p[1]), max(solid, key=lambda p: p[1])} if solid else set()
        kept += [p for p in bucket if p in chosen or not math.isfinite(p[1])]
    return kept


def draw(plot: Plot, ident: str) -> str:
    """A `figure` with heading, legend, drawing and the data that the hover script reads."""
    plot, steps, body = _drawn(plot)
    head = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{ident}-t {ident}-d">'
        f'<title id="{ident}-t">{escape(plot.title)}</title><desc id="{ident}-d">{escape(_spoken(plot))}</desc>'
    )
    data = json.dumps(_hover(plot, steps)).replace("<", "\\u003c")
    caption = f"<p>{escape(plot.caption)}</p>" if plot.caption else ""
    return (
        f'<figure class="card plot" id="{ident}"><figcaption><h3>{escape(plot.title)}</h3>{caption}'
        f'{_legend(plot)}</figcaption><div class="canvas" tabindex="0">{head}{body}</svg>'
        f'<div class="glass"></div></div><script type="application/json">{data}</script></figure>'
    )


def panel(plot: Plot) -> str:
    """The drawing alone, WIDTH x HEIGHT from the origin, for an SVG file that brings its own styles, heading and legend."""
    return _drawn(plot)[2]


def _drawn(plot: Plot) -> tuple[Plot, Steps, str]:
    """The plot with as many points as are drawn, its horizontal scale, and frame and lines as SVG."""
    plot = _stacked(plot) if plot.kind == "stack" else _thinned(plot)
    points = [p for s in plot.series for p in s.points]
    steps = _step_scale([p[0] for p in points], plot.kind == "stack")
    finite = [value for _, value in points if math.isfinite(value)]
    if plot.kind == "stack":
        axis = linear_axis([sum(column) for column in _columns(plot)], from_zero=True)
        return plot, steps, _frame(steps, axis) + _stack_body(plot, steps, axis)
    log = (
        plot.scale != "linear"
        and not any(v < 0 for v in finite)
        and (plot.scale == "zero-log" or any(finite))
    )
    axis = log_axis(finite) if log else linear_axis(finite, plot.from_zero)
    body = "".join(_line(s, steps, axis) for s in plot.series)
    if log and axis.zero_at is not None and not any(finite) and finite:
        body += f'<text class="remark" x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{FLOOR - 12}">exactly 0</text>'
    return plot, steps, _frame(steps, axis) + body


def _thinned(plot: Plot) -> Plot:
    series = [Series(s.label, thin(s.points), s.color, s.style) for s in plot.series]
    return Plot(plot.title, plot.caption, series, plot.kind, plot.scale, plot.unit, plot.from_zero)


def _step_scale(steps: Sequence[float], columns: bool) -> Steps:
    low, high = (min(steps), max(steps)) if steps else (0.0, 1.0)
    pad = 0.5 if columns or low == high else 0.0
    return Steps(low - pad, high + pad)


def _frame(steps: Steps, axis: Axis) -> str:
    """Grid lines, axis labels, and the gap mark between zero and the decades."""
    parts = []
    for height, label in axis.ticks:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
        )
        parts.append(f'<text class="tick y" x="{LEFT - 6}" y="{height + 3.5:.1f}">{escape(label)}</text>')
    for step in steps.ticks():
        label = str(step)
        x = min(steps.across(step), WIDTH - 2 - 3.4 * len(label))
        parts.append(f'<text class="tick x" x="{x:.1f}" y="{HEIGHT - 8}">{label}</text>')
    parts.append(f'<text class="tick y" x="{LEFT - 6}" y="{HEIGHT - 8}">step</text>')
    parts.append(f'<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{FLOOR}" y2="{FLOOR}"/>')
    if axis.zero_at is not None and axis.logarithmic:
        y = (axis.zero_at + axis.floor) / 2
        parts.append(f'<path class="gap" d="M{LEFT - 5} {y + 3:.1f}l10 -3M{LEFT - 5} {y + 7:.1f}l10 -3"/>')
    return "".join(parts)


def _line(series: Series, steps: Steps, axis: Axis) -> str:
    """A path broken at non-finite values and between decades and zero, dots where a point stands alone, crosses for
    the non-finite."""
    runs: list[list[tuple[float, float]]] = [[]]
    crosses, before = [], 0.0
    for step, value in series.points:
        x = steps.across(step)
        if math.isfinite(value):
            if axis.logarithmic and (value == 0) != (before == 0):
                runs.append([])
            runs[-1].append((x, axis.height(value)))
            before = value
        else:
            runs.append([])
            crosses.append(f'<path class="bad" d="M{x - 3.5:.1f} {CEILING - 3.5:.1f}l7 7m0 -7l-7 7"/>')
    path = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in run) for run in runs if len(run) > 1)
    all_dots = series.style == "dotted" and len(series.points) <= 60
    dots = "".join(
        f'<circle class="c{series.color}" cx="{x:.1f}" cy="{y:.1f}" r="{2.6 if all_dots else 3}"/>'
        for run in runs
        if all_dots or len(run) == 1
        for x, y in run
    )
    dense = " dense" if len(series.points) > 150 else ""
    line = f'<path class="line {series.style}{dense} c{series.color}" d="{path}"/>' if path else ""
    return line + dots + "".join(crosses)


def _columns(plot: Plot) -> list[list[float]]:
    """The values of a stack by column: non-finite and negative ones count as nothing."""
    rows = [[v if math.isfinite(v) and v > 0 else 0.0 for _, v in s.points] for s in plot.series]
    return [list(column) for column in zip(*rows, strict=True)]


def _stacked(plot: Plot) -> Plot:
    """The same stack with one value a series at every step, averaged into at most MOST_COLUMNS columns."""
    every = sorted({step for s in plot.series for step, _ in s.points})
    count = min(len(every), MOST_COLUMNS)
    series = []
    for s in plot.series:
        known = dict(s.points)
        points = []
        for b in range(count):
            part = every[b * len(every) // count : (b + 1) * len(every) // count]
            values = [known.get(step, 0.0) for step in part]
            points.append((part[0], sum(values) / len(values)))
        series.append(Series(s.label, points, s.color))
    return Plot(plot.title, plot.caption, series, plot.kind, plot.scale, plot.unit, plot.from_zero)


def _stack_body(plot: Plot, steps: Steps, axis: Axis) -> str:
    """One path of rectangles a series, the first at the bottom."""
    columns = _columns(plot)
    places = [step for step, _ in plot.series[0].points] if plot.series else []
    edges = [steps.across(p - 0.5) for p in places] + [steps.across(steps.high)]
    base = [0.0] * len(columns)
    body = []
    for index, s in enumerate(plot.series):
        parts = []
        for c, column in enumerate(columns):
            width = edges[c + 1] - edges[c]
            gap = min(1.0, width * 0.2) if len(columns) <= 60 else 0.0
            top, bottom = axis.height(base[c] + column[index]), axis.height(base[c])
            if bottom - top > 0.02:
                parts.append(f"M{edges[c]:.2f} {bottom:.1f}V{top:.1f}h{width - gap:.2f}V{bottom:.1f}z")
            base[c] += column[index]
        body.append(f'<path class="area c{s.color}" d="{"".join(parts)}"/>')
    return "".join(body)


def _legend(plot: Plot) -> str:
    """Name and last value of every series; a `faint` one shares the entry of the line before it."""
    items = []
    for s in plot.series:
        last = f" <b>{escape(short(s.points[-1][1]))}{escape(plot.unit)}</b>" if s.points else ""
        items.append(f'<li><i class="key {s.style} c{s.color}"></i>{escape(s.label)}{last}</li>')
    if any(not math.isfinite(v) for s in plot.series for _, v in s.points):
        items.append('<li><i class="cross"></i>not finite</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _spoken(plot: Plot) -> str:
    """The drawing in words, for those who can't see it."""
    parts = []
    for s in plot.series:
        if not s.points:
            continue
        solid = [v for _, v in s.points if math.isfinite(v)]
        (first, a), (last, b) = s.points[0], s.points[-1]
        text = f"{s.label}: {short(a)} at step {first:g}, {short(b)} at step {last:g}"
        if solid:
            text += f", lowest {short(min(solid))}, highest {short(max(solid))}"
        if len(solid) < len(s.points):
            text += f", {len(s.points) - len(solid)} not finite"
        parts.append(text)
    return (
        ". ".join([("Stacked columns" if plot.kind == "stack" else "Lines") + " over training steps", *parts])
        + "."
    )


@dataclass
class _Row:
    """What the tooltip says about one series."""

    label: str
    color: int
    values: list[str] = field(default_factory=list)


def _hover(plot: Plot, steps: Steps) -> dict[str, object]:
    """Data of the tooltip: steps, and for every series a text at each step."""
    every = sorted({step for s in plot.series for step, _ in s.points})
    rows = []
    for s in plot.series:
        known = dict(s.points)
        row = _Row(s.label, s.color, [short(known[x]) + plot.unit if x in known else "" for x in every])
        rows.append({"n": row.label, "c": row.color, "v": row.values})
    return {"x": every, "d": [steps.low, steps.high], "m": [LEFT / WIDTH, (WIDTH - RIGHT) / WIDTH], "s": rows}
