"""What is kept of a run: a small JSON file made from its `metrics.jsonl`, after every piece of it.

`OUT/results/ARM-seedN.json`: arm, seed, steps so far and planned, what it ran on, and for every metric of `METRICS` its curve as
[steps, values], beside its mean over the whole run and over the last tenth of it, its last and its largest value. Curves are
thinned by averaging over neighbouring steps, as many in every run, so that those of several seeds share their steps. Next:
`report.py`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

METRICS = (
    "reward", "reward_std", "frac_reward_zero_std", "eval/greedy_pass@1", "eval/reward", "eval/mean@k", "eval/sampled_pass@1",
    "policy/entropy", "policy/clip_fraction_high", "policy/clip_fraction_low", "policy/approx_kl", "policy/ratio_max",
    "mismatch/mean_abs_dlogp", "mismatch/p99_abs_dlogp", "mismatch/max_abs_dlogp", "mismatch/kl_k3", "mismatch/exact_tokens",
    "mismatch/ess", "mismatch/extreme_tokens", "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/rollout_is_ratio_fraction_high", "rollout_corr/rejected_fraction", "optim/grad_norm", "probe/cosine",
    "probe/cosine_worst_layer", "probe/cosine_weighted", "completions/mean_length", "completions/clipped_ratio",
    "data/kept_groups", "time/step_s", "time/rollout_s", "time/train_s", "time/probe_s", "num_tokens",
)  # fmt: skip
POSITIONS = "mismatch/position_"
"""Every metric that begins so is kept too."""
MOST_POINTS = 60
"""Of one curve, about."""
LAST = 0.1
"""The end of a run: this share of its planned steps."""


def write_record(
    path: Path, run_dir: Path, *, arm: str, seed: int, planned: int, about: dict[str, Any]
) -> int:
    """Writes the file, all at once, and returns the number of steps in it. about: what else is to be known, such as overrides."""
    rows = read_rows(run_dir / "metrics.jsonl")
    steps = max((row["step"] for row in rows), default=0)
    machine, width = run_dir / "stamp.json", -(-planned // MOST_POINTS)
    record = {
        "arm": arm,
        "seed": seed,
        "steps": steps,
        "planned": planned,
        **about,
        "stamp": json.loads(machine.read_text()) if machine.is_file() else {},
        "mean": {name: _short(mean_of(rows, name)) for name in names_of(rows)},
        "end": {
            name: _short(mean_of(rows[-max(round(LAST * planned), 1) :], name)) for name in names_of(rows)
        },
        "last": {name: _short(_last(rows, name)) for name in names_of(rows)},
        "most": {name: _short(max(values_of(rows, name))) for name in names_of(rows)},
        "curves": {name: curve_of(rows, name, width) for name in names_of(rows)},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(dense(record), encoding="utf-8")
    partial.replace(path)
    return steps


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Complete lines of a `metrics.jsonl`, in order of steps; none when there is no file."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return sorted((json.loads(line) for line in lines if line), key=lambda row: row["step"])


def names_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The metrics to keep that some step has as a number."""
    there = {name for row in rows for name in row}
    names = [*METRICS, *sorted((n for n in there if n.startswith(POSITIONS)), key=_first_position)]
    return [name for name in names if values_of(rows, name)]


def values_of(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Of the steps that have it as a finite number."""
    return [
        float(row[name])
        for row in rows
        if isinstance(row.get(name), int | float) and math.isfinite(float(row[name]))
    ]


def mean_of(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """Mean over the steps that have it; None when none has."""
    values = values_of(rows, name)
    return statistics.fmean(values) if values else None


def curve_of(rows: Sequence[dict[str, Any]], name: str, width: int) -> list[list[float]]:
    """[steps, values]: of every `width` steps the mean of those that have it; what is known before the first stands alone."""
    parts: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        for value in values_of([row], name):
            parts.setdefault((row["step"] + width - 1) // width, []).append((float(row["step"]), value))
    return [[_round(statistics.fmean(p[i] for p in part)) for part in parts.values()] for i in (0, 1)]


def dense(record: dict[str, Any]) -> str:
    """JSON with one line for each entry, and for each curve: readable, and small."""
    lines = []
    for key, value in record.items():
        if isinstance(value, dict) and value:
            inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _first_position(name: str) -> int:
    return int(name[len(POSITIONS) :].split("-")[0])


def _last(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    values = values_of(rows, name)
    return values[-1] if values else None


def _round(value: float) -> float:
    """Five digits."""
    return float(f"{value:.5g}")


def _short(value: float | None) -> float | None:
    return None if value is None else _round(value)
