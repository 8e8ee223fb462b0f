"""A `ModelSpec` and a Hugging Face config say the same thing, or the difference is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lockstep.errors import CheckpointError
from lockstep.models.spec import PRESETS, ModelSpec, MoESpec, RopeSpec, expected_tensors

# As published, in the layout of transformers 4.
LLAMA_31 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
QWEN_25 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
QWEN_3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
QWEN_3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.04,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
PUBLISHED = {
    "llama-3.1-8b": LLAMA_31,
    "qwen2.5-7b": QWEN_25,
    "qwen3-0.6b": QWEN_3,
    "qwen3-30b-a3b": QWEN_3_MOE,
    "smollm2-135m": SMOLLM2,
}


def new_layout(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 5 writes it."""
    rope = {**(config.get("rope_scaling") or {"rope_type": "default"}), "rope_theta": config["rope_theta"]}
    rest = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
    return {**rest, "rope_parameters": rope}


@pytest.mark.parametrize("name", PUBLISHED)
def test_both_layouts_read_as_the_preset(name: str) -> None:
    assert ModelSpec.from_hf(PUBLISHED[name]) == PRESETS[name]
    assert ModelSpec.from_hf(new_layout(PUBLISHED[name])) == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip_through_our_config_and_through_transformers(name: str, tmp_path: Path) -> None:
    spec = PRESETS[name]
    assert ModelSpec.from_hf(spec.to_hf()) == spec
    (tmp_path / "config.json").write_text(json.dumps(spec.to_hf()))
    config = AutoConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path / "again")
    assert ModelSpec.from_hf(json.loads((tmp_path / "again" / "config.json").read_text())) == spec


