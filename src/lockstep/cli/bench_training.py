"""`lockstep bench layer`, `train`, `step`, `gradients`, `sft`: what FP8 does for training, and to it.

Next: `bench/training_layer.py`, `bench/training.py`, `bench/step.py`, `bench/gradients.py`, `bench/sft.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lockstep.cli.bench_output import Goals, Out, begin, finish

if TYPE_CHECKING:
    from lockstep.bench.timing import Ceilings
    from lockstep.kernels.table import Kernels
    from lockstep.numerics.flow import Flow
    from lockstep.trainer.workload import Card

Model = Annotated[str, typer.Option(metavar="NAME", help="Model shape; weights are random.")]
Sequences = Annotated[int, typer.Option(min=1, help="Sequences side by side in a micro-batch.")]
Tokens = Annotated[int, typer.Option(min=2, help="Rows of a sequence.")]
Iterations = Annotated[int, typer.Option(min=1, help="Measured repetitions; times are medians.")]
FlowName = Annotated[Literal["fp8", "fp8+kv8"], typer.Option(help="FP8 flow; BF16 is the baseline.")]
SaveFP8 = Annotated[
    bool,
    typer.Option("--save-fp8/--no-save-fp8", help="Keep gate and up in FP8 until the backward pass."),
]
Deterministic = Annotated[
    bool,
    typer.Option("--deterministic", help="The same bits in every run on our side; the baseline's differ."),
]
Graphs = Annotated[
    bool,
    typer.Option(
        "--graphs/--no-graphs", help="Captured training passes on our side, as the trainer has them."
    ),
]
Profile = Annotated[bool, typer.Option("--profile", help="Also print the longest kernels of each side.")]
ModelPath = Annotated[
    Path,
    typer.Option("--model-path", metavar="DIR", help="Hugging Face checkpoint folder.", show_default=False),
]
KernelsName = Annotated[
    Literal["auto", "reference", "exact", "hopper"],
    typer.Option("--kernels", help="Both flows are computed with these."),
]


def layer(
    model: Model = "qwen3-8b",
    sequences: Sequences = 4,
    tokens: Tokens = 4096,
    iterations: Iterations = 20,
    save_fp8: SaveFP8 = False,
    deterministic: Deterministic = False,
    profile: Profile = False,
    out: Out = None,
    goals: Goals = False,
) -> None:
    """One decoder layer, forward and backward, FP8 against a BF16 baseline; its linear layers alone."""
    ceilings = begin("lockstep bench layer")
    from lockstep.bench import training_layer as bench
    from lockstep.numerics.flow import fp8_flow

    kernels, card = _kernels_and_card(ceilings)
    found = bench.run_layer(
        kernels,
        model,
        fp8_flow(),
        [tokens] * sequences,
        card,
        iterations=iterations,
        save_fp8=save_fp8,
        deterministic=deterministic,
        profiled=profile,
        say=typer.echo,
    )
    _say(found.lines())
    reached = bench.goals(model, found) if goals else ()
    finish(f"layer-{model}", out, _ceilings(ceilings, card), found.records(), reached)


def train(
    model: Model = "qwen3-1.7b",
    sequences: Sequences = 4,
    tokens: Tokens = 4096,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches of an optimizer step.")] = 8,
    iterations: Iterations = 4,
    flow: FlowName = "fp8",
    save_fp8: SaveFP8 = True,
    deterministic: Deterministic = False,
    lean: Annotated[
        bool, typer.Option("--lean", help="The baseline makes norm and SwiGLU outputs again too.")
    ] = False,
    small: Annotated[
        int, typer.Option(min=0, help="Also time micro-batches of so many rows by the wall; 0 doesn't.")
    ] = 512,
    graphs: Graphs = True,
    profile: Profile = False,
    out: Out = None,
    goals: Goals = False,
) -> None:
    """One optimizer step of a whole model, phase by phase, FP8 against a BF16 baseline; memory, measured and predicted."""
    ceilings = begin("lockstep bench train")
    from lockstep.bench import training as bench
    from lockstep.bench.shapes import preset
    from lockstep.bench.sides import make_sides, random_batch, random_masters

    kernels, card = _kernels_and_card(ceilings)
    decoder = random_masters(preset(model), _flow(flow), kernels)
    decoder.save_fp8, decoder.deterministic = save_fp8, deterministic
    lengths, scales = [tokens] * sequences, _scales(decoder)
    sides = make_sides(decoder, lengths, scales=scales, lean=lean)
    typer.echo(sides.choices)
    batches = [random_batch(decoder, lengths, seed=i) for i in range(micro_batches)]
    found = bench.run_training(
        sides, batches, card, iterations=iterations, say=typer.echo, captured=graphs, profiled=profile
    )
    _say(found.lines())
    records, ratio = found.records(), None
    if small:
        few = make_sides(decoder, [small], scales=scales, lean=lean, timer=bench.wall_ms)
        typer.echo(few.choices)
        short = [random_batch(decoder, [small], seed=i) for i in range(8)]
        for captured in (False, True) if graphs else (False,):
            few.capture(captured)
            ratio, times = bench.wall_ratio(few, short, 5)
            told = ", ".join(f"{side} {ms:.2f} ms" for side, ms in times.items())
            how = "captured" if captured else "launched one by one"
            typer.echo(f"8 micro-batches of {small} rows, by the wall, FP8 {how}: {told}: {ratio:.3f}x")
            records.append({"rows": small, "micro_batches": 8, "graphs": captured, **times, "ratio": ratio})
        few.capture(False)
    reached = bench.goals(model, found, ratio if small == 512 else None) if goals else ()
    finish(f"train-{model}", out, _ceilings(ceilings, card), records, reached)


def step(
    model: Model = "qwen3-1.7b",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a step.")] = 16,
    samples: Annotated[int, typer.Option(min=1, help="Samples of a prompt.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a sample.")] = 1024,
    microbatch_tokens: Annotated[int, typer.Option(min=1, help="Rows of a micro-batch, at most.")] = 12288,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps; times are medians.")] = 1,
    flow: FlowName = "fp8+kv8",
    save_fp8: SaveFP8 = True,
    deterministic: Deterministic = False,
    graphs: Graphs = True,
    profile: Profile = False,
    out: Out = None,
    goals: Goals = False,
) -> None:
    """A whole GRPO step on random weights: rollout, update, publication; the FP8 flow against a BF16 stack.

    Exit code 3: a log-probability of the FP8 side differed between rollout and trainer.
    """
    ceilings = begin("lockstep bench step")
    from lockstep.bench import step as bench
    from lockstep.bench.shapes import preset
    from lockstep.bench.sides import random_masters

    kernels, card = _kernels_and_card(ceilings)
    work = bench.StepWork(prompts, samples, prompt_tokens, new_tokens, microbatch_tokens)
    decoder = random_masters(preset(model), _flow(flow), kernels)
    decoder.save_fp8, decoder.deterministic = save_fp8, deterministic
    found = bench.run_step(decoder, work, steps=steps, say=typer.echo, captured=graphs, profiled=profile)
    _say(found.lines())
    name = f"step-{model}-{prompts}x{samples}x{prompt_tokens}-{new_tokens}"
    reached = bench.goals(model, found) if goals else ()
    finish(name, out, _ceilings(ceilings, card), found.records(), reached)


def gradients(
    model_path: ModelPath,
    kernels: KernelsName = "auto",
    count: Annotated[int, typer.Option(min=1, help="Held-out sequences of the corpus.")] = 4,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 256,
    save_fp8: SaveFP8 = False,
    out: Out = None,
    goals: Goals = False,
) -> None:
    """Cosine between the gradients of the FP8 and the BF16 flow on real weights and text, layer by layer. Runs on a CPU too."""
    from lockstep.bench import gradients as bench
    from lockstep.kernels.table import select
    from lockstep.numerics.flow import fp8_flow

    found = bench.run_gradients(
        model_path, fp8_flow(), select(kernels), count=count, length=length, save_fp8=save_fp8, say=typer.echo
    )
    _say(found.lines())
    finish("gradients", out, {}, found.records(), bench.goals(found) if goals else ())


def sft(
    model_path: ModelPath,
    kernels: KernelsName = "auto",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 500,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 4,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 512,
    lr: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 2e-5,
    every: Annotated[int, typer.Option(min=1, help="Steps between looks at held-out text.")] = 25,
    out: Out = None,
    goals: Goals = False,
) -> None:
    """Fine-tune in FP8 and in BF16 and compare the loss curves with those of two orders in BF16. Meant for a GPU."""
    from lockstep.bench import sft as bench
    from lockstep.kernels.table import select
    from lockstep.numerics.flow import fp8_flow

    how = bench.SFT(steps, batch, length, lr, every)
    found = bench.run_sft(model_path, fp8_flow(), select(kernels), how, say=typer.echo)
    _say(found.lines())
    finish("sft", out, {}, found.records(), bench.goals(found) if goals else ())


def _kernels_and_card(ceilings: Ceilings) -> tuple[Kernels, Card]:
    """The Hopper kernels, and what this GPU reaches."""
    from lockstep.bench.training import card_of, measure_fp8_tflops
    from lockstep.kernels.table import select

    kernels = select("hopper")
    card = card_of(ceilings, measure_fp8_tflops(kernels))
    typer.echo(f"block-scaled FP8 product {card.fp8_tflops:.0f} TFLOP/s")
    return kernels, card


def _ceilings(ceilings: Ceilings, card: Card) -> dict[str, float]:
    return {**ceilings.record(), "fp8_tflops": round(card.fp8_tflops, 1)}


def _flow(name: str) -> Flow:
    from lockstep.bench.rollout import FLOWS

    return FLOWS[name]()


def _scales(decoder: Any) -> Any:
    """KV scales for random weights, where the flow has an FP8 KV cache."""
    from lockstep.bench.rollout import flat_scales

    return flat_scales(decoder).to(decoder.device) if decoder.flow.kv_fp8 else None


def _say(lines: Sequence[str]) -> None:
    typer.echo("\n".join(lines))
