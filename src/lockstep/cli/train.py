"""`lockstep train`: one training run from one YAML file.

Next: `launch/local.py` builds everything, `trainer/loop.py` holds the step.
"""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli.arguments import ConfigFile, Overrides, load


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="auto: go on from the newest checkpoint of run_dir if there is one. never: start anew.",
        ),
    ] = "auto",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the complete configuration and what the run would make, then stop."
        ),
    ] = False,
) -> None:
    """Train a model."""
    from lockstep.config.load import dump

    spec = load(config, overrides)
    if dry_run:
        from lockstep.config.plan import plan

        typer.echo(dump(spec) + "\n" + "\n".join(f"# {line}" for line in plan(spec)))
        return
    from lockstep.launch.local import run_training
    from lockstep.launch.torchrun import speaks

    result = run_training(spec, resume=resume, config_yaml=dump(spec))
    if speaks():
        typer.echo(
            f"step {result.step}, weights {result.digest[:16]} (SHA-256); everything is in {spec.run_dir}"
        )
