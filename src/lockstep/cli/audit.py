"""`lockstep audit`: does the exactness contract hold here, for this model, on this machine?

Next: `trainer/audit.py`, and `bench/audit.py` for model shapes with random weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.arguments import Overrides, load
from lockstep.cli.bench_output import finish_goals
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.trainer.spec import RunSpec


def audit(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]",
            help="YAML file of the run; may be left out with --shape.",
            show_default=False,
        ),
    ] = None,
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
            help="Break something on purpose; the audit must notice: per-tensor-activation, split-k.",
            show_default=False,
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A model shape with random weights on a GPU, such as qwen3-8b; may be given again.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="So many layers of a --shape.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Result file (with --shape: benchmarks/results/audit.json).",
            show_default=False,
        ),
    ] = None,
    goals: Annotated[
        bool,
        typer.Option(
            "--goals",
            help="Also write goal C1 to benchmarks/results/goals.json, once all models were audited; parts may be done apart.",
        ),
    ] = False,
) -> None:
    """Check that rollout and trainer agree bit for bit.

    Exit code 3: they do not.
    """
    names = tuple(name.strip() for name in flows.split(",") if name.strip())
    spec = None if config is None else load(config, overrides)
    if shape:
        _audit_shapes(spec, names, shape, layers, plant, out, goals=goals)
        return
    if spec is None:
        raise ConfigError("nothing to audit", where="audit", fix="give a configuration, or --shape")
    if layers is not None or goals or out is not None:
        raise ConfigError("--layers, --goals and --out belong to --shape", where="audit", fix="add --shape")
    from lockstep.trainer.audit import run_audit

    result = run_audit(spec, names, plant, say=typer.echo)
    typer.echo(result.lines()[-1])
    if not result.passed:
        raise typer.Exit(3)


def _audit_shapes(
    spec: RunSpec | None,
    flows: tuple[str, ...],
    shapes: list[str],
    layers: int | None,
    plant: str | None,
    out: Path | None,
    *,
    goals: bool,
) -> None:
    """Shapes with random weights, then the model of the configuration, on the same kernels."""
    from lockstep.bench import audit as bench
    from lockstep.bench.machine import require_hopper, stamp
    from lockstep.bench.results import FOLDER

    if goals:
        bench.refuse_altered(layers=layers, plant=plant)
    require_hopper("lockstep audit --shape")
    from lockstep.kernels.table import select
    from lockstep.trainer.plants import planted

    kernels = select("hopper") if plant is None else planted(plant, exact=False, hopper=True)
    path, here, records = out or FOLDER / "audit.json", stamp(), []
    for audited in bench.audit_parts(
        shapes, flows, spec, kernels, layers=layers, plant=plant, say=typer.echo
    ):
        rows = audited.records()
        records += rows
        bench.Parts.written(path, here, rows)
    typer.echo(f"wrote {path}")
    if goals:
        parts = bench.Parts.of(path, here)
        finish_goals(parts.goals())
        if parts.missing:
            typer.echo(f"goal C1 still wants {', '.join(parts.missing)}")
    failed = [r for r in records if not r["passed"]]
    tokens, values = (sum(r[key] for r in records) for key in ("rows", "values"))
    typer.echo(
        f"contract BROKEN in {len(failed)} of {len(records)} combinations of model and flow"
        if failed
        else f"contract holds: {len(records)} combinations of model and flow, {tokens:,} sampled tokens, {values:,} values, "
        "no bit differs"
    )
    if failed:
        raise typer.Exit(3)
