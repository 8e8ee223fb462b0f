"""`lockstep bench`: how fast the kernels are on this GPU, against baselines and ceilings measured in the same call.

docs/benchmarks.md explains what is printed and written. Next: `bench/gemm.py`, `bench/quant.py`, `bench/attention.py`,
`bench/kernels_check.py`, `bench/rollout.py`; `bench_training.py` for what trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from lockstep.cli import bench_training
from lockstep.cli.bench_output import Goals, Out, begin, finish
from lockstep.cli.train_exact import train_exact
from lockstep.errors import ConfigError, ContractError

app = typer.Typer(
    help="Measure the kernels on this GPU, or check them against the reference.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("train-exact")(train_exact)
for command in (
    bench_training.layer,
    bench_training.train,
    bench_training.step,
    bench_training.gradients,
    bench_training.sft,
):
    app.command()(command)

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Model shape, such as qwen3-8b; may be given again.",
        show_default=False,
    ),
]
Rows = Annotated[
    str, typer.Option(metavar="LIST", help="Numbers of rows, separated by commas.", show_default=False)
]


@app.command()
def gemm(
    model: Models = None,
    rows: Rows = "",
    choices: Annotated[
        str, typer.Option(metavar="LIST", help="Products, separated by commas.", show_default=False)
    ] = "",
    out: Out = None,
) -> None:
    """Products of every layer: the library's FP8, ours, BF16; speed, equal bits, and bits over numbers of rows.

    Exit code 3: a kernel of ours broke the row law.
    """
    ceilings = begin("lockstep bench gemm")
    from lockstep.bench.gemm import broken, run_gemm
    from lockstep.bench.products import CHOICES
    from lockstep.bench.shapes import MODELS, ROWS

    chosen = _names(choices, CHOICES, "--choices")
    records = run_gemm(ceilings, model or MODELS, _numbers(rows) or ROWS, chosen, say=typer.echo)
    finish("gemm", out, ceilings.record(), records)
    shapes = broken(records)
    if shapes:
        raise ContractError(f"rows change with the number of rows: {', '.join(shapes)}")


@app.command()
def quant(model: Models = None, rows: Rows = "", out: Out = None) -> None:
    """What surrounds the products: quantization, alone and fused into norm, SwiGLU and the write to the cache."""
    ceilings = begin("lockstep bench quant")
    from lockstep.bench import quant as bench
    from lockstep.bench.shapes import MODELS

    records = bench.run_quant(ceilings, model or MODELS, _numbers(rows) or bench.ROWS, say=typer.echo)
    finish("quant", out, ceilings.record(), records)


@app.command()
def attention(model: Models = None, out: Out = None, goals: Goals = False) -> None:
    """Prefill against torch's kernels, paged decode against copy bandwidth; BF16 and FP8 keys and values."""
    ceilings = begin("lockstep bench attention")
    from lockstep.bench import attention as bench

    records = bench.run_attention(ceilings, model or (bench.GOAL_MODEL,), say=typer.echo)
    finish("attention", out, ceilings.record(), records, bench.goals(records) if goals else ())


@app.command()
def rollout(
    model: Annotated[str, typer.Option(metavar="NAME", help="Model shape; weights are random.")] = "qwen3-8b",
    work: Annotated[
        list[str] | None,
        typer.Option(
            "--work",
            metavar="WORK",
            help="PROMPTSxPROMPT_TOKENS+NEW_TOKENS (64x512+1024); may be given again.",
            show_default=False,
        ),
    ] = None,
    flows: Annotated[str, typer.Option(metavar="LIST", help="Of fp8+kv8, fp8, bf16.")] = "fp8+kv8,bf16",
    vllm: Annotated[
        bool,
        typer.Option("--vllm", help="Run vLLM beside it, in a process of its own; it must be importable."),
    ] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Also print the longest kernels of a decode step, half-way through."),
    ] = False,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of both engines; 1 keeps all tokens.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Of both engines; 0 keeps all tokens.")] = 0,
    out: Out = None,
    goals: Goals = False,
) -> None:
    """Rollout throughput of the embedded engine, against the byte floor and, if asked for, vLLM in the same call."""
    from lockstep.rollout.types import SamplingParams

    params = SamplingParams(1, top_p=top_p, top_k=top_k)
    if not top_p:
        raise ConfigError("no token is left", where="--top-p", fix="a share above 0")
    if goals and params.truncated:
        raise ConfigError(
            "goals are of tokens drawn from all", where="--goals", fix="leave out --top-p and --top-k"
        )
    ceilings = begin("lockstep bench rollout")
    from dataclasses import asdict

    from lockstep.bench import rollout as bench

    works = [bench.Work.parse(w) for w in work or ["64x512+1024"]]
    chosen = _names(flows, tuple(bench.FLOWS), "--flows")
    found: list[bench.Throughput] = []
    try:
        told = typer.echo if profile else None
        for result in bench.run_rollout(ceilings, model, works, chosen, vllm=vllm, told=told, params=params):
            found.append(result)
            typer.echo(result.line())
    finally:  # what was measured is kept, whatever stops the rest
        if found:
            reached = bench.goals(found, model, works) if goals else ()
            name = f"rollout-{model}-" + "-".join(
                f"{w.prompts}x{w.prompt_tokens}-{w.new_tokens}" for w in works
            )
            name += f"-top_p{top_p:g}-top_k{top_k}" if params.truncated else ""
            finish(name, out, ceilings.record(), [asdict(t) for t in found], reached)


