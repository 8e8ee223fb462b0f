"""The command line: one file a command, and the place where an error becomes a line and an exit code.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a bug of ours: the traceback is shown |
| 2 | the user can mend it: `error: <kind>: <line>` |
| 3 | the exactness contract did not hold |
| 130 | interrupted |

Commands import what they run inside their function, so `lockstep --help` is quick and a command needs only the packages
it uses. Next: `train.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from lockstep import __version__
from lockstep.cli import (
    attribute,
    audit,
    bench,
    config_cmd,
    doctor,
    evaluate,
    export,
    models_cmd,
    plan,
    report,
    train,
)
from lockstep.errors import CapacityError, ContractError, UserError

app = typer.Typer(
    name="lockstep",
    help="Reinforcement learning of language models in FP8, with rollout and trainer equal bit for bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train")(train.train)
app.command("plan")(plan.plan)
app.command("eval")(evaluate.evaluate)
app.command("audit")(audit.audit)
app.command("attribute")(attribute.attribute)
app.command("export")(export.export)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")
app.add_typer(config_cmd.app, name="config")
app.add_typer(models_cmd.app, name="model")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lockstep {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of errors too.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options that stand before the command; `main` reads --debug itself, so that it may also stand behind it."""


# Before torch is loaded: CPU threads that wait should sleep. Spinning costs little on an idle machine and a factor of
# twenty on a busy one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command line (`sys.argv` by default) and exit with its code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        app(args=[a for a in arguments if a != "--debug"], prog_name="lockstep")
    except Exception as e:
        told = e if isinstance(e, (UserError, ContractError)) else _out_of_memory(e)
        if told is None or debug:
            raise
        line = told.line() if isinstance(told, UserError) else " ".join(str(told).split())
        print(": ".join(part for part in ("error", told.kind, line) if part), file=sys.stderr)
        sys.exit(told.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _out_of_memory(error: Exception) -> CapacityError | None:
    """What torch says when a GPU is full, as an error that the user can mend; None for any other. Torch isn't loaded for it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, torch.OutOfMemoryError):
        return None
    sizes = str(error).split(". ")[1:4]  # how much was asked for, how much the GPU has, how much is ours
    return CapacityError(
        "a GPU ran out of memory",
        why=". ".join(sizes),
        fix="`lockstep plan CONFIG` says what a run takes and what would help most; --debug shows where it ended",
    )
