"""What a dry run says about the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config.load import load_run
from lockstep.config.plan import known_shape, plan
from lockstep.errors import CheckpointError
from lockstep.models.tiny import make_tiny, tiny_spec

SMALL = Path(__file__).parent / "files" / "small.yaml"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no run has left a model."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


def lines(*overrides: str) -> str:
    return "\n".join(plan(load_run(SMALL, overrides)))


def test_counts() -> None:
    said = lines("update.mini_batches=2", "update.epochs=3", "checkpoint.every=5")
    assert "4 prompts x 4 samples = 16 completions a step" in said
    assert "3 steps of 6 optimizer steps, 18 in all" in said
    assert "a checkpoint every 5 steps, the newest 2 kept" in said


def test_the_shape_of_a_recipe_is_known_before_it_is_made() -> None:
    model = tiny_spec(hidden=64, layers=2)
    assert known_shape(load_run(SMALL).model) == model
    said = lines()
    assert f"{model.num_parameters:,} parameters" in said
    assert f"KV cache of {2 * 2 * model.num_kv_heads * model.head_dim * 2} bytes a token" in said


def test_an_fp8_cache_takes_half_the_bytes() -> None:
    model = tiny_spec(hidden=64, layers=2)
    bytes_a_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    assert f"KV cache of {bytes_a_token} bytes a token; 1,000 tokens" in lines(
        "flow.kv=fp8", "rollout.cache_tokens=1000"
    )


def test_the_shape_of_a_folder(tmp_path: Path) -> None:
    made = make_tiny(tmp_path / "m", hidden=32, layers=1)
    assert known_shape(load_run(SMALL, [f"model.path={tmp_path / 'm'}"]).model) == made


def test_a_model_that_is_not_there_is_said() -> None:
    assert "nowhere, not found" in lines("model={path: nowhere}")


def test_a_recipe_argument_that_does_not_exist() -> None:
    with pytest.raises(CheckpointError, match="widht"):
        plan(load_run(SMALL, ["model.args.widht=3"]))


def test_a_broken_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        plan(load_run(SMALL, [f"model.path={tmp_path}"]))
