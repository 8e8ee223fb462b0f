"""The controller in a run: a planted drift is cured, its state survives a resume, and nothing drifts at learning rate 0."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.algorithms.spec import AlgorithmSpec
from lockstep.correction.controller_spec import ControllerSpec
from lockstep.data.spec import DataSpec
from lockstep.errors import ConfigError, ContractError
from lockstep.nn.kv_scales import KVScales
from lockstep.numerics.flow import FlowPair, FlowSpec
from lockstep.observe.glossary import describe
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Completion, Request
from lockstep.trainer.control import self_mismatch, use_flows
from lockstep.trainer.loop import Trainer
from lockstep.trainer.plants import PerTensorActivation
from lockstep.trainer.spec import CheckpointSpec, OptimSpec, RunSpec, UpdateSpec

MakeSpec = Callable[..., RunSpec]
Train = Callable[..., Any]
Outcome = Callable[[Path], dict[str, Any]]
Open = Callable[[RunSpec], Any]

MEAN = "mismatch/mean_abs_dlogp"
SPLIT = FlowSpec("fp8-rollout", "fp8", kv_headroom=1.0, kv_recalibrate="once")
ROLLOUT = RolloutSpec(prompts_per_step=6, samples_per_prompt=4, max_new_tokens=8)
WATCH = ControllerSpec(baseline_steps=2, band=2.0, patience=2)
FIRST_BAD = 3
"""Step from which the planted drift works."""


@pytest.fixture
def drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before step FIRST_BAD a calibration goes wrong: both sides are told half of the scales, so that the engine's keys and
    values saturate. The next calibration is right. A function of the state only, so that a resumed run meets the same."""
    honest = Trainer.calibrate

    def calibrate(trainer: Trainer) -> KVScales | None:
        held = trainer.scales
        if held is None or held.version > 1 or trainer.progress.step != FIRST_BAD - 1:
            return honest(trainer)
        bad = KVScales(held.k / 2, held.v / 2, 2)
        trainer.history.versions[2] = bad
        trainer.progress.scale_version = 2
        return bad

    monkeypatch.setattr(Trainer, "calibrate", calibrate)


