"""Tiny models are real checkpoints: deterministic, and read by transformers like any other."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.errors import CheckpointError
from lockstep.models.checkpoint import load_config, load_tensors
from lockstep.models.spec import Family
from lockstep.models.tiny import CHARS, SPECIAL, char_tokenizer, make_tiny
from lockstep.models.tokenizer import load_tokenizer

CHAT = [{"role": "system", "content": "add"}, {"role": "user", "content": "12+3=?"}]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def unstacked(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One tensor an expert, as on disk; transformers holds all experts of a layer in one, gate above up."""
    out = {}
    for name, value in state.items():
        prefix, found, part = name.partition("experts.")
        if not found:
            out[name] = value
            continue
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for i, expert in enumerate(value):
            for own, chunk in zip(parts, expert.chunk(len(parts))):
                out[f"{prefix}experts.{i}.{own}.weight"] = chunk
    return out


@pytest.mark.parametrize("family", get_args(Family))
def test_transformers_loads_it(tmp_path: Path, family: Family) -> None:
    spec = make_tiny(tmp_path / "m", family=family, hidden=48, heads=3, kv_heads=1, intermediate=72)
    assert load_config(tmp_path / "m") == spec
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(report.values())
    state = unstacked(model.state_dict())
    assert all(torch.equal(state[name], value) for name, value in load_tensors(tmp_path / "m", spec))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == "<bos><system>add<eos><user>12+3=?<eos><assistant>"
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    assert ids.shape == (1, 15)
    assert model(ids).logits.shape == (1, 15, spec.vocab_size)
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] <= 18


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        make_tiny(tmp_path / name, seed=seed, layers=1)
    a, b, c = (files(tmp_path / name) for name in "abc")
    assert a == b
    assert {name for name in a if a[name] != c[name]} == {"model.safetensors"}


def test_one_token_a_character_and_back(tmp_path: Path) -> None:
    spec = make_tiny(tmp_path / "m", layers=1)
    tokenizer = load_tokenizer(tmp_path / "m", spec)
    assert len(tokenizer) == spec.vocab_size == len(SPECIAL) + len(CHARS)
    assert len(tokenizer.encode(CHARS)) == len(CHARS)
    assert tokenizer.decode(tokenizer.encode(CHARS)) == CHARS
    spaced = "1 +  2 =\n\n3 ."
    assert tokenizer.decode(tokenizer.encode(spaced)) == spaced
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("1é€2")) == ["1", "<unk>", "2"]
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id] == [0, 1, 2]


def test_a_small_alphabet_makes_a_small_vocabulary(tmp_path: Path) -> None:
    spec = make_tiny(tmp_path / "m", layers=1, chars="0123456789+= ", tied=False, dtype=torch.bfloat16)
    assert spec.vocab_size == len(SPECIAL) + 13
    assert all(value.dtype == torch.bfloat16 for _, value in load_tensors(tmp_path / "m", spec))


def test_initial_values() -> None:
    from lockstep.models.tiny import random_tensors, tiny_spec

    for name, value in random_tensors(tiny_spec(family="qwen2", hidden=128, intermediate=256), 0):
        if name.endswith("norm.weight"):
            assert torch.equal(value, torch.ones_like(value))
        else:
            assert value.std() == pytest.approx(0.02, rel=0.3) and abs(value.mean()) < 0.01, name


def test_experts(tmp_path: Path) -> None:
    spec = make_tiny(
        tmp_path / "m", family="qwen3_moe", experts=5, experts_per_token=3, expert_intermediate=40
    )
    assert spec.moe is not None and (spec.moe.num_experts, spec.moe.experts_per_token) == (5, 3)
    names = [name for name, _ in load_tensors(tmp_path / "m", spec) if ".mlp." in name]
    assert len(names) == 2 * (1 + 5 * 3)


def test_impossible_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="experts_per_token 9"):
        make_tiny(tmp_path / "m", family="qwen3_moe", experts_per_token=9)
    with pytest.raises(CheckpointError, match="experts do not exist in family llama"):
        make_tiny(tmp_path / "m", experts=4)
    with pytest.raises(CheckpointError, match="num_kv_heads 3"):
        make_tiny(tmp_path / "m", kv_heads=3)
    with pytest.raises(CheckpointError, match="not ASCII"):
        char_tokenizer("0é")
