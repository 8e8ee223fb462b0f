"""The controller as a pure state machine: bands, patience, the order of actions, cool-downs, and what it remembers."""

from __future__ import annotations

import json
import math
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.correction.controller import CODES, Controller, Order
from lockstep.correction.controller_spec import Action, ControllerSpec

MEAN, P99 = "mismatch/mean_abs_dlogp", "mismatch/p99_abs_dlogp"
ALL: tuple[Action, ...] = get_args(Action)
NONE = dict.fromkeys(ALL, 0)


def spec(**options: Any) -> ControllerSpec:
    """Two steps of baseline, a band of 2, no waiting but for patience."""
    return ControllerSpec(**{"baseline_steps": 2, "band": 2.0, "patience": 2, "cooldown": NONE, **options})


def play(
    controller: Controller,
    steps: list[dict[str, float] | float],
    useless: tuple[str, ...] = (),
    start: int = 1,
) -> list[list[str]]:
    """Actions ordered at every step; the `useless` ones are of no use to the run."""
    ordered = []
    for step, given_metrics in enumerate(steps, start):
        metrics = given_metrics if isinstance(given_metrics, dict) else {MEAN: given_metrics}
        order, here = controller.observe(step, metrics), []
        while order is not None:
            here.append(order.action)
            order = controller.report(order, None if order.action in useless else "done", metrics)
        ordered.append(here)
    return ordered


def test_inside_the_band_nothing_happens() -> None:
    controller = Controller(spec())
    assert play(controller, [0.1, 0.1, 0.2, 0.19, 0.0, 0.2]) == [[]] * 6
    assert controller.limit(MEAN) == 0.2 and controller.state.history == []


def test_the_band_comes_from_floor_and_first_steps() -> None:
    controller = Controller(spec(baseline_steps=3, band=3.0))
    controller.measure_floor({MEAN: 0.01, "other": 5.0})
    assert controller.measured and controller.limit(MEAN) == math.inf
    play(controller, [0.02, 0.9, 0.03])
    assert controller.limit(MEAN) == pytest.approx(0.01 + 3 * 0.02), (
        "the median: one odd step does not widen it"
    )
    play(controller, [0.05] * 5, start=4)
    assert controller.limit(MEAN) == pytest.approx(0.07), "later steps do not move it"


def test_without_a_normal_level_any_difference_is_out_of_band() -> None:
    """`on` in an exact flow: floor 0, first steps 0."""
    controller = Controller(spec(patience=1))
    controller.measure_floor({})
    assert play(controller, [0.0, 0.0, 0.0, 1e-12], ("tighten",)) == [[], [], [], ["tighten", "recalibrate"]]


def test_the_ceiling_holds_from_the_first_step_on() -> None:
    controller = Controller(spec(ceiling=0.05, patience=1))
    assert play(controller, [0.06])[0] == ["tighten"]
    assert play(controller, [0.04, 0.03, 0.051], start=2) == [[], [], ["tighten"]]
    assert controller.limit(MEAN) == 0.05


def test_patience() -> None:
    controller = Controller(spec(patience=3))
    assert play(controller, [0.1, 0.1, 0.3, 0.3, 0.1, 0.3, 0.3, 0.3]) == [[]] * 7 + [["tighten"]]
    assert controller.state.history[0]["step"] == 8


def test_one_action_at_a_time_in_order_and_at_last_the_end() -> None:
    controller = Controller(spec())
    acted = play(controller, [0.1, 0.1] + [0.5] * 10)
    assert acted == [
        [],
        [],
        [],
        ["tighten"],
        [],
        ["recalibrate"],
        [],
        ["keep_layers"],
        [],
        ["republish"],
        [],
        ["stop"],
    ]
    assert play(controller, [0.5] * 4, start=13) == [[]] * 4, "nothing is left to try"
    assert controller.told().count("step ") == 4 and "step 6 recalibrate (done)" in controller.told()


def test_each_action_has_its_cool_down() -> None:
    waits = {"tighten": 3, "recalibrate": 1, "keep_layers": 2, "republish": 0}
    acted = play(Controller(spec(cooldown=waits)), [0.1, 0.1] + [0.5] * 20)
    steps = {a[0]: s for s, a in enumerate(acted, 1) if a}
    assert steps == {"tighten": 4, "recalibrate": 4 + 3 + 2, "keep_layers": 12, "republish": 16, "stop": 18}


