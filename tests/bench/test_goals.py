"""Result files and goals: complete, merged, and never half written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.bench import attention, kernels_check
from lockstep.bench.check import Check
from lockstep.bench.goals import Goal, passed, read_goals, write_goals
from lockstep.bench.machine import Stamp
from lockstep.bench.results import rounded, write_json, write_results
from lockstep.errors import DataError

STAMP = Stamp("H100", {"torch": "2.11.0"}, "abc123", "lockstep bench attention --goals", {"X": "0"})


def test_an_entry_is_what_the_plan_asks_for(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "goals.json"
    write_goals([Goal("C7a", 0.87, 0.85, "of copy bandwidth")], STAMP, file)
    assert json.loads(file.read_text(encoding="utf-8")) == {
        "C7a": {
            "value": 0.87,
            "goal": 0.85,
            "unit": "of copy bandwidth",
            "higher_is_better": True,
            "card": "H100",
            "versions": {"torch": "2.11.0"},
            "commit": "abc123",
            "command": "lockstep bench attention --goals",
        }
    }
    assert [p.name for p in file.parent.iterdir()] == ["goals.json"]


def test_entries_of_other_commands_stay(tmp_path: Path) -> None:
    file = tmp_path / "goals.json"
    write_goals(
        [Goal("C10", 3.0, 5.0, "ms", higher_is_better=False), Goal("C2a", 0.0, 1.0, "pass")], STAMP, file
    )
    later = Stamp("H200", {}, "def", "lockstep bench check --goals")
    write_goals([passed("C2a", True), Goal("C7b", 0.5, 0.6, "of copy bandwidth")], later, file)
    found = read_goals(file)
    assert list(found) == ["C2a", "C7b", "C10"]
    assert (found["C2a"]["value"], found["C2a"]["goal"], found["C2a"]["card"]) == (1.0, 1.0, "H200")
    assert (found["C10"]["value"], found["C10"]["card"]) == (3.0, "H100")


def test_what_is_reached() -> None:
    assert Goal("a", 1.4, 1.4, "x").reached and not Goal("a", 1.39, 1.4, "x").reached
    assert Goal("a", 49.0, 50.0, "ms", higher_is_better=False).reached
    assert Goal("C7b", 0.5, 0.6, "x").line() == "goal C7b: 0.5 x, goal 0.6: missed"


@pytest.mark.parametrize("text", ["{", "[]", '{"C1": 3}', "\xff"])
def test_a_file_of_something_else_is_not_overwritten(text: str, tmp_path: Path) -> None:
    file = tmp_path / "goals.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match="goals.json"):
        write_goals([passed("C2a", True)], STAMP, file)
    assert file.read_bytes() == text.encode("latin-1")


def test_a_document_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_json(file, {"a": 1})
    with pytest.raises(ValueError):
        write_json(file, {"a": float("nan")})
    assert json.loads(file.read_text(encoding="utf-8")) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_result_file_says_where_it_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "gemm.json"
    write_results(file, "gemm", STAMP, {"copy_gbps": 3000.0}, [{"M": 64, "ms": rounded(0.0123456)}])
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["rows"] == [{"M": 64, "ms": 0.01235}]
    assert {found[key] for key in ("benchmark", "card", "commit")} == {"gemm", "H100", "abc123"}
    assert found["versions"] == {"torch": "2.11.0"} and found["settings"] == {"X": "0"}


def record(
    kind: str, batch: int, length: int, kv: str, share: float, name: str = "qwen3-8b"
) -> dict[str, object]:
    return {
        "kind": kind,
        "batch": batch,
        "length": length,
        "kv": kv,
        "share_of_copy": share,
        "shape": {"name": name},
    }


def test_decode_attention_has_two_goals() -> None:
    records = [
        record("prefill", 64, 8192, "fp8", 0.1),
        record("decode", 64, 8192, "bf16", 0.95),
        record("decode", 64, 8192, "fp8", 0.86),
        record("decode", 8, 16_384, "fp8", 0.55),
        record("decode", 64, 2048, "fp8", 0.2),
        record("decode", 64, 8192, "fp8", 0.3, "smollm2-135m"),
    ]
    goals = attention.goals(records)
    assert [(g.id, g.value, g.goal, g.reached) for g in goals] == [
        ("C7a", 0.86, 0.85, True),
        ("C7b", 0.55, 0.60, False),
    ]


def test_attention_forward_and_gradient_have_a_goal_each() -> None:
    shape = {"name": "qwen3-8b"}
    prefill = {"kind": "prefill", "batch": 2, "length": 8192, "shape": shape}
    backward = {"kind": "backward", "batch": 2, "length": 8192, "pack": "2 x 8192", "shape": shape}
    records = [
        prefill | {"kv": "fp8", "ratio": {"cudnn": 0.5}},
        prefill | {"kv": "bf16", "ratio": {"cudnn": 0.82}},
        backward | {"kv": "bf16", "ratio": {"deterministic": 0.7, "fastest": 0.97}},
        backward | {"kv": "fp8", "ratio": {"deterministic": 0.7, "fastest": 0.7}},
        backward | {"kv": "bf16", "pack": "unequal", "ratio": {}},
    ]
    goals = attention.goals(records)
    assert [(g.id, g.value, g.goal) for g in goals] == [("D8a", 0.82, 0.8), ("D8b", 0.97, 0.9)]


def test_one_failed_comparison_fails_the_goal() -> None:
    good = Check("rope", "q", "SQNR dB", 70.0, 60.0)
    bad = Check("swiglu", "N 130", "same bits", 0.9999999, 1.0)
    nan = Check("swiglu", "N 130", "SQNR dB", float("nan"), 1.0)
    assert kernels_check.goals([good])[0].value == 1.0
    for wrong in (bad, nan):
        assert kernels_check.goals([good, wrong])[0].value == 0.0
        assert "1 of 2 comparisons FAILED: swiglu" in kernels_check.verdict([good, wrong])
        assert "swiglu" in "\n".join(kernels_check.summary([good, wrong]))
    assert kernels_check.records([nan])[0]["value"] is None
