"""The trackio view. The only file that imports trackio (extra `trackio`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.observe.sinks import ServiceSink


class TrackioSink(ServiceSink):
    """A trackio run named after the run folder. Raises UserError when trackio isn't installed."""

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        try:
            import trackio
        except ImportError as error:
            raise UserError(
                "the package trackio is missing",
                where="observe.trackio",
                fix="pip install 'lockstep-rl[trackio]', or set observe.trackio=false",
            ) from error
        self._trackio: Any = trackio
        super().__init__(run_dir, project, config)

    def start(self, name: str) -> Any:
        """Open a trackio run; the group keeps a run and its resumptions together."""
        return self._trackio.init(
            project=self.project,
            name=name,
            group=self.run_dir.name,
            resume="never",
            config=self.config,
        )