def test_what_is_of_no_use_is_passed_over_at_once() -> None:
    acted = play(Controller(spec()), [0.1, 0.1] + [0.5] * 4, ("tighten", "keep_layers"))
    assert acted[3] == ["tighten", "recalibrate"] and acted[5] == ["keep_layers", "republish"]


def test_back_in_band_the_episode_is_over_and_the_next_one_starts_from_the_top() -> None:
    controller = Controller(spec())
    first = play(controller, [0.1, 0.1, 0.5, 0.5, 0.5, 0.1, 0.5, 0.5])
    assert first[3] == ["tighten"] and first[7] == ["recalibrate"], "one step in band is no recovery"
    again = play(controller, [0.1, 0.1, 0.5, 0.5], start=9)
    assert again == [[], [], [], ["tighten"]]


@pytest.mark.parametrize(
    ("signal", "evidence"),
    [
        ({"kv/saturation_pct": 0.5}, "kv/saturation_pct is 0.5, allowed is 0.1"),
        ({"kv/scale_drift": 0.8}, "kv/scale_drift is 0.8, allowed is 0.5"),
        ({"kv/scale_drift": math.nan}, "kv/scale_drift is nan, allowed is 0.5"),
        ({"kv/saturation_pct": 0.1, "kv/scale_drift": 0.5}, ""),
        ({}, ""),
    ],
)
def test_the_order_follows_the_evidence(signal: dict[str, float], evidence: str) -> None:
    controller = Controller(spec())
    bad = {MEAN: 0.5, **signal}
    acted = play(controller, [0.1, 0.1, bad, bad, bad, bad])
    expected = ["recalibrate", "tighten"] if evidence else ["tighten", "recalibrate"]
    assert [a[0] for a in acted if a] == expected
    assert evidence in controller.state.history[0]["reason"]


def test_evidence_alone_is_no_reason_to_act() -> None:
    saturated = {MEAN: 0.1, "kv/saturation_pct": 50.0}
    assert play(Controller(spec()), [saturated] * 8) == [[]] * 8


