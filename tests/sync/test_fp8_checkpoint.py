"""FP8 exports: the engine's bytes in a folder, and nothing but such a folder is read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.errors import CheckpointError, ContractError
from lockstep.models.checkpoint import load_config, load_tensors
from lockstep.models.decoder import Decoder
from lockstep.numerics.flow import FlowSpec
from lockstep.sync.fp8_checkpoint import load_fp8, save_fp8

FLOWS = [FlowSpec("fp8"), FlowSpec("fp8", scale="pow2"), FlowSpec("fp8", keep_last_bf16=1)]
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("family", "flow"),
    [("llama_tied", FLOWS[0]), ("qwen3_moe", FLOWS[2]), *(("qwen2", f) for f in FLOWS)],
    ids=str,
)
def test_the_bytes_are_the_engines_and_come_back(
    wire: SimpleNamespace, tmp_path: Path, family: str, flow: FlowSpec
) -> None:
    decoder: Decoder = wire.decoder(family, flow)
    save_fp8(tmp_path / "m", decoder)
    stored = load_file(tmp_path / "m" / "model.safetensors")
    names = set()
    for name, module in decoder.working():
        names.add(name)
        codes = module.working.codes
        if codes is None:
            assert module.working.plain is not None and torch.equal(stored[name], module.working.plain)
            continue
        names.add(name + "_scale_inv")
        assert torch.equal(stored[name].view(torch.uint8), codes.codes.view(torch.uint8))
        assert torch.equal(stored[name + "_scale_inv"], codes.scale)
    assert {n for n in stored if not n.endswith(".bias")} == names
    back = load_fp8(tmp_path / "m", decoder.kernels)
    assert back.spec == decoder.spec and back.flow == decoder.flow and back.digest() == decoder.digest()
    ids = wire.ids(decoder.spec, [6, 9])
    assert torch.equal(wire.logits(back, ids, [6, 9]), wire.logits(decoder, ids, [6, 9]))
    with pytest.raises(ValueError, match="non-finite"):
        back.refresh(2)


def test_the_configuration_is_deepseeks_with_exact_paths_case_05(
    wire: SimpleNamespace, tmp_path: Path
) -> None:
    save_fp8(tmp_path / "m", wire.decoder("qwen3_moe", FlowSpec("fp8", scale="pow2", keep_first_bf16=1)))
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    quantization = config["quantization_config"]
    skipped = quantization.pop("modules_to_not_convert")
    assert quantization == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    }
    assert config["dtype"] == "bfloat16"
    assert "lm_head" in skipped and "model.layers.2.mlp.gate" in skipped
    assert (
        "model.layers.0.mlp.experts.3.gate_proj" in skipped and "model.layers.0.self_attn.o_proj" in skipped
    )
    assert not any(name.startswith("model.layers.1.") for name in skipped), (
        "the dense layer is quantized whole"
    )
    assert not any("norm" in name or "embed" in name for name in skipped)


def test_transformers_reads_the_configuration(wire: SimpleNamespace, tmp_path: Path) -> None:
    from transformers import AutoConfig, FineGrainedFP8Config

    save_fp8(tmp_path / "m", wire.decoder("llama31"))
    config = AutoConfig.from_pretrained(tmp_path / "m").quantization_config
    theirs = FineGrainedFP8Config(**{k: v for k, v in config.items() if k != "quant_method"})
    assert tuple(theirs.weight_block_size) == (128, 128) and theirs.activation_scheme == "dynamic"
    assert theirs.modules_to_not_convert == ["lm_head"]


def test_training_from_an_export_is_refused_with_the_reason(wire: SimpleNamespace, tmp_path: Path) -> None:
    """Codes are made from masters; an export has none."""
    save_fp8(tmp_path / "m", wire.decoder("qwen2"))
    with pytest.raises(CheckpointError, match="quantization_config .*already quantized"):
        load_config(tmp_path / "m")


def test_a_flow_without_codes_has_no_such_export(wire: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the flow quantizes nothing"):
        save_fp8(tmp_path / "m", wire.decoder("qwen2", FlowSpec("bf16")))
    assert not (tmp_path / "m").exists()


def test_nothing_is_written_of_weights_that_are_not_finite_case_15(
    wire: SimpleNamespace, tmp_path: Path
) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    codes = dict(decoder.working())[UP].working.codes
    assert codes is not None
    codes.scale[0, 0] = float("inf")
    with pytest.raises(ContractError, match=f"{UP}_scale_inv: 1 scales"):
        save_fp8(tmp_path / "m", decoder)
    assert list(tmp_path.iterdir()) == []


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(UP + "_scale_inv"), f"missing: {UP}_scale_inv"),
        (lambda t: t.pop(UP), f"missing: {UP}$|missing: {UP}[ ;(]"),
        (lambda t: t.update(stray=torch.ones(1)), "unexpected: stray"),
        (lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(1, 1)}), "unexpected: model.norm.weight_scale_inv"),
        (lambda t: t.update({UP: t[UP].bfloat16()}), f"wrong type: {UP} is BF16"),
        (lambda t: t.update({UP + "_scale_inv": t[UP + "_scale_inv"].bfloat16()}), f"{UP}_scale_inv is BF16"),
        (lambda t: t.update({UP + "_scale_inv": torch.ones(1, 2)}), r"_scale_inv is \[1, 2\], expected \[2, 1\]"),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float()}), "model.norm.weight is torch.float32"),
        (lambda t: t[UP].view(torch.uint8)[0].fill_(0x7F), f"NaN or infinite values in {UP}"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_such_export_is_refused_by_name_case_08_18(
    wire: SimpleNamespace, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    save_fp8(tmp_path / "m", decoder)
    edit(tmp_path / "m", change)
    with pytest.raises(CheckpointError, match=message):
        load_fp8(tmp_path / "m", decoder.kernels)


def test_a_scale_that_is_not_positive_is_refused_case_15(wire: SimpleNamespace, tmp_path: Path) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    save_fp8(tmp_path / "m", decoder)
    edit(tmp_path / "m", lambda t: t[UP + "_scale_inv"].fill_(0.0))
    with pytest.raises(ContractError, match=f"{UP}_scale_inv: 2 scales that are not positive"):
        load_fp8(tmp_path / "m", decoder.kernels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\], expected \[128, 128\]"),
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'"),
        ({"scale_fmt": "e5m3"}, "scale_fmt is 'e5m3'"),
        ({"more": 1}, "unknown more"),
        ({"modules_to_not_convert": None}, "no list of names"),
        ({"modules_to_not_convert": []}, "modules_to_not_convert fits no flow: lm_head"),
        ({"modules_to_not_convert": ["lm_head", "model.layers.1.mlp.up_proj"]}, "fits no flow: model.layers.1.mlp.up_proj"),
    ],
)  # fmt: skip
def test_another_quantization_is_refused_by_field_case_05_13(
    wire: SimpleNamespace, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    save_fp8(tmp_path / "m", decoder)
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_fp8(tmp_path / "m", decoder.kernels)


def test_a_plain_folder_is_no_export(wire: SimpleNamespace, tmp_path: Path) -> None:
    from lockstep.models.tiny import make_tiny

    spec = make_tiny(tmp_path / "m")
    assert load_config(tmp_path / "m") == spec and list(load_tensors(tmp_path / "m", spec))
    with pytest.raises(CheckpointError, match="quant_method is None"):
        load_fp8(tmp_path / "m", wire.decoder("qwen2").kernels)
