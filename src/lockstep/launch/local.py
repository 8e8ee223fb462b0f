"""One process: makes the parts, opens the run's folder, and lets the loop run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lockstep.observe.logger import RunLogger
from lockstep.rewards.evaluate import Rewards
from lockstep.sync.publish import Publisher
from lockstep.trainer.evaluation import Evaluator
from lockstep.trainer.loop import RunResult, Trainer
from lockstep.trainer.setup import make_parts
from lockstep.trainer.spec import ModelSource, RunSpec


def run_training(spec: RunSpec, *, resume: str = "auto", config_yaml: str = "") -> RunResult:
    """Trains; everything it writes is under `spec.run_dir`."""
    torch.manual_seed(spec.seed)
    run_dir = Path(spec.run_dir)
    with Rewards(spec.rewards) as rewards:
        parts = make_parts(spec)
        run_dir.mkdir(parents=True, exist_ok=True)
        with RunLogger(run_dir, spec.observe, spec.update.steps) as logger:
            return Trainer(parts, rewards, logger).run(resume, config_yaml)


def run_evaluation(spec: RunSpec, model_path: str | None = None) -> dict[str, float]:
    """Metrics of `spec.eval` for the run's model, or for another folder."""
    if model_path:
        spec = replace(spec, model=ModelSource(path=model_path))
    with Rewards(spec.rewards) as rewards:
        parts = make_parts(spec)
        scales = partial(parts.calibrate, 0, 1) if parts.flows.rollout.kv_fp8 else None
        Publisher(parts.decoder, parts.engine).publish(1, scales=scales)
        return Evaluator(parts, rewards).run(0, 1)
