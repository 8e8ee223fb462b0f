"""What is shown while a run is on."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

import pytest

from lockstep.observe.live import (
    COLUMNS,
    HEADER_EVERY,
    Clock,
    OffView,
    PlainView,
    TableView,
    difference,
    duration,
    make_live,
)


class Terminal(io.StringIO):
    """A stream that says it's a terminal."""

    def isatty(self) -> bool:
        return True


def test_auto_is_plain_on_a_pipe_and_a_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(make_live("auto", 10, io.StringIO(), "run"), PlainView)
    assert isinstance(make_live("auto", 10, Terminal(), "run"), TableView)
    assert isinstance(make_live("plain", 10, Terminal(), "run"), PlainView)
    assert isinstance(make_live("off", 10, Terminal(), "run"), OffView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_live("auto", 10, Terminal(), "run"), PlainView)


def test_plain_lines_are_aligned_ascii_with_a_repeated_header(synthetic: SimpleNamespace) -> None:
    stream = io.StringIO()
    view = make_live("auto", 45, stream, "run")
    for step in range(1, 46):
        view.step(step, synthetic.metrics_at(step))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 45 + 3
    assert [i for i, line in enumerate(lines) if "reward" in line] == [
        0,
        HEADER_EVERY + 1,
        2 * HEADER_EVERY + 2,
    ]
    assert len({len(line) for line in lines}) == 1
    assert stream.getvalue().isascii() and "\x1b" not in stream.getvalue()
    header, row = lines[0].split(), lines[2].split()
    assert header == ["step", *(c.title for c in COLUMNS), "ETA"]
    assert dict(zip(header, row, strict=True)) == {
        "step": "2",
        "reward": "0.200",
        "eval": "0.500",
        "length": "18.0",
        "entropy": "0.333",
        "max|dlogp|": "0",
        "changed%": "0.80",
        "s/step": "3.50",
        "ETA": "2:30",
    }


def test_missing_and_non_finite_values_have_their_own_look() -> None:
    stream = io.StringIO()
    PlainView(3, stream).step(1, {"reward": math.nan, "mismatch/max_abs_dlogp": 1e-9})
    row = stream.getvalue().splitlines()[1].split()
    assert row == ["1", "nan", "-", "-", "-", "1.0e-09", "-", "-", "-"]
    assert difference(0.0) == "0" and difference(-0.0) == "0"
    assert difference(5e-324) != "0" and difference(math.inf) == "inf"


def test_time_left() -> None:
    clock = Clock(10)
    assert clock.left(0, {"time/step_s": 500.0}) == "-"
    assert clock.left(1, {"time/step_s": 2.0}) == "0:18"
    assert clock.left(2, {"time/step_s": 100.0}) == "6:48"
    assert clock.left(3, {"time/step_s": math.nan}) == "5:57"
    assert clock.left(11, {}) == "-"
    assert [duration(s) for s in (59.6, 3723, 90000)] == ["1:00", "1:02:03", "1d 01h"]


def test_table_shows_the_last_steps(synthetic: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    view = make_live("auto", 30, stream, "demo [b]")
    view.note("a remark with [brackets]")
    for step in range(1, 16):
        view.step(step, synthetic.metrics_at(step, mismatch=math.inf if step == 15 else 0.0))
    view.close()
    view.close()
    text = stream.getvalue()
    assert "a remark with [brackets]" in text
    last = text[text.rindex("demo [b]") :]
    assert "step 15 of 30" in last and "max|dlogp|" in last and "inf" in last
    assert "1.400" in last and "0.300" not in last
