"""Whether training runs were exact: what their metrics say of every step, and goal D1.

A step counts when its log-probabilities, rollout against trainer, were compared over whole samples and not one differed. So
that this isn't said of nothing, a run must also have cut its steps into several micro-batches, recomputed its layers in the
backward pass, and moved its weights.

Next: `../correction/mismatch.py` for the comparison.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.bench.goals import Goal, passed
from lockstep.errors import DataError
from lockstep.models.checkpoint import load_config
from lockstep.models.spec import PRESETS, ModelSpec
from lockstep.observe.rundir import RunDir
from lockstep.trainer.spec import RunSpec

GOAL_MODELS = ("smollm2-135m", "qwen3-1.7b")
GOAL_STEPS = 50
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
)  # fmt: skip


@dataclass(frozen=True)
class ExactRun:
    """One run. steps, tokens: compared. inexact: steps in which a log-probability differed. max_abs_dlogp: of the steps that
    ended, None without one. moved: steps whose publication changed codes. On average of a step: microbatches, how many of them
    were launched kernel by kernel (uncaptured), and seconds."""

    model: str
    flow: str
    kernels: str
    checkpointing: bool
    steps: int
    tokens: int
    inexact: int
    max_abs_dlogp: float | None
    moved: int
    microbatches: float
    uncaptured: float
    step_s: float

    @property
    def exact(self) -> bool:
        """Whether the run says that nothing differed, over enough to say it."""
        return (
            self.steps >= GOAL_STEPS
            and self.inexact == 0
            and self.moved > self.steps // 2
            and self.microbatches > 1
            and self.checkpointing
            and self.kernels == "hopper"
        )

    def line(self) -> str:
        """For a terminal."""
        differ = f"{self.inexact} steps DIFFER" if self.inexact else "every log-probability equal"
        return (
            f"{self.model}, {self.flow}, {self.kernels}: {self.steps} steps of {self.step_s:.2f} s, {self.tokens:,} tokens, "
            f"{self.microbatches:.1f} micro-batches a step ({self.uncaptured:.1f} not captured), "
            f"weights moved in {self.moved}, max |delta logp| "
            f"{'unknown' if self.max_abs_dlogp is None else format(self.max_abs_dlogp, 'g')}, {differ}"
        )


def read_run(spec: RunSpec, kernels: str, *, broken: bool = False) -> ExactRun:
    """What the metrics of a run say. kernels: what it computed with. broken: a step that differed ended it, which the metrics
    don't have. Raises DataError when there are none."""
    file = RunDir(Path(spec.run_dir)).metrics_file
    if not file.is_file():
        raise DataError("the run left no metrics", where=str(file))
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    steps = [row for row in rows if "mismatch/tokens" in row]
    count = max(len(steps), 1)
    return ExactRun(
        model_name(load_config(spec.model.path)),
        f"{spec.flow.name}+kv8" if spec.flow.kv == "fp8" else spec.flow.name,
        kernels,
        spec.update.checkpointing,
        len(steps),
        int(sum(row["mismatch/tokens"] for row in steps)),
        sum(_differs(row) for row in steps) + broken,
        max((row["mismatch/max_abs_dlogp"] for row in steps), default=None),
        sum(row["sync/changed_codes_pct"] > 0 for row in steps),
        sum(row["data/microbatches"] for row in steps) / count,
        sum(row.get("time/uncaptured_microbatches", row["data/microbatches"]) for row in steps) / count,
        sum(row["time/step_s"] for row in steps) / count,
    )


def _differs(row: dict[str, Any]) -> bool:
    return not (row["mismatch/max_abs_dlogp"] == 0.0 and row["mismatch/exact_tokens"] == 1.0)


def model_name(model: ModelSpec) -> str:
    """The preset that this model has the sizes of, else its family."""
    same = [n for n, p in PRESETS.items() if all(getattr(p, s) == getattr(model, s) for s in SIZES)]
    return same[0] if same else model.family


def goal(runs: Sequence[ExactRun]) -> Goal:
    """Goal D1: every run exact, among them those of `GOAL_MODELS`."""
    return passed("D1", set(GOAL_MODELS) <= {r.model for r in runs} and all(r.exact for r in runs))


def even_ids(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
) -> list[float]:
    """A reward for weights without meaning: the share of even token ids in a completion."""
    return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]
