"""`lockstep attribute`: where does the mismatch of rollout and trainer come from?

Next: `trainer/attribution.py`, then `observe/attribution.py` for what is shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.arguments import Overrides, load
from lockstep.errors import ConfigError


def attribute(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CONFIG",
            help="Folder of a run (its newest checkpoint is measured), or YAML file of one.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(help="Prompts of the probe.")] = 4,
    samples: Annotated[int, typer.Option(help="Completions of each prompt.")] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens of a completion, at most.")] = 32,
    layers: Annotated[bool, typer.Option("--layers/--no-layers", help="Measure every layer too.")] = True,
    target: Annotated[
        float | None,
        typer.Option(
            metavar="NATS",
            help="Suggest layers to keep in BF16 so that mean |delta logp| is at most this.",
            show_default=False,
        ),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plot here too.", show_default=False)
    ] = None,
) -> None:
    """Measure what each source adds to the mismatch, and each layer."""
    run_dir = source if source.is_dir() else None
    if not source.exists():
        raise ConfigError("no such run folder or configuration", where=str(source))
    if run_dir is not None and not (run_dir / "config.yaml").is_file():
        raise ConfigError(
            "not the folder of a run",
            where=str(run_dir),
            why="it has no config.yaml",
            fix="name a folder that `lockstep train` wrote, or a YAML file",
        )
    spec = load(source if run_dir is None else run_dir / "config.yaml", overrides)
    from lockstep.observe.attribution import lines, save_attribution
    from lockstep.observe.attribution_plot import standalone
    from lockstep.observe.report import build_report
    from lockstep.observe.rundir import RunDir
    from lockstep.trainer.attribution import run_attribution
    from lockstep.trainer.probe import ProbeSpec

    found = run_attribution(
        spec,
        ProbeSpec(prompts, samples, tokens),
        run_dir=run_dir,
        by_layer=layers,
        target=target,
        say=typer.echo,
    )
    data = found.to_dict()
    typer.echo("\n" + "\n".join(lines(data)) + "\n")
    folder = run_dir or Path(spec.run_dir)
    typer.echo(f"wrote {save_attribution(folder, data)}")
    if svg is not None:
        svg.parent.mkdir(parents=True, exist_ok=True)
        svg.write_text(standalone(data), encoding="utf-8")
        typer.echo(f"wrote {svg}")
    if RunDir(folder).metrics_file.exists():
        typer.echo(f"wrote {build_report(folder)}")
