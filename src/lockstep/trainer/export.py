"""Writes a run's newest weights, or a model folder's, as a Hugging Face checkpoint: block FP8 as the engine holds it, or plain.

FP8 codes come from the FP32 masters of the run's newest full checkpoint, never from an exported BF16 copy, which would have
other codes. A model folder is its own source.

Next: `../sync/fp8_checkpoint.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from lockstep.errors import CheckpointError
from lockstep.kernels.table import select
from lockstep.models.checkpoint import load_config, save
from lockstep.models.decoder import Decoder
from lockstep.models.spec import ModelSpec
from lockstep.models.tokenizer import load_tokenizer
from lockstep.numerics.flow import Flow, FlowSpec, build_flows
from lockstep.numerics.formats import ScaleKind
from lockstep.sync.fp8_checkpoint import save_fp8
from lockstep.trainer.checkpoint import list_checkpoints, load_weights
from lockstep.trainer.setup import load_masters
from lockstep.trainer.spec import RunSpec

Format = Literal["fp8", "bfloat16", "float32"]


def export_run(
    spec: RunSpec, run_dir: Path, out: Path, form: Format, scale: ScaleKind | None, *, overwrite: bool
) -> str:
    """Exports the newest checkpoint of a run; one line that says what was written.

    scale: another scale format than the run's. Raises CheckpointError when there is no checkpoint.
    """
    found = list_checkpoints(run_dir / "checkpoints")
    if not found:
        raise CheckpointError(
            "the run has no checkpoint",
            where=str(run_dir),
            why="FP8 codes are made from FP32 masters, which only a full checkpoint has",
            fix="train with checkpoint.every, or name a model folder (such as the run's model/)",
        )
    model = load_config(spec.model.path)
    decoder = Decoder(model, _flow(spec.flow, model, scale), select("reference"))
    load_weights(found[-1], decoder)
    return _write(decoder, Path(spec.model.path), out, form, f"{run_dir.name}/{found[-1].name}", overwrite)


def export_model(
    model_dir: Path, out: Path, form: Format, scale: ScaleKind | None, *, overwrite: bool
) -> str:
    """Exports a model folder; one line that says what was written."""
    model = load_config(model_dir)
    decoder = Decoder(model, _flow(FlowSpec("fp8"), model, scale), select("reference"))
    load_masters(decoder, model_dir)
    return _write(decoder, model_dir, out, form, str(model_dir), overwrite)


def _flow(spec: FlowSpec, model: ModelSpec, scale: ScaleKind | None) -> Flow:
    """The engine's flow of a run; one that is all BF16 is exported as the `fp8` flow would have it."""
    spec = replace(spec, name="fp8" if spec.name == "bf16" else spec.name, scale=scale or spec.scale)
    return build_flows(spec, model.num_layers).rollout


def _write(decoder: Decoder, source: Path, out: Path, form: Format, name: str, overwrite: bool) -> str:
    tokenizer = load_tokenizer(source, decoder.spec)
    if form == "fp8":
        decoder.refresh(1)
        save_fp8(out, decoder, tokenizer=tokenizer, overwrite=overwrite)
        kept = sorted(decoder.flow.keep_bf16)
        detail = f"block FP8, {decoder.flow.scale} scales" + (f", layers {kept} in BF16" if kept else "")
        return f"wrote {out} from {name}: {detail}, weights {decoder.digest()[:16]} (SHA-256)"
    save(
        out,
        decoder.spec,
        decoder.named_parameters(),
        dtype=getattr(torch, form),
        tokenizer=tokenizer,
        overwrite=overwrite,
    )
    return f"wrote {out} from {name}: {form}"