def test_evidence_does_not_allow_what_the_spec_does_not() -> None:
    controller = Controller(spec(actions=("republish", "stop")))
    bad = {MEAN: 0.5, "kv/saturation_pct": 50.0}
    assert play(controller, [0.1, 0.1, bad, bad])[3] == ["republish"]
    assert "kv/" not in controller.state.history[0]["reason"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_waited_for_nor_learnt_from(value: float) -> None:
    controller = Controller(spec(patience=5))
    assert play(controller, [value])[0] == ["tighten"]
    assert controller.state.first == {MEAN: []}


def test_the_worst_of_several_metrics_is_named() -> None:
    controller = Controller(spec(metrics=(MEAN, P99)))
    good, bad = {MEAN: 0.1, P99: 0.5}, {MEAN: 0.15, P99: 3.0}
    play(controller, [good, good, bad, bad])
    assert controller.state.history[0]["reason"] == f"{P99} is 3, its band ends at 1, 2 steps in a row"


def test_a_step_that_compared_nothing_changes_nothing() -> None:
    one, two = Controller(spec()), Controller(spec())
    steps: list[dict[str, float] | float] = [0.1, 0.1, 0.5, 0.5, 0.5]
    play(one, steps)
    for step in steps:
        play(two, [step, {"mismatch/tokens": 0.0}])
    first, second = one.to_dict(), two.to_dict()
    assert first.pop("history")[0]["action"] == second.pop("history")[0]["action"] and first == second


def test_metrics_of_a_step() -> None:
    controller = Controller(spec())
    assert controller.metrics(None) == {"controller/action": 0.0, "controller/out_of_band": 0.0}
    play(controller, [0.1, 0.1, 0.5])
    assert controller.metrics(None) == {
        "controller/action": 0.0,
        "controller/out_of_band": 1.0,
        "controller/band": 0.2,
    }
    order = Order("keep_layers", 4, MEAN, 0.5, 0.2, 2)
    assert controller.metrics(order)["controller/action"] == CODES["keep_layers"] == 3.0
    assert set(CODES) == set(ALL)


VALUE = st.one_of(st.floats(0, 1), st.just(math.nan))
STEP = st.fixed_dictionaries(
    {},
    optional={
        MEAN: VALUE,
        P99: VALUE,
        "kv/saturation_pct": st.floats(0, 1),
        "kv/scale_drift": st.floats(0, 1),
    },
)
OPTIONS = st.fixed_dictionaries(
    {
        "metrics": st.sampled_from([(MEAN,), (MEAN, P99)]),
        "baseline_steps": st.integers(1, 4),
        "patience": st.integers(1, 3),
        "band": st.floats(1, 3),
        "ceiling": st.sampled_from([0.0, 0.5]),
        "cooldown": st.dictionaries(st.sampled_from(ALL), st.integers(0, 3)),
    }
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(OPTIONS, st.lists(STEP, max_size=25), st.integers(0, 25), st.sets(st.sampled_from(ALL[:-1])))
def test_resuming_from_its_state_decides_the_same(
    options: dict[str, Any], steps: list[dict[str, float]], cut: int, useless: set[str]
) -> None:
    """The state survives JSON, as in a checkpoint, at any step, and the rest goes on as if nothing had happened."""
    whole, before = Controller(ControllerSpec(**options)), Controller(ControllerSpec(**options))
    acted = play(whole, [*steps], tuple(useless))
    head = play(before, [*steps[:cut]], tuple(useless))
    after = Controller(ControllerSpec(**options))
    after.load(json.loads(json.dumps(before.to_dict())))
    assert head + play(after, [*steps[cut:]], tuple(useless), start=cut + 1) == acted
    assert json.dumps(after.to_dict()) == json.dumps(whole.to_dict())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(OPTIONS, st.lists(STEP, max_size=30))
def test_no_action_without_a_value_out_of_band_and_none_twice_in_an_episode(
    options: dict[str, Any], steps: list[dict[str, float]]
) -> None:
    controller = Controller(ControllerSpec(**options))
    episode: list[str] = []
    inside = waiting = 0
    for step, metrics in enumerate(steps, 1):
        seen = {n: metrics[n] for n in options["metrics"] if n in metrics}
        limits = {n: controller.limit(n) for n in seen}
        wrong = [n for n in seen if not (math.isfinite(seen[n]) and seen[n] <= limits[n])]
        order = controller.observe(step, metrics)
        if seen:
            inside = 0 if wrong else inside + 1
            episode = [] if inside >= options["patience"] else episode
        if order is not None:
            assert order.metric in wrong and order.limit == limits[order.metric] and waiting == 0
            assert order.action not in episode
            episode.append(order.action)
            assert controller.report(order, "done", metrics) is None
            waiting = controller.spec.wait(order.action)
            inside = 0
        elif seen:
            waiting = max(waiting - 1, 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"baseline_steps": 0}, "start at 1"),
        ({"patience": 0}, "start at 1"),
        ({"band": 0.5}, "at least 1"),
        ({"band": math.nan}, "at least 1"),
        ({"ceiling": -1.0}, "ceiling"),
        ({"kv_scale_drift": math.inf}, "kv_scale_drift"),
        ({"metrics": ()}, "at least one"),
        ({"metrics": (MEAN, MEAN)}, "once"),
        ({"actions": ("tighten", "tighten")}, "once"),
        ({"actions": ("stop", "tighten")}, "nothing comes after stop"),
        ({"cooldown": {"tigthen": 1}}, "no action 'tigthen'"),
        ({"cooldown": {"tighten": -1}}, "negative"),
        ({"keep_layers": (1, 0)}, "ascending"),
        ({"keep_layers": (-1,)}, "from 0"),
    ],
)
def test_specs_that_make_no_sense_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ControllerSpec(**options)


def test_off_in_exact_flows_unless_asked_for() -> None:
    answers = {e: [ControllerSpec(e).active(unified=u) for u in (True, False)] for e in ("auto", "on", "off")}  # type: ignore[arg-type]
    assert answers == {"auto": [False, True], "on": [True, True], "off": [False, False]}
