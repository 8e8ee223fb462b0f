"""Hugging Face `config.json` to and from the fields of a `ModelSpec`, strictly.

Two rules. A field that is absent means what transformers' own class would assume, so that both build the same model. A
field that changes the mathematics in a way the decoder can't follow is refused by name with a way out; fields that
transformers' class of that model type never reads are ignored. Transformers 5 moved `rope_theta` and `rope_scaling` into
`rope_parameters`: both layouts are read, a contradiction between them is refused, and both are written.
Next: `checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lockstep.errors import CheckpointError

if TYPE_CHECKING:
    from lockstep.models.spec import ModelSpec

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

_DENSE = "use a Llama 3, Qwen2, Qwen2.5, Qwen3, Qwen3-MoE or SmolLM2 checkpoint"
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 0.0, [], {})
_UNIT: tuple[Any, ...] = (None, 1, 1.0)
# Field -> values under which it changes nothing, why anything else is refused, what to do.
_REFUSED: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "quantization_config": (
        _NEUTRAL,
        "the checkpoint is already quantized",
        "give the BF16 checkpoint; the flow quantizes",
    ),
    "compression_config": (
        _NEUTRAL,
        "the checkpoint is already quantized",
        "give the BF16 checkpoint; the flow quantizes",
    ),
    "auto_map": (_NEUTRAL, "the checkpoint brings its own code", _DENSE),
    "hidden_act": ((None, "silu", "swish"), "only SiLU gates are implemented", _DENSE),
    "mlp_bias": (_NEUTRAL, "MLP projections have no bias here", _DENSE),
    "num_experts": (_NEUTRAL, "only qwen3_moe has experts here", _DENSE),
    "num_local_experts": (_NEUTRAL, "only qwen3_moe has experts here", _DENSE),
    "n_routed_experts": (_NEUTRAL, "this kind of mixture of experts is not supported", _DENSE),
    "partial_rotary_factor": (_UNIT, "rope covers the whole head here", _DENSE),
    "rotary_pct": (_UNIT, "rope covers the whole head here", _DENSE),
    "rope_interleaved": (_NEUTRAL, "rope pairs the two halves of a head here", _DENSE),
    "no_rope_layers": (_NEUTRAL, "every layer has rope here", _DENSE),
    "attn_logit_softcapping": (_NEUTRAL, "attention scores are not capped here", _DENSE),
    "final_logit_softcapping": (_NEUTRAL, "logits are not capped here", _DENSE),
    "query_pre_attn_scalar": (_NEUTRAL, "scores are scaled by head_dim ** -0.5 here", _DENSE),
    "attention_multiplier": (_NEUTRAL, "scores are scaled by head_dim ** -0.5 here", _DENSE),
    "embedding_multiplier": (_UNIT, "embeddings are not scaled here", _DENSE),
    "residual_multiplier": (_UNIT, "residuals are not scaled here", _DENSE),
    "logits_scaling": (_UNIT, "logits are not scaled here", _DENSE),
    "is_encoder_decoder": (_NEUTRAL, "only decoders are implemented", _DENSE),
    "add_cross_attention": (_NEUTRAL, "only decoders are implemented", _DENSE),
    "per_layer_config": (_NEUTRAL, "all layers share one shape here", _DENSE),
}
_EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""The number of experts on the hub, and as transformers 5 writes it."""
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_NATIVE = "remove the rope scaling to train at the native context length"


