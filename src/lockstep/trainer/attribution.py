"""Where the mismatch of rollout and trainer comes from: one source at a time switched from the trainer's side to the engine's.

The same tokens (`probe.py`) are scored again and again; d = log p before a switch - log p after it, so that switches along
a path add up to d = trainer - rollout, the mismatch that training logs. Three views of each source:

    alone        only this source on the engine's side
    step         switched on after the sources before it: the steps telescope, their sum is the whole, exactly
    cumulative   everything up to this source on

Effects alone need not add up to the whole: what they leave is the residue. Independent errors add in mean squares, so both
are given. Sampling truncation and staleness stand beside the path: both sides score the ids that truncation kept, and the
engine is never behind; what they would add is measured alone.

Two references for the size (field failure 49). mean exp|d|, the token multiplicative probability error, below 1.03 is what NeMo
RL calls healthy, up to 1.05 tolerable; 1 is perfect. And the trainer's own rounding: what its log-probabilities change when
activations are FP32. Whatever moves a single bit moves BF16 roundings after it, so no source has a much smaller effect than that.

Next: `suggestion.py`, which acts on the layers; `../observe/attribution.py`, which shows all this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep.correction.mismatch import nearest_rank
from lockstep.errors import ConfigError
from lockstep.models.checkpoint import load_config
from lockstep.models.decoder import Decoder
from lockstep.numerics.flow import Flow
from lockstep.sync.publish import Publisher
from lockstep.trainer.checkpoint import Progress, list_checkpoints, load_weights, read_progress
from lockstep.trainer.probe import FLOW_PARTS, Probe, ProbeSpec, Say, mixed_flow
from lockstep.trainer.recipes import prepare_model
from lockstep.trainer.setup import Parts, make_flows, make_parts
from lockstep.trainer.spec import RunSpec
from lockstep.trainer.suggestion import Suggestion, suggest

FORMAT = 1
"""Of `attribution.json`."""
BANDS = ((1.0, "exact"), (1.03, "healthy"), (1.05, "tolerable"))
"""Upper bounds of mean exp|d|, and what it is called up to there; above the last it is high."""
TITLES = {
    "weights": "weights",
    "activations": "activations",
    "kv": "keys and values",
    "attention": "attention",
    "head": "output head",
    "batch": "batch composition",
    "truncation": "sampling truncation",
    "staleness": "staleness",
    "rounding": "trainer's rounding",
}


@dataclass(frozen=True)
class Effect:
    """d over the probe's tokens, in nats: mean, 99th percentile (nearest rank) and largest |d|, mean of d squared, mean of d,
    and mean exp|d|."""

    mean: float
    p99: float
    max: float
    mean_square: float
    signed_mean: float
    mean_exp: float

    @staticmethod
    def of(d_N: Tensor) -> Effect:
        """Of a difference [N] float64."""
        a_N = d_N.abs()
        return Effect(
            float(a_N.mean()),
            nearest_rank(a_N, 0.99),
            float(a_N.max()),
            float(a_N.square().mean()),
            float(d_N.mean()) + 0.0,
            float(a_N.exp().mean()),
        )


@dataclass(frozen=True)
class Source:
    """One source. `alone` is None where it could not be measured; `step` and `cumulative` are None beside the path."""

    name: str
    title: str
    note: str
    alone: Effect | None
    step: Effect | None = None
    cumulative: Effect | None = None


@dataclass(frozen=True)
class Residue:
    """What the effects alone leave of the whole: mean |whole - sum of alone| by token, as a share of mean |whole| too, and
    both sums in mean squares, which independent errors share. telescoping: largest |whole - sum of steps|."""

    mean: float
    share: float
    parts_mean_square: float
    whole_mean_square: float
    telescoping: float


@dataclass(frozen=True)
class Layer:
    """One decoder layer on the engine's side, all others on the trainer's: its linears, and with its keys and values."""

    layer: int
    kept_bf16: bool
    linears: Effect
    both: Effect


@dataclass(frozen=True)
class Attribution:
    """Everything that was measured. `weights` says where they came from, `band` how large the whole is."""

    flows: dict[str, dict[str, str]]
    weights: str
    probe: dict[str, float]
    whole: Effect
    band: str
    sources: tuple[Source, ...]
    residue: Residue
    layers: tuple[Layer, ...]
    suggestion: Suggestion | None

    def to_dict(self) -> dict[str, Any]:
        """For attribution.json."""
        return {"format": FORMAT, **asdict(self)}


def band(mean_exp: float) -> str:
    """The name of the band that mean exp|d| lies in."""
    return next((name for bound, name in BANDS if mean_exp <= bound), "high")


@dataclass(frozen=True)
class Opened:
    """A run with its weights published. `older` is the checkpoint before, under the trainer's flow."""

    parts: Parts
    progress: Progress
    weights: str
    older: tuple[Progress, Decoder] | None


