"""What a run would make, before anything is made: the lines of `lockstep train --dry-run`, and all of `lockstep plan`.

Nothing is allocated or written. Sizes are given when the model's shape is known: its folder is there, or its recipe says.
`plan` says what would be done; `budget` what it takes: memory by part and by phase, and the least time of each phase.

Next: `../trainer/footprint.py` for bytes, `../trainer/workload.py` for time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lockstep.correction.spec import resolve as resolve_correction
from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.spec import PRESETS, ModelSpec
from lockstep.numerics.flow import FlowPair
from lockstep.trainer import footprint, workload
from lockstep.trainer.cache_size import cache_size, keeping_of, load_of
from lockstep.trainer.footprint import GB, GRADIENT, MASTER, MOMENTS, Load, Part
from lockstep.trainer.setup import check_ranks, make_flows
from lockstep.trainer.spec import ModelSource, RunSpec
from lockstep.trainer.workload import Card, Phase

_TRAIN_BYTES = MASTER + GRADIENT + MOMENTS
"""FP32 master weight, gradient and both AdamW moments of one parameter."""
ASSUMED_PROMPT = 256
"""Tokens of a prompt, where neither the config nor the command line says."""


def plan(spec: RunSpec) -> list[str]:
    """One line a topic. Raises CheckpointError for a model folder whose config.json can't be used."""
    model = known_shape(spec.model)
    memory = [] if model is None else _memory_lines(spec, model)
    return [*outline(spec, model), *memory, _run_dir_line(spec)]


def outline(spec: RunSpec, model: ModelSpec | None) -> list[str]:
    """Model, rollout, update, evaluation: a line each."""
    return [_model_line(spec.model, model), _rollout_line(spec), _update_line(spec), _eval_line(spec)]


def known_shape(source: ModelSource) -> ModelSpec | None:
    """The model's shape from its folder or from its recipe; None when neither tells."""
    file = Path(source.path) / "config.json"
    if file.exists():
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as e:
            raise CheckpointError("not valid JSON", where=str(file), why=str(e)) from e
        return ModelSpec.from_hf(config, where=str(file))
    if source.recipe == "smollm2":
        return PRESETS["smollm2-135m"]
    from lockstep.trainer.recipes import RECIPES, recipe_shape

    if source.recipe not in RECIPES:
        return None
    try:
        return recipe_shape(source)
    except TypeError as e:
        raise CheckpointError(f"model.args: {e}", where=f"{source.recipe} model") from e


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


@dataclass(frozen=True)
class Budget:
    """What a run takes. prompt_tokens, new_tokens: lengths that it was made for; the longest where they vary. savers: settings
    that would save memory and aren't made yet. note: that the KV cache is smaller than it might be. ranks: GPUs that share the
    run; all figures are of one of them."""

    model: ModelSpec
    card: Card
    parts: tuple[Part, ...]
    phases: tuple[Phase, ...]
    prompt_tokens: int
    new_tokens: int
    load: Load
    savers: tuple[str, ...]
    note: str | None
    ranks: int = 1

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes of each phase."""
        return footprint.peak(self.parts)

    @property
    def peak(self) -> int:
        """The larger one."""
        return max(self.peaks.values())

    @property
    def fits(self) -> bool:
        """Whether the card's memory holds it."""
        return self.peak <= self.card.memory_gb * GB

    def lines(self) -> list[str]:
        """Memory and time."""
        return [*self._memory(), *([] if self.note is None else ["", self.note]), "", *self._time(), ""]

    def verdict(self) -> str:
        """One line."""
        peak, memory = self.peak / GB, self.card.memory_gb
        phase = max(self.peaks, key=lambda name: self.peaks[name])
        if self.fits:
            return f"fits: peak {peak:.1f} GB of {memory:.0f} GB, in the {phase}; {memory - peak:.1f} GB are left"
        return f"doesn't fit: peak {peak:.1f} GB of {memory:.0f} GB, in the {phase}; {peak - memory:.1f} GB too much"

    def remedy(self) -> str:
        """What would help most, where it doesn't fit."""
        sizes = {part.name: part.nbytes for part in self.parts}
        fixed = sum(
            n for name, n in sizes.items() if name.startswith(("master", "AdamW", "gradients", "working"))
        )
        moments = sizes["AdamW moments, FP32"]
        if fixed - moments > self.card.memory_gb * GB:
            return "take a smaller model: its weights and gradients alone are larger"
        sharing = "share the run among more GPUs (--gpus), each with a part of the moments"
        if fixed > self.card.memory_gb * GB:
            return f"{sharing}, or take a smaller model"
        saved = sizes.get("saved activations of a micro-batch", 0)
        of_update = saved > sizes.get("KV cache", 0)
        first = (
            "update.max_tokens_per_microbatch" if of_update else "rollout.cache_tokens or rollout.max_running"
        )
        more = " or ".join(s for s in self.savers if s.startswith("update.") == of_update)
        advice = f"lower {first}" + (f", or set {more}" if more else "")
        return f"{advice}; or {sharing}" if self.peak - moments < self.card.memory_gb * GB else advice

    def _memory(self) -> list[str]:
        width = max(len(part.name) for part in self.parts)
        lines = [f"{'memory, GB':{width}}  rollout   update"]
        for part in self.parts:
            cells = (
                f"{part.nbytes / GB:8.2f}" if there else f"{'-':>8}" for there in (part.rollout, part.update)
            )
            lines.append(f"{part.name:{width}} {' '.join(cells)}")
        peaks = self.peaks
        lines.append(f"{'peak':{width}} {peaks['rollout'] / GB:8.2f} {peaks['update'] / GB:8.2f}")
        return lines

    def _time(self) -> list[str]:
        card, total = self.card, sum(phase.seconds for phase in self.phases)
        sharing = f" on {self.ranks} GPUs, without what travels between them," if self.ranks > 1 else ""
        lines = [
            f"least time of a step{sharing} at {card.copy_tbps:g} TB/s, {card.bf16_tflops:g} TFLOP/s BF16, "
            f"{card.fp8_tflops:g} FP8, prompts of {self.prompt_tokens} and completions of {self.new_tokens} tokens:"
        ]
        for phase in self.phases:
            share = 100 * phase.seconds / total if total else 0.0
            lines.append(f"  {phase.name:22} {phase.seconds:10.3f} s  {share:3.0f} %")
        return [*lines, f"  {'step':22} {total:10.3f} s"]


