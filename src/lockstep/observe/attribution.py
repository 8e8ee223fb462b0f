"""What `lockstep attribute` found, for people: the file, the lines of a terminal, and a section of the report.

`trainer/attribution.py` says what the numbers mean; here they are only shown, from the same JSON in every case. Next:
`attribution_plot.py`, which draws them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.observe.attribution_plot import layers_figure, sources_figure
from lockstep.observe.jsonl import spell
from lockstep.observe.page import Section, page
from lockstep.observe.plots import short
from lockstep.observe.rundir import RunDir

FORMAT = 1
LAYERS_SHOWN = 8
"""Layers in the terminal's ranking."""
BAND_TEXT = {
    "exact": "exact",
    "healthy": "healthy, up to 1.03",
    "tolerable": "tolerable, up to 1.05",
    "high": "high, above 1.05",
}


def save_attribution(folder: Path, data: Mapping[str, Any]) -> Path:
    """Writes attribution.json, and attribution.html with what the report would show; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(RunDir(folder).attribution_file, json.dumps(spell(data), indent=1, allow_nan=False) + "\n")
    name = folder.resolve().name
    head = f'<p class="eyebrow">Lockstep attribution</p><h1>{escape(name)}</h1>'
    found = section(data)
    text = page(f"{name} · attribution", head, [found], f"Lockstep, from {escape(name)}/attribution.json.")
    return _write(folder / "attribution.html", text)


def _write(path: Path, text: str) -> Path:
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8", newline="\n")
    os.replace(beside, path)
    return path


def read_attribution(path: Path) -> dict[str, Any] | None:
    """attribution.json as data, None when there is none. Raises DataError when it is something else."""
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError("no JSON", where=str(path), why=str(error)) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        fix = "run `lockstep attribute` again, or remove the file"
        raise DataError(f"not an attribution of format {FORMAT}", where=str(path), fix=fix)
    return data


def verdict(data: Mapping[str, Any]) -> str:
    """How large the mismatch is, and the largest source of it."""
    whole = data["whole"]
    if whole["max"] == 0:
        return f"No mismatch: {data['probe']['tokens']:,} log-probabilities are equal bit for bit."
    text = (
        f"Mismatch: mean |Δlogp| {short(whole['mean'])}, p99 {short(whole['p99'])}, max {short(whole['max'])}; "
        f"mean exp|Δlogp| {whole['mean_exp']:.4f}: {BAND_TEXT[data['band']]}."
    )
    largest = max(path_sources(data), key=lambda s: float(s["alone"]["mean_square"]))
    share = _share(data, largest)
    return f"{text} Largest source: {largest['title']}, {share} of the mean square." if share else text


def path_sources(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The sources that the whole is made of."""
    return [s for s in data["sources"] if s["step"] is not None]


def _share(data: Mapping[str, Any], source: Mapping[str, Any]) -> str:
    """A source's part in the sum of mean squares; empty where that is no question."""
    total = data["residue"]["parts_mean_square"]
    if source["step"] is None or not total:
        return ""
    return f"{100 * source['alone']['mean_square'] / total:.1f}%"


def probe_line(data: Mapping[str, Any]) -> str:
    """What was measured on."""
    p, flows = data["probe"], data["flows"]
    return (
        f"{p['completions']} completions of {p['prompts']} prompts, {p['tokens']:,} tokens at temperature "
        f"{p['temperature']:g}; trainer {flows['trainer']['name']}, engine {flows['rollout']['name']}; {data['weights']}"
    )


def residue_lines(data: Mapping[str, Any]) -> list[str]:
    """Parts against the whole, in words."""
    r = data["residue"]
    telescoping = "exactly" if r["telescoping"] == 0 else f"up to {short(r['telescoping'])}"
    if not r["whole_mean_square"]:
        return [f"the steps add up to the whole {telescoping}"]
    ratio = r["parts_mean_square"] / r["whole_mean_square"]
    return [
        f"the steps add up to the whole {telescoping}; the effects alone leave a residue of mean "
        f"{short(r['mean'])} a token ({100 * r['share']:.0f}% of the whole)",
        f"in mean squares the effects alone add up to {short(r['parts_mean_square'])}, the whole is "
        f"{short(r['whole_mean_square'])}: {100 * ratio:.0f}%",
    ]


def layers_line(data: Mapping[str, Any]) -> str:
    """The sum over layers against the whole; empty without layers."""
    total = sum(layer["both"]["mean_square"] for layer in data["layers"])
    whole = data["residue"]["whole_mean_square"]
    if not total or not whole:
        return ""
    return (
        f"in mean squares the {len(data['layers'])} layers alone add up to {short(total)}: "
        f"{100 * total / whole:.0f}% of the whole"
    )


