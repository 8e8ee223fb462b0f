"""A synthetic run, and readers of what it left behind."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.observe.logger import RunLogger
from lockstep.observe.sinks import SampleRecord
from lockstep.observe.spec import ObserveSpec

CONFIG = """
model:
  path: models/tiny
flow:
  name: fp8
  kv: fp8
update:
  steps: 6
"""


def metrics_at(step: int, mismatch: float = 0.0) -> dict[str, float]:
    """Metrics of one step: a function of the step only, apart from the wall clock."""
    values = {
        "reward": 0.1 * step,
        "reward_std": 0.3,
        "rewards/exact/mean": 0.1 * step,
        "completions/mean_length": 20.0 - step,
        "completions/clipped_ratio": 0.25,
        "policy/entropy": 1.0 / (step + 1),
        "mismatch/max_abs_dlogp": mismatch,
        "mismatch/mean_abs_dlogp": mismatch / 10,
        "sync/changed_codes_pct": 0.8,
        "optim/lr": 1e-6,
        "optim/grad_norm": 0.5 + step,
        "time/rollout_s": 1.0,
        "time/train_s": 2.0,
        "time/step_s": 3.5,
        "memory/rss_gb": 1.5,
    }
    if step % 2 == 0:
        values |= {"eval/greedy_pass@1": 0.5, "eval/mean@4": 0.4}
    return values


def samples_at(step: int) -> list[SampleRecord]:
    """Four samples of one step, one of them hostile markup."""
    hostile = "</script><script src=https://example.org/x.js></script><img src='http://example.org/a.png'>"
    return [
        SampleRecord(
            prompt=f"What is {step} + {i}?",
            completion=hostile if i == 3 else f"It is {step + i}.\n" * (1 + 10 * (i == 2)),
            answer=str(step + i),
            reward=float(i % 2),
            parts={"exact": float(i % 2), "format": None},
            finish_reason="stop",
            tokens=5 + i,
            mean_logp=-0.5,
            max_abs_dlogp=0.0,
            weight_version=step - 1,
        )
        for i in range(4)
    ]


def drive(log: RunLogger, first: int, last: int) -> None:
    """The steps first..last of the synthetic run."""
    if first == 1:
        log.receipt(0, {"version": 1, "tensors": 7, "bytes": 0, "digest": "ab" * 32})
    for step in range(first, last + 1):
        log.receipt(step, {"version": step + 1, "tensors": 7, "bytes": 0, "digest": f"{step:x}" * 64})
        log.step(step, metrics_at(step), samples_at(step))


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run folder of `steps` steps and returns it."""

    def make(name: str = "run", steps: int = 6, **options: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(CONFIG)
        spec = ObserveSpec(tensorboard=False, live="plain", **options)
        with RunLogger(folder, spec, steps, stream=io.StringIO()) as log:
            drive(log, 1, steps)
        return folder

    return make


def write_metrics(folder: Path, lines: list[dict[str, Any]]) -> Path:
    """A run folder with just these lines of metrics; floats as json writes them, NaN included."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


@pytest.fixture
def synthetic() -> SimpleNamespace:
    """The functions above, for tests."""
    return SimpleNamespace(
        metrics_at=metrics_at, samples_at=samples_at, drive=drive, write_metrics=write_metrics, config=CONFIG
    )
