"""Targets of the warm start: answers, completions, conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.data.sft import Target, targets
from lockstep.data.spec import DataSpec
from lockstep.errors import DataError

USER = {"role": "user", "content": "2+2?"}
REPLY = {"role": "assistant", "content": "4"}


def read(tmp_path: Path, *rows: Any, **spec: Any) -> list[Target]:
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return targets(DataSpec("jsonl", path=str(path), **spec))


def test_arithmetic_targets_are_the_answers() -> None:
    found = targets(DataSpec("arithmetic", args={"digits": 2, "size": 20, "template": "{a}+{b}="}), seed=5)
    assert len(found) == 20 and len({t.prompt for t in found if isinstance(t.prompt, str)}) == 20
    for target in found:
        assert isinstance(target.prompt, str)
        a, b = target.prompt.rstrip("=").split("+")
        assert target.completion == str(int(a) + int(b))


def test_completions_and_conversations(tmp_path: Path) -> None:
    rows = [
        {"prompt": "2+2=", "completion": " 4"},
        {"prompt": [USER], "completion": [REPLY]},
        {"messages": [{"role": "system", "content": "s"}, USER, REPLY]},
        {"prompt": "q", "answer": 7},
    ]
    assert read(tmp_path, *rows) == [
        Target("2+2=", " 4", 0),
        Target([USER], "4", 1),
        Target([{"role": "system", "content": "s"}, USER], "4", 2),
        Target("q", "7", 3),
    ]
    (shaped,) = read(tmp_path, {"messages": [USER, REPLY]}, args={"system": "Be brief."})
    assert shaped.prompt == [{"role": "system", "content": "Be brief."}, USER]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"prompt": "q"}, "no text to imitate"),
        ({"prompt": "q", "completion": "  "}, "completion is empty"),
        ({"prompt": "q", "completion": None}, "column 'completion' is null"),
        ({"prompt": "q", "completion": [USER]}, "doesn't end in one assistant message"),
        ({"messages": [USER]}, "messages is an empty list"),
        ({"messages": [REPLY]}, "messages is an empty list"),
        ({"messages": [USER, REPLY, USER]}, "nothing to answer"),
        ({"messages": [USER, REPLY, REPLY]}, "nothing to answer"),
        ({"messages": [USER, {"role": "asistant", "content": "x"}]}, "did you mean assistant"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, bad: Any, says: str) -> None:
    with pytest.raises(DataError, match=rf"sft\.jsonl:2: .*{says}"):
        read(tmp_path, {"prompt": "q", "answer": "a"}, bad)
