"""Checkpoint folders: strict both ways, whole or not there at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.errors import CheckpointError
from lockstep.models.checkpoint import HEAD, INDEX, SINGLE, load_config, load_tensors, save
from lockstep.models.spec import ModelSpec, expected_tensors
from lockstep.models.tiny import random_tensors, tiny_spec

SPEC = tiny_spec(hidden=24, layers=2, heads=3, kv_heads=1, intermediate=40, chars="0123")
UNTIED = tiny_spec(hidden=24, layers=1, heads=3, kv_heads=1, intermediate=40, chars="0123", tied=False)


def write(
    folder: Path, spec: ModelSpec = SPEC, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """A healthy folder with one file; returns what it holds."""
    save(folder, spec, random_tensors(spec, 0), dtype=dtype)
    return load_file(folder / SINGLE)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / SINGLE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_keeps_bits_names_and_order(tmp_path: Path, dtype: torch.dtype) -> None:
    save(tmp_path / "m", UNTIED, random_tensors(UNTIED, 3), dtype=dtype)
    spec = load_config(tmp_path / "m")
    assert spec == UNTIED
    read = list(load_tensors(tmp_path / "m", spec))
    assert [name for name, _ in read] == list(expected_tensors(spec))
    for (name, value), (_, original) in zip(read, random_tensors(UNTIED, 3), strict=True):
        assert value.dtype == dtype and torch.equal(value, original.to(dtype)), name
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == str(dtype)[6:]


def test_shards_round_trip_and_are_bounded(tmp_path: Path) -> None:
    limit = 8_000
    save(tmp_path / "m", SPEC, random_tensors(SPEC, 0), dtype=torch.float32, max_shard_bytes=limit)
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    shards = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == shards
    assert index["metadata"]["total_size"] == 4 * SPEC.num_parameters
    for shard in shards:
        sizes = [t.numel() * 4 for t in load_file(tmp_path / "m" / shard).values()]
        assert sum(sizes) <= limit or len(sizes) == 1
    for (name, value), (_, original) in zip(
        load_tensors(tmp_path / "m", SPEC), random_tensors(SPEC, 0), strict=True
    ):
        assert torch.equal(value, original), name


def test_any_type_can_be_written_with_its_own_names(tmp_path: Path) -> None:
    expected = {"codes": (4, 4), "scale": (1, 1), "model.embed_tokens.weight": (2, 2)}
    given = {
        "codes": torch.eye(4).to(torch.float8_e4m3fn),
        "scale": torch.tensor([[0.5]]),
        "model.embed_tokens.weight": torch.ones(2, 2, dtype=torch.bfloat16),
    }
    extra = {"quantization_config": {"quant_method": "fp8"}}
    save(tmp_path / "m", SPEC, given.items(), dtype=None, expected=expected, extra_config=extra)
    read = load_file(tmp_path / "m" / SINGLE)
    assert {name: value.dtype for name, value in read.items()} == {n: t.dtype for n, t in given.items()}
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["quantization_config"] == extra["quantization_config"] and config["dtype"] == "bfloat16"


def test_views_and_transposed_tensors_are_written_dense(tmp_path: Path) -> None:
    tensors = dict(random_tensors(SPEC, 0))
    fused = torch.randn(2 * 40, 24)
    tensors["model.layers.0.mlp.gate_proj.weight"], tensors["model.layers.0.mlp.up_proj.weight"] = (
        fused.chunk(2)
    )
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.randn(40, 24).t()
    save(tmp_path / "m", SPEC, tensors.items(), dtype=None)
    for name, value in load_tensors(tmp_path / "m", SPEC):
        assert torch.equal(value, tensors[name])


def test_case_18_missing_extra_and_misshapen_are_all_listed(tmp_path: Path) -> None:
    tensors = write(tmp_path / "m")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.gate_proj.weight_scale_inv"] = torch.ones(1, 1)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 24)
    rewrite(tmp_path / "m", tensors)
    with pytest.raises(CheckpointError) as refusal:
        load_tensors(tmp_path / "m", SPEC)
    line = refusal.value.line()
    assert "missing: model.norm.weight" in line
    assert "unexpected: model.layers.0.mlp.gate_proj.weight_scale_inv" in line
    assert "model.layers.1.mlp.up_proj.weight is [3, 24], expected [40, 24]" in line
    assert "BF16 checkpoint" in line


def test_case_08_weights_without_their_scales_are_refused(tmp_path: Path) -> None:
    tensors = write(tmp_path / "m")
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    rewrite(tmp_path / "m", tensors)
    with pytest.raises(CheckpointError, match=rf"wrong type: {name} is F8_E4M3"):
        load_tensors(tmp_path / "m", SPEC)


def test_case_17_non_finite_values_are_listed_and_none_is_handed_out(tmp_path: Path) -> None:
    tensors = write(tmp_path / "m")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    tensors["model.norm.weight"][1] = float("inf")
    rewrite(tmp_path / "m", tensors)
    seen: list[str] = []
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight, model\.norm\.weight"):
        seen += [name for name, _ in load_tensors(tmp_path / "m", SPEC)]
    assert "model.norm.weight" not in seen


def test_case_68_a_tied_head_that_equals_the_embedding_is_no_alarm(tmp_path: Path) -> None:
    tensors = write(tmp_path / "m")
    rewrite(tmp_path / "m", {**tensors, HEAD: tensors["model.embed_tokens.weight"].clone()})
    assert [name for name, _ in load_tensors(tmp_path / "m", SPEC)] == list(expected_tensors(SPEC))


def test_case_68_a_tied_head_that_differs_is_refused_with_both_facts(tmp_path: Path) -> None:
    tensors = write(tmp_path / "m")
    head = tensors["model.embed_tokens.weight"].clone()
    head[3, 5] += 1
    rewrite(tmp_path / "m", {**tensors, HEAD: head})
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true, but lm_head\.weight .* in 1 of"):
        load_tensors(tmp_path / "m", SPEC)


def test_case_68_an_absent_untied_head_names_the_switch(tmp_path: Path) -> None:
    tensors = write(tmp_path / "m", UNTIED)
    del tensors[HEAD]
    rewrite(tmp_path / "m", tensors)
    with pytest.raises(CheckpointError, match="set tie_word_embeddings to true"):
        load_tensors(tmp_path / "m", UNTIED)


def test_folders_that_are_no_checkpoint_say_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        load_config("Qwen/Qwen3-8B")
    for name, match in (("pytorch_model.bin", "pickled"), ("m.gguf", "import_gguf"), ("readme", "neither")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).touch()
        with pytest.raises(CheckpointError, match=match):
            load_tensors(folder, SPEC)
    (tmp_path / "readme" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="LoRA"):
        load_config(tmp_path / "readme")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    config.write_text(config.read_text()[:-20])
    with pytest.raises(CheckpointError, match="can't be read"):
        load_config(tmp_path / "m")
    file = tmp_path / "m" / SINGLE
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        load_tensors(tmp_path / "m", SPEC)
    file.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        load_tensors(tmp_path / "m", SPEC)


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save(folder, SPEC, random_tensors(SPEC, 0), max_shard_bytes=8_000)
    index = json.loads((folder / INDEX).read_text())

    def refused(weight_map: dict[str, str], match: str) -> None:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=match):
            load_tensors(folder, SPEC)

    good = index["weight_map"]
    last = good["model.norm.weight"]
    refused({k: v for k, v in good.items() if k != "model.norm.weight"}, f"model.norm.weight in {last}")
    refused({**good, "model.ghost.weight": last}, f"model.ghost.weight not in {last}")
    refused({**good, "model.norm.weight": "model-99.safetensors"}, "shards are missing: model-99")
    refused({**good, "model.norm.weight": f"../m/{last}"}, "outside the folder")
    save_file({"x": torch.ones(1)}, folder / SINGLE)
    refused(good, "two checkpoints in one folder")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model.norm.weight": None}, "not given: model.norm.weight"),
        ({"model.ghost.weight": torch.ones(1)}, "doesn't belong"),
        ({"model.norm.weight": torch.ones(23)}, r"\[23\], expected \[24\]"),
        ({"model.norm.weight": torch.full((24,), 1e39, dtype=torch.float64)}, "NaN or infinite"),
    ],
)
def test_what_is_wrong_is_never_written(
    tmp_path: Path, change: dict[str, torch.Tensor | None], match: str
) -> None:
    tensors = {k: v for k, v in {**dict(random_tensors(SPEC, 0)), **change}.items() if v is not None}
    with pytest.raises(CheckpointError, match=match) as refusal:
        save(tmp_path / "m", SPEC, tensors.items())
    assert refusal.value.where == str(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_in_the_middle_leaves_the_old_folder_as_it_was(tmp_path: Path) -> None:
    before = write(tmp_path / "m")

    def stops() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(random_tensors(SPEC, 1))[:7]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "m", SPEC, stops(), max_shard_bytes=1_000, overwrite=True)
    after = load_file(tmp_path / "m" / SINGLE)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_failing_rename_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = write(tmp_path / "m")
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if ".partial-" in self.name and Path(target).name == "m":
            raise OSError("disk went away")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="disk went away"):
        save(tmp_path / "m", SPEC, random_tensors(SPEC, 1), dtype=torch.float32, overwrite=True)
    after = load_file(tmp_path / "m" / SINGLE)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_killed_process_leaves_no_folder_at_the_target(tmp_path: Path) -> None:
    program = """
