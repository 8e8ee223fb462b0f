"""The report of a run: one HTML file that needs nothing else, from the files in the run folder.

It answers, in this order: did rollout and trainer agree, did it learn, what did it cost, what did the model write. The
same files always give the same bytes. `verdict.py` judges, `charts.py` lists the plots, `tables.py` the
tables, `page.py` holds the markup.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.observe.attribution import read_attribution, section
from lockstep.observe.charts import CHARTS, CORE, plot_of
from lockstep.observe.history import History, Points, finite
from lockstep.observe.live import duration
from lockstep.observe.page import Section, page
from lockstep.observe.plots import draw, short
from lockstep.observe.rundir import RunDir
from lockstep.observe.tables import (
    controller_table,
    metrics_table,
    notes_list,
    receipts_table,
    samples_table,
    shown,
    when,
)
from lockstep.observe.verdict import verdict, worst_differences

ICONS = {
    "good": "M4 12.5l5.5 5.5L20 6.5",
    "warn": "M12 4v10M12 18.5v1",
    "bad": "M5.5 5.5l13 13M18.5 5.5l-13 13",
    "plain": "M5 12h14",
}


def build_report(run_dir: Path | str) -> Path:
    """Write `report.html` into a run folder and return its path.

    Raises DataError when the folder has no metrics.jsonl, or one of its files can't be read.
    """
    run = RunDir(Path(run_dir))
    if not run.metrics_file.exists():
        raise DataError(
            "no run to report",
            where=str(run.metrics_file),
            why="the file is missing",
            fix="name a run folder",
        )
    history = History(run.lines(run.metrics_file))
    samples, receipts = run.lines(run.samples_file), run.lines(run.receipts_file)
    try:
        config, config_fault = run.config(), ""
    except DataError as error:
        config, config_fault = {}, error.line()
    summary = run.summary()
    name = run.path.resolve().name
    head = _headline(name, history, config, summary)
    attribution = read_attribution(run.attribution_file)
    sections = [
        *_plot_sections(history),
        *([section(attribution)] if attribution else []),
        Section("controller", "Controller", controller_table(run.lines(run.controller_file))),
        Section("samples", "Samples", samples_table(samples)),
        Section("receipts", "Receipts", receipts_table(receipts)),
        Section("notes", "Notes", notes_list(run.lines(run.notes_file))),
        Section("config", "Configuration", _config(run.config_text(), config_fault)),
        Section("summary", "Summary", _summary(summary)),
        Section("metrics", "All metrics", metrics_table(history) if history.names else ""),
    ]
    ended = when(history.last_time())
    foot = f"Lockstep, from {escape(name)}/metrics.jsonl" + (
        f", last step written {ended}." if ended else "."
    )
    beside = run.report_file.with_name("report.html.new")
    text = page(f"{name} · Lockstep", head, sections, foot)
    beside.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
    os.replace(beside, run.report_file)
    return run.report_file


def _at(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, None when there is none."""
    found: Any = config
    for key in path.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found


