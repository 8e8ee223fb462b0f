"""What the benchmark commands share: their first lines (machine, ceilings) and their last (result file, goals)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from lockstep.bench.goals import Goal
    from lockstep.bench.timing import Ceilings

Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Result file (benchmarks/results/<name>.json).", show_default=False),
]
Goals = Annotated[
    bool, typer.Option("--goals", help="Also write what goals ask for to benchmarks/results/goals.json.")
]


def begin(what: str) -> Ceilings:
    """Refuses other machines; measures what this one can reach."""
    from lockstep.bench.machine import require_hopper, stamp
    from lockstep.bench.timing import measure_ceilings

    require_hopper(what)
    here = stamp()
    typer.echo(f"{here.card}; " + ", ".join(f"{name} {version}" for name, version in here.versions.items()))
    ceilings = measure_ceilings()
    typer.echo(ceilings.line())
    return ceilings


def finish(
    name: str,
    out: Path | None,
    ceilings: Mapping[str, float],
    rows: Sequence[Mapping[str, Any]],
    goals: Sequence[Goal] = (),
) -> None:
    """Writes the result file, and the goals if there are any."""
    from lockstep.bench.machine import stamp
    from lockstep.bench.results import FOLDER, write_results

    path = out or FOLDER / f"{name}.json"
    write_results(path, name, stamp(), ceilings, rows)
    typer.echo(f"wrote {path}")
    finish_goals(goals)


def finish_goals(goals: Sequence[Goal]) -> None:
    """Writes the goals if there are any."""
    from lockstep.bench.goals import GOALS, write_goals
    from lockstep.bench.machine import stamp

    if goals:
        write_goals(goals, stamp())
        for goal in goals:
            typer.echo(goal.line())
        typer.echo(f"wrote {GOALS}")
