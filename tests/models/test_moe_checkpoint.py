"""Checkpoints of a mixture of experts: what transformers writes is read, one tensor an expert, and nothing else is guessed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from lockstep.errors import CheckpointError
from lockstep.kernels.reference import ReferenceKernels
from lockstep.models.checkpoint import load_config, load_tensors, save
from lockstep.models.decoder import Decoder
from lockstep.models.spec import expected_tensors
from lockstep.numerics.flow import bf16_flow
from lockstep.numerics.measures import sqnr_db


@pytest.fixture(scope="module")
def theirs() -> Any:
    """A random model of transformers' own making, in BF16, with every MoE field other than its default."""
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=90, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, moe_intermediate_size=40, num_experts=5, num_experts_per_tok=3,
        norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[3], initializer_range=0.3,
        eos_token_id=2, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()


def test_what_transformers_saves_is_read(theirs: Any, toy: SimpleNamespace, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path / "m")
    written = json.loads((tmp_path / "m" / "config.json").read_text())
    assert "num_local_experts" in written and "num_experts" not in written
    spec = load_config(tmp_path / "m")
    assert spec.moe is not None and spec.sparse_layers == (1,) and spec.moe.num_experts == 5
    tensors = dict(load_tensors(tmp_path / "m", spec))
    assert list(tensors) == list(expected_tensors(spec))
    assert tensors["model.layers.1.mlp.experts.4.down_proj.weight"].shape == (48, 40)
    decoder = Decoder(spec, bf16_flow(), ReferenceKernels())
    assert list(dict(decoder.named_parameters())) == list(tensors)
    decoder.load_state_dict({n: t.float() for n, t in tensors.items()}, strict=True)
    decoder.refresh(1)
    ids = toy.random_ids(spec, (40,))
    with torch.no_grad():
        expected = theirs(input_ids=ids[None], use_cache=False).logits[0].float()
    assert sqnr_db(expected, toy.logits(decoder, ids, (40,))) > 34


def test_the_layout_of_the_hub_says_the_same(theirs: Any, tmp_path: Path) -> None:
    """`num_experts` in config.json, in shards, and back: the same bytes, whoever wrote them."""
    theirs.save_pretrained(tmp_path / "a")
    spec = load_config(tmp_path / "a")
    save(tmp_path / "b", spec, load_tensors(tmp_path / "a", spec), max_shard_bytes=30_000)
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (written["num_experts"], written["num_experts_per_tok"], written["mlp_only_layers"]) == (5, 3, [3])
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 2 and load_config(tmp_path / "b") == spec
    pairs = zip(load_tensors(tmp_path / "a", spec), load_tensors(tmp_path / "b", spec))
    assert all(n == m and torch.equal(a, b) for (n, a), (m, b) in pairs)
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "b", output_loading_info=True, dtype="auto"
    )
    assert not any(report.values())
    state = again.state_dict()
    assert all(torch.equal(state[name], value) for name, value in theirs.state_dict().items())


def test_experts_in_one_tensor_are_refused_with_a_way_out(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path / "m", save_original_format=False)
    assert any("gate_up_proj" in name for name in load_file(tmp_path / "m" / "model.safetensors"))
    with pytest.raises(CheckpointError, match="experts.0.gate_proj.weight.*gate_up_proj") as refusal:
        load_tensors(tmp_path / "m", load_config(tmp_path / "m"))
    assert "save_original_format=True" in str(refusal.value)


@pytest.mark.parametrize("change", ["missing expert", "extra expert", "router of another size"])
def test_experts_and_router_must_be_those_of_the_config(theirs: Any, tmp_path: Path, change: str) -> None:
    theirs.save_pretrained(tmp_path / "m")
    file, prefix = tmp_path / "m" / "model.safetensors", "model.layers.1.mlp."
    tensors = load_file(file)
    if change == "missing expert":
        named = prefix + "experts.2.up_proj.weight"
        del tensors[named]
    elif change == "extra expert":
        named = prefix + "experts.5.up_proj.weight"
        tensors[named] = tensors[prefix + "experts.4.up_proj.weight"].clone()
    else:
        named = prefix + "gate.weight"
        tensors[named] = tensors[named][:4].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=named):
        load_tensors(tmp_path / "m", load_config(tmp_path / "m"))
