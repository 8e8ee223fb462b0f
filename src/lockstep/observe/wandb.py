"""The Weights & Biases view. The only file that imports wandb (extra `wandb`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.observe.sinks import ServiceSink


class WandbSink(ServiceSink):
    """A wandb run named after the run folder. Raises UserError when wandb isn't installed."""

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "the package wandb is missing",
                where="observe.wandb",
                fix="pip install 'lockstep-rl[wandb]', or set observe.wandb=false",
            ) from error
        self._wandb: Any = wandb
        super().__init__(run_dir, project, config)

    def start(self, name: str) -> Any:
        """Open a wandb run; the group keeps a run and its resumptions together."""
        return self._wandb.init(
            project=self.project,
            name=name,
            group=self.run_dir.name,
            dir=str(self.run_dir),
            config=self.config,
        )
