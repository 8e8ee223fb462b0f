"""The logger as a whole: resumed equals uninterrupted, nothing is lost in a crash."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.errors import UserError
from lockstep.observe.jsonl import read_lines
from lockstep.observe.logger import RunLogger
from lockstep.observe.metrics import reproducible
from lockstep.observe.sinks import metrics_of
from lockstep.observe.spec import ObserveSpec

PLAIN = ObserveSpec(tensorboard=False, live="plain")


def logger(folder: Path, spec: ObserveSpec = PLAIN) -> RunLogger:
    return RunLogger(folder, spec, 6, stream=io.StringIO())


def test_case_65_resumed_run_has_the_same_files(
    make_run: Callable[..., Path], synthetic: SimpleNamespace, tmp_path: Path
) -> None:
    whole = make_run("whole")
    folder = tmp_path / "broken"
    folder.mkdir()
    first = logger(folder)
    synthetic.drive(first, 1, 5)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rewa')
    del first

    with logger(folder) as second:
        second.resume(3)
        synthetic.drive(second, 4, 6)
    for name in ("samples.jsonl", "receipts.jsonl"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    lines = [
        [(line["step"], reproducible(metrics_of(line))) for line in read_lines(run / "metrics.jsonl")]
        for run in (whole, folder)
    ]
    assert lines[0] == lines[1] and len(lines[0]) == 6
    assert all("time/step_s" not in metrics and "reward" in metrics for _, metrics in lines[0])


def test_resume_rebuilds_the_views(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    spec = ObserveSpec(live="off")
    first = logger(tmp_path / "run", spec)
    synthetic.drive(first, 1, 5)
    first.close()
    with logger(tmp_path / "run", spec) as second:
        second.resume(2)
        second.step(3, {"reward": 7.0})
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("reward")] == [1, 2, 3]
    assert events.Scalars("reward")[-1].value == 7.0


def test_an_old_run_needs_resume(make_run: Callable[..., Path], synthetic: SimpleNamespace) -> None:
    folder = make_run("old")
    log = logger(folder)
    with pytest.raises(UserError, match="earlier run"):
        log.step(1, synthetic.metrics_at(1))
    log.resume(-1)
    log.step(0, {"eval/greedy_pass@1": 0.1})
    log.close()
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [0]


def test_a_crash_leaves_everything_and_a_report(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(KeyError), logger(tmp_path / "run") as log:
        synthetic.drive(log, 1, 2)
        raise KeyError("boom")
    assert len(list(read_lines(tmp_path / "run" / "metrics.jsonl"))) == 2
    assert (tmp_path / "run" / "report.html").exists()


def test_nothing_to_report_is_no_error(tmp_path: Path) -> None:
    log = logger(tmp_path / "new" / "run")
    log.close()
    log.close()
    assert not (tmp_path / "new" / "run" / "report.html").exists()


def test_report_every(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    log = logger(tmp_path / "run", ObserveSpec(tensorboard=False, live="off", report_every=2))
    report = tmp_path / "run" / "report.html"
    log.step(0, {"eval/greedy_pass@1": 0.1})
    log.step(1, synthetic.metrics_at(1))
    assert not report.exists()
    log.step(2, synthetic.metrics_at(2))
    assert report.exists()
    log.close()


def test_notes_are_shown_kept_and_never_cut(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    stream = io.StringIO()
    with RunLogger(tmp_path, PLAIN, 6, stream=stream) as log:
        synthetic.drive(log, 1, 4)
        log.note("4 samples dropped: no log-probability")
        log.resume(2)
        log.note("resumed at step 2")
    notes = list(read_lines(tmp_path / "notes.jsonl"))
    assert [(n["step"], n["text"]) for n in notes] == [
        (4, "4 samples dropped: no log-probability"),
        (2, "resumed at step 2"),
    ]
    assert "resumed at step 2\n" in stream.getvalue()
    assert "resumed at step 2" in (tmp_path / "report.html").read_text()


def test_a_non_finite_metric_reaches_file_line_and_report(tmp_path: Path) -> None:
    stream = io.StringIO()
    with RunLogger(tmp_path, PLAIN, 2, stream=stream) as log:
        log.step(1, {"reward": math.nan, "mismatch/max_abs_dlogp": math.inf})
    assert "nan" in stream.getvalue() and "inf" in stream.getvalue()
    assert '"reward": "NaN"' in (tmp_path / "metrics.jsonl").read_text()
    assert "Not a finite number in 1 step" in (tmp_path / "report.html").read_text()


def test_missing_tracker_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"observe\.wandb"):
        logger(tmp_path, ObserveSpec(tensorboard=False, wandb=True))


@pytest.mark.parametrize(
    "options", [{"samples_per_step": -1}, {"report_every": -1}, {"wandb": True, "project": ""}]
)
def test_spec_refuses(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"observe\."):
        ObserveSpec(**options)  # type: ignore[arg-type]
