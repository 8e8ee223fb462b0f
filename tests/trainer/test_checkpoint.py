"""Checkpoints: complete or not there, and refused by name when damaged, foreign or of another configuration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.errors import CheckpointError
from lockstep.models.tiny import make_tiny
from lockstep.trainer.checkpoint import list_checkpoints
from lockstep.trainer.spec import CheckpointSpec, ModelSource, OptimSpec, RunSpec, UpdateSpec

MakeSpec = Callable[..., RunSpec]
Train = Callable[..., Any]


def saving(make_spec: MakeSpec, **more: Any) -> RunSpec:
    """A run of two steps in FP8 with an FP8 cache that saves after each."""
    options: dict[str, Any] = {"update": UpdateSpec(2), "checkpoint": CheckpointSpec(every=1, keep=2), **more}
    return make_spec("fp8", "fp8", **options)


@pytest.fixture
def saved(make_spec: MakeSpec, train: Train) -> tuple[RunSpec, Path]:
    """A finished run and its newest checkpoint."""
    spec = saving(make_spec)
    train(spec)
    return spec, Path(spec.run_dir) / "checkpoints" / "step_000002"


def test_what_is_in_it(saved: tuple[RunSpec, Path], open_trainer: Callable[[RunSpec], Any]) -> None:
    spec, path = saved
    assert [p.name for p in list_checkpoints(path.parent)] == ["step_000001", "step_000002"], (
        "the newest two are kept"
    )
    assert [p.name for p in sorted(path.parent.iterdir())] == ["step_000001", "step_000002"], (
        "nothing is left beside"
    )
    state = json.loads((path / "state.json").read_text())
    assert (state["step"], state["ordinal"], state["version"]) == (2, 6, 3)
    scale_version = state["scale_version"]
    assert scale_version > 1, "completions have larger keys than the prompts that calibrated"
    assert (state["optimizer_steps"], state["skipped_steps"]) == (2, 0)
    with open_trainer(spec) as trainer:
        assert trainer.resume("auto")
        engine = trainer.parts.engine
        assert engine.version == 3 and engine.scale_version == scale_version == trainer.history.version
        tensors = load_file(path / "kv_scales.safetensors")
        assert torch.equal(tensors["k"], engine.scales.k) and torch.equal(tensors["v"], engine.scales.v)
        assert torch.equal(tensors["k.1"], trainer.history.of(1).k), "earlier versions are known, too"
        masters = load_file(path / "masters.safetensors")
        assert all(torch.equal(p, masters[n]) for n, p in trainer.parts.decoder.named_parameters())
        assert all(t.dtype == torch.float32 for t in masters.values())
        moments = load_file(path / "optimizer.safetensors")
        held = trainer.optimizer.state_tensors()
        assert held.keys() == moments.keys() and all(torch.equal(held[k], moments[k]) for k in held)


@pytest.mark.parametrize(
    "file", ["masters.safetensors", "optimizer.safetensors", "kv_scales.safetensors", "state.json"]
)
@pytest.mark.parametrize("damage", ["truncated", "garbled"])
def test_a_damaged_file_is_named(saved: tuple[RunSpec, Path], train: Train, file: str, damage: str) -> None:
    spec, path = saved
    content = (path / file).read_bytes()
    (path / file).write_bytes(
        content[: len(content) // 2] if damage == "truncated" else b"\xff" * len(content)
    )
    with pytest.raises(CheckpointError) as error:
        train(replace(spec, update=UpdateSpec(3)))
    assert path.name in error.value.line()


@pytest.mark.parametrize("file", ["masters.safetensors", "optimizer.safetensors", "kv_scales.safetensors"])
def test_a_missing_file_is_named(saved: tuple[RunSpec, Path], train: Train, file: str) -> None:
    spec, path = saved
    (path / file).unlink()
    with pytest.raises(CheckpointError, match=file):
        train(spec)


def test_without_state_it_does_not_count(saved: tuple[RunSpec, Path], train: Train) -> None:
    """A folder that was not finished is no checkpoint; `auto` takes the one before it."""
    spec, path = saved
    (path / "state.json").unlink()
    assert [p.name for p in list_checkpoints(path.parent)] == ["step_000001"]
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        train(spec, resume=str(path))


def test_a_foreign_checkpoint_is_refused(
    saved: tuple[RunSpec, Path], make_spec: MakeSpec, train: Train, tmp_path: Path
) -> None:
    """Same configuration, other shapes: the folder of the model was replaced."""
    spec, path = saved
    make_tiny(tmp_path / "other", hidden=48, layers=2, heads=2, kv_heads=1, intermediate=48)
    foreign = replace(spec, model=ModelSource(str(tmp_path / "other")))
    state = json.loads((path / "state.json").read_text())
    state["config"]["model"]["path"] = foreign.model.path
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="of another model"):
        train(foreign)


CHANGED: dict[str, Callable[[RunSpec], RunSpec]] = {
    "optim.lr": lambda s: replace(s, optim=replace(s.optim, lr=1e-4)),
    "seed": lambda s: replace(s, seed=9),
    "rollout.samples_per_prompt": lambda s: replace(s, rollout=replace(s.rollout, samples_per_prompt=2)),
    "flow.scale": lambda s: replace(s, flow=replace(s.flow, scale="pow2")),
    "data.args.size": lambda s: replace(s, data=replace(s.data, args={**s.data.args, "size": 13})),
    "update.mini_batches": lambda s: replace(s, update=replace(s.update, mini_batches=2)),
}


@pytest.mark.parametrize("key", CHANGED)
def test_a_changed_setting_is_named(saved: tuple[RunSpec, Path], train: Train, key: str) -> None:
    spec, _ = saved
    with pytest.raises(CheckpointError) as error:
        train(CHANGED[key](spec))
    assert f"{key} was " in error.value.line()


def test_what_may_change(saved: tuple[RunSpec, Path], train: Train, tmp_path: Path) -> None:
    """The folder's name, what is watched, when to save, and how far to go."""
    spec, path = saved
    moved = tmp_path / "moved"
    shutil.copytree(path.parent.parent, moved)
    observe = replace(spec.observe, samples_per_step=2)
    wider = replace(
        spec,
        run_dir=str(moved),
        update=UpdateSpec(3),
        checkpoint=CheckpointSpec(every=2, keep=1),
        observe=observe,
    )
    result, metrics = train(wider)
    assert result.step == 3 and [m["step"] for m in metrics] == [1, 2, 3]


