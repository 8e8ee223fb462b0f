"""The YAML dialect: no traps, and what is dumped is read back equal."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.dialect import Word, dump, parse
from lockstep.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E3", 1000.0),
        (".5e3", 500.0),
        ("-.inf", -math.inf),
        ("1_000", 1000),
        ("012", 12),
        ("0x1f", 31),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("~", None),
        ("'off'", "off"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    found = parse(text, "x")
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(("text", "truth"), [("off", False), ("On", True), ("no", False), ("YES", True)])
def test_switch_words_stay_words(text: str, truth: bool) -> None:
    found = parse(text, "x")
    assert isinstance(found, Word) and found == text and found.truth is truth


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "line 4", "'c' is given twice"),
        ("a: 1\n1: 2\n", "line 2", "key 1 is not a word"),
        ("a: [1\n", "line 2", "not valid YAML"),
        ("a: 1\n\tb: 2\n", "line 2", "not valid YAML"),
        ("a: !!python/object:os.system x", "line 1", "not valid YAML"),
        ("a: *b", "line 1", "undefined alias"),
        ("a: 1\n---\nb: 1\n", "line 2", "another document"),
    ],
)
def test_refused_with_the_line(text: str, line: str, says: str) -> None:
    with pytest.raises(ConfigError) as e:
        parse(text, "run.yaml")
    message = str(e.value)
    assert message.startswith(f"run.yaml: {line}") and says in message and "\n" not in message


def test_merge_keys_may_be_overridden() -> None:
    assert parse("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", "x")["b"] == {"x": 1, "y": 3}


TEXT = st.text(st.characters(exclude_categories=["C", "Z"]) | st.sampled_from(" \n"), max_size=20)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_dump_is_read_back_equal(tree: object) -> None:
    assert parse(dump(tree), "x") == tree


@pytest.mark.parametrize(
    "text", ["off", "no", "1e-6", "1:30", "2024-01-01", "012", "1_0", "", " x ", "~", "=", "<<", "a: b"]
)
def test_dumped_text_is_text_for_plain_yaml_too(text: str) -> None:
    assert yaml.safe_load(dump({"key": text})) == {"key": text}
