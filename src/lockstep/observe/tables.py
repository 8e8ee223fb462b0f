"""The report's tables: samples, receipts, notes, all metrics. Everything that came from a run is escaped here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from lockstep.observe.glossary import describe
from lockstep.observe.history import History, finite
from lockstep.observe.jsonl import number
from lockstep.observe.plots import short

SAMPLE_STEPS = 40
"""Steps whose samples the page holds: evenly spread, first and last included."""
TEXT_LIMIT = 4000
"""Characters of a text that the page holds."""
FOLD_AT = 240
"""A text longer than this, or of more than six lines, is folded."""
RECEIPTS = 200
"""Receipts the page holds: the newest."""


def shown(value: Any) -> str:
    """Any JSON value as short text: numbers rounded, missing ones as a dash."""
    if value is None or value == "":
        return "–"
    found = number(value)
    if found is not None:
        return f"{value:,}" if isinstance(value, int) else short(found)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def when(moment: float | None) -> str:
    """A wall clock in UTC, to the minute; empty when it is unknown or no date."""
    if moment is None or not 0 <= moment < 4e9:
        return ""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")


def spread(steps: Sequence[int], most: int) -> set[int]:
    """At most `most` of the steps, evenly spread, the first and last included."""
    if len(steps) <= most:
        return set(steps)
    return {steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)}


def _text(value: Any) -> str:
    """A prompt or completion, folded when long and cut when very long."""
    if value is None:
        return "–"
    raw = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    rest = len(raw) - TEXT_LIMIT
    body = escape(raw[:TEXT_LIMIT]) + (
        f" <i>… {rest} more characters in samples.jsonl</i>" if rest > 0 else ""
    )
    body = body or "<i>empty</i>"
    if len(raw) <= FOLD_AT and raw.count("\n") < 6:
        return f'<div class="text">{body}</div>'
    first = " ".join(raw[:FOLD_AT].split())
    return f'<details class="text"><summary><span>{escape(first)} …</span></summary>{body}</details>'


def _mismatch(value: Any) -> str:
    """The pill for a sample's largest |dlogp|: green only for exactly zero."""
    found = number(value)
    if found is None:
        return "–"
    kind = "good" if found == 0 else "warn" if math.isfinite(found) else "bad"
    return f'<span class="pill {kind}">{escape(short(found))}</span>'


def _sample_row(sample: Mapping[str, Any]) -> str:
    reward = number(sample.get("reward"))
    sortable = "" if reward is None or math.isnan(reward) else repr(reward)
    raw_parts = sample.get("parts")
    parts = raw_parts if isinstance(raw_parts, Mapping) else {}
    listed = "\n".join(f"{name} {shown(value)}" for name, value in parts.items())
    cells = (
        ("step", "num", escape(shown(sample.get("step")))),
        ("reward", "num", escape(shown(sample.get("reward"))) + _parts(listed if len(parts) > 1 else "")),
        ("prompt", "long", _text(sample.get("prompt"))),
        ("completion", "long", _text(sample.get("completion"))),
        ("answer", "", _text(sample.get("answer")) if sample.get("answer") not in (None, "") else "–"),
        ("tokens", "num", escape(shown(sample.get("tokens")))),
        ("ended by", "", escape(shown(sample.get("finish_reason")))),
        ("mean logp", "num", escape(shown(sample.get("mean_logp")))),
        ("max |Δlogp|", "num", _mismatch(sample.get("max_abs_dlogp"))),
        ("version", "num", escape(shown(sample.get("weight_version")))),
    )
    columns = "".join(f'<td class="{kind}" data-label="{label}">{text}</td>' for label, kind, text in cells)
    return f'<tr data-step="{escape(str(sample.get("step")))}" data-reward="{sortable}">{columns}</tr>'


def _parts(listed: str) -> str:
    return f'<small class="parts">{escape(listed)}</small>' if listed else ""


def samples_table(samples: Sequence[Mapping[str, Any]]) -> str:
    """All samples of up to SAMPLE_STEPS steps, with the filter's controls; empty without samples."""
    steps = sorted({s["step"] for s in samples if isinstance(s.get("step"), int)})
    if not steps:
        return ""
    kept = spread(steps, SAMPLE_STEPS)
    rows = "".join(_sample_row(s) for s in samples if s.get("step") in kept)
    options = "".join(f'<option value="{step}">{step}</option>' for step in sorted(kept, reverse=True))
    heads = (
        "step",
        "reward",
        "prompt",
        "completion",
        "answer",
        "tokens",
        "ended by",
        "mean logp",
        "max |Δlogp|",
        "version",
    )
    numeric = {"step", "reward", "tokens", "mean logp", "max |Δlogp|", "version"}
    head = "".join(f'<th scope="col"{" class=num" if h in numeric else ""}>{h}</th>' for h in heads)
    left_out = len(steps) - len(kept)
    remark = (
        f'<p class="muted">Samples of {left_out} more steps are in samples.jsonl.</p>' if left_out else ""
    )
    return (
        '<div class="card"><div class="controls" hidden>'
        f'<label>Step <select id="by-step">{options}<option value="all">all</option></select></label>'
        '<label>Order <select id="by-reward"><option value="">as sampled</option><option value="high">highest reward first'
        '</option><option value="low">lowest reward first</option></select></label>'
        '<label>Containing <input id="by-text" type="search"></label><span id="shown" class="muted" role="status"></span>'
        f'</div><div class="scroll" tabindex="0" role="region" aria-label="Samples"><table class="samples"><thead><tr>{head}'
        f"</tr></thead><tbody>{rows}</tbody></table></div></div>"
        f'<p><button id="more" type="button" hidden>Show more samples</button></p>{remark}'
    )


