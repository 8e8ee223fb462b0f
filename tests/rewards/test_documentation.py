"""What docs/rewards-and-data.md shows is what runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from lockstep.data.sft import targets
from lockstep.data.spec import COMMON_ARGS, SOURCE_ARGS, DataSpec
from lockstep.rewards.evaluate import Rewards
from lockstep.rewards.load import BUILTINS
from lockstep.rewards.spec import RewardSpec

PAGE = Path(__file__).parents[2] / "docs" / "rewards-and-data.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_functions_are_rewards(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(blocks("python")[0])
    specs = [
        RewardSpec(f"{tmp_path}/my_rewards.py:brevity", weight=0.2, args={"target": 2}),
        RewardSpec(f"{tmp_path}/my_rewards.py:judged"),
    ]
    columns = {"answer": ["a", "b"], "topic": ["essay", "sum"]}
    with Rewards(specs) as rewards:
        batch = rewards.score(["q", "q"], ["an a", "b"], [[1] * 4, [1]], columns)
    assert batch.parts == {"brevity": [0.5, 1.0], "judged": [1.0, None]}
    assert batch.total == [pytest.approx(1.1), pytest.approx(0.2)]


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("python")[1], str(PAGE), "exec"), {})
    assert "rewards/last_number/mean" in capsys.readouterr().out


def test_the_configurations_are_valid() -> None:
    for text in blocks("yaml"):
        document = yaml.safe_load(text)
        TypeAdapter(DataSpec).validate_python(document["data"])
        TypeAdapter(tuple[RewardSpec, ...]).validate_python(document.get("rewards", []))


def test_the_rows_are_valid(tmp_path: Path) -> None:
    for number, text in enumerate(blocks("json")):
        for line in text.splitlines():
            json.loads(line)
        path = tmp_path / f"{number}.jsonl"
        path.write_text(text)
        assert len(targets(DataSpec("jsonl", path=str(path)))) == 2


def test_every_builtin_and_every_option_of_a_source_is_there() -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = {
        *BUILTINS,
        "verl",
        *SOURCE_ARGS,
        *COMMON_ARGS,
        *(a for args in SOURCE_ARGS.values() for a in args),
    }
    assert sorted(name for name in names if f"`{name}" not in page) == []
