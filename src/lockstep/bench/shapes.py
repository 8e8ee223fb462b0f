"""One generator of shapes for tests and benchmarks: what a kernel is tested on is what it is timed on.

Shapes come from `models/spec.py`, as the engine multiplies them: q, k, v in one product, gate and up in one. Shapes that
several models share appear once, under all their names. Ragged ones are appended on request: inner and outer sizes that are
no multiple of 128, 16 or 2, which no released model has and which a kernel must survive.

Legend: K inputs, N outputs, V vocabulary, H query heads, G key/value heads, D head size. Next: `timing.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.errors import ConfigError
from lockstep.models.spec import PRESETS, ModelSpec

MODELS = ("qwen3-8b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-1.7b", "qwen3-0.6b", "smollm2-135m")
"""Presets that benchmarks and tests cover unless told otherwise."""

DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a product in decode: sequences that run at once."""
ROWS = (*DECODE_ROWS, 128, 256, 1024, 4096, 16_384)
"""Rows of a product that benchmarks time."""
CHECKED_ROWS = (
    *range(1, 65),
    65,
    96,
    100,
    127,
    128,
    129,
    130,
    192,
    255,
    256,
    257,
    384,
    512,
    513,
    768,
    1000,
    1024,
    1536,
    2048,
)
"""Rows over which a product must not change: every decode batch, both sides of every tile size."""
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 500, 2047, 2048, 2049, 4095, 4096, 4097, 9000)
"""Sequence lengths around key steps of 64 and chunks of 2048."""


@dataclass(frozen=True)
class LinearShape:
    """A product [M, K] x [N, K]^T. name: the models that have it, and which layer it is."""

    name: str
    inputs: int
    outputs: int

    @property
    def ragged(self) -> bool:
        """Whether a quantization block is cut off at an edge."""
        return bool(self.inputs % 128 or self.outputs % 128)


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one layer. norm: queries and keys are normalised before the rotation."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    norm: bool = False

    @property
    def group(self) -> int:
        """Query heads of one key/value head."""
        return self.heads // self.kv_heads

    @property
    def row_width(self) -> int:
        """Columns of a projected row: q, k and v side by side."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


RAGGED_LINEARS = (
    LinearShape("ragged", 200, 72),
    LinearShape("ragged", 1000, 130),
    LinearShape("ragged", 130, 200),
    LinearShape("ragged", 323, 97),
)
EXTRA_ATTENTIONS = (
    AttentionShape("groups of 1", 4, 4, 64),
    AttentionShape("groups of 4, small heads", 16, 4, 64),
    AttentionShape("groups of 7, heads of 80", 14, 2, 80, norm=True),
    AttentionShape("groups of 3, heads of 96", 12, 4, 96),
    AttentionShape("groups of 8", 32, 4, 128, norm=True),
)
RAGGED_WIDTHS = (130, 200, 1000)


def preset(name: str) -> ModelSpec:
    """A model shape by name. Raises ConfigError with the nearest name."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        raise ConfigError(
            f"no model shape named {name!r}",
            where="--model",
            fix=f"did you mean {near[0]}?" if near else "one of " + ", ".join(PRESETS),
        )
    return PRESETS[name]


def layer_linears(model: str) -> tuple[LinearShape, ...]:
    """The four products of a dense decoder layer, in the order of the forward pass. Raises ConfigError for experts."""
    spec = preset(model)
    if spec.moe is not None:
        raise ConfigError(
            f"{model} has experts", where="--model", why="these are the products of a dense layer",
            fix="choose one of " + ", ".join(MODELS),
        )  # fmt: skip
    sizes = {
        "qkv": (spec.hidden_size, spec.q_size + 2 * spec.kv_size),
        "o": (spec.q_size, spec.hidden_size),
        "gate_up": (spec.hidden_size, 2 * spec.intermediate_size),
        "down": (spec.intermediate_size, spec.hidden_size),
    }
    return tuple(LinearShape(f"{model} {layer}", *size) for layer, size in sizes.items())


def linears(models: Sequence[str] = MODELS, *, ragged: bool = False) -> tuple[LinearShape, ...]:
    """Products of all layers, each size once."""
    found = [shape for model in models for shape in layer_linears(model)]
    merged = _merged((shape.name, (shape.inputs, shape.outputs)) for shape in found)
    shapes = tuple(LinearShape(name, *size) for size, name in merged.items())
    return shapes + RAGGED_LINEARS if ragged else shapes


def heads(models: Sequence[str] = MODELS) -> tuple[LinearShape, ...]:
    """Output heads [V, K], each size once."""
    specs = [(model, preset(model)) for model in models]
    merged = _merged((f"{model} head", (spec.hidden_size, spec.vocab_size)) for model, spec in specs)
    return tuple(LinearShape(name, *size) for size, name in merged.items())


def attentions(models: Sequence[str] = MODELS, *, extra: bool = False) -> tuple[AttentionShape, ...]:
    """Attention layers, each shape once; `extra` adds groups of 1 to 8 heads and heads of 64, 80, 96 and 128."""
    specs = [(model, preset(model)) for model in models]
    merged = _merged((m, (s.num_heads, s.num_kv_heads, s.head_dim, int(s.qk_norm))) for m, s in specs)
    shapes = tuple(AttentionShape(name, h, g, d, bool(norm)) for (h, g, d, norm), name in merged.items())
    return shapes + EXTRA_ATTENTIONS if extra else shapes


def norm_widths(models: Sequence[str] = MODELS, *, ragged: bool = False) -> tuple[int, ...]:
    """Widths of the residual stream."""
    found = dict.fromkeys(preset(model).hidden_size for model in models)
    return (*found, *(RAGGED_WIDTHS if ragged else ()))


def mlp_widths(models: Sequence[str] = MODELS, *, ragged: bool = False) -> tuple[int, ...]:
    """Widths of the gated MLP."""
    found = dict.fromkeys(preset(model).intermediate_size for model in models)
    return (*found, *(RAGGED_WIDTHS if ragged else ()))


def _merged(named: Iterable[tuple[str, tuple[int, ...]]]) -> dict[tuple[int, ...], str]:
    """Size to the names that have it, in order of first appearance."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name, size in named:
        found.setdefault(size, []).append(name)
    return {size: ", ".join(names) for size, names in found.items()}
