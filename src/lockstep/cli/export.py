"""`lockstep export`: a run's weights, or a model folder's, as a Hugging Face checkpoint in block FP8.

Next: `trainer/export.py`.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from lockstep.cli.arguments import load
from lockstep.errors import ConfigError


class Format(StrEnum):
    """What is written."""

    fp8 = "fp8"
    bfloat16 = "bfloat16"
    float32 = "float32"


class Scale(StrEnum):
    """How scales are rounded."""

    fp32 = "fp32"
    pow2 = "pow2"


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|MODEL",
            help="Folder of a run (its newest checkpoint is exported) or of a model.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.", show_default=False)],
    form: Annotated[
        Format,
        typer.Option("--format", help="fp8: DeepSeek's block layout, the bytes the engine computes with."),
    ] = Format.fp8,
    scale: Annotated[
        Scale | None,
        typer.Option(help="Scales of fp8; the run's own if not given, fp32 for a model.", show_default=False),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in OUT.")] = False,
) -> None:
    """Write weights as a Hugging Face checkpoint."""
    if scale is not None and form != Format.fp8:
        raise ConfigError(f"--scale has no effect with --format {form.value}", where="--scale")
    kind: Literal["fp32", "pow2"] | None = None if scale is None else scale.value
    if (source / "config.yaml").is_file():
        from lockstep.trainer.export import export_run

        spec = load(source / "config.yaml", None)
        typer.echo(export_run(spec, source, out, form.value, kind, overwrite=overwrite))
        return
    if not (source / "config.json").is_file():
        raise ConfigError(
            "neither a run nor a model",
            where=str(source),
            why="there is no config.yaml and no config.json in it",
        )
    from lockstep.trainer.export import export_model

    typer.echo(export_model(source, out, form.value, kind, overwrite=overwrite))
