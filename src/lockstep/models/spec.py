"""What a decoder is: the few numbers that fix its mathematics and the tensors that its checkpoint must hold.

`ModelSpec` is the only description of a model that the rest of the code reads. It says less than a Hugging Face
`config.json` on purpose: what it can't say, the decoder can't do, so reading one (`hf_config.py`, reached through
`ModelSpec.from_hf`) refuses by name every field that would change the result. Tensor names and shapes are those of
Hugging Face, so a checkpoint needs no mapping. Next: `hf_config.py`, then `checkpoint.py`, then `decoder.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.errors import CheckpointError
from lockstep.models.hf_config import read_config, write_config

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]
RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: base frequencies `theta ** (-2 i / head_dim)` and how they are stretched.

    `default`: as they are. `linear`: divided by `factor` (position interpolation, arXiv 2306.15595). `llama3`: wavelengths
    above `original_max_position / low_freq_factor` divided by `factor`, those below `original_max_position /
    high_freq_factor` kept, a linear blend between (Llama 3.1). None of them scales the attention scores.
    """

    __pydantic_config__ = {"extra": "forbid"}

    theta: float = 10_000.0
    """Base of the frequencies."""
    kind: RopeKind = "default"
    """How the frequencies are stretched for long contexts."""
    factor: float = 1.0
    """Stretch; at least 1. Read by `linear` and `llama3`."""
    low_freq_factor: float = 1.0
    """Read by `llama3` only."""
    high_freq_factor: float = 4.0
    """Read by `llama3` only; above `low_freq_factor`."""
    original_max_position: int = 8192
    """Context length of pre-training, in tokens. Read by `llama3` only."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.theta) and self.theta > 0):
            raise ValueError(f"rope theta must be a positive number, got {self.theta}")
        if self.kind not in ("default", "linear", "llama3"):
            raise ValueError(f"rope kind {self.kind!r} is not supported: default, linear, llama3 are")
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"rope factor must be at least 1, got {self.factor}")
        if self.kind == "default" and self.factor != 1:
            raise ValueError(
                f"rope factor {self.factor} has no effect with kind 'default': use linear or llama3"
            )
        if self.kind == "llama3":
            if not 0 < self.low_freq_factor < self.high_freq_factor:
                raise ValueError(
                    f"llama3 rope needs 0 < low_freq_factor < high_freq_factor, got {self.low_freq_factor} and "
                    f"{self.high_freq_factor}"
                )
            if self.original_max_position < 1:
                raise ValueError(f"original_max_position must be positive, got {self.original_max_position}")


@dataclass(frozen=True)
class MoESpec:
    """Mixture of experts in place of the MLP: a row goes to the `experts_per_token` experts of highest softmax score."""

    __pydantic_config__ = {"extra": "forbid"}

    num_experts: int
    """Experts of a sparse layer."""
    experts_per_token: int
    """How many of them compute a row."""
    intermediate_size: int
    """Width of one expert's gated MLP."""
    norm_topk_prob: bool = False
    """The chosen scores are divided by their sum."""
    sparse_step: int = 1
    """Every `sparse_step`th layer is sparse, the others have the dense MLP: layers `sparse_step - 1`, `2 sparse_step - 1`, ..."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have the dense MLP whatever `sparse_step` says, ascending (`mlp_only_layers`)."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "experts_per_token", "intermediate_size", "sparse_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"moe.{name} must be positive, got {getattr(self, name)}")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"moe.experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}"
            )
        if list(self.dense_layers) != sorted(set(self.dense_layers)):
            raise ValueError(f"moe.dense_layers must ascend without repetition, got {self.dense_layers}")


@dataclass(frozen=True)
class ModelSpec:
    """Shape and mathematics of one decoder (pre-norm RMSNorm, grouped-query attention, SwiGLU, dense or of experts)."""

    __pydantic_config__ = {"extra": "forbid"}

    family: Family
    """Which Hugging Face classes it round-trips to. SmolLM2 is `llama`, Qwen2.5 is `qwen2`."""
    vocab_size: int
    """Rows of the embedding and of the head, padding rows included."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the gated MLP."""
    num_layers: int
    """Decoder layers."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; divides `num_heads`."""
    head_dim: int
    """Width of a head, even. `num_heads * head_dim` need not be `hidden_size` (Qwen3)."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in every RMSNorm, QK norms included."""
    rope: RopeSpec = field(default_factory=RopeSpec)
    """Rotary embedding."""
    max_position: int = 32_768
    """Longest sequence in tokens that the checkpoint vouches for."""
    tie_embeddings: bool = False
    """The head is the embedding: no `lm_head.weight`."""
    attention_bias: bool = False
    """Query, key and value projections have a bias (always in `qwen2`)."""
    attention_output_bias: bool = False
    """The output projection has one too (`attention_bias` in `llama` and `qwen3`, never in `qwen2`)."""
    qk_norm: bool = False
    """RMSNorm over `head_dim` on every query and key head before rope (`qwen3` and `qwen3_moe` always, the others never)."""
    moe: MoESpec | None = None
    """Mixture of experts (`qwen3_moe` always, the others never)."""
    bos_id: int | None = None
    """Token that starts a text, if any."""
    eos_ids: tuple[int, ...] = ()
    """Tokens that end a text according to `config.json`; `tokenizer.stop_ids` knows the whole set."""
    pad_id: int | None = None
    """Token for padding, if any. Never counted in a loss."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_position"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for the rotary embedding, got {self.head_dim}")
        if not (math.isfinite(self.rms_norm_eps) and self.rms_norm_eps > 0):
            raise ValueError(f"rms_norm_eps must be positive, got {self.rms_norm_eps}")
        self._check_family()
        for name, ids in (("bos_id", (self.bos_id,)), ("eos_ids", self.eos_ids), ("pad_id", (self.pad_id,))):
            for token in ids:
                if token is not None and not 0 <= token < self.vocab_size:
                    raise ValueError(f"{name} {token} is outside the vocabulary of {self.vocab_size}")

    def _check_family(self) -> None:
        if self.family not in ("llama", "qwen2", "qwen3", "qwen3_moe"):
            raise ValueError(f"family {self.family!r} is not supported: llama, qwen2, qwen3, qwen3_moe are")
        if self.qk_norm != (self.family in ("qwen3", "qwen3_moe")):
            raise ValueError(f"qk_norm={self.qk_norm} does not exist in family {self.family}")
        if (self.moe is not None) != (self.family == "qwen3_moe"):
            raise ValueError(f"moe={self.moe} does not exist in family {self.family}")
        dense = self.moe.dense_layers if self.moe is not None else ()
        if any(not 0 <= layer < self.num_layers for layer in dense):
            raise ValueError(f"moe.dense_layers {dense} are not all among the {self.num_layers} layers")
        if self.family == "qwen2" and (not self.attention_bias or self.attention_output_bias):
            raise ValueError("family qwen2 always has a bias on q, k, v and never on o")
        if self.family != "qwen2" and self.attention_bias != self.attention_output_bias:
            raise ValueError(f"attention_bias and attention_output_bias must agree in family {self.family}")
        if self.family == "llama" and self.hidden_size % self.num_heads:
            raise ValueError(
                f"family llama needs num_heads {self.num_heads} to divide hidden_size {self.hidden_size}"
            )

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def query_group(self) -> int:
        """Query heads for each KV head."""
        return self.num_heads // self.num_kv_heads

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer has experts in place of the dense MLP."""
        moe = self.moe
        return moe is not None and layer not in moe.dense_layers and (layer + 1) % moe.sparse_step == 0

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Every layer that has experts, ascending."""
        return tuple(layer for layer in range(self.num_layers) if self.is_sparse(layer))

    @property
    def num_parameters(self) -> int:
        """Trainable values; a tied head counts once."""
        return sum(math.prod(shape) for shape in expected_tensors(self).values())

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, where: str = "config.json") -> ModelSpec:
        """Read a Hugging Face `config.json`, in the layout of transformers 4 or 5.

        Raises `CheckpointError`, naming the field, for everything that would change the result and isn't supported.
        """
        fields = read_config(config, where)
        try:
            moe = fields["moe"] and MoESpec(**fields["moe"])
            return cls(**{**fields, "rope": RopeSpec(**fields["rope"]), "moe": moe})
        except ValueError as error:
            raise CheckpointError(str(error), where=where) from error

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` from which transformers 5 (and 4) builds the same model."""
        return write_config(self)


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its shape, in model order, under Hugging Face names ([out, in] for linears)."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        for name, rows in (("q_proj", spec.q_size), ("k_proj", spec.kv_size), ("v_proj", spec.kv_size)):
            shapes[f"{layer}self_attn.{name}.weight"] = (rows, hidden)
            if spec.attention_bias:
                shapes[f"{layer}self_attn.{name}.bias"] = (rows,)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, spec.q_size)
        if spec.attention_output_bias:
            shapes[layer + "self_attn.o_proj.bias"] = (hidden,)
        if spec.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (spec.head_dim,)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        shapes |= _feed_forward_tensors(spec, i, layer + "mlp.")
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def _feed_forward_tensors(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[int, ...]]:
    """Of one layer: the gated MLP, or the router and one gated MLP for each expert."""
    hidden, inner, moe = spec.hidden_size, spec.intermediate_size, spec.moe
    shapes: dict[str, tuple[int, ...]] = {}
    prefixes = [prefix]
    if moe is not None and spec.is_sparse(layer):
        shapes[prefix + "gate.weight"] = (moe.num_experts, hidden)
        inner = moe.intermediate_size
        prefixes = [f"{prefix}experts.{i}." for i in range(moe.num_experts)]
    for name in prefixes:
        shapes[name + "gate_proj.weight"] = (inner, hidden)
        shapes[name + "up_proj.weight"] = (inner, hidden)
        shapes[name + "down_proj.weight"] = (hidden, inner)
    return shapes


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> ModelSpec:
    return ModelSpec(
        family="qwen3", vocab_size=151_936, hidden_size=hidden, intermediate_size=inner, num_layers=layers,
        num_heads=heads, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6, rope=RopeSpec(theta=1e6),
        max_position=40_960, tie_embeddings=tied, qk_norm=True, bos_id=151_643, eos_ids=(151_645,),
    )  # fmt: skip


