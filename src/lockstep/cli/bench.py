"""`lockstep bench`: how fast the kernels are on this GPU, against baselines and ceilings measured in the same call.

docs/benchmarks.md explains what is printed and written. Next: `bench/gemm.py`, `bench/quant.py`, `bench/attention.py`,
`bench/kernels_check.py`, `bench/rollout.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.errors import ConfigError, ContractError

if TYPE_CHECKING:
    from lockstep.bench.goals import Goal
    from lockstep.bench.timing import Ceilings

app = typer.Typer(
    help="Measure the kernels on this GPU, or check them against the reference.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

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
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Result file (benchmarks/results/<name>.json).", show_default=False),
]
Goals = Annotated[
    bool, typer.Option("--goals", help="Also write what goals ask for to benchmarks/results/goals.json.")
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
    ceilings = _begin("lockstep bench gemm")
    from lockstep.bench.gemm import broken, run_gemm
    from lockstep.bench.products import CHOICES
    from lockstep.bench.shapes import MODELS, ROWS

    chosen = _names(choices, CHOICES, "--choices")
    records = run_gemm(ceilings, model or MODELS, _numbers(rows) or ROWS, chosen, say=typer.echo)
    _finish("gemm", out, ceilings.record(), records)
    shapes = broken(records)
    if shapes:
        raise ContractError(f"rows change with the number of rows: {', '.join(shapes)}")


@app.command()
def quant(model: Models = None, rows: Rows = "", out: Out = None) -> None:
    """What surrounds the products: quantization, alone and fused into norm, SwiGLU and the write to the cache."""
    ceilings = _begin("lockstep bench quant")
    from lockstep.bench import quant as bench
    from lockstep.bench.shapes import MODELS

    records = bench.run_quant(ceilings, model or MODELS, _numbers(rows) or bench.ROWS, say=typer.echo)
    _finish("quant", out, ceilings.record(), records)


@app.command()
def attention(model: Models = None, out: Out = None, goals: Goals = False) -> None:
    """Prefill against torch's kernels, paged decode against copy bandwidth; BF16 and FP8 keys and values."""
    ceilings = _begin("lockstep bench attention")
    from lockstep.bench import attention as bench

    records = bench.run_attention(ceilings, model or (bench.GOAL_MODEL,), say=typer.echo)
    _finish("attention", out, ceilings.record(), records, bench.goals(records) if goals else ())


@app.command()
def rollout(
    model: Annotated[str, typer.Option(metavar="NAME", help="Model shape; weights are random.")] = "qwen3-8b",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, one completion each.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a completion.")] = 1024,
    flows: Annotated[str, typer.Option(metavar="LIST", help="Of fp8+kv8, fp8, bf16.")] = "fp8+kv8,bf16",
    vllm: Annotated[
        bool,
        typer.Option("--vllm", help="Run vLLM beside it, in a process of its own; it must be importable."),
    ] = False,
    out: Out = None,
    goals: Goals = False,
) -> None:
    """Rollout throughput of the embedded engine, against the byte floor and, if asked for, vLLM in the same call."""
    ceilings = _begin("lockstep bench rollout")
    from dataclasses import asdict

    from lockstep.bench import rollout as bench

    work = bench.Work(prompts, prompt_tokens, new_tokens)
    chosen = _names(flows, tuple(bench.FLOWS), "--flows")
    found = bench.run_rollout(ceilings, model, work, chosen, vllm=vllm, say=typer.echo)
    reached = bench.goals(found, model, work) if goals else ()
    name = f"rollout-{model}-{prompts}x{prompt_tokens}+{new_tokens}"
    _finish(name, out, ceilings.record(), [asdict(t) for t in found], reached)


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
        _finish("check", out, {}, bench.records(checks), bench.goals(checks) if goals else ())
    typer.echo(bench.verdict(checks))
    if not all(c.passed for c in checks):
        raise typer.Exit(3)


def _sanitize(tools: str, names: Sequence[str], out: Path | None, *, goals: bool, write: bool) -> None:
    from dataclasses import asdict

    from lockstep.bench import sanitize as bench

    verdicts = bench.run_sanitizer(_names(tools, bench.TOOLS, "--sanitize"), names, say=typer.echo)
    if write:
        rows = [asdict(v) for v in verdicts]
        _finish("sanitize", out, {}, rows, bench.goals(verdicts) if goals else ())
    if not all(v.clean for v in verdicts):
        raise typer.Exit(3)


def _begin(what: str) -> Ceilings:
    """Refuses other machines; measures what this one can reach."""
    from lockstep.bench.machine import require_hopper, stamp
    from lockstep.bench.timing import measure_ceilings

    require_hopper(what)
    here = stamp()
    typer.echo(f"{here.card}; " + ", ".join(f"{name} {version}" for name, version in here.versions.items()))
    ceilings = measure_ceilings()
    typer.echo(ceilings.line())
    return ceilings


def _finish(
    name: str,
    out: Path | None,
    ceilings: Mapping[str, float],
    rows: Sequence[Mapping[str, Any]],
    goals: Sequence[Goal] = (),
) -> None:
    """Writes the result file, and the goals if there are any."""
    from lockstep.bench.goals import GOALS, write_goals
    from lockstep.bench.machine import stamp
    from lockstep.bench.results import FOLDER, write_results

    path, here = out or FOLDER / f"{name}.json", stamp()
    write_results(path, name, here, ceilings, rows)
    typer.echo(f"wrote {path}")
    if goals:
        write_goals(goals, here)
        for goal in goals:
            typer.echo(goal.line())
        typer.echo(f"wrote {GOALS}")


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
