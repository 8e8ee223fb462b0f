"""Runs that take a second: a model of two layers, sums of one digit, rewards that a random model differs in."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.data.spec import DataSpec
from lockstep.launch.local import run_training
from lockstep.models.tiny import make_tiny
from lockstep.numerics.flow import FlowSpec
from lockstep.observe.logger import RunLogger
from lockstep.observe.metrics import reproducible
from lockstep.observe.spec import ObserveSpec
from lockstep.rewards.evaluate import Rewards
from lockstep.rewards.spec import RewardSpec
from lockstep.rollout.spec import RolloutSpec
from lockstep.trainer.loop import RunResult, Trainer
from lockstep.trainer.setup import make_parts
from lockstep.trainer.spec import ModelSource, OptimSpec, RunSpec, UpdateSpec

REWARDS = """
def spread(prompts, completions, completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]

def zero(prompts, completions, completion_ids, **columns):
    return [0.0] * len(completion_ids)

def partly(prompts, completions, completion_ids, **columns):
    return [None if i % 4 == 1 else float(sum(ids) % 7) for i, ids in enumerate(completion_ids)]

def nothing(prompts, completions, completion_ids, **columns):
    return [None] * len(completion_ids)

def first_group(prompts, completions, completion_ids, **columns):
    same = prompts[0]
    return [float(sum(ids) % 7) if p == same else 1.0 for p, ids in zip(prompts, completion_ids)]

def short(prompts, completions, completion_ids, **columns):
    return [1.0] * (len(completion_ids) - 1)

def broken(prompts, completions, completion_ids, **columns):
    raise KeyError("no such thing")

def nan(prompts, completions, completion_ids, **columns):
    return [float("nan")] * len(completion_ids)
"""

MakeSpec = Callable[..., RunSpec]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama folder, weights five times those of the recipe, so that distributions are not flat."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny(folder, hidden=32, layers=2, heads=2, kv_heads=1, intermediate=48)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    scaled = {n: t if "norm" in n else t * 5 for n, t in tensors.items()}
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def reward_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reward functions, by name."""
    path = tmp_path_factory.mktemp("rewards") / "rewards_of_tests.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture
def make_spec(model_dir: Path, reward_file: Path, tmp_path: Path) -> MakeSpec:
    """A small run in a folder of its own; keywords are sections of the RunSpec, `reward` a function's name."""

    def make(
        flow: str | FlowSpec = "fp8",
        kv: str = "bf16",
        *,
        reward: str = "spread",
        name: str = "run",
        **sections: Any,
    ) -> RunSpec:
        spec = RunSpec(
            model=ModelSource(str(model_dir)),
            data=DataSpec("arithmetic", args={"template": "{a}+{b}=", "size": 12}),
            rewards=(RewardSpec(f"{reward_file}:{reward}"),),
            run_dir=str(tmp_path / name),
            seed=3,
            kernels="reference",
            flow=flow if isinstance(flow, FlowSpec) else FlowSpec(flow, kv),  # type: ignore[arg-type]
            rollout=RolloutSpec(prompts_per_step=3, samples_per_prompt=4, max_new_tokens=6),
            optim=OptimSpec(lr=2e-3),
            update=UpdateSpec(steps=3),
            observe=ObserveSpec(tensorboard=False, live="off"),
        )
        return replace(spec, **sections)

    return make


@pytest.fixture
def open_trainer() -> Callable[[RunSpec], Any]:
    """A context manager: a trainer with everything it needs, not yet begun."""

    @contextmanager
    def open_one(spec: RunSpec) -> Any:
        torch.manual_seed(spec.seed)
        with (
            Rewards(spec.rewards) as rewards,
            RunLogger(spec.run_dir, spec.observe, spec.update.steps) as logger,
        ):
            yield Trainer(make_parts(spec), rewards, logger)

    return open_one


@pytest.fixture
def train() -> Callable[..., tuple[RunResult, list[dict[str, float]]]]:
    """Trains and returns the result and the metrics of every step."""

    def run(spec: RunSpec, **options: Any) -> tuple[RunResult, list[dict[str, float]]]:
        result = run_training(spec, **options)
        return result, metrics_of(Path(spec.run_dir))

    return run


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    """Lines of metrics.jsonl without the wall clock."""
    return [dict(reproducible(row)) for row in lines_of(run_dir)]


def lines_of(run_dir: Path) -> list[dict[str, float]]:
    """Lines of metrics.jsonl as they are."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def read_metrics() -> Callable[[Path], list[dict[str, float]]]:
    """See `metrics_of`."""
    return metrics_of


@pytest.fixture
def read_lines() -> Callable[[Path], list[dict[str, float]]]:
    """See `lines_of`."""
    return lines_of


@pytest.fixture
def outcome() -> Callable[[Path], dict[str, Any]]:
    """All that two equal runs must share, from their folders."""

    def read(run_dir: Path) -> dict[str, Any]:
        files = ("samples.jsonl", "receipts.jsonl", "model/model.safetensors")
        return {"metrics": metrics_of(run_dir), **{f: (run_dir / f).read_bytes() for f in files}}

    return read
