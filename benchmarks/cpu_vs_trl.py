"""The same reinforcement learning in TRL's GRPOTrainer (FP32) and in Lockstep (unified FP8 flow), on one CPU.

Three subcommands, since the two trainers need not share an environment: `trl` and `lockstep` each write what their steps
took and earned, `compare` puts the two files side by side. Prompts, their order and the reward function are Lockstep's on
both sides; every option that is named below is set on both sides, so that no default decides. README.md has the commands.

What a step's seconds are: from the start of generation to the end of the optimizer step, with the weights ready for the
next generation. Rewards and advantages are inside, logging and saving outside. In TRL that is `on_step_begin` to
`on_step_end` (the trainer generates with the very weights it trains); in Lockstep the phases rollout, train and publish.
Torch and both trainers are imported inside the functions that use them: `compare` needs the standard library only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

TRL = "1.16."
PROMPTS, SAMPLES, NEW_TOKENS = 8, 8, 24
LR, BETAS, EPS, MAX_GRAD_NORM = 5e-6, (0.9, 0.999), 1e-8, 1.0
TEMPERATURE, CLIP, ADVANTAGE_EPS = 1.0, 0.2, 1e-4
TEMPLATE = "What is {a} + {b}? Answer with a number."
DATA = {"digits": 1, "operators": ["+"], "holdout": "train", "chat": True, "template": TEMPLATE}
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16",
            "asimd", "sve", "bf16")  # fmt: skip


def work(model: Path, seed: int) -> dict[str, Any]:
    """What both sides must have in common to be comparable."""
    config = json.loads((model / "config.json").read_text())
    shape = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    return {
        "model": {key: config.get(key) for key in shape},
        "data": DATA,
        "seed": seed,
        "prompts_per_step": PROMPTS,
        "samples_per_prompt": SAMPLES,
        "max_new_tokens": NEW_TOKENS,
        "temperature": TEMPERATURE,
        "loss": {"type": "grpo", "clip": CLIP, "kl": 0.0, "advantage_eps": ADVANTAGE_EPS},
        "adamw": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": 0.0, "max_grad_norm": MAX_GRAD_NORM},
        "optimizer_steps_per_batch": 1,
    }


def machine(packages: tuple[str, ...]) -> dict[str, Any]:
    """Versions, threads and the processor's features."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, str] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return {
        "versions": found,
        "threads": torch.get_num_threads(),
        "cores": cores,
        "processor": {
            "architecture": platform.machine(),
            "torch_capability": torch.backends.cpu.get_cpu_capability(),
            "features": cpu_features(),
        },
    }


def cpu_features() -> list[str]:
    """Those of `FEATURES` that the kernel reports; none where it doesn't tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    flags: set[str] = set()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags.update(value.split())
    return [name for name in FEATURES if name in flags]


def write(path: Path, record: dict[str, Any]) -> None:
    """Replaces the file in one go, so that a broken run leaves its finished steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)


def find_lockstep() -> None:
    """Makes `lockstep` importable from the source tree where it isn't installed."""
    try:
        import lockstep  # noqa: F401
    except ImportError:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))


def prompt_rows(steps: int, seed: int) -> list[dict[str, Any]]:
    """The prompts (chat messages) and answers of all steps in the order in which Lockstep's trainer takes them."""
    from lockstep.data import DataSpec, PromptStream, load

    stream = PromptStream(load(DataSpec(source="arithmetic", args=DATA), seed), seed)
    return [{"prompt": e.prompt, "answer": e.columns["answer"]} for e in stream.take(0, steps * PROMPTS)]


def need_trl(batch: int) -> Any:
    """The module; ends the program when it is missing or another version, or `batch` doesn't suit."""
    try:
        import trl
    except ImportError as error:
        raise SystemExit(f"error: {error}; this needs TRL's environment, see benchmarks/README.md") from error
    if not trl.__version__.startswith(TRL):
        raise SystemExit(f"error: trl is {trl.__version__}, this script is written for {TRL}*")
    if not 0 < batch <= PROMPTS * SAMPLES or PROMPTS * SAMPLES % batch:
        raise SystemExit(f"error: --batch {batch} doesn't divide the {PROMPTS * SAMPLES} samples of a step")
    return trl