def run_attribution(
    spec: RunSpec,
    size: ProbeSpec,
    *,
    run_dir: Path | None = None,
    by_layer: bool = True,
    target: float | None = None,
    say: Say = lambda _: None,
) -> Attribution:
    """Attributes the mismatch of a run: of its newest checkpoint in `run_dir` if there is one, else of its model.

    target: mean |d| below which a suggestion should bring it. Raises ConfigError when both sides compute in the same flow and
    there is no second checkpoint either.
    """
    if target is not None and not target >= 0:
        raise ConfigError("must be a mean |delta logp|, at least 0", where="--target")
    opened = open_run(spec, size, run_dir)
    say(f"weights: {opened.weights}")
    probe = Probe(opened.parts, opened.progress, size, say)
    sources, residue = attribute_sources(probe, opened.older, opened.progress, say)
    layers = attribute_layers(probe, say) if by_layer or target is not None else ()
    flows = probe.flows
    whole_N = probe.score(flows.trainer) - probe.rollout_N
    whole = Effect.of(whole_N)
    suggestion = None
    if target is not None:
        ranked = sorted(layers, key=lambda x: -x.linears.mean_square)
        order = [x.layer for x in ranked if not x.kept_bf16]
        suggestion = suggest(probe, probe.parts.spec.flow, order, target, say)
    return Attribution(
        {"trainer": flows.trainer.describe(), "rollout": flows.rollout.describe()},
        opened.weights,
        {
            "step": opened.progress.step,
            "prompts": len({c.prompt_index for c in probe.completions}),
            "completions": len(probe.completions),
            "tokens": len(whole_N),
            "max_new_tokens": size.tokens,
            "temperature": spec.rollout.temperature,
        },
        whole,
        band(whole.mean_exp),
        tuple(sources),
        residue,
        tuple(layers),
        suggestion,
    )


def open_run(spec: RunSpec, size: ProbeSpec, run_dir: Path | None) -> Opened:
    """Loads and publishes the weights, under the flows that the run had last."""
    saved = [] if run_dir is None else list_checkpoints(run_dir / "checkpoints")
    kept = read_progress(saved[-1]).controller.get("kept_layers", []) if saved else []
    layers = tuple(sorted({*spec.flow.keep_bf16_layers, *kept}))
    if spec.kernels == "hopper":
        raise ConfigError(
            "attribution has no form on a GPU",
            where="kernels",
            why="it switches single operands, for which there are reference kernels only",
            fix="add kernels=reference",
        )
    kernels: Literal["reference", "exact"] = "exact" if spec.kernels == "exact" else "reference"
    update = replace(spec.update, checkpointing=False, save_fp8=False)
    spec = replace(spec, flow=replace(spec.flow, keep_bf16_layers=layers), kernels=kernels, update=update)
    flows = make_flows(spec, load_config(prepare_model(spec.model)))
    if flows.unified and len(saved) < 2:
        raise ConfigError(
            "rollout and trainer compute in the same flow: their mismatch is 0 and has no sources",
            where=f"flow.name {spec.flow.name}",
            fix="`lockstep audit` checks that zero; add flow.name=fp8-rollout to see what a BF16 trainer would disagree about",
        )
    try:
        rollout = replace(spec.rollout, max_new_tokens=size.tokens)
        spec = replace(spec, rollout=rollout, update=replace(spec.update, steps=0))
    except ValueError as error:
        raise ConfigError(str(error), where="--tokens") from error
    parts = make_parts(spec)
    progress, scales, weights = Progress(), None, f"model {spec.model.path}"
    if saved:
        progress, scales = load_weights(saved[-1], parts.decoder)
        weights = f"checkpoint {saved[-1].name}"
        weights += f", layers {', '.join(map(str, kept))} in BF16 by its controller" if kept else ""
    version = max(progress.version, 1)
    kv = (scales or partial(parts.calibrate, progress.ordinal, 1)) if flows.rollout.kv_fp8 else None
    Publisher(parts.decoder, parts.engine).publish(version, scales=kv)
    older = None
    if len(saved) > 1:
        decoder = Decoder(parts.model_spec, parts.flows.trainer, parts.decoder.kernels)
        before, _ = load_weights(saved[-2], decoder)
        decoder.refresh(before.version)
        older = (before, decoder)
    return Opened(parts, progress, weights, older)


