"""The built-in rewards that are plain text work, and how answers are found in text."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import RewardError
from lockstep.rewards import builtin, extract


def call(function, completions, ids=None, **more):  # type: ignore[no-untyped-def]
    ids = ids or [[0]] * len(completions)
    return function(["q"] * len(completions), completions, ids, **more)


def test_exact_match() -> None:
    completions = [" 4\n", "4.", "Paris", "paris", [{"role": "assistant", "content": "4"}]]
    answers = ["4", "4", "Paris", "Paris", 4]
    assert call(builtin.exact_match, completions, answer=answers) == [1, 0, 1, 0, 1]
    assert call(builtin.exact_match, completions, answer=answers, casefold=True) == [1, 0, 1, 1, 1]
    assert call(builtin.exact_match, completions, answer=answers, strip=False) == [0, 0, 1, 0, 1]
    tagged = ["<answer> 4 </answer>", "4", "<answer>5</answer><answer>4</answer>", "<answer>4"]
    assert call(builtin.exact_match, tagged, answer=["4"] * 4, tag="answer") == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 12.", "12"),
        ("3 + 4 = 7", "7"),
        ("5-3", "3"),
        ("x = -3", "-3"),
        ("(-3)", "-3"),
        ("it is \u22123", "-3"),
        ("1,234.50 dollars", "1234.50"),
        ("1,23", "23"),
        ("0.5", "0.5"),
        (".5", "0.5"),
        ("007", "7"),
        ("none at all", None),
        ("", None),
        ("1234567,890", "890"),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    assert extract.last_number(text) == (None if number is None else Decimal(number))


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=3))
def test_any_decimal_is_found_exactly(value: Decimal) -> None:
    assert extract.last_number(f"First 12, then it is {value:,f}") == value
    assert extract.whole_number(f" {value:f} ") == value


@given(st.text(max_size=60))
def test_extraction_never_raises(text: str) -> None:
    extract.last_number(text), extract.whole_number(text), extract.in_tag(text, "answer")
    assert isinstance(extract.final_answer(text), str)


def test_last_number_compares_exactly() -> None:
    completions = ["so 0.30", "0.3000001", "nothing", "12 or 13", "72"]
    answers = ["0.3", "0.3", "1", 12, "Natalia sold 48/2 = 24 clips. #### 72"]
    assert call(builtin.last_number, completions, answer=answers) == [1, 0, 0, 0, 1]
    with pytest.raises(RewardError, match="last_number, sample 1: the answer 'blue' is not a number"):
        call(builtin.last_number, ["1", "2"], answer=["1", "blue"])


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("\n<think>\na\n</think>\n\n<answer>b</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("<think>a</think>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think><answer>b</answer> and more", 0),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("<think>a</think><think>c</think><answer>b</answer>", 0),
        ("<think>a<answer>x</answer></think><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_format_tags(text: str, score: int) -> None:
    assert call(builtin.format_tags, [text]) == [score]


def test_format_tags_with_a_prefilled_tag_and_other_tags() -> None:
    assert call(builtin.format_tags, ["a</think><answer>b</answer>"], prefilled=True) == [1]
    assert call(builtin.format_tags, ["<think>a</think><answer>b</answer>"], prefilled=True) == [0]
    assert call(builtin.format_tags, ["<a.b>x</a.b>", "<aXb>x</aXb>"], tags=["a.b"]) == [1, 0]
    with pytest.raises(RewardError, match="tags is empty"):
        call(builtin.format_tags, ["x"], tags=[])


def test_length_falls_linearly_between_the_limits() -> None:
    ids = [[0] * n for n in (0, 10, 15, 20, 30)]
    assert call(builtin.length, ["x"] * 5, ids, soft=10, hard=20) == [0, 0, -0.5, -1, -1]
    assert call(builtin.length, ["x"] * 5, ids, soft=10, hard=20, penalty=0.2)[2] == pytest.approx(-0.1)
    with pytest.raises(RewardError, match="soft 20 and hard 20"):
        call(builtin.length, ["x"], [[0]], soft=20, hard=20)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("I think <answer> 3 </answer>", "3"),
        (r"so \boxed{\frac{1}{2}} follows", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2", "1"),
        ("The answer is 3.", "3"),
        ("**Final answer:** 3", "3"),
        ("Answer: 3.5\nbye", "3.5"),
        ("  3  ", "3"),
    ],
)
def test_final_answer(text: str, answer: str) -> None:
    assert extract.final_answer(text) == answer