def orders(spec: RunSpec) -> list[dict[str, Any]]:
    """Lines of controller.jsonl."""
    path = Path(spec.run_dir) / "controller.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def receipts(spec: RunSpec) -> list[dict[str, Any]]:
    """Lines of receipts.jsonl."""
    return [json.loads(line) for line in (Path(spec.run_dir) / "receipts.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("drift")
def test_a_planted_drift_is_cured_by_recalibration_case_49(make_spec: MakeSpec, train: Train) -> None:
    """Two steps out of band, then the action that the evidence asks for, and the mismatch is back in its band."""
    spec = make_spec(SPLIT, rollout=ROLLOUT, update=UpdateSpec(7), controller=WATCH)
    result, metrics = train(spec)
    assert result.step == 7
    band = metrics[-1]["controller/band"]
    inside = [m[MEAN] <= band for m in metrics]
    assert inside == [True, True, False, False, True, True, True]
    assert [m["controller/action"] for m in metrics] == [0, 0, 0, 2, 0, 0, 0]
    assert [m["controller/out_of_band"] for m in metrics] == [0, 0, 1, 2, 0, 0, 0]
    (done,) = orders(spec)
    assert [m["kv/saturation_pct"] > 1 for m in metrics] == [False, False, True, True, False, False, False]
    assert done["evidence"].startswith("kv/saturation_pct is")
    assert (done["step"], done["action"], done["metric"]) == (4, "recalibrate", MEAN) and done["carried_out"]
    assert done["value"] == metrics[3][MEAN] and done["limit"] == band and "v2 became v3" in done["done"]
    published = [(r["step"], r["version"], r["scale_version"]) for r in receipts(spec)]
    assert published[4:7] == [(4, 5, 2), (4, 6, 3), (5, 7, 3)]
    notes = (Path(spec.run_dir) / "notes.jsonl").read_text()
    assert "controller, step 4: recalibrate" in notes and "tighten" not in notes
    ours = (
        "controller/",
        "mismatch/",
        "rollout_corr/",
        "sampling/",
        "clip_ratio/",
        "policy",
        "gen_kl",
        "js_div",
    )
    assert not [n for m in metrics for n in m if n.startswith(ours) and describe(n) is None]
    report = (Path(spec.run_dir) / "report.html").read_text()
    assert "band of the mean" in report and "KV scales v2 became v3" in report


@pytest.mark.usefixtures("drift")
def test_without_the_controller_a_planted_drift_stays_case_49(make_spec: MakeSpec, train: Train) -> None:
    spec = make_spec(SPLIT, rollout=ROLLOUT, update=UpdateSpec(7), controller=ControllerSpec("off"))
    _, metrics = train(spec)
    band = 2 * sum(m[MEAN] for m in metrics[:2]) / 2
    assert [m[MEAN] > band for m in metrics] == [False, False] + [True] * 5
    assert not [name for m in metrics for name in m if name.startswith("controller/")] and orders(spec) == []


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_an_exact_flow_has_no_controller_and_any_difference_stops_it(
    make_spec: MakeSpec, open_trainer: Open, kv: str
) -> None:
    with open_trainer(make_spec("fp8", kv)) as trainer:
        trainer.begin()
        metrics = trainer.step()
        assert trainer.control.controller is None and trainer.progress.controller == {}
        assert metrics["mismatch/max_abs_dlogp"] == 0 and not [
            n for n in metrics if n.startswith("controller/")
        ]
        honest = trainer.parts.engine.generate

        def one_ulp(requests: list[Request], **options: Any) -> list[Completion]:
            first, *rest = honest(requests, **options)
            less = torch.nextafter(torch.tensor(first.logprobs[0]), torch.tensor(-100.0))
            return [replace(first, logprobs=(float(less), *first.logprobs[1:])), *rest]

        trainer.parts.engine.generate = one_ulp
        with pytest.raises(
            ContractError, match="rollout and trainer disagree.*1 of .* samples differ.*the trainer"
        ):
            trainer.step()
    assert not (Path(trainer.run_dir) / "controller.jsonl").exists()
    told = json.loads((Path(trainer.run_dir) / "violation.json").read_text())
    (one,) = told["differing"]
    assert told["repeats"] and (one["first"], one["differ"], one["alone"]) == (0, 1, "the trainer")
    assert one["deltas"][0] > 0 and not any(one["deltas"][1:])


def same_rollouts(trainer: Any) -> None:
    """Every step asks for the same prompts with the same noise, whatever its number."""
    honest, size = trainer.parts.engine.generate, trainer.spec.rollout.prompts_per_step

    def generate(requests: list[Request], *, step: int, **options: Any) -> list[Completion]:
        start = requests[0].prompt_index
        assert start % size == 0
        made = honest([replace(r, prompt_index=r.prompt_index - start) for r in requests], step=0, **options)
        return [replace(c, prompt_index=c.prompt_index + start) for c in made]

    trainer.parts.engine.generate = generate


def still(make_spec: MakeSpec, flow: FlowSpec, **sections: Any) -> RunSpec:
    """Learning rate 0, two prompts that are those of every step."""
    data = DataSpec("arithmetic", args={"template": "{a}+{b}=", "size": 2}, shuffle=False)
    options = {"data": data, "optim": OptimSpec(lr=0.0), "update": UpdateSpec(30), **sections}
    return make_spec(flow, rollout=RolloutSpec(2, 3, 6), **options)


def compared(metrics: dict[str, float]) -> dict[str, float]:
    """What was measured of the mismatch."""
    prefixes = ("mismatch/", "rollout_corr/", "sampling/", "token_mult", "gen_kl", "policy_kl", "js_")
    return {name: value for name, value in metrics.items() if name.startswith(prefixes)}


@pytest.mark.parametrize(
    "flow", [FlowSpec("fp8", "fp8"), FlowSpec("fp8-rollout", "fp8")], ids=lambda f: f.name
)
def test_nothing_drifts_at_learning_rate_zero_case_45(
    make_spec: MakeSpec, open_trainer: Open, flow: FlowSpec
) -> None:
    """Thirty steps of the same rollouts: under one version of the KV scales every measure keeps its bits, so neither side
    carries anything from step to step; and the scales settle at once."""
    found: dict[int, dict[str, float]] = {}
    with open_trainer(still(make_spec, flow)) as trainer:
        same_rollouts(trainer)
        trainer.begin()
        for _ in range(30):
            scales = trainer.progress.scale_version
            metrics = compared(trainer.step())
            assert found.setdefault(scales, metrics) == metrics
            assert len(metrics) > 25 and (metrics["mismatch/max_abs_dlogp"] == 0) == (flow.name == "fp8")
    assert len(found) <= 2


def test_the_drift_test_sees_state_in_the_engine_case_45(make_spec: MakeSpec, open_trainer: Open) -> None:
    """The same with an engine that keeps something: a scale that creeps by a percent between two rollouts."""
    with open_trainer(still(make_spec, FlowSpec("fp8-rollout", "fp8", kv_recalibrate="once"))) as trainer:
        same_rollouts(trainer)
        trainer.begin()
        first = compared(trainer.step())
        engine = trainer.parts.engine
        honest, scales = engine.generate, engine.scales

        def creeping(*args: Any, **options: Any) -> list[Completion]:
            engine.scales = replace(scales, v=scales.v * 1.01)
            try:
                return honest(*args, **options)
            finally:
                engine.scales = scales

        engine.generate = creeping
        assert compared(trainer.step()) != first


RESUMED: dict[str, tuple[FlowSpec, ControllerSpec]] = {
    "recalibrate": (SPLIT, WATCH),
    "keep layers": (SPLIT, replace(WATCH, actions=("keep_layers",), keep_layers=(1,))),
    "tighten, then keep layers": (
        SPLIT,
        replace(WATCH, actions=("tighten", "keep_layers"), cooldown={"tighten": 0}, patience=1),
    ),
    "republish": (SPLIT, replace(WATCH, actions=("republish",))),
}


@pytest.mark.usefixtures("drift")
@pytest.mark.parametrize("kind", RESUMED)
def test_a_resumed_run_decides_the_same_case_65(
    make_spec: MakeSpec,
    train: Train,
    outcome: Outcome,
    tmp_path: Path,
    kind: str,
) -> None:
    """Cut after every step that matters: in the middle of patience, right after the action, in the cool-down."""
    flow, controller = RESUMED[kind]
    options = {
        "rollout": RolloutSpec(3, 4, 6),
        "checkpoint": CheckpointSpec(every=1, keep=9),
        "controller": controller,
    }
    whole = make_spec(flow, name="whole", update=UpdateSpec(7), **options)
    result, metrics = train(whole)
    acted = {m["controller/action"] for m in metrics} - {0.0}
    assert acted == {1.0, 3.0} if "then" in kind else len(acted) == 1
    broken = replace(whole, run_dir=str(tmp_path / "broken"))
    for steps in (3, 4, 5, 6, 7):
        last, _ = train(replace(broken, update=UpdateSpec(steps)))
    assert last.digest == result.digest
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "whole")
    assert orders(broken) == orders(whole)


def always(*actions: str, **options: Any) -> ControllerSpec:
    """Out of band from the first step on, whatever is measured but 0."""
    return ControllerSpec(ceiling=1e-9, patience=1, actions=actions, **options)  # type: ignore[arg-type]


def test_layers_kept_in_bf16_leave_no_mismatch_where_they_were_all_of_it(
    make_spec: MakeSpec, train: Train, outcome: Outcome
) -> None:
    """BF16 trainer, FP8 engine: with every layer in BF16 the engine computes what the trainer does, bit for bit, and training
    goes on from the same masters and moments."""
    spec = make_spec(
        "fp8-rollout", controller=always("keep_layers", keep_layers=(0, 1)), update=UpdateSpec(4)
    )
    _, metrics = train(spec)
    assert [m[MEAN] == 0 for m in metrics] == [False, True, True, True]
    assert [m["controller/action"] for m in metrics] == [3, 0, 0, 0]
    assert all(m["sync/changed_codes_pct"] > 0 for m in metrics), (
        "the optimizer still moves what is published"
    )
    assert [m["sync/version"] for m in metrics] == [3, 4, 5, 6]
    assert len(orders(spec)) == 1 and "layers 0, 1 in BF16" in orders(spec)[0]["done"]


def test_the_first_and_the_last_layer_are_kept_where_none_is_named(
    make_spec: MakeSpec, open_trainer: Open
) -> None:
    with open_trainer(make_spec("fp8-rollout", controller=always("keep_layers"))) as trainer:
        trainer.begin()
        trainer.step()
        assert trainer.parts.flows.rollout.keep_bf16 == {0, 1}
        assert trainer.parts.flows.trainer.keep_bf16 == frozenset() == trainer.parts.decoder.flow.keep_bf16
        assert trainer.control.keep_layers() is None, "nothing is left to keep"


def test_a_unified_flow_is_still_unified_after_its_layers_changed(
    make_spec: MakeSpec, open_trainer: Open
) -> None:
    """New decoders on both sides over the same masters; the reference policy gets the new flow too."""
    spec = make_spec("fp8", "fp8", algorithm=AlgorithmSpec("grpo", kl_coef=0.1))
    with open_trainer(spec) as trainer:
        trainer.begin()
        trainer.step()
        before, masters = trainer.parts.decoder, dict(trainer.parts.decoder.named_parameters())
        moments = {n: t.clone() for n, t in trainer.optimizer.state_tensors().items()}
        flow = replace(trainer.parts.flows.trainer, keep_bf16=frozenset({1}))
        use_flows(trainer, FlowPair(flow, flow))
        trainer.publish(must_change=False)
        after = trainer.parts.decoder
        assert after is not before and trainer.publisher.unified and trainer.parts.engine.decoder is after
        assert all(masters[n] is p for n, p in after.named_parameters())
        assert all(torch.equal(moments[n], t) for n, t in trainer.optimizer.state_tensors().items())
        assert trainer.updater.reference.flow == flow
        metrics = trainer.step()
        assert metrics["mismatch/max_abs_dlogp"] == 0 and metrics["policy/kl_to_reference"] > 0
        changed = [not torch.equal(moments[n], t) for n, t in trainer.optimizer.state_tensors().items()]
        assert any(changed), "the optimizer moves the masters of the new decoder"


def test_republishing_ships_the_same_weights_again(make_spec: MakeSpec, train: Train) -> None:
    spec = make_spec("fp8-rollout", controller=always("republish"), update=UpdateSpec(2))
    train(spec)
    shipped = receipts(spec)
    assert [(r["step"], r["version"]) for r in shipped] == [(0, 1), (1, 2), (1, 3), (2, 4)]
    assert shipped[1]["digest"] == shipped[2]["digest"] and shipped[2]["changed_pct"] == 0.0
    assert [o["done"] for o in orders(spec)] == ["weights published again as v3"]


def test_recalibration_is_passed_over_without_an_fp8_cache(make_spec: MakeSpec, train: Train) -> None:
    spec = make_spec("fp8-rollout", controller=always("recalibrate", "republish"), update=UpdateSpec(1))
    train(spec)
    assert [(o["action"], o["carried_out"]) for o in orders(spec)] == [
        ("recalibrate", False),
        ("republish", True),
    ]


def test_the_end_of_the_ladder_is_the_end_of_the_run(
    make_spec: MakeSpec, train: Train, tmp_path: Path
) -> None:
    """The step is in the log, the message has the history, and the run goes on once its band is wider."""
    told = always("republish", "stop", cooldown={"republish": 0})
    spec = make_spec("fp8-rollout", controller=told, update=UpdateSpec(4), checkpoint=CheckpointSpec(every=1))
    with pytest.raises(ContractError, match=r"tried: step 1 republish \(weights published again as v3\)"):
        train(spec)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["controller/action"] for line in lines] == [4.0, 5.0]
    assert (tmp_path / "run" / "report.html").exists()
    result, metrics = train(replace(spec, controller=ControllerSpec("off")))
    assert result.step == 4 and [m["step"] for m in metrics] == [1, 2, 3, 4]


def test_a_layer_that_is_not_there_is_refused_at_the_start(make_spec: MakeSpec, train: Train) -> None:
    with pytest.raises(ConfigError, match="the model has layers 0 to 1"):
        train(make_spec("fp8-rollout", controller=ControllerSpec(keep_layers=(0, 2))))


@pytest.mark.parametrize("planted", [False, True])
def test_the_floor_is_zero_by_the_row_law_and_more_without_it(
    make_spec: MakeSpec, open_trainer: Open, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """An activation scale that depends on the batch is what the floor is for."""
    if planted:
        monkeypatch.setattr("lockstep.trainer.setup.choose_kernels", lambda *_: PerTensorActivation())
    with open_trainer(make_spec("fp8")) as trainer:
        trainer.begin()
        samples, _ = trainer.sample()
        found = self_mismatch(trainer.updater, samples, None)
    assert found.tokens > 20 and (found.max_abs > 0) == planted


def test_the_floor_is_measured_once(make_spec: MakeSpec, open_trainer: Open) -> None:
    with open_trainer(make_spec("fp8-rollout")) as trainer:
        trainer.begin()
        assert not trainer.control.controller.measured
        trainer.step()
        assert trainer.progress.controller["floor"] == {MEAN: 0.0}
