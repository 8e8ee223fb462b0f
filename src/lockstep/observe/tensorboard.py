"""The TensorBoard view: event files in `tensorboard/` of the run folder. The only file that imports tensorboard."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.observe.sinks import metrics_of


class TensorBoardSink:
    """One scalar a metric. Event files can't be cut, so `truncate` writes new ones from the lines that stay."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "the package tensorboard is missing",
                where="observe.tensorboard",
                fix="pip install tensorboard, or set observe.tensorboard=false",
            ) from error
        self._folder, self._make = folder, SummaryWriter
        self._writer: Any = None

    def write(self, step: int, metrics: Mapping[str, float], moment: float) -> None:
        """Append one step's scalars and flush."""
        if self._writer is None:
            self._writer = self._make(log_dir=str(self._folder))
        self._scalars(self._writer, step, metrics, moment)
        self._writer.flush()

    def truncate(self, step: int, kept: Sequence[Mapping[str, Any]] = ()) -> None:
        """Rebuild the folder from `kept`, with the wall clock of the original lines."""
        self.close()
        beside = self._folder.with_name(self._folder.name + ".new")
        shutil.rmtree(beside, ignore_errors=True)
        if kept:
            writer = self._make(log_dir=str(beside))
            for line in kept:
                if line["step"] <= step:
                    self._scalars(writer, line["step"], metrics_of(line), float(line["time"]))
            writer.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if beside.exists():
            beside.rename(self._folder)

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    @staticmethod
    def _scalars(writer: Any, step: int, metrics: Mapping[str, float], moment: float) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, global_step=step, walltime=moment)