def budget(
    spec: RunSpec,
    card: Card,
    *,
    model: ModelSpec | None = None,
    prompt_tokens: int | None = None,
    ranks: int = 1,
) -> Budget:
    """Memory and least time of a run on a card. model: another shape than the config's. ranks: cards that share the run.

    Raises ConfigError when the shape isn't known or there are fewer prompts than cards, CheckpointError for a config.json that
    can't be used.
    """
    check_ranks(spec, ranks)
    model = model or known_shape(spec.model)
    if model is None:
        raise ConfigError(
            "the model's shape is not known",
            where=f"model.path {spec.model.path}",
            why="there is no config.json, and the recipe doesn't say",
            fix="name a shape with --model, such as qwen3-8b",
        )
    flows = make_flows(spec, model)
    prompt = prompt_tokens or spec.data.max_prompt_tokens or ASSUMED_PROMPT
    fused = spec.kernels in ("auto", "hopper")
    memory = card.memory_gb * GB if fused else None
    size = cache_size(spec, model, flows, prompt, fused=fused, memory=memory, ranks=ranks)
    load = load_of(spec, prompt, size.tokens, fused=fused, ranks=ranks)
    parts = footprint.parts(model, flows, load, keeping_of(spec, model, load, fused=fused))
    phases = _phases(spec, model, flows, card, prompt, load.trained_tokens, ranks)
    savers = {
        "flow.kv to fp8": spec.flow.kv == "fp8",
        "update.save_fp8": spec.update.save_fp8,
        "update.checkpointing": spec.update.checkpointing,
    }
    left = tuple(saver for saver, there in savers.items() if not there)
    new = spec.rollout.max_new_tokens
    return Budget(model, card, tuple(parts), tuple(phases), prompt, new, load, left, size.note, ranks)


def _phases(
    spec: RunSpec, model: ModelSpec, flows: FlowPair, card: Card, prompt: int, together: int, ranks: int
) -> list[Phase]:
    """Of one training step, on the rank with most to do. A correction that has to know the old policy first gets a pass of its
    own. together: targets of a micro-batch."""
    r, u = spec.rollout, spec.update
    prompts = -(-r.prompts_per_step // ranks)
    samples = prompts * r.samples_per_prompt
    lengths, targets = [prompt + r.max_new_tokens - 1] * samples, samples * r.max_new_tokens
    found = [
        workload.rollout(
            model,
            flows.rollout,
            card,
            prompts=prompts,
            samples=r.samples_per_prompt,
            prompt=prompt,
            new=r.max_new_tokens,
            running=r.max_running,
        )
    ]
    if not u.steps:
        return found
    correction = resolve_correction(spec.correction)
    if correction.rejects or correction.needs_batch:
        old = workload.forward(model, flows.trainer, card, lengths, targets)
        found.append(Phase("old log-probabilities", old.seconds))
    both = workload.forward_backward(model, flows.trainer, card, lengths, targets, together=together)
    repeats = u.epochs * (4 / 3 if u.checkpointing else 1)
    found.append(Phase(both.name, both.seconds * repeats))
    steps = u.mini_batches * u.epochs
    found.append(Phase("optimizer", workload.optimizer(model, card, ranks).seconds * steps))
    each = {flows.trainer, flows.rollout}
    publications = sum(workload.publication(model, flow, card).seconds for flow in each)
    return [*found, Phase("publication", publications * steps)]