class _Fields:
    """Typed access to one config: every complaint carries the file and the field."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def refuse(self, what: str, why: str = "", fix: str = "") -> CheckpointError:
        return CheckpointError(what, where=self.where, why=why, fix=fix)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive whole number; `default` stands in for an absent or null field."""
        value = self.config.get(key)
        value = default if value is None else value
        if value is None:
            raise self.refuse(f"{key} is missing", "the model's shape depends on it")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(f"{key} must be a positive whole number, got {value!r}")
        return value

    def boolean(self, key: str) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(f"{key} must be true or false, got {value!r}")
        return bool(value)

    def number(self, source: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = source.get(key)
        value = default if value is None else value
        if value is None:
            raise self.refuse(f"{key} is missing", "the rotary embedding depends on it")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(f"{key} must be a number, got {value!r}")
        return float(value)

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.refuse(f"{key} must be a mapping, got {value!r}")
        return {k: v for k, v in (value or {}).items() if v is not None}

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them or nothing (-1 is an old way to say nothing)."""
        value = self.config.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
            raise self.refuse(f"{key} must be a token id or a list of them, got {value!r}")
        return tuple(token for token in ids if token != -1)


def read_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Constructor arguments of the `ModelSpec` that `config` describes; `rope` and `moe` are those of its parts.

    Raises `CheckpointError` for a field that is missing, has the wrong type, or asks for mathematics we don't have.
    """
    fields = _Fields(config, where)
    family = _family(fields)
    for key, (neutral, why, fix) in _REFUSED.items():
        counts_experts = family == "qwen3_moe" and key in _EXPERT_COUNTS
        if config.get(key) not in neutral and not counts_experts:
            raise fields.refuse(f"{key} is {config[key]!r}", why, fix)
    layers, heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    _refuse_sliding_window(fields, family, layers)
    max_position = fields.integer("max_position_embeddings", 2048 if family == "llama" else 32_768)
    bias = family == "qwen2" or fields.boolean("attention_bias")
    bos, pad = fields.token_ids("bos_token_id"), fields.token_ids("pad_token_id")
    return {
        "family": family,
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads if family == "llama" else None),
        "head_dim": _head_dim(fields, family, hidden, heads),
        "rms_norm_eps": fields.number(config, "rms_norm_eps", 1e-6),
        "rope": _read_rope(fields, max_position),
        "max_position": max_position,
        "tie_embeddings": fields.boolean("tie_word_embeddings"),
        "attention_bias": bias,
        "attention_output_bias": bias and family != "qwen2",
        "qk_norm": family in ("qwen3", "qwen3_moe"),
        "moe": _read_moe(fields) if family == "qwen3_moe" else None,
        "bos_id": bos[0] if bos else None,
        "eos_ids": fields.token_ids("eos_token_id"),
        "pad_id": pad[0] if pad else None,
    }


def _family(fields: _Fields) -> str:
    model_type = fields.config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise fields.refuse(
            f"model_type {model_type!r} is not supported", f"{', '.join(ARCHITECTURES)} are", _DENSE
        )
    named = fields.config.get("architectures") or [ARCHITECTURES[model_type]]
    if named != [ARCHITECTURES[model_type]]:
        why = f"a causal language model of type {model_type} is {ARCHITECTURES[model_type]}"
        raise fields.refuse(
            f"architectures is {named!r}", why, "give a checkpoint with a language-model head"
        )
    return str(model_type)


def _head_dim(fields: _Fields, family: str, hidden: int, heads: int) -> int:
    if fields.config.get("head_dim") is not None:
        return fields.integer("head_dim")
    if family == "qwen3":
        return 128  # Qwen3Config's default: not hidden_size / heads
    if hidden % heads:
        raise fields.refuse(
            f"head_dim is missing and num_attention_heads {heads} doesn't divide hidden_size {hidden}"
        )
    return hidden // heads


def _read_moe(fields: _Fields) -> dict[str, Any]:
    """Arguments of the `MoESpec`."""
    counts = [key for key in _EXPERT_COUNTS if fields.config.get(key) is not None]
    if len({fields.integer(key) for key in counts}) > 1:
        raise fields.refuse(
            f"num_experts is {fields.config['num_experts']}, num_local_experts {fields.config['num_local_experts']}",
            "they name the same number",
        )
    dense = fields.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise fields.refuse(f"mlp_only_layers must be a list of layer numbers, got {dense!r}")
    return {
        "num_experts": fields.integer(counts[0] if counts else "num_experts"),
        "experts_per_token": fields.integer("num_experts_per_tok"),
        "intermediate_size": fields.integer("moe_intermediate_size"),
        "norm_topk_prob": fields.boolean("norm_topk_prob"),
        "sparse_step": fields.integer("decoder_sparse_step", 1),
        "dense_layers": tuple(sorted(set(dense))),
    }


def _refuse_sliding_window(fields: _Fields, family: str, layers: int) -> None:
    config = fields.config
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise fields.refuse(
            f"layer_types holds {sorted(kinds)}", "only full attention is implemented", _DENSE
        )
    if config.get("sliding_window") is None or config.get("layer_types"):
        return
    llama = family == "llama"
    if llama or (fields.boolean("use_sliding_window") and config.get("max_window_layers", 28) < layers):
        field = "sliding_window to null" if llama else "use_sliding_window to false"
        fix = f"set {field} if your sequences are shorter than the window"
        raise fields.refuse(
            f"sliding_window {config['sliding_window']} is in use", "only full attention is implemented", fix
        )