def attribute_sources(
    probe: Probe, older: tuple[Progress, Decoder] | None, progress: Progress, say: Say
) -> tuple[list[Source], Residue]:
    """Every source alone and along the path, then those beside it."""
    trainer, rollout = probe.flows.trainer, probe.flows.rollout
    base_N = probe.score(trainer)
    alone: dict[str, Callable[[], Tensor]] = {
        part: partial(_flow_part_alone, probe, part) for part in FLOW_PARTS
    }
    alone["head"] = lambda: base_N - probe.score(trainer, engine_head=True)
    alone["batch"] = lambda: base_N - probe.score(trainer, apart=True)
    path: dict[str, Callable[[], Tensor]] = {
        part: partial(probe.score, mixed_flow(probe.flows, FLOW_PARTS[: i + 1]))
        for i, part in enumerate(FLOW_PARTS)
    }
    path["head"] = partial(probe.score, rollout, engine_head=True)
    path["batch"] = lambda: probe.rollout_N
    whole_N = base_N - probe.rollout_N
    parts_N, steps_N = torch.zeros_like(whole_N), torch.zeros_like(whole_N)
    sources, parts_mean_square = [], 0.0
    before_N = base_N
    for name in alone:
        alone_N, after_N = alone[name](), path[name]()
        effect = Effect.of(alone_N)
        sources.append(
            Source(
                name,
                TITLES[name],
                _note(name, probe),
                effect,
                Effect.of(before_N - after_N),
                Effect.of(base_N - after_N),
            )
        )
        parts_N, steps_N = parts_N + alone_N, steps_N + (before_N - after_N)
        parts_mean_square += effect.mean_square
        before_N = after_N
        say(f"{TITLES[name]} alone: mean |dlogp| {effect.mean:.3g}")
    whole = Effect.of(whole_N)
    left_N = (whole_N - parts_N).abs()
    residue = Residue(
        float(left_N.mean()),
        float(left_N.mean()) / whole.mean if whole.mean else 0.0,
        parts_mean_square,
        whole.mean_square,
        float((whole_N - steps_N).abs().max()),
    )
    return [*sources, _truncation(probe), _staleness(probe, older, progress), _rounding(probe)], residue


def _flow_part_alone(probe: Probe, part: str) -> Tensor:
    """d [N] of switching one part of the flow; attention over FP8 keys and values on both sides, since it needs them."""
    before = {"kv"} if part == "attention" and probe.flows.rollout.attention_fp8 else set()
    flows = probe.flows
    return probe.score(mixed_flow(flows, before)) - probe.score(mixed_flow(flows, before | {part}))


