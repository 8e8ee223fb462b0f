"""Which kernels a run gets, and what is refused, on a machine with a GPU or without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.kernels import table
from lockstep.kernels.reference import ReferenceKernels
from lockstep.kernels.table import device_of, hopper_missing, select
from lockstep.models.spec import PRESETS
from lockstep.numerics.flow import FlowSpec, build_flows
from lockstep.trainer import backend
from lockstep.trainer.backend import choice, choose_kernels
from lockstep.trainer.setup import make_parts
from lockstep.trainer.spec import ModelSource, RunSpec, UpdateSpec

MakeSpec = Callable[..., RunSpec]
DENSE, EXPERTS = PRESETS["smollm2-135m"], PRESETS["qwen3-30b-a3b"]
ATTENTION = FlowSpec("fp8", "fp8", attention="fp8")


class Fused(ReferenceKernels):
    """Stands for the kernels of a GPU."""

    fused = True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that looks as if it had one."""

    def chosen(name: str, *, dense: bool = True) -> ReferenceKernels:
        return Fused() if name == "hopper" or (name == "auto" and dense) else ReferenceKernels()

    monkeypatch.setattr(backend, "select", chosen)
    monkeypatch.setattr(backend, "hopper_missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")


def chosen(spec: RunSpec, model: Any = DENSE) -> ReferenceKernels:
    return choose_kernels(spec, model, build_flows(spec.flow, model.num_layers))


@pytest.mark.skipif(hopper_missing() is None, reason="there is such a GPU here")
def test_without_a_gpu_hopper_is_refused_before_a_model_is_made(make_spec: MakeSpec, tmp_path: Any) -> None:
    model = ModelSource(str(tmp_path / "m"), "random", {"shape": "smollm2-135m", "layers": 1})
    with pytest.raises(
        ConfigError, match=r"kernels: the Hopper kernels need an NVIDIA GPU.*kernels: reference"
    ):
        make_parts(replace(make_spec(), kernels="hopper", model=model))
    assert not (tmp_path / "m").exists()
    assert select("auto").name == "reference" and device_of(select("auto")).type == "cpu"
    assert choice(make_spec(kernels="auto"), select("auto")) is None


def test_another_gpu_and_a_missing_triton_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert hopper_missing() == "a card has compute capability 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(table, "find_spec", lambda _: None)
    assert hopper_missing() == "triton is not installed"


def test_auto_takes_the_gpu_where_it_can_train(make_spec: MakeSpec, gpu: None) -> None:
    spec = make_spec(kernels="auto")
    kernels = chosen(spec)
    assert kernels.fused and choice(spec, kernels) == "kernels: auto takes hopper, on a card"
    assert choice(replace(spec, kernels="hopper"), kernels) is None
    for other, model in ((spec, EXPERTS), (make_spec(ATTENTION, kernels="auto"), DENSE)):
        kernels = chosen(other, model)
        assert not kernels.fused and "can't train this model or flow" in str(choice(other, kernels))


@pytest.mark.parametrize(
    "flow, model, message",
    [
        (FlowSpec("fp8"), EXPERTS, "kernels: a model with experts can't be trained on a GPU yet"),
        (
            ATTENTION,
            DENSE,
            "flow.attention: FP8 queries and probabilities can't be trained on a GPU yet",
        ),
    ],
)
def test_hopper_refuses_what_it_can_not_train(
    flow: FlowSpec, model: Any, message: str, make_spec: MakeSpec, gpu: None
) -> None:
    with pytest.raises(ConfigError, match=f"{message}.*set kernels to reference"):
        chosen(replace(make_spec(flow), kernels="hopper"), model)


@pytest.mark.parametrize(
    ("name", "value"), [("checkpointing", True), ("save_fp8", True), ("deterministic", False)]
)
def test_options_of_a_gpu_have_no_effect_elsewhere_and_are_refused(
    name: str, value: bool, make_spec: MakeSpec, gpu: None
) -> None:
    spec = make_spec(kernels="auto", update=UpdateSpec(1, **{name: value}))
    assert chosen(spec).fused
    with pytest.raises(
        ConfigError, match=f"update.{name}: has no effect on reference kernels.*leave it at its default"
    ):
        chosen(replace(spec, kernels="reference"))