@app.command()
def goals() -> None:
    """What the project promises, what was measured, and the command for each: the table of docs/goals.md."""
    from lockstep.bench.goals import read_goals
    from lockstep.bench.promises import table

    typer.echo("\n".join(table(read_goals())))


@app.command()
def price(
    model: Annotated[str, typer.Option(metavar="NAME", help="Model shape; weights are random.")] = "qwen3-8b",
    work: Annotated[
        str, typer.Option(metavar="WORK", help="PROMPTSxPROMPT_TOKENS+NEW_TOKENS.")
    ] = "64x512+256",
    out: Out = None,
    goals: Goals = False,
) -> None:
    """What exactness costs: rollout with our kernels against rollout with the fastest choice of each, exact or not."""
    ceilings = begin("lockstep bench price")
    from dataclasses import asdict

    from lockstep.bench import price as bench
    from lockstep.bench.rollout import Work

    found = bench.run_price(ceilings, model, Work.parse(work), say=typer.echo)
    finish("price", out, ceilings.record(), [asdict(t) for t in found], bench.goals(found) if goals else ())


@app.command()
def publish(
    model: Annotated[str, typer.Option(metavar="NAME", help="Model shape; weights are random.")] = "qwen3-8b",
    flow: Annotated[
        Literal["fp8+kv8", "fp8", "bf16"], typer.Option(help="Formats of the weights.")
    ] = "fp8+kv8",
    repeats: Annotated[int, typer.Option(min=1, help="Measured publications; the time is their median.")] = 7,
    out: Out = None,
    goals: Goals = False,
) -> None:
    """Publication to the embedded engine after an optimizer step: time, and the share of copy bandwidth.

    Exit code 3: the receipt told of other codes than the engine holds.
    """
    ceilings = begin("lockstep bench publish")
    from lockstep.bench import publish as bench
    from lockstep.bench.rollout import FLOWS
    from lockstep.bench.shapes import preset
    from lockstep.kernels.table import select

    found = bench.run_publish(
        preset(model), model, FLOWS[flow](), select("hopper"), ceilings, repeats=repeats, say=typer.echo
    )
    typer.echo("\n".join(found.lines()))
    reached = bench.goals([found]) if goals else ()
    finish(f"publish-{model}", out, ceilings.record(), [found.record()], reached)


@app.command()
def check(
    small: Annotated[
        bool, typer.Option("--small", help="Small sizes, as compute-sanitizer needs them.")
    ] = False,
    only: Annotated[
        str, typer.Option(metavar="LIST", help="Kernels, separated by commas.", show_default=False)
    ] = "",
    sanitize: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Run the small sizes under these tools of compute-sanitizer: memcheck,racecheck.",
            show_default=False,
        ),
    ] = "",
    out: Out = None,
    write: Annotated[bool, typer.Option("--write/--no-write", help="Write the result file.")] = True,
    goals: Goals = False,
) -> None:
    """Every kernel against the reference, with the stated tolerance.

    Exit code 3: a comparison failed.
    """
    from lockstep.bench.machine import require_hopper

    if goals and (only or (small and not sanitize)):
        raise ConfigError(
            "--goals needs every kernel in full size", where="bench check", fix="leave --small and --only out"
        )
    require_hopper("lockstep bench check")
    from lockstep.bench import kernels_check as bench
    from lockstep.bench.check import Size

    names = _names(only, tuple(bench.CHECKS), "--only")
    if sanitize:
        _sanitize(sanitize, names, out, goals=goals, write=write)
        return
    checks = bench.run_checks(Size(small=small), names, say=typer.echo)
    if write:
        finish("check", out, {}, bench.records(checks), bench.goals(checks) if goals else ())
    typer.echo(bench.verdict(checks))
    if not all(c.passed for c in checks):
        raise typer.Exit(3)


def _sanitize(tools: str, names: Sequence[str], out: Path | None, *, goals: bool, write: bool) -> None:
    from dataclasses import asdict

    from lockstep.bench import sanitize as bench

    verdicts = bench.run_sanitizer(_names(tools, bench.TOOLS, "--sanitize"), names, say=typer.echo)
    if write:
        rows = [{name: value for name, value in asdict(v).items() if name != "tail"} for v in verdicts]
        finish("sanitize", out, {}, rows, bench.goals(verdicts) if goals else ())
    if not all(v.clean for v in verdicts):
        raise typer.Exit(3)


def _numbers(text: str) -> tuple[int, ...]:
    """Positive numbers of a list. Raises ConfigError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(
            f"{text!r} is no list of positive numbers", where="--rows", fix="for example 64,4096"
        )
    return tuple(int(word) for word in words)


def _names(text: str, known: Sequence[str], where: str) -> tuple[str, ...]:
    """Names of a list, all that are known when it is empty. Raises ConfigError."""
    names = tuple(word.strip() for word in text.split(",") if word.strip())
    for name in names:
        if name not in known:
            raise ConfigError(f"{name!r} is unknown", where=where, fix="one of " + ", ".join(known))
    return names or tuple(known)