def _headline(name: str, history: History, config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Run name, facts, verdict and tiles."""
    told = verdict(history)
    facts = "".join(
        f"<li>{label} <b>{escape(value)}</b></li>" for label, value in _facts(history, config, summary)
    )
    remark = f"<span>{escape(told.remark)}</span>" if told.remark else ""
    icon = f'<path d="{ICONS[told.kind]}" fill="none" stroke="currentColor" stroke-width="2.6" stroke-linecap="round"/>'
    tiles = "".join(
        f'<div class="card"><dt>{escape(label)}</dt><dd>{escape(value)}'
        f"{f'<small>{escape(note)}</small>' if note else ''}</dd></div>"
        for label, value, note in _tiles(history)
    )
    return (
        f'<p class="eyebrow">Lockstep run</p><h1>{escape(name)}</h1><ul class="facts">{facts}</ul>'
        f'<div class="verdict {told.kind}"><svg viewBox="0 0 24 24" aria-hidden="true">{icon}</svg>'
        f'<div><strong>{escape(told.text)}</strong>{remark}</div></div><dl class="tiles">{tiles}</dl>'
    )


def _facts(history: History, config: Mapping[str, Any], summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Model, flow and what else names the run, from the summary or the configuration."""
    wanted = (
        ("model", ("model.path", "model.name", "model")),
        ("flow", ("flow.name", "flow")),
        ("KV cache", ("flow.kv",)),
        ("scales", ("flow.scale",)),
        ("kernels", ("kernels",)),
        ("seed", ("seed",)),
    )
    facts = []
    for label, paths in wanted:
        values = [_at(source, path) for path in paths for source in (summary, config)]
        value = next(
            (v for v in values if v is not None and v != "" and not isinstance(v, (Mapping, list))), None
        )
        if value is not None:
            facts.append((label, str(value)))
    trained, planned = sum(step > 0 for step in history.steps), _at(config, "update.steps")
    return [*facts, ("steps", f"{trained} of {planned}" if isinstance(planned, int) else str(trained))]


def _change(points: Points) -> tuple[str, str]:
    """`first → last` and where they are; one number for one step."""
    (first, a), (last, b) = points[0], points[-1]
    if len(points) == 1:
        return short(a), f"step {first}"
    return f"{_plain(a)} → {_plain(b)}", f"steps {first} to {last}"


def _plain(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) and 1e-3 <= abs(value) < 100 else short(value)


def _tiles(history: History) -> list[tuple[str, str, str]]:
    """The headline numbers: label, value, remark. What was not measured has no tile."""
    tiles: list[tuple[str, str, str]] = []
    if points := history.points("reward"):
        value, note = _change(points)
        solid = finite(points)
        tiles.append(("Reward", value, note + (f", highest {_plain(max(solid))}" if len(solid) > 1 else "")))
    for label, metric in (("Greedy pass@1", "eval/greedy_pass@1"), ("Sampled pass@1", "eval/sampled_pass@1")):
        if points := history.points(metric):
            tiles.append((label, *_change(points)))
    if points := worst_differences(history):
        worst = max((math.inf if math.isnan(v) else v for _, v in points), default=0.0)
        value = "0" if worst == 0 else "not finite" if math.isinf(worst) else short(worst)
        tiles.append(("Max |Δlogp| ever", value, "nats, over all tokens of all steps"))
    if solid := finite(history.points("sync/changed_codes_pct")):
        mean = sum(solid) / len(solid)
        tiles.append(("Changed codes", f"{short(mean)}%", "of FP8 weight codes a step, mean"))
    if solid := finite([p for p in history.points("time/step_s") if p[0] > 0]):
        middle = sorted(solid)[len(solid) // 2]
        tiles.append(("Time", duration(sum(solid)), f"{short(middle)} s a step, median"))
    lost = [name for name in history.names if name.startswith("data/dropped_") or name == "rewards/unscored"]
    if dropped := sum(sum(finite(history.points(name))) for name in lost):
        tiles.append(("Dropped samples", short(dropped), "never filled in"))
    if skipped := max(finite(history.points("optim/skipped_steps")), default=0.0):
        tiles.append(("Skipped steps", short(skipped), "gradient not finite"))
    return tiles


def _plot_sections(history: History) -> list[Section]:
    """One section for each group of charts; a core chart without data is named, not drawn empty."""
    groups: dict[str, list[str]] = {}
    missing: list[str] = []
    for number, chart in enumerate(CHARTS):
        plot = plot_of(chart, history)
        if plot is not None:
            groups.setdefault(chart.section, []).append(draw(plot, f"plot{number}"))
        elif chart.title in CORE:
            missing.append(chart.title.lower())
    sections = [
        Section(title.lower().replace(" ", "-"), title, f'<div class="plots">{"".join(plots)}</div>')
        for title, plots in groups.items()
    ]
    remark = (
        f'<p class="muted">Not recorded in this run: {escape(", ".join(missing))}.</p>' if missing else ""
    )
    if not sections:
        return [Section("plots", "Plots", remark)]
    last = sections[-1]
    return [*sections[:-1], Section(last.ident, last.title, last.body + remark)]


def _config(text: str, fault: str) -> str:
    """config.yaml as it was written."""
    if not text:
        return ""
    remark = f'<p class="muted">{escape(fault)}</p>' if fault else ""
    return (
        f'{remark}<details class="card"><summary>config.yaml</summary>'
        f'<pre tabindex="0" aria-label="config.yaml">{escape(text)}</pre></details>'
    )


def _summary(summary: Mapping[str, Any]) -> str:
    """summary.json as a table of its top-level fields."""
    rows: Sequence[str] = [
        f"<tr><td><code>{escape(str(key))}</code></td><td>{escape(shown(value))}</td></tr>"
        for key, value in summary.items()
    ]
    return (
        f'<div class="card scroll"><table class="pairs"><tbody>{"".join(rows)}</tbody></table></div>'
        if rows
        else ""
    )
