"""Training through a backend that fuses, on a CPU: the trainer's decoder has one made of the reference's operations, the engine
keeps the plain one, and they agree bit for bit."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.models import trunk_graph
from lockstep.models.build import sharing_decoder
from lockstep.numerics.flow import FlowSpec
from lockstep.trainer.loop import Trainer
from lockstep.trainer.spec import CheckpointSpec, RunSpec, UpdateSpec

MakeSpec = Callable[..., RunSpec]
FUSED = Path(__file__).parents[1] / "models" / "conftest.py"


@pytest.fixture(scope="module")
def fused_kernels() -> Any:
    """The backend of the tests of `models/fused_layer.py`."""
    found = importlib.util.spec_from_file_location("fused_reference", FUSED)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.FusedReference


@pytest.fixture
def run(open_trainer: Callable[[RunSpec], Any], fused_kernels: Any) -> Callable[..., Trainer]:
    """A finished run whose trainer fuses."""

    def finish(spec: RunSpec, *, checkpointing: bool = False, graphs: bool = False) -> Trainer:
        with open_trainer(spec) as plain:
            parts = plain.parts
            parts.decoder = sharing_decoder(parts.decoder, parts.flows.trainer, fused_kernels())
            parts.decoder.checkpointing = checkpointing
            parts.decoder.capture(graphs)
            trainer = Trainer(parts, plain.rewards, plain.logger)
            trainer.run("never")
        return trainer

    return finish


@pytest.mark.parametrize("flow", [FlowSpec("bf16"), FlowSpec("fp8"), FlowSpec("fp8", "fp8")], ids=str)
def test_a_run_is_exact_and_learns(
    flow: FlowSpec, make_spec: MakeSpec, run: Callable[..., Trainer], read_metrics: Any
) -> None:
    spec = make_spec(flow, update=UpdateSpec(3, max_tokens_per_microbatch=40))
    trainer = run(spec)
    assert trainer.parts.kernels.name == "fused-reference" and trainer.parts.kernels.calls["score"] > 0
    steps = [row for row in read_metrics(Path(spec.run_dir)) if "mismatch/tokens" in row]
    assert len(steps) == 3
    assert all(row["mismatch/max_abs_dlogp"] == 0.0 and row["mismatch/exact_tokens"] == 1.0 for row in steps)
    assert all(row["data/microbatches"] > 1 and row["sync/changed_codes_pct"] > 0 for row in steps)
    if flow.kv == "fp8":
        assert all("kv/saturation_pct" in row for row in steps)


def test_checkpointing_changes_no_bit(make_spec: MakeSpec, run: Callable[..., Trainer]) -> None:
    digests = []
    for checkpointing in (False, True):
        trainer = run(make_spec(FlowSpec("fp8", "fp8"), name=str(checkpointing)), checkpointing=checkpointing)
        assert trainer.receipt is not None
        digests.append(trainer.receipt.digest)
    assert digests[0] == digests[1]


def test_it_says_how_many_passes_were_not_captured(
    make_spec: MakeSpec, run: Callable[..., Trainer], read_lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trunk_graph, "MOST_ROWS", 0)
    for graphs in (False, True):
        spec = make_spec(name=str(graphs), update=UpdateSpec(2, max_tokens_per_microbatch=40))
        run(spec, graphs=graphs)
        steps = [row for row in read_lines(Path(spec.run_dir)) if "data/microbatches" in row]
        expected = [row["data/microbatches"] if graphs else None for row in steps]
        assert len(steps) == 2 and [row.get("time/uncaptured_microbatches") for row in steps] == expected


def test_a_checkpoint_says_which_kernels_made_it(make_spec: MakeSpec, run: Callable[..., Trainer]) -> None:
    trainer = run(replace(make_spec(), checkpoint=CheckpointSpec(every=1, export_hf=False)))
    assert trainer.config()["kernels"] == "fused-reference"