def _note(name: str, probe: Probe) -> str:
    """What was switched, in a few words."""
    trainer, rollout = probe.flows.trainer, probe.flows.rollout
    same = {
        "weights": trainer.fprop.rhs == rollout.fprop.rhs,
        "activations": trainer.fprop.lhs == rollout.fprop.lhs,
        "kv": trainer.kv_fp8 == rollout.kv_fp8,
        "attention": trainer.attention_fp8 == rollout.attention_fp8,
    }
    if same.get(name, False):
        return "the same on both sides"
    return {
        "weights": f"{rollout.fprop.rhs} codes, other arithmetic the trainer's",
        "activations": f"{rollout.fprop.lhs} inputs of the linears",
        "kv": "e4m3 cache, a scale for each layer and head",
        "attention": "e4m3 queries and probabilities; alone: over FP8 keys and values on both sides",
        "head": "the engine's working copy",
        "batch": "alone: each completion by itself; step: the engine's own schedule and cache",
    }[name]


def _truncation(probe: Probe) -> Source:
    """What scoring under the full softmax would miss: log of the kept mass."""
    full_N = probe.score(probe.flows.trainer, full_softmax=True)
    d_N = full_N - probe.score(probe.flows.trainer)
    note = "none: sampled from the full softmax"
    if any(m.mask is not None for m in probe.packed):
        note = f"kept mass {float(d_N.exp().mean()):.4f} on average; both sides score what was kept, so it adds 0 to the whole"
    return Source("truncation", TITLES["truncation"], note, Effect.of(d_N))


def _staleness(probe: Probe, older: tuple[Progress, Decoder] | None, progress: Progress) -> Source:
    """What an engine at the checkpoint before would add."""
    if older is None:
        return Source(
            "staleness", TITLES["staleness"], "not measured: needs a run with two checkpoints", None
        )
    before, decoder = older
    trainer = probe.flows.trainer
    d_N = probe.score(trainer) - probe.score(trainer, decoder=decoder)
    note = f"an engine at step {before.step} under a trainer at step {progress.step}; this engine is never behind"
    return Source("staleness", TITLES["staleness"], note, Effect.of(d_N))


def _rounding(probe: Probe) -> Source:
    """What the trainer's BF16 activations change, a size to compare with."""
    trainer = probe.flows.trainer
    d_N = probe.score(replace(trainer, activation=torch.float32)) - probe.score(trainer)
    note = "from FP32 activations and plain weights to BF16; a size to compare with, no part of the mismatch"
    return Source("rounding", TITLES["rounding"], note, Effect.of(d_N))


def attribute_layers(probe: Probe, say: Say) -> list[Layer]:
    """Each layer's linears, and linears with keys, values and attention, alone on the engine's side. Empty where nothing that
    belongs to a layer differs, or where the trainer has FP8 linears of its own."""
    trainer, rollout = probe.flows.trainer, probe.flows.rollout
    linears = mixed_flow(probe.flows, {"weights", "activations"}) is not trainer
    kv = rollout.kv_fp8 and not trainer.kv_fp8
    if (linears and trainer.is_fp8) or not (linears or kv):
        return []
    base_N = probe.score(trainer)
    layers = []
    for layer in range(probe.parts.model_spec.num_layers):
        kept = linears and layer in rollout.keep_bf16
        flow = layer_flow(probe, layer, linears=linears and not kept, kv=kv)
        without = Effect.of(base_N - probe.score(flow, kv_layers=frozenset() if kv else None))
        both = Effect.of(base_N - probe.score(flow, kv_layers=frozenset({layer}))) if kv else without
        layers.append(Layer(layer, kept, without, both))
        say(f"layer {layer} alone: mean |dlogp| {both.mean:.3g}")
    return layers


def layer_flow(probe: Probe, layer: int, *, linears: bool, kv: bool) -> Flow:
    """The trainer's flow with the engine's linears in one layer, and with its FP8 keys and values (in layers that the context
    says)."""
    flow, rollout = probe.flows.trainer, probe.flows.rollout
    if linears:
        others = frozenset(range(probe.parts.model_spec.num_layers)) - {layer}
        flow = replace(flow, fprop=rollout.fprop, keep_bf16=others)
    return replace(flow, kv_fp8=True, attention_fp8=rollout.attention_fp8) if kv else flow
