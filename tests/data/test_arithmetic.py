"""Generated arithmetic: right answers, distinct problems, and a holdout that is disjoint whatever the settings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.arithmetic import HOLDOUT_FRACTION, held_out
from lockstep.data.example import Example, load
from lockstep.data.spec import DataSpec
from lockstep.errors import DataError


def problems(seed: int = 0, **args: Any) -> list[Example]:
    return load(DataSpec("arithmetic", args=args), seed=seed)


def pairs(examples: list[Example]) -> set[tuple[int, int]]:
    return {tuple(sorted((e.columns["a"], e.columns["b"]))) for e in examples}  # type: ignore[misc]


def test_one_digit_pairs_are_split_without_overlap_or_loss() -> None:
    train, held = problems(), problems(holdout="eval")
    assert len(train) + len(held) == 100
    assert not pairs(train) & pairs(held)
    assert 10 <= len(held) <= 30


@given(
    digits=st.sampled_from([1, 2, [1, 2], [2, 1], 3, [1, 5]]),
    operators=st.sampled_from([["+"], ["-", "*"], ["*", "+", "-"]]),
    seeds=st.tuples(st.integers(0, 2**32), st.integers(0, 2**32)),
)
@settings(max_examples=25, deadline=None)
def test_train_and_eval_never_share_a_pair(digits: Any, operators: Any, seeds: tuple[int, int]) -> None:
    size = 8
    train = problems(seeds[0], digits=digits, operators=operators, size=size)
    held = problems(seeds[1], digits=digits, operators=["+"], size=size, holdout="eval")
    assert len(train) == len(held) == size
    assert not pairs(train) & pairs(held)


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_the_holdout_does_not_see_the_order_of_the_operands(a: int, b: int) -> None:
    assert held_out(a, b) == held_out(b, a)


def test_the_holdout_fraction_is_what_it_says() -> None:
    share = sum(held_out(a, b) for a in range(200) for b in range(a, 200)) / (200 * 201 / 2)
    assert share == pytest.approx(HOLDOUT_FRACTION, abs=0.01)


@pytest.mark.parametrize(("digits", "low", "high"), [(1, 0, 9), (2, 10, 99), (7, 10**6, 10**7 - 1)])
def test_problems_are_distinct_and_right(digits: int, low: int, high: int) -> None:
    examples = problems(digits=digits, operators=["+", "-", "*"], size=60)
    keys = {(e.columns["a"], e.columns["op"], e.columns["b"]) for e in examples}
    assert len(keys) == 60
    for e in examples:
        a, op, b = e.columns["a"], e.columns["op"], e.columns["b"]
        assert low <= a <= high and low <= b <= high
        assert int(e.columns["answer"]) == {"+": a + b, "-": a - b, "*": a * b}[op]
        assert e.prompt == f"What is {a} {op} {b}? Answer with a number."
    assert [e.index for e in examples] == list(range(60))


def test_two_numbers_of_digits_are_for_the_two_operands() -> None:
    examples = problems(digits=[1, 3], size=20)
    assert all(0 <= e.columns["a"] <= 9 and 100 <= e.columns["b"] <= 999 for e in examples)


def test_the_same_seed_gives_the_same_problems_and_another_seed_others() -> None:
    for digits in (2, 6):
        first = problems(1, digits=digits, size=50)
        assert first == problems(1, digits=digits, size=50)
        assert first != problems(2, digits=digits, size=50)
    assert load(DataSpec("arithmetic", seed=1), seed=9) == problems(1)


def test_template_chat_and_system() -> None:
    (example, *_) = problems(template="{a} + {b} = ", size=1)
    assert example.prompt == f"{example.columns['a']} + {example.columns['b']} = "
    (example, *_) = problems(chat=True, system="Be brief.", size=1)
    assert [m["role"] for m in example.prompt] == ["system", "user"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"digits": 0}, "digits is 0"),
        ({"digits": [1, 2, 3]}, "digits is"),
        ({"digits": True}, "digits is True"),
        ({"digits": "2"}, "digits is '2'"),
        ({"operators": ["/"]}, "operators is"),
        ({"operators": []}, "operators is"),
        ({"operators": ["+", "+"]}, "each once"),
        ({"size": 0}, "size is 0"),
        ({"size": 101}, "only 8. problems"),
        ({"holdout": "test"}, "train or eval"),
        ({"template": "{a} plus {c}"}, "template has {c}"),
        ({"template": "{a} plus"}, "template has no {b}"),
        ({"template": "{a} ? {b}", "operators": ["+", "-"]}, "template has no {op}"),
        ({"template": "{a} + {b} {"}, "not a format string"),
        ({"template": "{a} + {b} {0}"}, "is not the name of a column"),
    ],
)
def test_refuses(args: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        problems(**args)