import os, sys
from lockstep.models.checkpoint import save
from lockstep.models.tiny import random_tensors, tiny_spec
spec = tiny_spec(chars="0123")
def dies():
    for position, item in enumerate(random_tensors(spec, 0)):
        if position == 9:
            os._exit(9)
        yield item
save(sys.argv[1], spec, dies(), max_shard_bytes=10_000)
"""
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "m")], env=environment, check=False)
    assert done.returncode == 9
    assert not (tmp_path / "m").exists()
    assert [path.name.startswith(".m.partial-") for path in tmp_path.iterdir()] == [True]
    write(tmp_path / "m")  # what was left behind is in nobody's way


def test_an_occupied_target_is_kept_unless_told(tmp_path: Path) -> None:
    before = write(tmp_path / "m")
    with pytest.raises(CheckpointError, match="isn't empty"):
        save(tmp_path / "m", SPEC, random_tensors(SPEC, 1))
    (tmp_path / "m" / "stale.txt").touch()
    save(tmp_path / "m", SPEC, random_tensors(SPEC, 1), dtype=torch.float32, overwrite=True)
    after = load_file(tmp_path / "m" / SINGLE)
    changed = "model.embed_tokens.weight"
    assert not torch.equal(before[changed], after[changed]) and not (tmp_path / "m" / "stale.txt").exists()
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", SPEC, random_tensors(SPEC, 0))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        save(tmp_path / "file", SPEC, random_tensors(SPEC, 0))


def test_files_are_readable_by_whoever_can_read_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "m")
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "m").iterdir()}
    assert modes == {(tmp_path / "m").stat().st_mode & 0o666}
