"""`lockstep eval`: the held-out evaluation of a run, on its model or another one.

Next: `launch/local.py`, then `trainer/evaluation.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.arguments import ConfigFile, Overrides, load
from lockstep.errors import ConfigError


def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Checkpoint to evaluate instead of the run's.", show_default=False),
    ] = None,
) -> None:
    """Evaluate a model on the run's evaluation data."""
    spec = load(config, overrides)
    if spec.eval.data is None:
        raise ConfigError("eval.data is missing", where=str(config), fix="name the data to evaluate on")
    from lockstep.launch.local import run_evaluation

    metrics = run_evaluation(spec, str(model) if model else None)
    width = max(map(len, metrics))
    for name, value in metrics.items():
        typer.echo(f"{name:{width}}  {value:.6g}")
