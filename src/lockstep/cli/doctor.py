"""`lockstep doctor`: what this machine and this environment offer. The first thing to attach to a bug report."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

_NEEDED = (
    "torch", "transformers", "safetensors", "numpy", "pydantic", "PyYAML", "typer", "rich", "tensorboard", "datasets",
    "math-verify", "psutil",
)  # fmt: skip
_OPTIONAL = ("triton", "gguf", "reasoning-gym", "ray", "vllm", "sglang", "wandb", "trackio")


def doctor(
    template: Annotated[
        str,
        typer.Option(
            "--template", metavar="MODEL", help="Check the chat template of a model's folder instead."
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(metavar="NAME", help="Model shape for the verdict on FP8, where there is a Hopper GPU."),
    ] = "qwen3-8b",
) -> None:
    """Print versions, processors and the kernels that would be used, test them, and say whether FP8 is worth it here; or what a
    chat template does to earlier turns.

    Exit code 3: a kernel gives wrong results.
    """
    if template:
        for line in _template_lines(template):
            typer.echo(line)
        return
    from lockstep import __version__

    typer.echo(f"lockstep     {__version__}")
    typer.echo(f"python       {platform.python_version()} on {platform.system()} {platform.machine()}")
    typer.echo("packages     " + ", ".join(f"{name} {_version(name) or 'MISSING'}" for name in _NEEDED))
    present = [f"{name} {v}" for name in _OPTIONAL if (v := _version(name))]
    typer.echo("optional     " + (", ".join(present) or "none"))
    if _version("torch"):
        from lockstep.bench.doctor import examine
        from lockstep.kernels.table import WORKSPACE

        workspace = os.environ.get(WORKSPACE)  # before the kernels that _machine_lines loads set it
        for line in _machine_lines():
            typer.echo(line)
        if not examine(model, workspace, typer.echo):
            raise typer.Exit(3)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine_lines() -> list[str]:
    import torch

    from lockstep.kernels.table import select

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    capability = torch.backends.cpu.get_cpu_capability()
    lines = [f"cpu          {cores} cores, {torch.get_num_threads()} torch threads, {capability}{_memory()}"]
    if not torch.cuda.is_available():
        lines.append("gpu          none")
    for index in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(index)
        fp8 = "FP8 tensor cores" if (props.major, props.minor) >= (8, 9) else "no FP8 tensor cores"
        size = f"{props.total_memory / 2**30:.0f} GiB"
        lines.append(
            f"gpu {index}        {props.name}, compute capability {props.major}.{props.minor}, {size}, {fp8}"
        )
    return [*lines, f"kernels      auto means {select('auto').name} here"]


def _template_lines(folder: str) -> list[str]:
    from lockstep.data.template import check_template
    from lockstep.models.tokenizer import load_tokenizer

    verdicts = check_template(load_tokenizer(folder))
    rewritten = [v.name for v in verdicts if v.appended is False]
    verdict = "append-only: a conversation of several turns is one sample"
    if rewritten:
        verdict = f"rewrites earlier turns ({', '.join(rewritten)}): such a turn starts a new segment, docs/samples.md"
    return [f"chat template of {folder}", *(f"  {v.line()}" for v in verdicts), f"verdict: {verdict}"]


def _memory() -> str:
    if not _version("psutil"):
        return ""
    import psutil

    memory = psutil.virtual_memory()
    return f", {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
