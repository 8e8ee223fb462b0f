"""`lockstep plan`: what a run would take, before anything is allocated.

Next: `config/plan.py`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli.arguments import ConfigFile, Overrides, load


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Plan for this model shape, such as qwen3-8b, instead.", show_default=False
        ),
    ] = "",
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a prompt (data.max_prompt_tokens, or 256).", show_default=False),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that share the run, a process each.")] = 1,
    memory_gb: Annotated[
        float | None,
        typer.Option(min=0.1, help="Memory of the GPU (the one here, or 80).", show_default=False),
    ] = None,
    copy_tbps: Annotated[float, typer.Option(min=0.001, help="TB/s of a copy, read plus written.")] = 3.0,
    bf16_tflops: Annotated[float, typer.Option(min=0.001, help="TFLOP/s of BF16 products.")] = 720.0,
    fp8_tflops: Annotated[float, typer.Option(min=0.001, help="TFLOP/s of block-scaled FP8.")] = 1100.0,
) -> None:
    """Memory by part and phase of a GPU, the least time of each phase, and whether the GPU holds it.

    Exit code 2: it doesn't fit.
    """
    from lockstep.bench.shapes import preset
    from lockstep.config.plan import budget, outline
    from lockstep.errors import CapacityError
    from lockstep.trainer.workload import Card

    spec = load(config, overrides)
    card = Card(_memory_here() if memory_gb is None else memory_gb, copy_tbps, bf16_tflops, fp8_tflops)
    found = budget(
        spec, card, model=preset(model) if model else None, prompt_tokens=prompt_tokens, ranks=gpus
    )
    typer.echo("\n".join([*outline(spec, found.model), "", *found.lines()]))
    if not found.fits:
        raise CapacityError(found.verdict(), where=str(config), fix=found.remedy())
    typer.echo(found.verdict())


def _memory_here() -> float:
    """GB of the first GPU; 80 where there is none."""
    import torch

    if not torch.cuda.is_available():
        return 80.0
    return float(torch.cuda.get_device_properties(0).total_memory) / 1e9
