"""The one object the training loop talks to: it takes a step's numbers and samples and passes them to every sink.

Files come first and the terminal last, so that what was shown has been written. Reports are built by `report.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from lockstep.observe.jsonl import LineFile
from lockstep.observe.live import make_live
from lockstep.observe.report import build_report
from lockstep.observe.rundir import RunDir
from lockstep.observe.sinks import (
    ControllerSink,
    JsonlSink,
    MetricSink,
    ReceiptsSink,
    SampleRecord,
    SamplesSink,
)
from lockstep.observe.spec import ObserveSpec


class RunLogger:
    """Writes one run's folder. Other ranks of a job than the first have a `SilentLogger`.

    A folder that already holds steps is refused by the first `step` unless `resume` cut it back before.
    """

    def __init__(
        self, run_dir: Path | str, spec: ObserveSpec, total_steps: int, *, stream: TextIO | None = None
    ) -> None:
        self._dir, self._spec = RunDir(Path(run_dir)), spec
        self._dir.path.mkdir(parents=True, exist_ok=True)
        self._metrics = JsonlSink(self._dir.metrics_file)
        self._samples = SamplesSink(self._dir.samples_file, spec.samples_per_step)
        self._receipts = ReceiptsSink(self._dir.receipts_file)
        self._controller = ControllerSink(self._dir.controller_file)
        self._notes = LineFile(self._dir.notes_file, order="free")
        self._views = self._make_views()
        self._live = make_live(spec.live, total_steps, stream or sys.stdout, self._dir.path.name)
        self._closed = False

    def _make_views(self) -> list[MetricSink]:
        """The optional sinks that the spec asks for; a missing package is an error now, not after an hour."""
        views: list[MetricSink] = []
        if self._spec.tensorboard:
            from lockstep.observe.tensorboard import TensorBoardSink

            views.append(TensorBoardSink(self._dir.tensorboard_folder))
        if self._spec.wandb:
            from lockstep.observe.wandb import WandbSink

            views.append(WandbSink(self._dir.path, self._spec.project, self._dir.config()))
        if self._spec.trackio:
            from lockstep.observe.trackio import TrackioSink

            views.append(TrackioSink(self._dir.path, self._spec.project, self._dir.config()))
        return views

    @property
    def folder(self) -> RunDir:
        """The run's folder."""
        return self._dir

    @property
    def last_step(self) -> int | None:
        """The last step written, by this run or one before it in the same folder."""
        return self._metrics.last_step

    def step(self, step: int, metrics: Mapping[str, float], samples: Sequence[SampleRecord] = ()) -> None:
        """Write one step: all its metrics at once, evaluation included. Step 0 is what is known before training.

        Raises UserError when the folder already holds this step.
        """
        moment = time.time()
        self._samples.write(step, samples)
        self._metrics.write(step, metrics, moment)
        for view in self._views:
            view.write(step, metrics, moment)
        self._live.step(step, metrics)
        if self._spec.report_every and step > 0 and step % self._spec.report_every == 0:
            build_report(self._dir.path)

    def receipt(self, step: int, receipt: Mapping[str, Any]) -> None:
        """Keep a publication's receipt; `step` is the step at whose end it happened, 0 before training. The weights
        that a resumed run publishes again have theirs already."""
        self._receipts.write(step, receipt)

    def control(self, step: int, order: Mapping[str, Any]) -> None:
        """Keep what the mismatch controller ordered at the end of this step."""
        self._controller.write(step, order)

    def busy(self, done: int, total: int, what: str = "rollout") -> None:
        """What is going on within a step, where the live view has a place for it."""
        self._live.busy(f"{what} {done}/{total}")

    def note(self, text: str) -> None:
        """A one-off remark: shown now, kept with the time in notes.jsonl, and in the report."""
        self._notes.append(self._metrics.last_step or 0, [{"time": round(time.time(), 3), "text": text}])
        self._live.note(text)

    def resume(self, step: int) -> None:
        """Forget everything after `step`, the last step of the checkpoint that the run goes on from."""
        self._metrics.truncate(step)
        self._samples.truncate(step)
        self._receipts.truncate(step)
        self._controller.truncate(step)
        kept = self._dir.lines(self._dir.metrics_file)
        for view in self._views:
            view.truncate(step, kept)

    def close(self) -> None:
        """Finish all sinks and build the report, when there is a step to report."""
        if self._closed:
            return
        self._closed = True
        self._live.close()
        for file in (self._metrics, self._samples, self._receipts, self._controller, self._notes):
            file.close()
        for view in self._views:
            view.close()
        if self._metrics.last_step is not None:
            build_report(self._dir.path)

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class SilentLogger(RunLogger):
    """Takes what the others of a job write, and writes nothing."""

    def __init__(
        self, run_dir: Path | str, spec: ObserveSpec, total_steps: int, *, stream: TextIO | None = None
    ) -> None:
        self._dir = RunDir(Path(run_dir))

    @property
    def last_step(self) -> int | None:
        """None: it knows of none."""
        return None

    def step(self, step: int, metrics: Mapping[str, float], samples: Sequence[SampleRecord] = ()) -> None:
        """Nothing."""

    def receipt(self, step: int, receipt: Mapping[str, Any]) -> None:
        """Nothing."""

    def control(self, step: int, order: Mapping[str, Any]) -> None:
        """Nothing."""

    def busy(self, done: int, total: int, what: str = "rollout") -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def resume(self, step: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
