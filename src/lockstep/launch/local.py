"""Makes the parts, opens the run's folder, and lets the loop run: in one process, or in each of those that `torchrun` started."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lockstep.launch.torchrun import joined
from lockstep.observe.logger import RunLogger, SilentLogger
from lockstep.rewards.evaluate import Rewards
from lockstep.sync.publish import Publisher
from lockstep.trainer.evaluation import Evaluator
from lockstep.trainer.loop import RunResult, Trainer
from lockstep.trainer.ranks import Ranks
from lockstep.trainer.setup import Parts, make_parts
from lockstep.trainer.spec import ModelSource, RunSpec


def run_training(spec: RunSpec, *, resume: str = "auto", config_yaml: str = "") -> RunResult:
    """Trains; everything it writes is under `spec.run_dir`, and the first process of the job writes it."""
    torch.manual_seed(spec.seed)
    run_dir = Path(spec.run_dir)
    with joined() as ranks, Rewards(spec.rewards) as rewards:
        parts = _in_turn(spec, ranks)
        run_dir.mkdir(parents=True, exist_ok=True)
        logger = RunLogger if ranks.first else SilentLogger
        with logger(run_dir, spec.observe, spec.update.steps) as log:
            return Trainer(parts, rewards, log).run(resume, config_yaml)


def _in_turn(spec: RunSpec, ranks: Ranks) -> Parts:
    """The first rank goes ahead: it may have to make or fetch the model that the others load."""
    if ranks.first:
        parts = make_parts(spec, ranks)
    ranks.wait()
    if not ranks.first:
        parts = make_parts(spec, ranks)
    return parts


def run_evaluation(spec: RunSpec, model_path: str | None = None) -> dict[str, float]:
    """Metrics of `spec.eval` for the run's model, or for another folder."""
    if model_path:
        spec = replace(spec, model=ModelSource(path=model_path))
    with Rewards(spec.rewards) as rewards:
        parts = make_parts(spec)
        scales = partial(parts.calibrate, 0, 1) if parts.flows.rollout.kv_fp8 else None
        Publisher(parts.decoder, parts.engine).publish(1, scales=scales)
        return Evaluator(parts, rewards).run(0, 1)