def _read_rope(fields: _Fields, max_position: int) -> dict[str, Any]:
    """Arguments of the `RopeSpec`, from either layout."""
    new, old = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    sources = (new, old, fields.config)
    thetas = {fields.number(s, "rope_theta") for s in sources if s.get("rope_theta") is not None}
    if len(thetas) > 1:
        why = "the layouts contradict each other"
        raise fields.refuse(f"rope_theta has {len(thetas)} values: {sorted(thetas)}", why)
    for source in (new, old):
        source.pop("rope_theta", None)
        for key, value in source.items():
            if isinstance(value, Mapping):
                what = f"rope of its own for layers of kind {key!r}"
                raise fields.refuse(what, "all layers share one rope here", _DENSE)
        kind = source.pop("type", None)
        if source.setdefault("rope_type", kind or "default") != (kind or source["rope_type"]):
            raise fields.refuse(f"rope type is both {kind!r} and {source['rope_type']!r}")
    if fields.config.get("rope_parameters") and fields.config.get("rope_scaling") and new != old:
        what = f"rope_parameters {new} and rope_scaling {old} differ"
        raise fields.refuse(what, fix="remove the wrong one")
    params = new if fields.config.get("rope_parameters") else old
    rope = _rope_scaling(fields, params, max_position)
    rope["theta"] = thetas.pop() if thetas else 10_000.0
    return rope


def _rope_scaling(fields: _Fields, params: dict[str, Any], max_position: int) -> dict[str, Any]:
    kind = params.pop("rope_type")
    if kind not in _ROPE_KEYS:
        raise fields.refuse(f"rope type {kind!r} is not supported", "default, linear and llama3 are", _NATIVE)
    if params.pop("partial_rotary_factor", 1.0) != 1:
        raise fields.refuse("partial_rotary_factor is not 1", "rope covers the whole head here", _DENSE)
    rope: dict[str, Any] = {"kind": kind, **{key: fields.number(params, key) for key in _ROPE_KEYS[kind]}}
    outer = fields.config.get("original_max_position_embeddings")
    original = params.pop("original_max_position_embeddings", outer)
    if kind == "llama3":
        if outer not in (None, original):
            raise fields.refuse(f"original_max_position_embeddings is both {outer} and {original}")
        rope["original_max_position"] = int(fields.number({"o": original}, "o", float(max_position)))
    unknown = sorted(set(params) - set(_ROPE_KEYS[kind]))
    if unknown:
        raise fields.refuse(
            f"rope of type {kind!r} has unknown fields {unknown}", "they might change the model", _NATIVE
        )
    return rope


def write_config(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of `spec`, rope in both layouts (they agree, so either reader builds the same model)."""
    scaling: dict[str, Any] = {"rope_type": spec.rope.kind}
    scaling |= {key: getattr(spec.rope, key) for key in _ROPE_KEYS[spec.rope.kind]}
    if spec.rope.kind == "llama3":
        scaling["original_max_position_embeddings"] = spec.rope.original_max_position
    eos = list(spec.eos_ids)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position,
        "rope_parameters": {"rope_theta": spec.rope.theta, **scaling},
        "rope_theta": spec.rope.theta,
        "rope_scaling": None if spec.rope.kind == "default" else scaling,
        "tie_word_embeddings": spec.tie_embeddings,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": spec.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": spec.pad_id,
    }
    if spec.family == "llama":
        config |= {"attention_bias": spec.attention_bias, "mlp_bias": False}
    else:
        config |= {"use_sliding_window": False, "sliding_window": None}
        if spec.qk_norm:
            config["attention_bias"] = spec.attention_bias
    if spec.moe is not None:
        config |= {
            "num_experts": spec.moe.num_experts,
            "num_experts_per_tok": spec.moe.experts_per_token,
            "moe_intermediate_size": spec.moe.intermediate_size,
            "norm_topk_prob": spec.moe.norm_topk_prob,
            "decoder_sparse_step": spec.moe.sparse_step,
            "mlp_only_layers": list(spec.moe.dense_layers),
        }
    return config
