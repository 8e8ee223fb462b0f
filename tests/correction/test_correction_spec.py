"""Presets and options: what they resolve to, what they refuse, and that the documentation says the same."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from lockstep.correction.presets import (
    GEOMETRIC_MIS,
    ICEPOP,
    NONE,
    PRESETS,
    TOKEN_TIS,
    Correction,
)
from lockstep.correction.spec import CorrectionSpec, resolve
from lockstep.correction.tighten import WIDEST, tighten

DOCS = Path(__file__).parents[2] / "docs" / "mismatch.md"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_by_itself_is_what_it_says(name: Any) -> None:
    assert resolve(CorrectionSpec(name)) == PRESETS[name]
    assert PRESETS[name].active is (name != "none")


def test_the_published_values() -> None:
    """verl's and the papers': a change here is a change of what the names mean."""
    assert Correction(rollout_is="token", rollout_is_threshold=2.0) == TOKEN_TIS
    assert (ICEPOP.rollout_rs_threshold_lower, ICEPOP.rollout_rs_threshold) == (0.5, 5.0)
    assert ICEPOP.rollout_is == "token" and math.isinf(ICEPOP.rollout_is_threshold)
    geometric = (0.999, 1.001, 1e-4)
    assert geometric == (
        GEOMETRIC_MIS.rollout_rs_threshold_lower,
        GEOMETRIC_MIS.rollout_rs_threshold,
        GEOMETRIC_MIS.rollout_token_veto_threshold,
    )
    assert PRESETS["sequence_mis"].rollout_rs_threshold_lower == 0.0 and PRESETS["bypass"].bypass_mode


def test_the_documented_table_is_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|", DOCS.read_text(), re.M)
    documented = {row[0]: tuple(cell.strip() for cell in row[1:]) for row in rows if row[0] in PRESETS}
    assert set(documented) == set(PRESETS)
    for name, (weights, rejection, more) in documented.items():
        c = PRESETS[name]  # type: ignore[index]
        upper = "" if math.isinf(c.rollout_is_threshold) else f", at most {c.rollout_is_threshold:g}"
        assert weights == ("-" if c.rollout_is == "none" else c.rollout_is + upper), name
        bounds = f"{c.rollout_rs}, {c.rollout_rs_threshold_lower:g} to {c.rollout_rs_threshold:g}"
        assert rejection == ("-" if c.rollout_rs == "none" else bounds), name
        others = [f"veto {c.rollout_token_veto_threshold:g}"] if c.rollout_token_veto_threshold else []
        others += [f"`ess_target` {c.ess_target:g}"] if c.ess_target else []
        others += ["`bypass_mode`"] if c.bypass_mode else []
        assert more == (", ".join(others) or "-"), name


@pytest.mark.parametrize(
    ("spec", "changed"),
    [
        (CorrectionSpec("token_tis", rollout_is_threshold=3.0), {"rollout_is_threshold": 3.0}),
        (CorrectionSpec("token_tis", rollout_is="geometric"), {"rollout_is": "geometric"}),
        (CorrectionSpec("ais", ess_target=0.5), {"ess_target": 0.5}),
        (
            CorrectionSpec("ais", rollout_is="none"),
            {"rollout_is": "none", "rollout_is_threshold": math.inf, "ess_target": 0.0},
        ),
        (
            CorrectionSpec("icepop", rollout_rs_threshold=4.0),
            {"rollout_rs_threshold": 4.0, "rollout_rs_threshold_lower": 0.25},
        ),
        (
            CorrectionSpec("icepop", rollout_rs_threshold=4.0, rollout_rs_threshold_lower=0.0),
            {"rollout_rs_threshold": 4.0, "rollout_rs_threshold_lower": 0.0},
        ),
        (CorrectionSpec("icepop", rollout_rs_threshold_lower=0.7), {"rollout_rs_threshold_lower": 0.7}),
        (CorrectionSpec("icepop", count_masked_tokens=True), {"count_masked_tokens": True}),
        (
            CorrectionSpec("icepop", rollout_rs="geometric"),
            {
                "rollout_rs": "geometric",
                "rollout_rs_threshold": 1.001,
                "rollout_rs_threshold_lower": 1 / 1.001,
            },
        ),
        (
            CorrectionSpec("geometric_mis", rollout_rs="none"),
            {"rollout_rs": "none", "rollout_rs_threshold": math.inf, "rollout_rs_threshold_lower": 0.0},
        ),
        (
            CorrectionSpec("geometric_mis", rollout_token_veto_threshold=0.0),
            {"rollout_token_veto_threshold": 0.0},
        ),
        (
            CorrectionSpec("none", rollout_rs="sequence"),
            {"rollout_rs": "sequence", "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 0.5},
        ),
        (CorrectionSpec("none", rollout_is="token"), {"rollout_is": "token", "rollout_is_threshold": 2.0}),
        (CorrectionSpec("bypass", bypass_mode=False), {"bypass_mode": False}),
        (
            CorrectionSpec("bypass", rollout_rs="geometric"),
            {
                "rollout_rs": "geometric",
                "rollout_rs_threshold": 1.001,
                "rollout_rs_threshold_lower": 1 / 1.001,
            },
        ),
    ],
    ids=str,
)
def test_explicit_fields_override_the_preset_and_nothing_else(
    spec: CorrectionSpec, changed: dict[str, Any]
) -> None:
    assert resolve(spec) == dataclasses.replace(PRESETS[spec.preset], **changed)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"preset": "tis"}, "unknown preset 'tis'; known: none, token_tis"),
        ({"preset": "bypass", "rollout_is": "token"}, "counted twice"),
        ({"preset": "token_tis", "bypass_mode": True}, "set rollout_is to none, or bypass_mode to false"),
        ({"preset": "ais", "bypass_mode": True}, "counted twice"),
        ({"rollout_is_threshold": 2.0}, "rollout_is_threshold has no effect without rollout_is"),
        ({"rollout_is_threshold_lower": 0.5}, "no effect without rollout_is"),
        ({"rollout_is_batch_normalize": True}, "no effect without rollout_is"),
        ({"preset": "geometric_mis", "ess_target": 0.9}, "ess_target has no effect without rollout_is"),
        ({"preset": "token_tis", "rollout_rs_threshold": 2.0}, "no effect without rollout_rs"),
        ({"rollout_rs_threshold_lower": 0.5}, "no effect without rollout_rs"),
        ({"preset": "token_tis", "count_masked_tokens": True}, "only with rollout_rs token"),
        ({"preset": "geometric_mis", "count_masked_tokens": True}, "rejected samples always leave"),
        ({"preset": "token_tis", "rollout_is_threshold": 0.5}, "at least 1, not 0.5"),
        ({"preset": "token_tis", "rollout_is_threshold": math.nan}, "at least 1"),
        ({"preset": "token_tis", "rollout_is_threshold_lower": 1.5}, "in 0..1, not 1.5"),
        ({"preset": "icepop", "rollout_rs_threshold": 0.9}, "at least 1, not 0.9"),
        ({"preset": "icepop", "rollout_rs_threshold_lower": -0.1}, "in 0..1, not -0.1"),
        ({"rollout_token_veto_threshold": 1.0}, "in 0..1 (0: off), not 1.0"),
        ({"preset": "ais", "ess_target": 1.0}, "below 1 (1 would leave no weights), not 1.0"),
        ({"preset": "ais", "ess_target": math.nan}, "below 1"),
    ],
)
def test_what_contradicts_itself_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        CorrectionSpec(**arguments)


def test_the_schema_validates_straight_into_the_dataclass() -> None:
    adapter = TypeAdapter(CorrectionSpec)
    assert adapter.validate_python({"preset": "icepop", "rollout_rs_threshold": 3}) == CorrectionSpec(
        "icepop", rollout_rs_threshold=3.0
    )
    for wrong in ({"preset": "tis"}, {"rollout_is": "tokens"}, {"threshold": 2}, {"rollout_is_threshold": 2}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


def test_what_has_to_be_known_before_the_update() -> None:
    rejects = {name for name, c in PRESETS.items() if c.rejects}
    assert rejects == {"sequence_mis", "geometric_mis", "geometric_token_tis", "icepop", "veto"}
    assert {name for name, c in PRESETS.items() if c.needs_batch} == {"ais"}
    assert not resolve(CorrectionSpec("icepop", count_masked_tokens=True)).rejects
    assert resolve(CorrectionSpec("token_tis", rollout_is_batch_normalize=True)).needs_batch


def test_the_ladder_of_tightening() -> None:
    steps, now = [], NONE
    while (found := tighten(now)) is not None:
        now, text = found
        steps.append((now, text))
    assert [c for c, _ in steps[:3]] == [TOKEN_TIS, ICEPOP, WIDEST]
    widths = [c.rollout_rs_threshold - 1 for c, _ in steps[2:]]
    assert widths == pytest.approx([0.016 / 2**i for i in range(7)]) and len(steps) == 9
    assert [1 - c.rollout_rs_threshold_lower for c, _ in steps[2:]] == pytest.approx(widths)
    assert [t for _, t in steps[:3]] == [
        f"correction tightened to {n}" for n in ("token_tis", "icepop", "geometric means in 0.984..1.016")
    ]
    assert "0.992..1.008" in steps[3][1]
    assert steps[6][0].rollout_rs_threshold == pytest.approx(GEOMETRIC_MIS.rollout_rs_threshold)


@pytest.mark.parametrize(
    ("start", "after"),
    [
        ("veto", "token_tis"),
        ("bypass", "token_tis"),
        ("sequence_tis", "icepop"),
        ("ais", "icepop"),
    ],
)
def test_tightening_from_anywhere(start: Any, after: Any) -> None:
    found = tighten(PRESETS[start])
    assert found is not None
    veto = max(PRESETS[start].rollout_token_veto_threshold, PRESETS[after].rollout_token_veto_threshold)
    assert found[0] == dataclasses.replace(PRESETS[after], rollout_token_veto_threshold=veto)
    assert after in found[1]


@pytest.mark.parametrize("start", ["sequence_mis", "icepop"])
def test_geometric_rejection_begins_wide(start: Any) -> None:
    found = tighten(PRESETS[start])
    assert found is not None and found[0] == WIDEST and "0.984..1.016" in found[1]


def test_tightening_keeps_a_stricter_veto() -> None:
    found = tighten(resolve(CorrectionSpec("icepop", rollout_token_veto_threshold=1e-2)))
    assert found is not None and found[0].rollout_token_veto_threshold == 1e-2
