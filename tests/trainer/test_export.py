"""`lockstep export`: from a run or a model folder to the engine's own bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.cli.main import main
from lockstep.config.load import dump
from lockstep.errors import CheckpointError
from lockstep.kernels.table import select
from lockstep.models.checkpoint import load_config, load_tensors
from lockstep.models.decoder import Decoder
from lockstep.models.tokenizer import load_tokenizer
from lockstep.numerics.flow import FlowSpec, build_flows
from lockstep.sync.fp8_checkpoint import load_fp8
from lockstep.trainer.export import export_run
from lockstep.trainer.setup import load_masters
from lockstep.trainer.spec import CheckpointSpec, RunSpec, UpdateSpec

MakeSpec = Callable[..., RunSpec]
Train = Callable[..., Any]


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in arguments])
    return int(e.value.code or 0)


def codes_of(folder: Path, flow: FlowSpec) -> Decoder:
    """What a model folder quantizes to."""
    spec = load_config(folder)
    decoder = Decoder(spec, build_flows(flow, spec.num_layers).rollout, select("reference"))
    load_masters(decoder, folder)
    decoder.refresh(1)
    return decoder


@pytest.mark.parametrize(
    "flow", [FlowSpec("fp8", scale="pow2"), FlowSpec("fp8-rollout", keep_last_bf16=1)], ids=str
)
def test_a_runs_export_is_what_its_engine_held(
    make_spec: MakeSpec, train: Train, tmp_path: Path, flow: FlowSpec
) -> None:
    spec = make_spec(flow=flow, update=UpdateSpec(2), checkpoint=CheckpointSpec(every=1))
    result, _ = train(spec, config_yaml=dump(spec))
    assert run("export", spec.run_dir, tmp_path / "out") == 0
    back = load_fp8(tmp_path / "out", select("reference"))
    assert back.digest() == result.digest
    assert load_tokenizer(tmp_path / "out", back.spec).chat_template


def test_codes_come_from_the_masters_and_not_from_the_bf16_model(
    make_spec: MakeSpec, train: Train, tmp_path: Path
) -> None:
    spec = make_spec(update=UpdateSpec(2), checkpoint=CheckpointSpec(every=1))
    result, _ = train(spec, config_yaml=dump(spec))
    assert run("export", Path(spec.run_dir) / "model", tmp_path / "second_hand") == 0
    assert load_fp8(tmp_path / "second_hand", select("reference")).digest() != result.digest


def test_a_model_folder_is_its_own_source(model_dir: Path, tmp_path: Path) -> None:
    assert run("export", model_dir, tmp_path / "a", "--scale", "pow2") == 0
    want = codes_of(model_dir, FlowSpec("fp8", scale="pow2"))
    assert load_fp8(tmp_path / "a", select("reference")).digest() == want.digest()
    assert run("export", model_dir, tmp_path / "a") == 2, "the folder isn't empty"
    assert run("export", model_dir, tmp_path / "a", "--overwrite") == 0
    assert (
        load_fp8(tmp_path / "a", select("reference")).digest()
        == codes_of(model_dir, FlowSpec("fp8")).digest()
    )
    assert run("export", model_dir, tmp_path / "b", "--format", "bfloat16") == 0
    source = dict(load_tensors(model_dir, load_config(model_dir)))
    for name, tensor in load_tensors(tmp_path / "b", load_config(tmp_path / "b")):
        assert torch.equal(tensor, source[name].bfloat16())


def test_what_cannot_be_exported_is_refused(
    make_spec: MakeSpec, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("export", tmp_path, tmp_path / "x") == 2
    assert "neither a run nor a model" in capsys.readouterr().err
    assert run("export", model_dir, tmp_path / "x", "--format", "float32", "--scale", "fp32") == 2
    assert "--scale has no effect" in capsys.readouterr().err
    spec = replace(make_spec(), run_dir=str(tmp_path / "empty"))
    with pytest.raises(CheckpointError, match="the run has no checkpoint"):
        export_run(spec, tmp_path / "empty", tmp_path / "x", "fp8", None, overwrite=False)
    assert not (tmp_path / "x").exists()
