"""Training on a Hopper GPU: exact in every step, the same on every run, and resumed as if it had never stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.algorithms.spec import AlgorithmSpec
from lockstep.data.spec import DataSpec
from lockstep.models.random_weights import make_random
from lockstep.numerics.flow import FlowSpec
from lockstep.rollout.spec import RolloutSpec
from lockstep.trainer.spec import (
    CheckpointSpec,
    EvalSpec,
    ModelSource,
    OptimSpec,
    RunSpec,
    UpdateSpec,
    WarmStartSpec,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MakeSpec = Callable[..., RunSpec]
FLOWS = [FlowSpec("fp8", "fp8"), FlowSpec("fp8"), FlowSpec("bf16")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of SmolLM2's shape."""
    folder = tmp_path_factory.mktemp("random") / "m"
    make_random(folder, shape="smollm2-135m", layers=2)
    return folder


@pytest.fixture
def device_spec(make_spec: MakeSpec, folder: Path) -> MakeSpec:
    """`make_spec` on a GPU: larger steps, several micro-batches."""

    def make(flow: FlowSpec, **sections: Any) -> RunSpec:
        options = {
            "kernels": "hopper",
            "model": ModelSource(str(folder)),
            "rollout": RolloutSpec(4, 6, 24),
            "update": UpdateSpec(4, max_tokens_per_microbatch=256),
            "optim": OptimSpec(lr=1e-4),
        }
        return make_spec(flow, **{**options, **sections})

    return make


def exact(metrics: list[dict[str, float]]) -> bool:
    steps = [row for row in metrics if "mismatch/tokens" in row]
    return bool(steps) and all(
        row["mismatch/max_abs_dlogp"] == 0.0
        and row["mismatch/exact_tokens"] == 1.0
        and row["data/microbatches"] > 1
        and row["sync/changed_codes_pct"] > 0
        for row in steps
    )


@pytest.mark.parametrize("flow", FLOWS, ids=["fp8+kv8", "fp8", "bf16"])
def test_every_step_is_exact_and_a_second_run_is_the_first(
    flow: FlowSpec, device_spec: MakeSpec, train: Any, outcome: Any, read_lines: Any
) -> None:
    first, second = (device_spec(flow, name=name) for name in ("a", "b"))
    _, metrics = train(first)
    assert exact(metrics)
    rows = read_lines(Path(first.run_dir))
    launched, all_of_them = (
        sum(row.get(name, 0) for row in rows)
        for name in ("time/uncaptured_microbatches", "data/microbatches")
    )
    assert 0 < launched < all_of_them
    train(second)
    assert outcome(Path(first.run_dir)) == outcome(Path(second.run_dir))


def test_checkpointing_changes_no_bit(device_spec: MakeSpec, train: Any) -> None:
    update = UpdateSpec(3, max_tokens_per_microbatch=256)
    plain, _ = train(device_spec(FLOWS[0], name="plain", update=update))
    again, metrics = train(device_spec(FLOWS[0], name="again", update=replace(update, checkpointing=True)))
    assert plain.digest == again.digest and exact(metrics)
    saved, metrics = train(device_spec(FLOWS[0], name="saved", update=replace(update, save_fp8=True)))
    assert exact(metrics) and saved.digest != plain.digest


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "KL, mini-batches, warm start": {
        "algorithm": AlgorithmSpec("grpo", kl_coef=0.1),
        "update": UpdateSpec(4, mini_batches=2, max_tokens_per_microbatch=256),
        "warm_start": WarmStartSpec(steps=2, batch=4),
    },
    "evaluation": {
        "eval": EvalSpec(
            DataSpec("arithmetic", args={"template": "{a}+{b}=", "holdout": "eval"}),
            every=2,
            prompts=2,
            samples=2,
        )
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_an_uninterrupted_one(
    kind: str, device_spec: MakeSpec, train: Any, outcome: Any
) -> None:
    whole = device_spec(FLOWS[0], name="whole", checkpoint=CheckpointSpec(every=2), **KINDS[kind])
    _, metrics = train(whole)
    assert all(row["mismatch/max_abs_dlogp"] == 0.0 for row in metrics if "mismatch/tokens" in row)
    cut = replace(whole, run_dir=str(Path(whole.run_dir).with_name("cut")))
    train(replace(cut, update=replace(cut.update, steps=2)))
    train(cut)
    assert outcome(Path(cut.run_dir)) == outcome(Path(whole.run_dir))


def test_auto_takes_the_gpu_and_a_split_flow_is_corrected(device_spec: MakeSpec, train: Any) -> None:
    from lockstep.correction.spec import CorrectionSpec

    spec = device_spec(
        FlowSpec("fp8-rollout", "fp8"), kernels="auto", correction=CorrectionSpec("geometric_token_tis")
    )
    _, metrics = train(spec)
    steps = [row for row in metrics if "mismatch/tokens" in row]
    assert len(steps) == 4 and all(0 < row["mismatch/max_abs_dlogp"] < 1 for row in steps)