def run_trl(model: Path, steps: int, seed: int, batch: int, out: Path) -> None:
    """GRPOTrainer in FP32. `batch` is the number of samples in one forward and backward."""
    trl = need_trl(batch)
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    from lockstep.rewards.builtin import last_number

    record: dict[str, Any] = {
        "side": "trl",
        "precision": "FP32 weights, activations and gradients",
        "samples_per_microbatch": batch,
        "work": work(model, seed),
        "machine": machine(("torch", "trl", "transformers", "accelerate", "numpy")),
        "steps": [],
    }
    current: dict[str, float] = {}

    def reward(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **_: Any) -> list[float]:
        scores = [float(s or 0.0) for s in last_number(prompts, completions, completion_ids, answer)]
        current["reward"] = statistics.fmean(scores)
        current["mean_length"] = statistics.fmean(len(ids) for ids in completion_ids)
        return scores

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            current.clear()
            current["begin"] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_done(record, current, time.perf_counter() - current.pop("begin"), out)

    class Timed(trl.GRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            begin = time.perf_counter()
            inputs = super()._prepare_inputs(generation_batch)
            current["rollout_s"] = current.get("rollout_s", 0.0) + time.perf_counter() - begin
            return inputs

    with tempfile.TemporaryDirectory() as folder:
        Timed(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True),
            processing_class=AutoTokenizer.from_pretrained(model, local_files_only=True),
            reward_funcs=reward,
            args=trl.GRPOConfig(**trl_options(folder, steps, seed, batch)),
            train_dataset=Dataset.from_list(prompt_rows(steps, seed)),
            callbacks=[Clock()],
        ).train()


