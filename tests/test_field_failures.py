"""docs/field-failures.md and the tests that carry a case number say the same."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def case_numbers() -> dict[int, set[str]]:
    """Test files by the case numbers in the names of their tests."""
    found: dict[int, set[str]] = defaultdict(set)
    for file in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"def (test_\w+)\(", file.read_text(encoding="utf-8")):
            for numbers in re.findall(r"case((?:_\d+)+)", name):
                for number in re.findall(r"\d+", numbers):
                    found[int(number)].add(file.relative_to(ROOT).as_posix())
    return found


def test_the_table_names_every_case_and_every_file_of_its_tests() -> None:
    table = (ROOT / "docs" / "field-failures.md").read_text(encoding="utf-8")
    rows = [line for line in table.splitlines() if re.match(r"\| \d+ \|", line)]
    said = {int(row.split("|")[1]): set(re.findall(r"\(\.\./(tests/[\w/]+\.py)\)", row)) for row in rows}
    assert said == dict(case_numbers())
    assert len(said) >= 44
