"""`lockstep bench train-exact`: whole training runs on this GPU, and whether every log-probability was the rollout's.

Next: `bench/exact_run.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.arguments import load
from lockstep.cli.bench_output import finish
from lockstep.errors import ConfigError, ContractError

if TYPE_CHECKING:
    from lockstep.trainer.spec import RunSpec


def train_exact(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG [KEY=VALUE]...",
            help="YAML files of runs, each followed by settings over its own.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Result file (benchmarks/results/train-exact.json).", show_default=False
        ),
    ] = None,
    goals: Annotated[
        bool, typer.Option("--goals", help="Also write goal D1 to benchmarks/results/goals.json.")
    ] = False,
) -> None:
    """Train, from the beginning, and say whether rollout and trainer agreed bit for bit in every step.

    Exit code 3: they did not, or a run was not of the kind that shows it.
    """
    from dataclasses import asdict

    from lockstep.bench import exact_run as bench
    from lockstep.bench.machine import require_hopper
    from lockstep.config.load import dump
    from lockstep.launch.local import run_training

    specs = specs_of(runs)
    require_hopper("lockstep bench train-exact")
    found = []
    for spec in specs:
        broken = False
        try:
            run_training(spec, resume="never", config_yaml=dump(spec))
        except ContractError as error:
            typer.echo(f"error: {error}", err=True)
            broken = True
        found.append(bench.read_run(spec, kernels=spec.kernels, broken=broken))
        typer.echo(found[-1].line())
    finish("train-exact", out, {}, [asdict(run) for run in found], [bench.goal(found)] if goals else ())
    if not all(run.exact for run in found):
        raise typer.Exit(3)


def specs_of(words: list[str]) -> list[RunSpec]:
    """Runs from a command line of files, each followed by its settings. Raises ConfigError for a setting without a file."""
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if "=" not in word:
            groups.append((word, []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise ConfigError(f"{word!r} stands before any configuration", where="bench train-exact")
    return [load(Path(file), settings) for file, settings in groups]
