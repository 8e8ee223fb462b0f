"""docs/coming-from.md and docs/on-a-gpu.md name keys that exist, and their configurations load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.config.load import load_run
from lockstep.config.plan import budget
from lockstep.models.spec import PRESETS
from lockstep.observe.glossary import GLOSSARY
from lockstep.trainer.spec import RunSpec
from lockstep.trainer.workload import Card

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("coming-from.md", "on-a-gpu.md")


def known_keys() -> set[str]:
    """Of docs/configuration.md, which `test_reference.py` holds against the specs."""
    section, found = "", set()
    for line in (DOCS / "configuration.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = "" if line == "## The run" else line.removeprefix("## ") + "."
        elif key := re.match(r"\| `([a-z_0-9]+)` \|", line):
            found.add(section + key[1])
    return found


def rows(page: str) -> list[list[str]]:
    """Cells of all tables, headings left out."""
    text = (DOCS / page).read_text(encoding="utf-8")
    tables = re.findall(r"^\|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
    return [re.split(r" \| ?", line.strip("| ")) for table in tables for line in table.splitlines()]


def runs(page: str, folder: Path) -> list[RunSpec]:
    """All configurations, loaded."""
    found = []
    for block in re.findall(r"^```yaml\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S):
        (folder / "run.yaml").write_text(block, encoding="utf-8")
        found.append(load_run(folder / "run.yaml", []))
    return found


@pytest.mark.parametrize(("page", "column", "least"), [("coming-from.md", 1, 60), ("on-a-gpu.md", 0, 10)])
def test_every_key_exists(page: str, column: int, least: int) -> None:
    known = known_keys()
    named = [key for cells in rows(page) for key in re.findall(r"`([^`]+)`", cells[column])]
    assert len(named) >= least and "update.steps" in known and "rewards" in known
    assert [key for key in named if key not in known] == []


@pytest.mark.parametrize("page", PAGES)
def test_other_keys_in_the_text_exist_too(page: str) -> None:
    known = known_keys()
    sections = "|".join(sorted({key.partition(".")[0] for key in known if "." in key}))
    text = re.sub(r"^\|.*$", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.M)
    named = re.findall(rf"`((?:{sections})\.[a-z_0-9]+)(?::[^`]*)?`", text)
    assert named and [key for key in named if key not in known] == []


@pytest.mark.parametrize("page", PAGES)
def test_configurations_load(page: str, tmp_path: Path) -> None:
    found = runs(page, tmp_path)
    assert found and all(run.update.steps == 200 for run in found)


def test_the_run_to_start_from_fits(tmp_path: Path) -> None:
    """With the memory that the page says."""
    text = (DOCS / "on-a-gpu.md").read_text(encoding="utf-8")
    found = budget(runs("on-a-gpu.md", tmp_path)[0], Card(80.0), model=PRESETS["qwen3-1.7b"])
    assert found.fits and f"{found.peak / 1e9:.0f} GB at most" in text


def test_metrics_exist() -> None:
    text = (DOCS / "on-a-gpu.md").read_text(encoding="utf-8")
    names = re.findall(r"`((?:time|data|mismatch)/[^`]+)`", text)
    assert len(names) >= 4 and [name for name in names if name not in GLOSSARY] == []
