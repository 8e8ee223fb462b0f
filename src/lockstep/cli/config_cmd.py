"""`lockstep config`: show a complete configuration, or the reference of every key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.arguments import ConfigFile, Overrides, load

app = typer.Typer(
    help="Show configurations and their reference.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def show(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print the complete configuration, defaults included, as YAML."""
    from lockstep.config.load import dump

    typer.echo(dump(load(config, overrides)), nl=False)


@app.command()
def reference(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write here instead of printing.", show_default=False)
    ] = None,
) -> None:
    """Print the reference of every key, in Markdown."""
    from lockstep.config.reference import reference as make

    if out is None:
        typer.echo(make(), nl=False)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(make(), encoding="utf-8")
    typer.echo(f"wrote {out}")
