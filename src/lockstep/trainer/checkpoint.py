"""Full training state, written beside and renamed: a checkpoint either is complete or isn't there.

A folder `step_000123` holds FP32 masters, optimizer moments, KV scales (the last versions, and the maxima that the next ones will
be made from) and `state.json` (step, data cursor, versions,
counters, the configuration). There is no generator state: every random number is a function of counters in `state.json`.
A resumed run equals an uninterrupted one bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lockstep.errors import CheckpointError
from lockstep.models.decoder import Decoder
from lockstep.nn.kv_scales import KVScales
from lockstep.trainer.optimizer import Optimizer
from lockstep.trainer.scale_history import ScaleHistory

FREE_SECTIONS = ("run_dir", "observe", "checkpoint", "controller", "update.steps")
"""Configuration that may differ between a checkpoint and the run that goes on from it: the controller, because a run that it
stopped goes on with another band; the number of steps only under a constant learning rate, since schedules are stretched."""


@dataclass
class Progress:
    """Counters of a run. step: finished training steps. ordinal: prompts consumed. version, scale_version: published.
    controller: what the mismatch controller remembers. clip_calibration: state of the calibrated clip bounds. ranks: processes
    that computed it."""

    step: int = 0
    ordinal: int = 0
    version: int = 0
    scale_version: int = 0
    tokens: int = 0
    controller: dict[str, Any] = field(default_factory=dict)
    clip_calibration: list[float] = field(default_factory=list)
    ranks: int = 1


def save_checkpoint(
    folder: Path,
    progress: Progress,
    decoder: Decoder,
    optimizer: Optimizer,
    scales: ScaleHistory,
    config: dict[str, Any],
    keep: int,
) -> Path:
    """Writes `folder/step_N` and removes all but the newest `keep`: on the first rank, but all have to call."""
    target = folder / f"step_{progress.step:06d}"
    moments = optimizer.state_tensors()
    if not optimizer.ranks.first:
        return target
    partial = folder / f".partial_{target.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(
        {n: p.detach().contiguous() for n, p in decoder.named_parameters()}, partial / "masters.safetensors"
    )
    save_file({n: t.detach().contiguous() for n, t in moments.items()}, partial / "optimizer.safetensors")
    if scales.version:
        save_file(scales.state_tensors(), partial / "kv_scales.safetensors")
    state = {
        **asdict(progress),
        "optimizer_steps": optimizer.steps,
        "skipped_steps": optimizer.skipped,
        "threads": torch.get_num_threads(),
        "config": config,
    }
    (partial / "state.json").write_text(json.dumps(state, indent=1, sort_keys=True))
    for file in partial.iterdir():
        _sync(file)
    _sync(partial)
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    _sync(folder)
    for old in list_checkpoints(folder)[:-keep] if keep else []:
        shutil.rmtree(old)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in folder.glob("step_*") if (p / "state.json").is_file())


def load_checkpoint(
    path: Path, decoder: Decoder, optimizer: Optimizer, scales: ScaleHistory, config: dict[str, Any]
) -> Progress:
    """Restores masters, optimizer and KV scales in place. Raises CheckpointError when something is missing, or when the
    configuration differs in a way that would make the run another one."""
    state = _read_state(path)
    _check_config(path, state["config"], config)
    progress, _ = load_weights(path, decoder)
    moments = _read_tensors(path / "optimizer.safetensors")
    try:
        optimizer.load_state_tensors(moments, steps=state["optimizer_steps"], skipped=state["skipped_steps"])
    except ValueError as error:
        raise CheckpointError(
            "the optimizer's state is incomplete", where=str(path), why=str(error)
        ) from error
    try:
        if progress.scale_version:
            scales.load_state_tensors(_read_tensors(path / "kv_scales.safetensors"), progress.scale_version)
    except ValueError as error:
        raise CheckpointError("the KV scales are incomplete", where=str(path), why=str(error)) from error
    return progress


def load_weights(path: Path, decoder: Decoder) -> tuple[Progress, KVScales | None]:
    """Restores the masters in place, and the KV scales, under any configuration. Raises CheckpointError for another model."""
    masters = _read_tensors(path / "masters.safetensors")
    own = dict(decoder.named_parameters())
    if masters.keys() != own.keys() or any(masters[n].shape != p.shape for n, p in own.items()):
        raise CheckpointError(
            "the checkpoint is of another model", where=str(path), fix="use --resume never or another run_dir"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(masters[name])
    progress = read_progress(path)
    scales = None
    if progress.scale_version:
        tensors = _read_tensors(path / "kv_scales.safetensors")
        if not {"k", "v"} <= tensors.keys():
            raise CheckpointError("the KV scales are incomplete", where=str(path))
        scales = KVScales(tensors["k"], tensors["v"], progress.scale_version)
    return progress, scales


def read_progress(path: Path) -> Progress:
    """The counters of a checkpoint. Raises CheckpointError when it isn't one."""
    state = _read_state(path)
    return Progress(**{f: state[f] for f in Progress.__dataclass_fields__})


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / "state.json").read_text())
    except FileNotFoundError as error:
        raise CheckpointError("not a checkpoint", where=str(path), why="it has no state.json") from error
    except ValueError as error:
        raise CheckpointError("state.json is damaged", where=str(path), why=str(error)) from error
    needed = {*Progress.__dataclass_fields__, "optimizer_steps", "skipped_steps", "threads", "config"}
    if missing := sorted(needed - state.keys()):
        raise CheckpointError(f"state.json lacks {', '.join(missing)}", where=str(path))
    return state  # type: ignore[no-any-return]


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise CheckpointError("missing or damaged", where=str(path), why=str(error)) from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise CheckpointError("damaged", where=str(path), why=str(error)) from error


def _check_config(path: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    old, new = _flatten(then), _flatten(now)
    free = FREE_SECTIONS if old.get("optim.schedule") == "constant" else FREE_SECTIONS[:-1]
    changed = sorted(
        key
        for key in old.keys() | new.keys()
        if old.get(key) != new.get(key) and not any(key == f or key.startswith(f"{f}.") for f in free)
    )
    if changed:
        key = next((k for k in changed if k != "data_fingerprint"), "data_fingerprint")
        raise CheckpointError(
            f"{key} was {old.get(key)!r} when the checkpoint was made and is {new.get(key)!r} now",
            where=str(path),
            why=f"a resumed run must equal an uninterrupted one; {len(changed)} setting(s) differ",
            fix="set it back, or start anew with another run_dir or --resume never",
        )


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            k: v for key, x in value.items() for k, v in _flatten(x, f"{prefix}.{key}".lstrip(".")).items()
        }
    if isinstance(value, list | tuple):
        return {k: v for i, x in enumerate(value) for k, v in _flatten(x, f"{prefix}.{i}").items()}
    return {prefix: value}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
