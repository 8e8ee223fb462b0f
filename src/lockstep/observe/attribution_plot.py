"""Two drawings of an attribution: a bar for each source, a column for each layer. In the report, and as one SVG file.

They use the report's classes (`page.py`), so that one drawing serves light and dark; the file brings the few it needs. Values
are told by tooltips of the SVG itself, without a script.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from lockstep.observe.plots import nice_ticks, short

WIDTH, ROW, TOP = 420, 22, 10
LABELS, VALUES = 122, 76
"""Room left of the bars for names and right of them for values."""
COLUMNS_HEIGHT, LEFT, RIGHT, BOTTOM = 220, 50, 10, 34
MOST_LABELS = 12

STYLE = """
svg{--card:#fff;--ink:#16181d;--soft:#5b616e;--grid:#ececea;--good:#0f7b45;--c1:#2a78d6;--c2:#e0602a;--c3:#179a69;
--c4:#c98a00}
@media (prefers-color-scheme:dark){svg{--card:#181b21;--ink:#e9eaee;--soft:#9ba2b0;--grid:#252932;--good:#5fd39a;
--c1:#5aa2f5;--c2:#f0864f;--c3:#35c08c;--c4:#e0aa33}}
text{font:11px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--soft);font-variant-numeric:tabular-nums}
.back{fill:var(--card)}.title{font-size:15px;font-weight:600;fill:var(--ink)}
.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}
.area,circle{fill:currentColor}.grid{stroke:var(--grid)}.base{stroke:var(--soft);opacity:.55}
.line{fill:none;stroke:currentColor;stroke-width:1.3;opacity:.38}
.y{text-anchor:end}.x{text-anchor:middle}
"""


def sources_figure(data: Mapping[str, Any]) -> str:
    """The sources as a figure of the report."""
    body, height = sources(data)
    legend = _key("c1", "alone") + _key("c2", "so far, switched on from top to bottom")
    caption = "Mean |Δlogp| of each source, in nats"
    return _figure(
        "attribution-sources", "Where the mismatch comes from", caption, legend, body, height, _spoken(data)
    )


def layers_figure(data: Mapping[str, Any]) -> str:
    """The layers as a figure of the report."""
    legend = "".join(_key(*item) for item in _layer_legend(data))
    caption = (
        "Mean |Δlogp| with one layer in FP8, all others as in the trainer; dashed: the trainer's own rounding"
    )
    worst = max(data["layers"], key=lambda x: float(x["both"]["mean"]))
    spoken = (
        f"Columns over layers; the highest is layer {worst['layer']} with {short(worst['both']['mean'])}."
    )
    return _figure("attribution-layers", "By layer", caption, legend, layers(data), COLUMNS_HEIGHT, spoken)


def standalone(data: Mapping[str, Any]) -> str:
    """Both drawings in one SVG file, side by side."""
    left, height = sources(data)
    panels = [(left, "Mean |Δlogp| by source", [("c1", "alone"), ("c2", "so far")])]
    if data["layers"]:
        title = "By layer (dashed: the trainer's rounding)"
        panels.append((layers(data), title, _layer_legend(data)))
        height = max(height, COLUMNS_HEIGHT)
    width = 24 + len(panels) * (WIDTH + 24)
    parts = []
    for number, (body, title, legend) in enumerate(panels):
        keys, at = [], 0
        for color, name in legend:
            keys.append(
                f'<circle class="{color}" cx="{at + 4}" cy="42" r="4"/><text x="{at + 13}" y="46">{escape(name)}</text>'
            )
            at += 30 + 6 * len(name)
        parts.append(
            f'<g transform="translate({24 + number * (WIDTH + 24)} 0)"><text class="title" x="0" y="26">{escape(title)}</text>'
            f'{"".join(keys)}<g transform="translate(0 56)">{body}</g></g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 68}" width="{width}" '
        f'height="{height + 68}" role="img" aria-label="{escape(_spoken(data))}"><style>{STYLE}</style>'
        f'<rect class="back" width="100%" height="100%" rx="12"/>{"".join(parts)}</svg>\n'
    )


def sources(data: Mapping[str, Any]) -> tuple[str, int]:
    """Bars of the effects alone, dots of the effects so far, the whole below; and the drawing's height."""
    rows = list(data["sources"])
    inside = sum(s["step"] is not None for s in rows)
    values = [s[k]["mean"] for s in rows for k in ("alone", "cumulative") if s[k]] + [data["whole"]["mean"]]
    ticks = _ticks(max(values))
    height = TOP + ROW * (len(rows) + 1) + 30
    floor = height - 24

    def across(value: float) -> float:
        return LABELS + value / ticks[-1] * (WIDTH - LABELS - VALUES)

    parts = []
    for tick in ticks:
        x = across(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{floor}"/>')
        parts.append(f'<text class="tick x" x="{x:.1f}" y="{floor + 15}">{short(tick)}</text>')
    entries = [(s["title"], s["alone"], s["cumulative"]) for s in rows]
    entries.insert(inside, ("whole", data["whole"], None))
    dots, line = [], []
    for number, (title, effect, total) in enumerate(entries):
        y = TOP + ROW * number
        parts.append(f'<text class="tick y" x="{LABELS - 7}" y="{y + 15}">{escape(title)}</text>')
        if effect is None:
            parts.append(f'<text class="tick y" x="{WIDTH - 2}" y="{y + 15}">not measured</text>')
            continue
        end, color = across(effect["mean"]), "c3" if number == inside else "c1"
        beside = ' opacity=".45"' if number > inside else ""
        told = (
            f"{title}: mean {short(effect['mean'])}, p99 {short(effect['p99'])}, max {short(effect['max'])}"
        )
        bar = f"M{LABELS} {y + 4}H{end:.1f}v{ROW - 8}H{LABELS}z"
        parts.append(f'<path class="area {color}"{beside} d="{bar}"><title>{escape(told)}</title></path>')
        if total is not None:
            told = f"with everything down to {title}: mean {short(total['mean'])}"
            dots.append(_dot("c2", across(total["mean"]), y + ROW / 2, 3.5, told))
            line.append(f"{across(total['mean']):.1f} {y + ROW / 2}")
        text = "exactly 0" if effect["max"] == 0 else short(effect["mean"])
        parts.append(f'<text class="tick y" x="{WIDTH - 2}" y="{y + 15}">{text}</text>')
    parts.append(f'<line class="base" x1="{LABELS}" x2="{LABELS}" y1="{TOP}" y2="{floor}"/>')
    path = f'<path class="line faint c2" d="M{"L".join(line)}"/>' if len(line) > 1 else ""
    return "".join(parts) + path + "".join(dots), height


def layers(data: Mapping[str, Any]) -> str:
    """A column for each layer: linears, and behind them linears with keys and values; a dashed line at the trainer's rounding;
    dots under layers in BF16."""
    rows = data["layers"]
    ticks = _ticks(max(x[k]["mean"] for x in rows for k in ("both", "linears")))
    floor, split = COLUMNS_HEIGHT - BOTTOM, _splits(data)
    step = (WIDTH - LEFT - RIGHT) / len(rows)
    suggested = set((data["suggestion"] or {}).get("layers", ()))
    every = -(-len(rows) // MOST_LABELS)
    parts = []
    for tick in ticks:
        y = floor - tick / ticks[-1] * (floor - TOP)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick y" x="{LEFT - 6}" y="{y + 3.5:.1f}">{short(tick)}</text>')
    for number, row in enumerate(rows):
        x = LEFT + number * step
        told = f"layer {row['layer']}: mean {short(row['both']['mean'])}, linears {short(row['linears']['mean'])}"
        if split:
            parts.append(_column(x, step, row["both"]["mean"], ticks[-1], floor, "c2", told))
        parts.append(_column(x, step, row["linears"]["mean"], ticks[-1], floor, "c1", told))
        middle = x + step / 2
        if row["kept_bf16"] or row["layer"] in suggested:
            what = "in BF16 already" if row["kept_bf16"] else "suggested for BF16"
            parts.append(_dot("c3", middle, floor + 6, 2.6, f"layer {row['layer']}: {what}"))
        if row["layer"] % every == 0:
            parts.append(f'<text class="tick x" x="{middle:.1f}" y="{floor + 21}">{row["layer"]}</text>')
    rounding = floor - min(_rounding(data) / ticks[-1], 1.0) * (floor - TOP)
    parts.append(
        f'<line class="c4" stroke="currentColor" stroke-width="1.5" stroke-dasharray="5 3" x1="{LEFT}" '
        f'x2="{WIDTH - RIGHT}" y1="{rounding:.1f}" y2="{rounding:.1f}"/>'
    )
    parts.append(f'<text class="tick y" x="{LEFT - 6}" y="{floor + 21}">layer</text>')
    parts.append(f'<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}"/>')
    return "".join(parts)


def _dot(color: str, x: float, y: float, radius: float, told: str) -> str:
    return (
        f'<circle class="{color}" cx="{x:.1f}" cy="{y}" r="{radius}"><title>{escape(told)}</title></circle>'
    )


def _column(x: float, step: float, value: float, most: float, floor: int, color: str, told: str) -> str:
    top = floor - value / most * (floor - TOP)
    left, right = x + step * 0.15, x + step * 0.85
    return (
        f'<path class="area {color}" d="M{left:.1f} {floor}V{top:.1f}H{right:.1f}V{floor}z">'
        f"<title>{escape(told)}</title></path>"
    )


def _rounding(data: Mapping[str, Any]) -> float:
    """Mean |d| of the trainer's own rounding."""
    return float(next(s["alone"]["mean"] for s in data["sources"] if s["name"] == "rounding"))


def _splits(data: Mapping[str, Any]) -> bool:
    """Whether keys and values have a part of their own in some layer."""
    return any(x["both"] != x["linears"] for x in data["layers"])


def _layer_legend(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = [("c1", "linears"), *([("c2", "with keys and values")] if _splits(data) else [])]
    if data["suggestion"] and data["suggestion"]["layers"]:
        found.append(("c3", "suggested for BF16"))
    elif any(x["kept_bf16"] for x in data["layers"]):
        found.append(("c3", "in BF16"))
    return found


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to at least the largest value."""
    return nice_ticks(0.0, most, 4) if most > 0 else [0.0, 1.0]


def _key(color: str, label: str) -> str:
    return f'<li><i class="key {color}"></i>{escape(label)}</li>'


def _figure(ident: str, title: str, caption: str, legend: str, body: str, height: int, spoken: str) -> str:
    """A card like those of `plots.py`; its data for the hover script are empty, so that the script passes over it."""
    return (
        f'<figure class="card plot" id="{ident}"><figcaption><h3>{escape(title)}</h3><p>{escape(caption)}</p>'
        f'<ul class="legend">{legend}</ul></figcaption><div class="canvas">'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{ident}-t {ident}-d"><title id="{ident}-t">'
        f'{escape(title)}</title><desc id="{ident}-d">{escape(spoken)}</desc>{body}</svg></div>'
        '<script type="application/json">{"x":[]}</script></figure>'
    )


def _spoken(data: Mapping[str, Any]) -> str:
    """The sources in words."""
    parts = [f"{s['title']} {short(s['alone']['mean'])}" for s in data["sources"] if s["alone"]]
    return f"Mean absolute difference of log-probabilities by source: {', '.join(parts)}; whole {short(data['whole']['mean'])}."