def test_fewer_steps_than_it_has_are_refused(saved: tuple[RunSpec, Path], train: Train) -> None:
    spec, _ = saved
    with pytest.raises(CheckpointError, match="2 steps, the run only 1"):
        train(replace(spec, update=UpdateSpec(1)))


def test_a_finished_run_stays_as_it_is(
    saved: tuple[RunSpec, Path], train: Train, outcome: Callable[[Path], dict[str, Any]]
) -> None:
    spec, _ = saved
    before = outcome(Path(spec.run_dir))
    train(spec)
    assert outcome(Path(spec.run_dir)) == before


def test_missing_moments_are_refused(saved: tuple[RunSpec, Path], train: Train) -> None:
    spec, path = saved
    tensors = load_file(path / "optimizer.safetensors")
    kept = {k: t for k, t in tensors.items() if "mlp" not in k}
    save_file(kept, path / "optimizer.safetensors")
    with pytest.raises(CheckpointError):
        train(replace(spec, update=UpdateSpec(3)))


def test_changed_data_are_refused(make_spec: MakeSpec, train: Train, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    spec = saving(make_spec)
    spec = replace(spec, data=replace(spec.data, source="jsonl", path=str(file), args={}))
    train(spec)
    file.write_text("".join(json.dumps(r) + "\n" for r in rows[3:]))
    with pytest.raises(CheckpointError):
        train(replace(spec, update=UpdateSpec(3)))


def test_optim_spec_bounds() -> None:
    for bad in (
        {"lr": -1.0},
        {"betas": (1.0, 0.9)},
        {"min_lr_ratio": 2.0},
        {"eps": 0.0},
        {"warmup_steps": -1},
    ):
        with pytest.raises(ValueError):
            OptimSpec(**bad)  # type: ignore[arg-type]
