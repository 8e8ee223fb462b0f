"""The named algorithms: what they resolve to, what they refuse, and that the documentation says the same."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from lockstep.algorithms import AlgorithmName, AlgorithmSpec, Recipe, resolve

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"
NAMES = get_args(AlgorithmName)


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_is_fully_concrete(name: AlgorithmName) -> None:
    recipe = resolve(AlgorithmSpec(name=name))
    assert all(getattr(recipe, field.name) is not None for field in dataclasses.fields(Recipe))
    assert not recipe.needs_reference and not recipe.needs_entropy


def test_the_documented_table_is_the_code() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| `(\w+)` \| [^|(]*\(`(\w+)`\) \| (\S+), (\S+) \| `(\w+)` \| (yes|no) \|",
        DOCS.read_text(),
        re.M,
    )
    documented = {row[0]: row[1:] for row in rows}
    assert set(documented) == set(NAMES)
    for name, (advantage, loss, low, high, denominator, dynamic) in documented.items():
        recipe = resolve(AlgorithmSpec(name=name))
        assert (recipe.advantage, recipe.loss, recipe.denominator) == (advantage, loss, denominator)
        assert (recipe.clip_low, recipe.clip_high) == (float(low), float(high))
        assert recipe.dynamic_sampling == (dynamic == "yes")


def test_deviations_replace_what_the_name_prescribes_and_nothing_else() -> None:
    spec = AlgorithmSpec(
        name="dapo",
        clip_high=0.5,
        advantage="group_mean",
        dynamic_sampling=False,
        overlong_buffer=64,
        kl_coef=0.01,
    )
    expected = dataclasses.replace(
        resolve(AlgorithmSpec(name="dapo")),
        clip_high=0.5,
        advantage="group_mean",
        dynamic_sampling=False,
        overlong_buffer=64,
        kl_coef=0.01,
    )
    assert resolve(spec) == expected
    assert resolve(spec).needs_reference


def test_only_the_sequence_ratio_needs_whole_samples() -> None:
    assert [name for name in NAMES if resolve(AlgorithmSpec(name=name)).needs_whole_samples] == ["gspo"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": "ppo"}, "unknown algorithm 'ppo'; known: grpo"),
        ({"clip_low": 0.0}, "clip_low"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_low": math.nan}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"clip_high": math.nan}, "clip_high"),
        ({"name": "rloo", "clip_high": 0.2}, "no importance ratio"),
        ({"overlong_buffer": -1}, "overlong_buffer"),
        ({"kl_coef": -0.1}, "kl_coef"),
        ({"kl_coef": math.inf}, "kl_coef"),
        ({"entropy_coef": math.nan}, "entropy_coef"),
        ({"advantage_eps": 0.0}, "advantage_eps"),
    ],
)
def test_bad_values_are_refused(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        AlgorithmSpec(**arguments)  # type: ignore[arg-type]


def test_the_schema_validates_straight_into_the_dataclass() -> None:
    adapter = TypeAdapter(AlgorithmSpec)
    assert adapter.validate_python({"name": "gspo", "clip_low": 1e-3}) == AlgorithmSpec(
        name="gspo", clip_low=1e-3
    )
    for wrong in ({"name": "ppo"}, {"denominator": "mean"}, {"clip": 0.2}, {"clip_low": 2.0}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)
