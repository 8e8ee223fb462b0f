"""What a run would make, before anything is made: the lines of `lockstep train --dry-run`.

Nothing is allocated or written. Sizes are given when the model's shape is known: its folder is there, or its recipe says.
"""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.errors import CheckpointError
from lockstep.models.spec import ModelSpec
from lockstep.trainer.spec import ModelSource, RunSpec

_TRAIN_BYTES = 16
"""FP32 master weight, gradient and both AdamW moments of one parameter."""


def plan(spec: RunSpec) -> list[str]:
    """One line a topic. Raises CheckpointError for a model folder whose config.json can't be used."""
    model = known_shape(spec.model)
    lines = [_model_line(spec.model, model), _rollout_line(spec), _update_line(spec), _eval_line(spec)]
    if model is not None:
        lines += _memory_lines(spec, model)
    return [*lines, _run_dir_line(spec)]


def known_shape(source: ModelSource) -> ModelSpec | None:
    """The model's shape from its folder or from the arguments of the `tiny` recipe; None when neither tells."""
    file = Path(source.path) / "config.json"
    if file.exists():
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as e:
            raise CheckpointError("not valid JSON", where=str(file), why=str(e)) from e
        return ModelSpec.from_hf(config, where=str(file))
    if source.recipe != "tiny":
        return None
    from lockstep.models.tiny import tiny_spec

    shape = {k: v for k, v in source.args.items() if k != "seed"}
    try:
        return tiny_spec(**shape)  # type: ignore[arg-type]
    except TypeError as e:
        raise CheckpointError(f"model.args: {e}", where="tiny model") from e


def _model_line(source: ModelSource, model: ModelSpec | None) -> str:
    if (Path(source.path) / "config.json").exists():
        state = "found"
    else:
        state = (
            f"will be made by recipe {source.recipe}" if source.recipe else "not found: the run would stop"
        )
    size = f", {model.num_parameters:,} parameters, {model.num_layers} layers" if model else ""
    return f"model: {source.path}, {state}{size}"


def _rollout_line(spec: RunSpec) -> str:
    r = spec.rollout
    total = r.prompts_per_step * r.samples_per_prompt
    return (
        f"rollout: {r.prompts_per_step} prompts x {r.samples_per_prompt} samples = {total} completions a step, "
        f"{r.max_new_tokens} tokens each at most; flow {spec.flow.name}, KV cache {spec.flow.kv}"
    )


def _update_line(spec: RunSpec) -> str:
    u = spec.update
    each = u.mini_batches * u.epochs
    line = (
        f"update: {u.steps} steps of {each} optimizer step{'s' if each > 1 else ''}, {u.steps * each} in all"
    )
    warm = spec.warm_start.steps
    return f"{line}, after {warm} supervised steps" if warm else line


def _eval_line(spec: RunSpec) -> str:
    e = spec.eval
    if not e.every:
        return "evaluation: none"
    times = spec.update.steps // e.every + 1
    sampled = f" and {e.samples} samples each" if e.samples else ""
    return f"evaluation: {times} times, {e.prompts} prompts, greedy{sampled}"


def _memory_lines(spec: RunSpec, model: ModelSpec) -> list[str]:
    state = model.num_parameters * _TRAIN_BYTES / 1e9
    values = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    token = values * (1 if spec.flow.kv == "fp8" else 2)
    r = spec.rollout
    if r.cache_gb:
        size = f"{r.cache_gb:g} GB, {int(r.cache_gb * 1e9 // token):,} tokens"
    elif r.cache_tokens:
        size = f"{r.cache_tokens:,} tokens, {r.cache_tokens * token / 1e9:.3g} GB"
    else:
        size = "what a step needs at most"
    return [
        f"memory: {state:.3g} GB for master weights, gradients and AdamW moments ({_TRAIN_BYTES} bytes a parameter)",
        f"memory: KV cache of {token:,} bytes a token; {size}",
    ]


def _run_dir_line(spec: RunSpec) -> str:
    folder = Path(spec.run_dir)
    state = "exists" if folder.exists() else "new"
    c = spec.checkpoint
    saves = (
        f"a checkpoint every {c.every} steps, the newest {c.keep} kept"
        if c.every
        else "no checkpoints on the way"
    )
    export = "; the final model as a Hugging Face folder" if c.export_hf else ""
    return f"run_dir: {spec.run_dir} ({state}); {saves}{export}"
