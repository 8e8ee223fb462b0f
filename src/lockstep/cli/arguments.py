"""Arguments that several commands share: the configuration file, its overrides, and loading both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lockstep.trainer.spec import RunSpec

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Settings over the file's, such as optim.lr=1e-5.", show_default=False
    ),
]


def load(config: Path, overrides: list[str] | None) -> RunSpec:
    """The run a command line describes. Raises ConfigError."""
    from lockstep.config.load import load_run

    return load_run(config, overrides or [])
