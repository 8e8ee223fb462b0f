"""What a dry run says about the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.config.load import load_run
from lockstep.config.plan import Budget, budget, known_shape, plan
from lockstep.errors import CapacityError, CheckpointError, ConfigError
from lockstep.models.spec import PRESETS, expected_tensors
from lockstep.models.tiny import make_tiny, tiny_spec
from lockstep.trainer.workload import Card, attention_flops, layer_linears_flops

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


def found(*overrides: str, card: Card | None = None, **more: Any) -> Budget:
    return budget(load_run(SMALL, overrides), card or Card(), **more)


def test_memory_by_part_adds_up_to_a_peak_by_phase() -> None:
    model = PRESETS["qwen3-1.7b"]
    made = found("flow.kv=fp8", "rollout.cache_tokens=100000", model=model)
    sizes = {part.name: part.nbytes for part in made.parts}
    count = model.num_parameters
    assert sizes["master weights, FP32"] == sizes["gradients, FP32"] == 4 * count
    assert sizes["AdamW moments, FP32"] == 8 * count
    assert sizes["KV cache"] == 100_000 * 2 * 28 * 8 * 128
    linears = 28 * (2048 * 4096 + 2048 * 2048 + 3 * 2048 * 6144)
    scales = 2 * 4 * linears // 128**2
    assert sizes["transposed codes"] == linears + scales
    norms = 28 * (2 * 2048 + 2 * 128) + 2048
    assert sizes["working copies"] == linears + scales + 2 * (151_936 * 2048 + norms)
    assert set(made.peaks) == {"rollout", "update"}
    for phase in made.peaks:
        assert made.peaks[phase] == sum(p.nbytes for p in made.parts if getattr(p, phase))
    assert made.fits and "are left" in made.verdict()
    text = "\n".join(made.lines())
    assert all(name in text for name in sizes)


def test_what_the_backward_pass_keeps_follows_the_settings() -> None:
    model = PRESETS["qwen3-1.7b"]
    rows = ("update.max_tokens_per_microbatch=16384", "rollout.max_new_tokens=4096")

    def saved(*overrides: str) -> int:
        return {p.name: p.nbytes for p in found(*rows, *overrides, model=model).parts}[
            "saved activations of a micro-batch"
        ]

    layer = (
        4 * 2048 + 2 * 4096 + 2 * 2048 + 4 * 16
    )  # both norm inputs, qkv, attention's output and log-sum-exp
    codes, inverses = 6144 + 4 * 48, 2 * 4  # of y, or half of gate and up; of both norms
    ends = 16_384 * (3 * 4096 + 4096 + 24)
    assert saved("flow.name=bf16") == 16_384 * 28 * (layer + 4 * 6144) + ends
    assert saved() == 16_384 * 28 * (layer + 4 * 6144 + codes + inverses) + ends
    assert saved("update.save_fp8=true") == 16_384 * 28 * (layer + 3 * codes + inverses) + ends
    once = layer + 4 * 6144 + codes + inverses
    assert saved("update.checkpointing=true") == 16_384 * (28 * 4096 + once) + ends


def test_probabilities_of_the_head_are_stored_as_far_as_they_fit() -> None:
    """2 bytes a token of the vocabulary, 3 GiB at most, in whole 128s of rows; a chunk of FP32 logits beside them."""
    model = PRESETS["qwen3-1.7b"]

    def sizes(rows: int, *more: str) -> tuple[int | None, int, bool]:
        settings = (f"update.max_tokens_per_microbatch={rows}", "rollout.max_new_tokens=4096", *more)
        parts = {p.name: p for p in found(*settings, model=model).parts}
        stored = parts.get("probabilities of a micro-batch")
        return stored and stored.nbytes, parts["logits of a chunk"].nbytes, bool(stored and stored.rollout)

    assert sizes(1000) == (2 * 1000 * 151_936, 4 * 1000 * 151_936, False)
    assert sizes(16_384) == (2 * 82 * 128 * 151_936, 1 << 30, False)
    assert sizes(1000, "kernels=reference") == (None, 3 * 4 * 256 * 151_936, False)


def test_captured_passes_keep_their_memory_during_the_rollout() -> None:
    model, names = PRESETS["qwen3-1.7b"], {"gradients, FP32", "saved activations of a micro-batch"}
    for overrides, there in (
        ((), True),
        (("update.cuda_graphs=false",), False),
        (("kernels=reference",), False),
        (
            ("update.max_tokens_per_microbatch=32768", "rollout.max_new_tokens=4096", "rollout.cache_gb=2"),
            False,
        ),
    ):
        parts = {p.name: p for p in found(*overrides, model=model).parts}
        assert {parts[name].rollout for name in names} == {there}, overrides


def test_a_split_flow_has_two_sets_of_working_copies() -> None:
    names = [part.name for part in found("flow.name=fp8-rollout").parts]
    assert "working copies, trainer" in names and "working copies, engine" in names
    assert "transposed codes" not in names


def test_the_reference_holds_dense_values_and_no_graphs() -> None:
    names = [part.name for part in found("kernels=reference").parts]
    assert any("dense" in name for name in names) and not any("CUDA" in name for name in names)


def test_gpus_share_moments_sequences_and_time() -> None:
    model, settings = PRESETS["qwen3-8b"], ("rollout.max_running=512", "rollout.prompts_per_step=64")
    one, eight = (found(*settings, card=Card(memory_gb=141), model=model, ranks=n) for n in (1, 8))
    assert not one.fits and eight.fits
    assert "share the run among more GPUs" in one.remedy()
    sizes = [{part.name: part.nbytes for part in made.parts} for made in (one, eight)]
    name = "AdamW moments, FP32"
    assert sizes[0].pop(name) == 8 * sizes[1].pop(name) == 8 * model.num_parameters
    assert one.load.running == 8 * eight.load.running == 64 * 4
    assert all(sizes[1][n] <= sizes[0][n] for n in sizes[1])
    times = [{phase.name: phase.seconds for phase in made.phases} for made in (one, eight)]
    assert times[0]["forward and backward"] == pytest.approx(8 * times[1]["forward and backward"])
    assert times[0]["publication"] == times[1]["publication"]
    assert times[1]["optimizer"] == pytest.approx(times[0]["optimizer"] * (9 / 8 + 1) / 10)
    assert "on 8 GPUs, without what travels between them," in "\n".join(eight.lines())
    with pytest.raises(ConfigError, match="65 processes share 64 prompts"):
        found(*settings, model=model, ranks=65)


def test_what_does_not_fit_is_said_with_what_would_help() -> None:
    big = found(model=PRESETS["qwen3-8b"])
    assert not big.fits and "smaller model" in big.remedy()
    assert big.verdict().startswith("doesn't fit: peak ") and "80 GB" in big.verdict()
    cache = found("rollout.cache_gb=100", model=PRESETS["qwen3-1.7b"])
    assert not cache.fits and "rollout.cache_tokens" in cache.remedy()
    kinds = {
        kv: found("rollout.cache_gb=100", f"flow.kv={kv}", model=PRESETS["qwen3-1.7b"]).remedy()
        for kv in ("bf16", "fp8")
    }
    assert kinds["bf16"].endswith("rollout.max_running, or set flow.kv to fp8")
    assert kinds["fp8"].endswith("rollout.max_running"), "what is set already is no advice"
    rows = found(
        "update.max_tokens_per_microbatch=65536",
        "rollout.max_new_tokens=8192",
        "rollout.cache_gb=1",
        model=PRESETS["qwen3-1.7b"],
    )
    assert not rows.fits and "max_tokens_per_microbatch" in rows.remedy()
    assert rows.remedy().endswith("set update.save_fp8 or update.checkpointing")
    assert found("rollout.cache_gb=100", card=Card(memory_gb=141), model=PRESETS["qwen3-1.7b"]).fits


def test_time_by_phase() -> None:
    model = PRESETS["qwen3-8b"]
    settings = ("rollout.max_new_tokens=1024", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=8")
    made = found(*settings, model=model, prompt_tokens=512)
    names = [phase.name for phase in made.phases]
    assert names == ["rollout", "forward and backward", "optimizer", "publication"]
    times = {phase.name: phase.seconds for phase in made.phases}
    linears = 36 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12_288)
    rows = 64 * 1535
    assert layer_linears_flops(model) == 2 * linears
    products = 6 * linears * rows / 1100e12
    attention = 3.5 * 4 * 36 * 32 * 128 * 64 * 1535 * 1536 / 2 / 720e12
    head = 6 * 64 * 1024 * 4096 * 151_936 / 720e12  # of a micro-batch that stores all probabilities
    assert attention_flops(model, [1535] * 64) == 4 * 36 * 32 * 128 * 64 * 1535 * 1536 / 2
    assert products + attention + head < times["forward and backward"] < 1.3 * (products + attention + head)
    slower = found(
        *settings, "update.max_tokens_per_microbatch=16384", model=model, prompt_tokens=512, card=Card()
    )
    more = {phase.name: phase.seconds for phase in slower.phases}["forward and backward"]
    again = 2 * (1 - 82 * 128 / 16_384) * 64 * 1024 * 4096 * 151_936 / 720e12
    assert more - times["forward and backward"] == pytest.approx(again)
    assert times["optimizer"] == pytest.approx(40 * model.num_parameters / 3e12)
    weights = sum(math.prod(s) for s in expected_tensors(model).values()) - 151_936 * 4096
    read = 1024 * weights + 2 * 36 * 8 * 128 * 2 * 64 * (512 * 1024 + 1024 * 1023 / 2)
    assert times["rollout"] > read / 3e12 and times["rollout"] < 1.3 * read / 3e12
    slow = found(*settings, model=model, prompt_tokens=512, card=Card(80, 1.5, 360, 550))
    assert sum(p.seconds for p in slow.phases) == pytest.approx(2 * sum(times.values()))


def test_bf16_takes_longer_and_a_rejecting_correction_has_a_pass_of_its_own() -> None:
    model = PRESETS["qwen3-8b"]
    fp8, bf16 = (found(f"flow.name={name}", model=model).phases for name in ("fp8", "bf16"))
    for a, b in zip(fp8[:2], bf16[:2], strict=True):
        assert b.seconds > 1.2 * a.seconds
    split = found("flow.name=fp8-rollout", "correction.preset=geometric_mis", model=model)
    assert "old log-probabilities" in [phase.name for phase in split.phases]


def test_a_shape_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="--model"):
        found("model={path: nowhere}")
    assert found("model={path: nowhere, recipe: smollm2}").model == PRESETS["smollm2-135m"]


def test_the_command() -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["plan", str(SMALL), "--memory-gb", "40"])
    assert done.exit_code == 0 and "fits: peak" in done.output and "of 40 GB" in done.output
    done = runner.invoke(app, ["plan", str(SMALL), "--memory-gb", "1", "update.steps=2"])
    assert isinstance(done.exception, CapacityError) and "doesn't fit" in str(done.exception)
    done = runner.invoke(app, ["plan", str(SMALL), "--gpus", "2"])
    assert done.exit_code == 0 and "on 2 GPUs" in done.output
    done = runner.invoke(app, ["plan", str(SMALL), "--model", "qwen3-2b", "--memory-gb", "80"])
    assert isinstance(done.exception, ConfigError)