def suggestion_lines(data: Mapping[str, Any]) -> list[str]:
    """What to change, and what that was measured to give; empty when nobody asked."""
    s = data["suggestion"]
    if s is None:
        return []
    goal = f"mean |Δlogp| {short(s['before'])} as configured, target {short(s['target'])}"
    if s["reached"] and not s["layers"] and not s["kv_to_bf16"]:
        return [f"{goal}: nothing to change"]
    kv = "keys and values in BF16 and " if s["kv_to_bf16"] else ""
    what = f"{kv}{len(s['layers'])} more of {len(data['layers'])} layers in BF16"
    reached = "" if s["reached"] else ", which misses the target: what is left comes from elsewhere"
    return [f"{goal}; with {what} it is {short(s['after'])}, measured{reached}. For the configuration:"]


def lines(data: Mapping[str, Any]) -> list[str]:
    """Everything for a terminal."""
    width = max(len(s["title"]) for s in data["sources"])
    head = f"{'source':{width}}  {'mean':>9} {'p99':>9} {'max':>9} {'share':>6}   {'step':>9} {'so far':>9}"
    rows = [
        probe_line(data),
        "",
        f"{'':{width}}  {'alone':-^36}   {'on the path':-^19}",
        head,
    ]
    for source in data["sources"]:
        rows.append(_row(data, source, width))
    whole = data["whole"]
    whole_row = f"{'whole':{width}}  " + " ".join(f"{short(whole[k]):>9}" for k in ("mean", "p99", "max"))
    rows.insert(4 + len(path_sources(data)), whole_row)
    rows += ["", *residue_lines(data)]
    if data["layers"]:
        ranked = sorted(data["layers"], key=lambda x: -float(x["both"]["mean"]))[:LAYERS_SHOWN]
        shown = ", ".join(f"{x['layer']} ({short(x['both']['mean'])})" for x in ranked)
        rows += [f"layers by mean |Δlogp| alone: {shown}", *filter(None, [layers_line(data)])]
    rows += ["", verdict(data)]
    if data["suggestion"] is not None:
        rows += ["", *suggestion_lines(data), data["suggestion"]["config"]]
    return rows


def _row(data: Mapping[str, Any], source: Mapping[str, Any], width: int) -> str:
    alone = source["alone"]
    if alone is None:
        return f"{source['title']:{width}}  {source['note']}"
    cells = " ".join(f"{short(alone[k]):>9}" for k in ("mean", "p99", "max"))
    text = f"{source['title']:{width}}  {cells} {_share(data, source):>6}"
    if source["step"] is None:
        return f"{text}   {'beside the path':>19}"
    return f"{text}   {short(source['step']['mean']):>9} {short(source['cumulative']['mean']):>9}"


def section(data: Mapping[str, Any]) -> Section:
    """The report's section."""
    figures = sources_figure(data) + (layers_figure(data) if data["layers"] else "")
    remarks = [*residue_lines(data), *filter(None, [layers_line(data)])]
    told = "".join(f"<li>{escape(_sentence(line))}</li>" for line in remarks)
    suggestion = ""
    if data["suggestion"] is not None:
        said = "".join(f"<p>{escape(_sentence(line))}</p>" for line in suggestion_lines(data))
        config = escape(data["suggestion"]["config"])
        suggestion = f'<div class="card advice">{said}<pre tabindex="0" aria-label="suggested flow">{config}</pre></div>'
    body = (
        f'<p>{escape(verdict(data))}</p><p class="muted">{escape(_sentence(probe_line(data)))}</p>'
        f'<div class="plots">{figures}</div>{_table(data)}<ul class="muted">{told}</ul>{suggestion}'
    )
    return Section("attribution", "Attribution", body)


def _sentence(line: str) -> str:
    """A line of the terminal as a sentence."""
    return line[:1].upper() + line[1:] + ("" if line.endswith((".", ":")) else ".")


def _table(data: Mapping[str, Any]) -> str:
    heads = ("source", "mean", "p99", "max", "share", "step", "so far", "what was switched")
    head = "".join(
        f'<th scope="col"{"" if h in (heads[0], heads[-1]) else " class=num"}>{h}</th>' for h in heads
    )
    rows = []
    for source in data["sources"]:
        alone, step, total = source["alone"], source["step"], source["cumulative"]
        cells = [short(alone[k]) if alone else "–" for k in ("mean", "p99", "max")]
        cells += [_share(data, source) or "–", *(short(e["mean"]) if e else "–" for e in (step, total))]
        numbers = "".join(f'<td class="num">{cell}</td>' for cell in cells)
        rows.append(f"<tr><td>{escape(source['title'])}</td>{numbers}<td>{escape(source['note'])}</td></tr>")
    whole = data["whole"]
    numbers = "".join(f'<td class="num"><b>{short(whole[k])}</b></td>' for k in ("mean", "p99", "max"))
    note = "trainer's log-probability less the engine's own"
    rows.insert(
        len(path_sources(data)),
        f'<tr><td><b>whole</b></td>{numbers}<td class="num">–</td><td class="num">–</td>'
        f'<td class="num"><b>{short(whole["mean"])}</b></td><td>{note}</td></tr>',
    )
    return (
        '<div class="card scroll" tabindex="0" role="region" aria-label="Sources"><table class="ledger"><thead>'
        f"<tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
