"""docs/configuration.md is what the specs say."""

from __future__ import annotations

from pathlib import Path

from lockstep.config.explain import dotted
from lockstep.config.reference import docstrings, reference
from lockstep.config.schema import walk
from lockstep.trainer.spec import OptimSpec, RunSpec

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run `make docs`"


def test_every_key_is_on_the_page() -> None:
    page = reference()
    for path, _, _ in walk(RunSpec):
        assert f"| `{path[-1]}` |" in page, dotted(path)


def test_a_docstring_belongs_to_the_field_above_it() -> None:
    texts = docstrings(OptimSpec)
    assert texts["lr"] == "Peak learning rate." and "betas" not in texts


def test_a_spec_that_appears_twice_is_written_once() -> None:
    assert reference().count("The same keys as [`data`](#data).") == 2  # eval.data and warm_start.data