RECEIPT_FIELDS = ("step", "version", "tensors", "bytes", "digest", "hash", "changed_pct", "max_rel_err")
"""Columns of the receipts, before any other field a receipt has."""


def receipts_table(receipts: Sequence[Mapping[str, Any]]) -> str:
    """The newest receipts, newest first; empty without receipts."""
    if not receipts:
        return ""
    part = list(receipts)[-RECEIPTS:][::-1]
    fields = [f for f in RECEIPT_FIELDS if any(f in r for r in part)]
    fields += sorted({str(key) for r in part for key in r} - set(fields))
    head = "".join(f'<th scope="col">{escape(f.replace("_", " "))}</th>' for f in fields)
    rows = "".join("<tr>" + "".join(_receipt_cell(f, r.get(f)) for f in fields) + "</tr>" for r in part)
    hidden = len(receipts) - len(part)
    remark = f'<p class="muted">{hidden} earlier receipts are in receipts.jsonl.</p>' if hidden else ""
    summary = f"{len(receipts)} publication{'s' if len(receipts) > 1 else ''} of weights, newest first"
    return (
        f'<details class="card"{" open" if len(part) <= 12 else ""}><summary>{summary}</summary>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Receipts"><table class="ledger">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>{remark}"
    )


def controller_table(orders: Sequence[Mapping[str, Any]]) -> str:
    """What the mismatch controller ordered and what became of it, oldest first; empty when it never did."""
    if not orders:
        return ""
    heads = ("step", "action", "reason", "what was done")
    head = "".join(f'<th scope="col">{h}</th>' for h in heads)
    rows = "".join(
        f'<tr><td>{escape(shown(o.get("step")))}</td><td style="white-space:nowrap">{escape(shown(o.get("action")))}</td>'
        f"<td>{escape(shown(o.get('reason')))}</td><td>{escape(shown(o.get('done')))}</td></tr>"
        for o in list(orders)[-RECEIPTS:]
    )
    return (
        '<div class="card scroll" tabindex="0" role="region" aria-label="Controller"><table class="pairs">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _receipt_cell(name: str, value: Any) -> str:
    text = shown(value)
    if name in ("digest", "hash") or len(text) > 24:
        return (
            f'<td><code title="{escape(text)}">{escape(text[:16])}{"…" if len(text) > 16 else ""}</code></td>'
        )
    return f"<td>{escape(text)}</td>"


def metrics_table(history: History) -> str:
    """Every metric of the run with its range and meaning."""
    rows = []
    for name in sorted(history.names):
        points = history.points(name)
        solid = finite(points)
        numbers = (
            points[0][1],
            points[-1][1],
            min(solid) if solid else math.nan,
            max(solid) if solid else math.nan,
        )
        meaning = describe(name)
        text = escape(meaning.text) if meaning else ""
        unit = escape(meaning.unit) if meaning else ""
        cells = "".join(f'<td class="num">{short(v)}</td>' for v in numbers)
        odd = len(points) - len(solid)
        note = f' <span class="pill bad">{odd} not finite</span>' if odd else ""
        rows.append(
            f"<tr><td><code>{escape(name)}</code>{note}</td>{cells}<td>{unit}</td><td>{text}</td></tr>"
        )
    heads = (
        ("metric", ""),
        ("first", "num"),
        ("last", "num"),
        ("lowest", "num"),
        ("highest", "num"),
        ("unit", ""),
        ("meaning", ""),
    )
    head = "".join(f'<th scope="col" class="{kind}">{label}</th>' for label, kind in heads)
    return (
        f'<details class="card"><summary>{len(rows)} metrics: first, last and extreme values, meaning</summary>'
        '<div class="scroll" tabindex="0" role="region" aria-label="All metrics"><table class="ledger"><thead><tr>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def notes_list(notes: Sequence[Mapping[str, Any]]) -> str:
    """The last remarks of the run, oldest first; empty without any."""
    if not notes:
        return ""
    rows = "".join(
        f"<tr><td>{escape(when(number(n.get('time'))))}</td><td>{escape(shown(n.get('text')))}</td></tr>"
        for n in list(notes)[-100:]
    )
    return (
        '<div class="card scroll" tabindex="0" role="region" aria-label="Notes">'
        f'<table class="pairs"><tbody>{rows}</tbody></table></div>'
    )