def _llama3(hidden: int, inner: int, layers: int, head_dim: int, *, factor: float, tied: bool) -> ModelSpec:
    rope = RopeSpec(theta=5e5, kind="llama3", factor=factor)
    return ModelSpec(
        family="llama", vocab_size=128_256, hidden_size=hidden, intermediate_size=inner, num_layers=layers,
        num_heads=32, num_kv_heads=8, head_dim=head_dim, rms_norm_eps=1e-5, rope=rope, max_position=131_072,
        tie_embeddings=tied, bos_id=128_000, eos_ids=(128_001, 128_008, 128_009),
    )  # fmt: skip


PRESETS: dict[str, ModelSpec] = {
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tied=False),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-30b-a3b": ModelSpec(
        family="qwen3_moe", vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_layers=48,
        num_heads=32, num_kv_heads=4, head_dim=128, rms_norm_eps=1e-6, rope=RopeSpec(theta=1e6),
        max_position=40_960, qk_norm=True, moe=MoESpec(128, 8, 768, norm_topk_prob=True), bos_id=151_643,
        eos_ids=(151_645,),
    ),
    "llama-3.1-8b": _llama3(4096, 14_336, 32, 128, factor=8.0, tied=False),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 64, factor=32.0, tied=True),
    "qwen2.5-7b": ModelSpec(
        family="qwen2", vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_layers=28,
        num_heads=28, num_kv_heads=4, head_dim=128, rms_norm_eps=1e-6, rope=RopeSpec(theta=1e6),
        max_position=32_768, attention_bias=True, bos_id=151_643, eos_ids=(151_645,),
    ),
    "smollm2-135m": ModelSpec(
        family="llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30,
        num_heads=9, num_kv_heads=3, head_dim=64, rms_norm_eps=1e-5, rope=RopeSpec(theta=1e5),
        max_position=8192, tie_embeddings=True, bos_id=1, eos_ids=(2,), pad_id=2,
    ),
}  # fmt: skip
"""Shapes of published instruct models, for benchmarks and memory plans without a checkpoint."""
