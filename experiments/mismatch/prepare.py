"""What all runs have in common, made once: the problems, and the weights they start from.

    python experiments/mismatch/prepare.py CONFIG [KEY=VALUE ...] --data OUT/data --out OUT/start

SmolLM2 doesn't answer in the task's form by itself, so it imitates a few worked problems first, in BF16: blocks of a few
supervised steps, until sampled completions of held-out problems earn `--reward` on average. That leaves room to learn, and gives
every arm the same weights (FP32 masters, so that nothing is rounded on the way). `OUT/start/warm.json` tells how it went. Next:
`run.py`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from run import machine
from task import Task, write_rows

from lockstep.config.load import load_run
from lockstep.data.spec import DataSpec
from lockstep.errors import ContractError, UserError
from lockstep.models.checkpoint import save
from lockstep.numerics.flow import FlowSpec
from lockstep.observe.logger import RunLogger
from lockstep.rewards.evaluate import Rewards
from lockstep.sync.publish import Publisher
from lockstep.trainer.evaluation import Evaluator
from lockstep.trainer.setup import Parts, make_parts
from lockstep.trainer.spec import RunSpec, WarmStartSpec
from lockstep.trainer.warm_start import warm_start

TRAIN, EVAL, WARM = 4000, 256, 1024
"""Problems of each kind."""


@dataclass(frozen=True)
class Warm:
    """Blocks of `steps` supervised steps of `batch` problems, until the mean sampled reward is `reward`; at most `blocks`."""

    reward: float = 0.3
    steps: int = 8
    blocks: int = 25
    batch: int = 16
    lr: float = 1e-4


def write_data(folder: Path, task: Task) -> None:
    """Training, evaluation and warm-up problems; those of evaluation are in neither of the others."""
    for name, count, held_out in (("train", TRAIN, False), ("eval", EVAL, True), ("warm", WARM, False)):
        write_rows(folder / f"{name}.jsonl", task, count=count, seed=len(name), held_out=held_out)


def make_start(spec: RunSpec, data: Path, out: Path, warm: Warm) -> list[dict[str, float]]:
    """Writes the starting weights to `out`, a Hugging Face folder, and returns reward by supervised steps."""
    source = DataSpec("jsonl", path=str(data / "warm.jsonl"))
    block = WarmStartSpec(data=source, steps=warm.steps, batch=warm.batch, lr=warm.lr, warmup_steps=2)
    spec = replace(
        spec,
        flow=FlowSpec("bf16"),
        warm_start=block,
        eval=replace(
            spec.eval, every=1, prompts=min(spec.eval.prompts, 32), samples=max(spec.eval.samples, 1)
        ),
        run_dir=str(out.parent / "runs" / "prepare"),
    )
    torch.manual_seed(spec.seed)
    shutil.rmtree(spec.run_dir, ignore_errors=True)
    curve: list[dict[str, float]] = []
    with Rewards(spec.rewards) as rewards:
        parts = make_parts(spec)
        with RunLogger(spec.run_dir, spec.observe, warm.blocks) as logger:
            evaluator, publisher = Evaluator(parts, rewards), Publisher(parts.decoder, parts.engine)
            for number in range(warm.blocks + 1):
                publisher.publish(number + 1)
                found = evaluator.run(number, number + 1)
                curve.append({"steps": float(number * warm.steps), **found})
                told = {k: round(found[k], 3) for k in ("eval/reward", "eval/mean@k")}
                print(f"{number * warm.steps} supervised steps: {told}", flush=True)
                if found["eval/mean@k"] >= warm.reward or number == warm.blocks:
                    break
                parts.spec = replace(spec, seed=number)  # other problems in every block
                warm_start(parts, logger)
    _save(parts, out, curve, warm)
    return curve


def _save(parts: Parts, out: Path, curve: list[dict[str, float]], warm: Warm) -> None:
    """The folder, all at once: whoever finds it finds it whole."""
    partial = out.with_name(f".partial_{out.name}")
    shutil.rmtree(partial, ignore_errors=True)
    parameters = parts.decoder.named_parameters()
    save(
        partial, parts.model_spec, parameters, dtype=torch.float32, tokenizer=parts.tokenizer, overwrite=True
    )
    record = {"warm": asdict(warm), "curve": curve, "stamp": machine(parts.kernels.name)}
    (partial / "warm.json").write_text(json.dumps(record, indent=1) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def main(argv: Sequence[str] | None = None) -> int:
    """2 for what the user got wrong, 3 for a broken promise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--data", type=Path, required=True, help="folder of the problems")
    parser.add_argument("--out", type=Path, required=True, help="folder of the starting weights")
    for name, value in asdict(Warm()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value, metavar="N", help="see Warm")
    options = vars(parser.parse_args(argv))
    warm = Warm(**{name: options[name] for name in asdict(Warm())})
    begun = time.perf_counter()
    try:
        make_start(load_run(options["config"], options["overrides"]), options["data"], options["out"], warm)
    except (UserError, ContractError) as error:
        print(f"error: {error.kind}: {error}", file=sys.stderr)
        return error.exit_code
    print(f"starting weights in {options['out']}, {time.perf_counter() - begun:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
