"""Progress while a run is on: a table on a terminal, aligned lines elsewhere. The only file that imports rich.

Both show the same columns. A value that isn't there is `-`, a non-finite one is spelled out, and a mismatch of exactly
zero is the digit `0`, so that it can't be mistaken for a small one.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TextIO

from lockstep.errors import UserError

ROWS = 12
"""Steps the table shows."""
HEADER_EVERY = 20
"""Plain lines between two headers."""


def decimals(digits: int) -> Callable[[float], str]:
    """A format with this many decimals; non-finite values as `nan`, `inf`, `-inf`."""
    return lambda value: f"{value:.{digits}f}" if math.isfinite(value) else str(value)


def difference(value: float) -> str:
    """A mismatch: `0` only when it is exactly zero."""
    return "0" if value == 0 else f"{value:.1e}" if math.isfinite(value) else str(value)


def duration(seconds: float) -> str:
    """`4:05`, `1:02:03` or `3d 04h`."""
    whole = round(seconds)
    if whole >= 86400:
        return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


@dataclass(frozen=True)
class Column:
    """One column: the first of `metrics` that a step has."""

    title: str
    width: int
    metrics: tuple[str, ...]
    show: Callable[[float], str]

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """What this column shows of a step, None when the step has none of its metrics."""
        return next((metrics[name] for name in self.metrics if name in metrics), None)


COLUMNS = (
    Column("reward", 8, ("reward",), decimals(3)),
    Column(
        "eval", 7, ("eval/greedy_pass@1", "eval/sampled_pass@1", "eval/mean@k", "eval/reward"), decimals(3)
    ),
    Column("length", 8, ("completions/mean_length",), decimals(1)),
    Column("entropy", 8, ("policy/entropy", "entropy"), decimals(3)),
    Column("max|dlogp|", 11, ("mismatch/max_abs_dlogp",), difference),
    Column("changed%", 9, ("sync/changed_codes_pct",), decimals(2)),
    Column("s/step", 8, ("time/step_s",), decimals(2)),
)
"""Columns between the step and the time left."""


class Live(Protocol):
    """Shows steps and remarks."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step."""

    def busy(self, text: str) -> None:
        """Say what is going on within a step; only a table has a place for it."""

    def note(self, text: str) -> None:
        """Show a remark."""

    def close(self) -> None:
        """Stop showing."""


class Clock:
    """Time left, from the median of the last ten steps."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._recent: deque[float] = deque(maxlen=10)

    def left(self, step: int, metrics: Mapping[str, float]) -> str:
        """Take one step in; the time left after it, `-` while unknown. Step 0 is evaluation only and says nothing."""
        seconds = metrics.get("time/step_s", math.nan)
        if step > 0 and math.isfinite(seconds):
            self._recent.append(seconds)
        remaining = self._total - step
        if not self._recent or remaining < 0:
            return "-"
        return duration(statistics.median(self._recent) * remaining)


def cells(step: int, metrics: Mapping[str, float], left: str) -> list[str]:
    """The texts of one row, step first and time left last."""
    values = [(column, column.value(metrics)) for column in COLUMNS]
    return [str(step), *("-" if value is None else column.show(value) for column, value in values), left]


class OffView:
    """Shows nothing."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def busy(self, text: str) -> None:
        """Nothing is shown."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class PlainView:
    """One line a step, for log files and pipes: no colour, no cursor movement, plain ASCII."""

    def __init__(self, total_steps: int, stream: TextIO) -> None:
        self._stream, self._clock, self._lines = stream, Clock(total_steps), 0
        self._widths = [max(6, len(str(total_steps))), *(column.width for column in COLUMNS), 8]

    def _line(self, texts: list[str]) -> None:
        aligned = (text.rjust(width) for text, width in zip(texts, self._widths, strict=True))
        self._stream.write(" ".join(aligned) + "\n")
        self._stream.flush()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print one line, and the header before every twentieth."""
        if self._lines % HEADER_EVERY == 0:
            self._line(["step", *(column.title for column in COLUMNS), "ETA"])
        self._lines += 1
        self._line(cells(step, metrics, self._clock.left(step, metrics)))

    def busy(self, text: str) -> None:
        """Lines are for finished steps."""

    def note(self, text: str) -> None:
        """Print the remark as a line of its own."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing to let go of."""


class TableView:
    """The last steps as a table that is redrawn in place; remarks scroll by above it."""

    def __init__(self, total_steps: int, stream: TextIO, title: str) -> None:
        try:
            from rich.console import Console
            from rich.live import Live as RichLive
        except ImportError as error:
            raise UserError(
                "the package rich is missing",
                where="observe.live",
                fix="pip install rich, or set observe.live=plain",
            ) from error
        self._title, self._total, self._clock = title, total_steps, Clock(total_steps)
        self._rows: deque[list[tuple[str, str]]] = deque(maxlen=ROWS)
        self._console = Console(file=stream)
        self._live = RichLive(console=self._console, auto_refresh=False)
        self._started = False
        self._step, self._busy = 0, ""

    def busy(self, text: str) -> None:
        """Show the text below the table."""
        self._busy = text
        self._redraw()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Redraw with this step as the last row."""
        texts = cells(step, metrics, self._clock.left(step, metrics))
        styles = ["bold", *(_style(column, column.value(metrics)) for column in COLUMNS), "dim"]
        self._rows.append(list(zip(texts, styles, strict=True)))
        self._step, self._busy = step, ""
        self._redraw()

    def _redraw(self) -> None:
        if not self._started:
            self._live.start()
            self._started = True
        self._live.update(self._table(self._step), refresh=True)

    def _table(self, step: int) -> Any:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=Text(f"{self._title}  step {step} of {self._total}"),
            title_style="bold",
            title_justify="left",
            caption=self._busy,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
        )
        for heading in ("step", *(column.title for column in COLUMNS), "ETA"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*(Text(text, style=style) for text, style in row))
        return table

    def note(self, text: str) -> None:
        """Print the remark above the table."""
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last table on the screen and give the terminal back."""
        if self._started:
            self._live.stop()
            self._started = False


def _style(column: Column, value: float | None) -> str:
    """Colour of a cell: non-finite values red; a mismatch green when it is zero and yellow when it isn't."""
    if value is None:
        return "dim"
    if not math.isfinite(value):
        return "bold red"
    if column.metrics[0] == "mismatch/max_abs_dlogp":
        return "green" if value == 0 else "yellow"
    return ""


def make_live(
    mode: Literal["auto", "table", "plain", "off"], total_steps: int, stream: TextIO, title: str
) -> Live:
    """The view that `observe.live` asks for."""
    if mode == "off":
        return OffView()
    terminal = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    if mode == "table" or (mode == "auto" and terminal):
        return TableView(total_steps, stream, title)
    return PlainView(total_steps, stream)