def trl_options(folder: str, steps: int, seed: int, batch: int) -> dict[str, Any]:
    """Arguments of GRPOConfig. Gradient checkpointing, TRL's default, is off: there is memory enough and it costs time."""
    return {
        "output_dir": folder,
        "seed": seed,
        "max_steps": steps,
        # precision and memory
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        # rollout
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": PROMPTS * SAMPLES // batch,
        "num_generations": SAMPLES,
        "max_completion_length": NEW_TOKENS,
        "temperature": TEMPERATURE,
        "top_p": 1.0,
        "top_k": 0,
        "shuffle_dataset": False,
        # loss
        "loss_type": "grpo",
        "beta": 0.0,
        "epsilon": CLIP,
        "num_iterations": 1,
        "scale_rewards": "group",
        "disable_dropout": True,
        # optimizer
        "optim": "adamw_torch",
        "learning_rate": LR,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "weight_decay": 0.0,
        "max_grad_norm": MAX_GRAD_NORM,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        # nothing else
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def step_done(record: dict[str, Any], values: dict[str, float], seconds: float, out: Path) -> None:
    """Keeps and shows a finished step."""
    number = len(record["steps"]) + 1
    record["steps"].append({"step": number, "seconds": seconds, **values})
    write(out, record)
    print(f"step {number}: {seconds:.2f} s, reward {values['reward']:.3f}", flush=True)


def run_lockstep(model: Path, steps: int, seed: int, out: Path) -> None:
    """Lockstep's own training run; the steps are read from its metrics.jsonl, also those of a run that broke."""
    from lockstep.kernels.table import select
    from lockstep.launch.local import run_training

    record: dict[str, Any] = {
        "side": "lockstep",
        "precision": "fp8 flow: E4M3 operands in all GEMMs of the decoder's linears, FP32 masters",
        "kernels": select("auto").name,
        "work": work(model, seed),
        "machine": machine(("torch", "transformers", "numpy")),
        "steps": [],
    }
    record["machine"]["versions"]["lockstep"] = sys.modules["lockstep"].__version__
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "lockstep"
        try:
            run_training(lockstep_spec(model, steps, seed, run_dir), resume="never")
        finally:
            metrics = run_dir / "metrics.jsonl"
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            record["steps"] = [lockstep_step(json.loads(line)) for line in lines]
            write(out, record)


def lockstep_spec(model: Path, steps: int, seed: int, run_dir: Path) -> Any:
    """The run as Lockstep's record."""
    from lockstep.algorithms.spec import AlgorithmSpec
    from lockstep.data import DataSpec
    from lockstep.numerics.flow import FlowSpec
    from lockstep.observe.spec import ObserveSpec
    from lockstep.rewards import RewardSpec
    from lockstep.rollout.spec import RolloutSpec
    from lockstep.trainer.spec import CheckpointSpec, ModelSource, OptimSpec, RunSpec, UpdateSpec

    return RunSpec(
        model=ModelSource(path=str(model)),
        data=DataSpec(source="arithmetic", args=DATA),
        rewards=(RewardSpec(use="last_number"),),
        run_dir=str(run_dir),
        seed=seed,
        flow=FlowSpec(name="fp8"),
        rollout=RolloutSpec(
            prompts_per_step=PROMPTS,
            samples_per_prompt=SAMPLES,
            max_new_tokens=NEW_TOKENS,
            temperature=TEMPERATURE,
            max_running=PROMPTS * SAMPLES,
        ),
        algorithm=AlgorithmSpec(name="grpo", clip_low=CLIP, clip_high=CLIP, advantage_eps=ADVANTAGE_EPS),
        optim=OptimSpec(lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, max_grad_norm=MAX_GRAD_NORM),
        update=UpdateSpec(steps=steps, mini_batches=1, epochs=1),
        checkpoint=CheckpointSpec(every=0, export_hf=False),
        observe=ObserveSpec(tensorboard=False, live="plain", samples_per_step=0),
    )


def lockstep_step(line: dict[str, Any]) -> dict[str, float]:
    """A line of metrics.jsonl as a step of ours."""
    phases = {name: float(line[f"time/{name}_s"]) for name in ("rollout", "train", "publish")}
    return {
        "step": line["step"],
        "seconds": sum(phases.values()),
        "rollout_s": phases["rollout"],
        "reward": line["reward"],
        "mean_length": line["completions/mean_length"],
        "max_abs_dlogp": line["mismatch/max_abs_dlogp"],
        "exact_tokens": line["mismatch/exact_tokens"],
    }


def summary(record: dict[str, Any], steps: int) -> dict[str, Any]:
    """Medians without the first step, which warms up caches and pools; reward by thirds of the run."""
    rows = record["steps"][:steps]
    later = rows[1:] or rows
    ends = [i * len(rows) // 3 for i in range(4)]
    parts = [rows[a:b] for a, b in itertools.pairwise(ends)]
    return {
        "median_seconds": statistics.median(r["seconds"] for r in later),
        "median_rollout_seconds": statistics.median(r["rollout_s"] for r in later),
        "mean_tokens": statistics.fmean(r["mean_length"] for r in later),
        "reward_by_thirds": [statistics.fmean(r["reward"] for r in p) if p else None for p in parts],
    }


def compare(trl_file: Path, lockstep_file: Path, out: Path | None) -> None:
    """Prints both runs side by side and writes the comparison."""
    for file in (trl_file, lockstep_file):
        if not file.is_file():
            raise SystemExit(f"error: there is no file {file}")
    trl, lockstep = (json.loads(f.read_text()) for f in (trl_file, lockstep_file))
    for record, side in ((trl, "trl"), (lockstep, "lockstep")):
        if record["side"] != side:
            raise SystemExit(f"error: expected the file of the {side} side, got that of {record['side']}")
    differing = [key for key in trl["work"] if trl["work"][key] != lockstep["work"].get(key)]
    if differing:
        raise SystemExit(f"error: the two runs did different work: {', '.join(differing)}")
    steps = min(len(trl["steps"]), len(lockstep["steps"]))
    if not steps:
        raise SystemExit("error: one of the runs has no finished step")
    result: dict[str, Any] = {
        "steps": steps,
        "trl": summary(trl, steps),
        "lockstep": summary(lockstep, steps),
    }
    medians = [result[side]["median_seconds"] for side in ("trl", "lockstep")]
    result["seconds_ratio_lockstep_over_trl"] = medians[1] / medians[0]
    result["max_abs_dlogp"] = max(r["max_abs_dlogp"] for r in lockstep["steps"][:steps])
    result["exact_tokens_min"] = min(r["exact_tokens"] for r in lockstep["steps"][:steps])
    print("\n".join(table(trl, lockstep, result)))
    if out is not None:
        write(out, {"summary": result, "runs": [trl, lockstep]})


def table(trl: dict[str, Any], lockstep: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """The comparison as text."""
    lines = [
        "         TRL, FP32                   Lockstep, FP8",
        "step   seconds  reward  tokens     seconds  reward  tokens  max |dlogp|",
    ]
    for a, b in zip(trl["steps"], lockstep["steps"], strict=False):
        left, right = (f"{r['seconds']:9.2f} {r['reward']:7.3f} {r['mean_length']:7.1f}" for r in (a, b))
        lines.append(f"{a['step']:4d} {left}   {right}  {b['max_abs_dlogp']:11.3g}")
    lines.append("")
    for name, record, side in (("TRL", trl, "trl"), ("Lockstep", lockstep, "lockstep")):
        s = result[side]
        thirds = ", ".join("-" if r is None else f"{r:.3f}" for r in s["reward_by_thirds"])
        rollout = f"{s['median_rollout_seconds']:.2f} s of it generation and rewards"
        lines.append(
            f"{name:9s} median {s['median_seconds']:.2f} s a step ({rollout}), reward by thirds {thirds}"
        )
        versions = ", ".join(f"{n} {v}" for n, v in record["machine"]["versions"].items())
        processor = record["machine"]["processor"]["torch_capability"]
        lines.append(f"{'':9s} {record['machine']['threads']} threads, {processor}; {versions}")
    if trl["machine"]["threads"] != lockstep["machine"]["threads"]:
        lines.append("WARNING   the two sides ran with different numbers of threads")
    if trl["machine"]["processor"] != lockstep["machine"]["processor"]:
        lines.append("WARNING   the two sides ran on different processors")
    lines.append(
        f"ratio     Lockstep takes {result['seconds_ratio_lockstep_over_trl']:.2f} times TRL's seconds"
    )
    exact = f"at least {result['exact_tokens_min']:.1%} of a step's tokens equal bit for bit"
    lines.append(
        f"mismatch  Lockstep's max |dlogp| between rollout and trainer {result['max_abs_dlogp']:.3g}, {exact}"
    )
    return lines


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for side in ("trl", "lockstep"):
        command = commands.add_parser(side, help=f"run {side}'s side")
        command.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
        command.add_argument("--steps", type=int, required=True)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--out", type=Path, required=True)
    commands.choices["trl"].add_argument(
        "--batch", type=int, default=PROMPTS * SAMPLES, help="samples in one forward and backward"
    )
    command = commands.add_parser("compare", help="put two files side by side")
    command.add_argument("trl", type=Path)
    command.add_argument("lockstep", type=Path)
    command.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    """Runs one subcommand."""
    args = arguments()
    if args.command == "compare":
        compare(args.trl, args.lockstep, args.out)
        return
    if args.steps < 1:
        raise SystemExit(f"error: --steps is {args.steps}; it starts at 1")
    if not (args.model / "config.json").is_file():
        raise SystemExit("error: --model is no folder with a config.json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` keeps the finished steps
    find_lockstep()
    if args.command == "trl":
        run_trl(args.model, args.steps, args.seed, args.batch, args.out)
    else:
        run_lockstep(args.model, args.steps, args.seed, args.out)


if __name__ == "__main__":
    main()
