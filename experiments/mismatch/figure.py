"""SVG files of the experiment: several panels, one line an arm. Thin lines are seeds, thick ones their mean.

The panels are those of the run's report (`lockstep.observe.plots`); this file brings what an SVG that stands alone needs: styles,
headings and one legend. Next: `report.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from lockstep.observe.plots import (
    BOTTOM,
    FLOOR,
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    Plot,
    Series,
    log_axis,
    panel,
)

STYLE = """
svg{--card:#fff;--ink:#16181d;--soft:#5b616e;--grid:#ececea;--good:#0f7b45;--bad:#c02626;--c1:#2a78d6;--c2:#e0602a;
--c3:#179a69;--c4:#c98a00;--c5:#6a55c9;--c6:#d1548d;--c7:#5f7d1f;--c8:#7b8190}
@media (prefers-color-scheme:dark){svg{--card:#181b21;--ink:#e9eaee;--soft:#9ba2b0;--grid:#252932;--good:#5fd39a;--bad:#ff7a70;
--c1:#5aa2f5;--c2:#f0864f;--c3:#35c08c;--c4:#e0aa33;--c5:#a295f2;--c6:#ec7fb0;--c7:#a3c558;--c8:#8c93a3}}
text{font:11px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--soft);font-variant-numeric:tabular-nums}
.back{fill:var(--card)}.title{font-size:15px;font-weight:600;fill:var(--ink)}.name{font-size:13px;fill:var(--ink)}
.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}
.c5{color:var(--c5)}.c6{color:var(--c6)}.c7{color:var(--c7)}.c8{color:var(--c8)}
.line{fill:none;stroke:currentColor;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}
.faint{opacity:.4;stroke-width:1}.key{stroke:currentColor;stroke-width:3;stroke-linecap:round}
circle{fill:currentColor}.grid{stroke:var(--grid)}.base{stroke:var(--soft);opacity:.55}.gap{stroke:var(--soft);fill:none}
.bad{stroke:var(--bad);stroke-width:2;fill:none}.y{text-anchor:end}.x,.remark{text-anchor:middle}
.remark{font-size:13px;fill:var(--good);font-weight:600}
"""
GAP, HEAD, TITLE = 24, 40, 44
"""Between panels; above them all, for the legend; above each, for its heading."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Arm:
    """An arm's line: its name, colour, and the points of each seed."""

    name: str
    color: int
    seeds: Sequence[Points]


@dataclass(frozen=True)
class Panel:
    """One panel, drawn: heading, a line on what it shows, and SVG of WIDTH x HEIGHT."""

    title: str
    caption: str
    body: str


def lines(
    title: str, caption: str, arms: Sequence[Arm], *, scale: str = "linear", from_zero: bool = False
) -> Panel:
    """Curves over steps."""
    thin = [Series(arm.name, points, arm.color, "faint") for arm in arms for points in arm.seeds if points]
    thick = [Series(arm.name, mean(arm.seeds), arm.color) for arm in arms]
    series = [*thin, *(s for s in thick if s.points)]
    plot = Plot(title, caption, series, scale=scale, from_zero=from_zero)  # type: ignore[arg-type]
    return Panel(title, caption, panel(plot))


def mean(seeds: Sequence[Points]) -> list[tuple[float, float]]:
    """Of the steps that all seeds have."""
    known = [dict(points) for points in seeds if points]
    if not known:
        return []
    shared = sorted(set.intersection(*(set(k) for k in known)))
    return [(step, sum(k[step] for k in known) / len(known)) for step in shared]


def buckets(title: str, caption: str, names: Sequence[str], arms: Sequence[Arm]) -> Panel:
    """Values over named groups, on the scale that keeps zero apart; a point's step is the number of its group."""
    values = [v for arm in arms for points in arm.seeds for _, v in points]
    axis = log_axis(values)
    width = (WIDTH - LEFT - RIGHT) / max(len(names), 1)

    def place(number: float, value: float) -> str:
        return f"{LEFT + (number + 0.5) * width:.1f} {axis.height(value):.1f}"

    parts = []
    for height, label in axis.ticks:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
        )
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{height + 3.5:.1f}">{escape(label)}</text>')
    for number, name in enumerate(names):
        x = LEFT + (number + 0.5) * width
        parts.append(f'<text class="x" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}">{escape(name)}</text>')
    parts.append(f'<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{FLOOR}" y2="{FLOOR}"/>')
    for style, color, points in [
        *(("faint", arm.color, seed) for arm in arms for seed in arm.seeds),
        *(("", arm.color, mean(arm.seeds)) for arm in arms),
    ]:
        if points:
            path = "M" + "L".join(place(n, v) for n, v in points)
            parts.append(f'<path class="line {style} c{color}" d="{path}"/>')
    return Panel(title, caption, "".join(parts))


def svg(title: str, keys: Mapping[str, int], panels: Sequence[Panel], columns: int = 2) -> str:
    """The file: a legend (name and colour of each arm), and the panels row by row."""
    rows = -(-len(panels) // columns)
    width = GAP + columns * (WIDTH + GAP)
    height = HEAD + rows * (TITLE + HEIGHT + GAP)
    parts, at = [], GAP
    for name, color in keys.items():
        parts.append(f'<line class="key c{color}" x1="{at}" x2="{at + 18}" y1="24" y2="24"/>')
        parts.append(f'<text class="name" x="{at + 25}" y="28">{escape(name)}</text>')
        at += 50 + 7 * len(name)
    for number, part in enumerate(panels):
        row, column = divmod(number, columns)
        x, y = GAP + column * (WIDTH + GAP), HEAD + row * (TITLE + HEIGHT + GAP)
        parts.append(
            f'<g transform="translate({x} {y})"><text class="title" x="0" y="18">{escape(part.title)}</text>'
            f'<text x="0" y="35">{escape(part.caption)}</text><g transform="translate(0 {TITLE})">{part.body}</g></g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(title)}"><style>{STYLE}</style><rect class="back" width="100%" height="100%" rx="12"/>'
        f"{''.join(parts)}</svg>\n"
    )
