"""What a run shows and keeps of itself. `config/` fills this record from YAML; `logger.py` obeys it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ObserveSpec:
    """Where metrics go. metrics.jsonl and samples.jsonl in the run folder are always written; the rest are views."""

    __pydantic_config__ = {"extra": "forbid"}

    tensorboard: bool = True
    """Write TensorBoard event files to `tensorboard/` in the run folder."""

    wandb: bool = False
    """Send metrics to Weights & Biases (extra `wandb`)."""

    trackio: bool = False
    """Send metrics to trackio (extra `trackio`)."""

    live: Literal["auto", "table", "plain", "off"] = "auto"
    """Progress while it runs: `table` redraws a table, `plain` prints one aligned line a step, `auto` takes the table
    on a terminal and plain lines elsewhere."""

    samples_per_step: int = 8
    """Samples kept in samples.jsonl each step: the best, the worst, then an even spread; 0 keeps none."""

    report_every: int = 0
    """Rebuild report.html every this many steps; 0 builds it once, at the end."""

    project: str = "lockstep"
    """Project name at wandb and trackio; the run's name is that of its folder."""

    def __post_init__(self) -> None:
        if self.samples_per_step < 0 or self.report_every < 0:
            raise ValueError("observe.samples_per_step and observe.report_every can't be negative")
        if (self.wandb or self.trackio) and not self.project:
            raise ValueError("observe.project is empty, but wandb and trackio file a run under a project")