def on_disk(key: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """A parameter under the names that a checkpoint has: transformers holds all experts of a layer in one."""
    prefix, found, part = key.partition("experts.")
    if not found:
        return {key: shape}
    halves = 2 if part == "gate_up_proj" else 1
    names = ("gate_proj", "up_proj") if halves == 2 else ("down_proj",)
    each = (shape[1] // halves, shape[2])
    return {f"{prefix}experts.{i}.{name}.weight": each for i in range(shape[0]) for name in names}


@pytest.mark.parametrize("name", [*PRESETS, "llama with biases", "qwen3 with biases"])
def test_expected_tensors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    base = {"llama with biases": "smollm2-135m", "qwen3 with biases": "qwen3-8b"}.get(name, name)
    spec = dataclasses.replace(PRESETS[base], num_layers=2)
    if name != base:
        spec = dataclasses.replace(spec, attention_bias=True, attention_output_bias=True)
    (tmp_path / "config.json").write_text(json.dumps(spec.to_hf()))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    theirs: dict[str, tuple[int, ...]] = {}
    for key, value in model.named_parameters():
        theirs |= on_disk(key, tuple(value.shape))
    assert expected_tensors(spec) == theirs
    assert spec.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b"])
def test_written_rope_gives_the_frequencies_of_the_published_config(name: str, tmp_path: Path) -> None:
    frequencies = []
    for config in (PUBLISHED[name], PRESETS[name].to_hf()):
        (tmp_path / "config.json").write_text(json.dumps(config))
        loaded = AutoConfig.from_pretrained(tmp_path)
        kind = loaded.rope_parameters["rope_type"]
        if kind == "default":
            frequencies.append(torch.tensor(loaded.rope_parameters["rope_theta"]))
        else:
            frequencies.append(ROPE_INIT_FUNCTIONS[kind](loaded, "cpu")[0])
    assert torch.equal(*frequencies)


def test_linear_rope_in_the_oldest_spelling() -> None:
    spec = ModelSpec.from_hf({**LLAMA_31, "rope_scaling": {"type": "linear", "factor": 4}})
    assert spec.rope == RopeSpec(theta=5e5, kind="linear", factor=4.0)
    assert ModelSpec.from_hf(spec.to_hf()) == spec


def test_absent_fields_mean_what_transformers_assumes() -> None:
    bare = {"model_type": "llama", "vocab_size": 32, "hidden_size": 64, "intermediate_size": 96}
    bare |= {"num_hidden_layers": 1, "num_attention_heads": 4}
    spec = ModelSpec.from_hf(bare)
    config = AutoConfig.for_model(**bare)
    assert (spec.num_kv_heads, spec.head_dim) == (config.num_key_value_heads, config.head_dim)
    assert spec.rms_norm_eps == config.rms_norm_eps
    assert spec.rope.theta == config.rope_parameters["rope_theta"]
    assert spec.tie_embeddings == config.tie_word_embeddings
    assert spec.max_position == config.max_position_embeddings
    qwen = {**bare, "model_type": "qwen3", "num_key_value_heads": 2}
    assert ModelSpec.from_hf(qwen).head_dim == AutoConfig.for_model(**qwen).head_dim == 128
    counts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    sparse = {**qwen, "model_type": "qwen3_moe", **counts}
    spec, config = ModelSpec.from_hf(sparse), AutoConfig.for_model(**sparse)
    assert spec.moe is not None and spec.head_dim == 64 // 4
    assert (
        spec.moe.norm_topk_prob == config.norm_topk_prob
        and spec.moe.sparse_step == config.decoder_sparse_step
    )
    assert list(spec.moe.dense_layers) == config.mlp_only_layers
    written = {**{k: v for k, v in sparse.items() if k != "num_experts"}, "num_local_experts": 4}
    assert ModelSpec.from_hf(written) == spec


REFUSED = [
    (LLAMA_31, {"model_type": "mixtral"}, "mixtral"),
    (LLAMA_31, {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    (LLAMA_31, {"hidden_act": "gelu"}, "hidden_act"),
    (LLAMA_31, {"mlp_bias": True}, "mlp_bias"),
    (LLAMA_31, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (LLAMA_31, {"rope_interleaved": True}, "rope_interleaved"),
    (LLAMA_31, {"sliding_window": 4096}, "sliding_window"),
    (LLAMA_31, {"num_local_experts": 8}, "num_local_experts"),
    (LLAMA_31, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    (LLAMA_31, {"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map"),
    (LLAMA_31, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    (LLAMA_31, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    (LLAMA_31, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    (LLAMA_31, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    (LLAMA_31, {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}}, "beta_fast"),
    (LLAMA_31, {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "both"),
    (LLAMA_31, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "differ"),
    (LLAMA_31, {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta"),
    (LLAMA_31, {"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    (LLAMA_31, {"hidden_size": None}, "hidden_size"),
    (LLAMA_31, {"num_hidden_layers": "32"}, "num_hidden_layers"),
    (LLAMA_31, {"num_key_value_heads": 7}, "num_kv_heads"),
    (LLAMA_31, {"head_dim": 127}, "head_dim"),
    (LLAMA_31, {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    (LLAMA_31, {"eos_token_id": 128256}, "outside the vocabulary"),
    (QWEN_25, {"use_sliding_window": True, "max_window_layers": 14}, "sliding_window"),
    (QWEN_25, {"layer_types": ["sliding_attention"] * 28}, "layer_types"),
    (QWEN_25, {"num_key_value_heads": None}, "num_key_value_heads"),
    (QWEN_3, {"model_type": "qwen3_next"}, "qwen3_next"),
    (QWEN_3, {"model_type": "qwen3_moe"}, "architectures"),
    (QWEN_3, {"num_experts": 8}, "num_experts"),
    (QWEN_3_MOE, {"num_experts": None}, "num_experts is missing"),
    (QWEN_3_MOE, {"num_local_experts": 64}, "num_local_experts"),
    (QWEN_3_MOE, {"n_routed_experts": 128}, "n_routed_experts"),
    (QWEN_3_MOE, {"num_experts_per_tok": None}, "num_experts_per_tok"),
    (QWEN_3_MOE, {"num_experts_per_tok": 129}, "experts_per_token 129"),
    (QWEN_3_MOE, {"moe_intermediate_size": 0}, "moe_intermediate_size"),
    (QWEN_3_MOE, {"mlp_only_layers": [48]}, "dense_layers"),
    (QWEN_3_MOE, {"mlp_only_layers": "0"}, "mlp_only_layers"),
    (QWEN_3_MOE, {"norm_topk_prob": 1}, "norm_topk_prob"),
]


@pytest.mark.parametrize(
    ("base", "change", "named"), REFUSED, ids=[str(change)[:50] for _, change, _ in REFUSED]
)
def test_unsupported_mathematics_is_refused_by_name(
    base: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named) as refusal:
        ModelSpec.from_hf({**base, **change}, where="somewhere/config.json")
    assert refusal.value.where == "somewhere/config.json"


def test_harmless_fields_are_read_over() -> None:
    harmless = {"attention_dropout": 0.1, "pretraining_tp": 2, "use_cache": False, "unsloth_fixed": True}
    harmless |= {"quantization_config": None, "partial_rotary_factor": 1.0, "pad_token_id": -1}
    assert ModelSpec.from_hf({**LLAMA_31, **harmless}) == PRESETS["llama-3.1-8b"]
    windows = {"use_sliding_window": True, "max_window_layers": 28}
    assert ModelSpec.from_hf({**QWEN_25, **windows}) == PRESETS["qwen2.5-7b"]
    layers = {"layer_types": ["full_attention"] * 28}
    assert ModelSpec.from_hf({**QWEN_25, **layers}) == PRESETS["qwen2.5-7b"]


@pytest.mark.parametrize(
    "change",
    [
        {"num_heads": 0},
        {"qk_norm": True},
        {"attention_bias": True},
        {"rms_norm_eps": 0.0},
        {"bos_id": 49_152},
        {"family": "gpt2"},
        {"num_heads": 7, "num_kv_heads": 7},
    ],
)
def test_a_spec_that_no_config_could_say_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(PRESETS["smollm2-135m"], **change)


def test_rope_settings_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match="no effect"):
        RopeSpec(factor=2.0)
    with pytest.raises(ValueError, match="high_freq_factor"):
        RopeSpec(kind="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0)


def test_presets_have_the_published_sizes() -> None:
    sizes = {name: round(spec.num_parameters / 1e6) for name, spec in PRESETS.items()}
    assert sizes["qwen3-8b"] == 8191 and sizes["llama-3.1-8b"] == 8030 and sizes["llama-3.2-1b"] == 1236
    assert sizes["qwen2.5-7b"] == 7616 and sizes["qwen3-1.7b"] == 1721 and sizes["qwen3-0.6b"] == 596
    assert sizes["smollm2-135m"] == 135 and sizes["qwen3-30b-a3b"] == 30_532


def test_which_layers_are_sparse() -> None:
    spec = PRESETS["qwen3-30b-a3b"]
    assert all(spec.is_sparse(i) for i in range(48)) and not PRESETS["qwen3-8b"].is_sparse(0)
    assert spec.moe is not None
    moe = dataclasses.replace(spec.moe, sparse_step=2, dense_layers=(3,))
    mixed = dataclasses.replace(spec, num_layers=6, moe=moe)
    assert [i for i in range(6) if mixed.is_sparse(i)] == [1, 5]
    assert ModelSpec.from_hf(mixed.to_hf()) == mixed
    for wrong in ({"family": "qwen3"}, {"moe": None}, {"num_layers": 3}):
        with pytest.raises(ValueError, match="moe"):
            dataclasses.replace(mixed, **wrong)
    for wrong in ({"experts_per_token": 129}, {"sparse_step": 0}, {"dense_layers": (3, 1)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            dataclasses.replace(moe, **wrong)
    with pytest.raises(ValueError, match="num_experts"):
        MoESpec(0, 0, 8)
