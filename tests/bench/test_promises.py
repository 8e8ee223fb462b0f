"""The list of promises: every entry of `goals.json` belongs to one, every command exists, and the page is that table."""

from pathlib import Path

import typer.main

from lockstep.bench.goals import read_goals
from lockstep.bench.promises import PROMISES, table
from lockstep.cli.main import app

ROOT = Path(__file__).parents[2]


def test_every_entry_belongs_to_one_promise() -> None:
    ids = [id for promise in PROMISES for id in promise.ids]
    assert len(ids) == len(set(ids))
    assert set(read_goals(ROOT / "benchmarks" / "results" / "goals.json")) <= set(ids)


def test_every_command_exists_and_writes_goals() -> None:
    root = typer.main.get_command(app)
    for promise in PROMISES:
        command, words = root, promise.command.split()
        if words[0] == "python":
            assert (ROOT / words[1]).is_file() and "--goals" in words, promise.command
            continue
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
        options = {option for parameter in command.params for option in parameter.opts}
        asked = {word for word in words if word.startswith("--")}
        assert "--goals" in asked <= options, promise.command


def test_the_table_says_what_was_reached_and_what_was_not_measured() -> None:
    entry = {
        "value": 1.5,
        "goal": 1.4,
        "unit": "x",
        "higher_is_better": True,
        "card": "NVIDIA H100 80GB HBM3",
    }
    rows = {
        row.split("|")[1].strip(): row
        for row in table({"C3a": entry, "C6": {**entry, "higher_is_better": False}})
    }
    assert "at least 1.4 x | 1.5 | reached | H100 |" in rows["C3a"]
    assert "at most 1.4 x | 1.5 | missed" in rows["C6"]
    assert "not measured" in rows["C4a"]


def test_the_page_is_the_table() -> None:
    page = (ROOT / "docs" / "goals.md").read_text(encoding="utf-8")
    lines = table(read_goals(ROOT / "benchmarks" / "results" / "goals.json"))
    assert "\n".join(lines) in page, "run: lockstep bench goals, and put its output into docs/goals.md"
