"""controller.jsonl is written, cut back on a resume, and shown; the report has the plots of the mismatch."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.correction.mismatch import POSITION_NAMES
from lockstep.errors import UserError
from lockstep.observe.charts import CHARTS, MOST_LINES, lines_of
from lockstep.observe.history import History
from lockstep.observe.logger import RunLogger
from lockstep.observe.report import build_report
from lockstep.observe.spec import ObserveSpec
from lockstep.observe.tables import controller_table

ORDER = {
    "action": "recalibrate",
    "reason": "too <much>",
    "carried_out": True,
    "done": "KV scales v1 became v2",
    "value": 0.5,
}


def logger(folder: Path) -> RunLogger:
    """A logger without views."""
    return RunLogger(folder, ObserveSpec(tensorboard=False, live="off"), 6, stream=io.StringIO())


def test_orders_are_kept_and_cut_back(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    with logger(tmp_path) as log:
        for step in (1, 2, 3):
            log.step(step, synthetic.metrics_at(step))
            log.control(step, ORDER)
            log.control(step, {**ORDER, "action": "republish", "value": float("nan")})
        with pytest.raises(UserError, match="can't follow"):
            log.control(2, ORDER)
        log.resume(2)
        log.step(3, synthetic.metrics_at(3))
    lines = [json.loads(line) for line in (tmp_path / "controller.jsonl").read_text().splitlines()]
    assert [(o["step"], o["action"]) for o in lines] == [
        (step, action) for step in (1, 2) for action in ("recalibrate", "republish")
    ]
    assert lines[0] == {"step": 1, **ORDER} and lines[1]["value"] == "NaN"


def test_the_report_shows_them_as_text(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    with logger(tmp_path) as log:
        log.step(1, synthetic.metrics_at(1))
        log.control(1, ORDER)
    html = (tmp_path / "report.html").read_text()
    assert 'href="#controller"' in html and "KV scales v1 became v2" in html
    assert "too &lt;much&gt;" in html and "too <much>" not in html
    assert controller_table([]) == ""


def test_the_plots_of_the_mismatch(tmp_path: Path) -> None:
    """Mean, percentile, maximum and band in one, one line for each group of positions, the effective sample size."""
    names = ["max_abs_dlogp", "p99_abs_dlogp", "mean_abs_dlogp", "kl_k3", "ess"]
    metrics = {f"mismatch/{n}": 0.5 for n in names} | {f"mismatch/position_{n}": 0.1 for n in POSITION_NAMES}
    line = {"step": 1, "time": 1.0, **metrics, "controller/band": 0.6}
    history = History([line])
    drawn = {
        c.title: [label for label, _ in lines_of(c, history)] for c in CHARTS if c.section == "Agreement"
    }
    assert drawn["Mismatch"] == [
        "largest |Δlogp|",
        "99th percentile",
        "mean |Δlogp|",
        "KL (k3)",
        "band of the mean",
    ]
    assert drawn["Mismatch by position"] == list(POSITION_NAMES) and len(POSITION_NAMES) <= MOST_LINES
    assert drawn["Effective sample size"] == ["tokens"]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    html = build_report(tmp_path).read_text()
    assert "Mismatch by position" in html and "Effective sample size" in html
