"""`lockstep audit`: does the exactness contract hold here, for this model, on this machine?

Next: `trainer/audit.py`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli.arguments import ConfigFile, Overrides, load


def audit(
    config: ConfigFile,
    overrides: Overrides = None,
    flows: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Flows to try, separated by commas; +kv8 adds an FP8 KV cache, +kv8+attn8 FP8 attention over it.",
        ),
    ] = "bf16,fp8,fp8+kv8",
    plant: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT",
            help="Break something on purpose; the audit must notice: per-tensor-activation.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Check that rollout and trainer agree bit for bit.

    Exit code 3: they do not.
    """
    spec = load(config, overrides)
    from lockstep.trainer.audit import run_audit

    names = tuple(name.strip() for name in flows.split(",") if name.strip())
    result = run_audit(spec, names, plant, say=typer.echo)
    typer.echo(result.lines()[-1])
    if not result.passed:
        raise typer.Exit(3)
