"""A published shape with random weights is a checkpoint like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.errors import CheckpointError
from lockstep.models.checkpoint import load_config, load_tensors
from lockstep.models.random_weights import TOKENIZER_IDS, make_random, random_spec
from lockstep.models.spec import PRESETS
from lockstep.models.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "m"
    make_random(folder, shape="smollm2-135m", layers=1, seed=4)
    return folder


def test_it_has_the_sizes_of_the_preset_and_weights_of_one_deviation(folder: Path) -> None:
    spec = load_config(folder)
    assert spec == replace(PRESETS["smollm2-135m"], num_layers=1, **TOKENIZER_IDS)  # type: ignore[arg-type]
    tensors = dict(load_tensors(folder, spec))
    assert sum(t.numel() for t in tensors.values()) == spec.num_parameters
    assert 0.019 < float(tensors["model.embed_tokens.weight"].float().std()) < 0.021
    assert bool((tensors["model.norm.weight"] == 1).all())
    q, k = (tensors[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qk")
    assert not torch.equal(q[: len(k)], k)
    tokenizer = load_tokenizer(folder, spec)
    assert tokenizer.decode([40_000, *tokenizer.encode("1+2=", add_special_tokens=False)]) == "1+2="


def test_the_same_arguments_give_the_same_bytes_and_another_seed_others(folder: Path, tmp_path: Path) -> None:
    bytes_of = lambda path: (path / "model.safetensors").read_bytes()  # noqa: E731
    for seed in (4, 5):
        make_random(tmp_path / str(seed), shape="smollm2-135m", layers=1, seed=seed)
    assert bytes_of(tmp_path / "4") == bytes_of(folder) != bytes_of(tmp_path / "5")


def test_what_it_does_not_know() -> None:
    with pytest.raises(CheckpointError, match=r"no model shape named 'qwen3-8'.*did you mean qwen3-8b"):
        random_spec(shape="qwen3-8")
    with pytest.raises(CheckpointError, match="num_layers must be positive"):
        random_spec(shape="qwen3-8b", layers=0)
