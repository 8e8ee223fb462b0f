"""What a reward function may return, and the shapes of completions."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from lockstep.errors import RewardError
from lockstep.rewards.contract import as_completion, check_batch, check_scores, text_of


def test_numbers_of_every_kind_become_floats() -> None:
    import numpy as np

    scores = check_scores("f", [1, 0.5, True, None, np.float32(0.25), Fraction(1, 2)], 6)
    assert scores == [1.0, 0.5, 1.0, None, 0.25, 0.5]
    assert all(score is None or type(score) is float for score in scores)
    assert check_scores("f", (1.0,), 1) == [1.0]


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ([1.0], "my_reward returned 1 scores for 3 completions"),
        ([1.0, "0.5", 0.0], "my_reward, sample 1: '0.5' is a str, not a number"),
        ([1.0, 0.0, float("nan")], "my_reward, sample 2: nan"),
        ([float("-inf"), 0.0, 0.0], "my_reward, sample 0: -inf"),
        ([0.0, 1e39, 0.0], "my_reward, sample 1: 1e\\+39"),
        (1.0, "my_reward returned float 1.0"),
        (None, "my_reward returned NoneType None"),
        ("abc", "my_reward returned str 'abc'"),
    ],
)
def test_anything_else_is_refused_with_function_sample_and_value(scores: Any, says: str) -> None:
    with pytest.raises(RewardError, match=says):
        check_scores("my_reward", scores, 3)


def test_case_44_a_nan_is_never_a_score() -> None:
    with pytest.raises(RewardError, match="return None where the reward doesn't apply"):
        check_scores("f", [float("nan")], 1)


def test_a_tensor_is_told_how_to_become_a_number() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(RewardError, match=r"tensor.item\(\)"):
        check_scores("f", [torch.tensor(1.0)], 1)


def test_completions_take_the_shape_of_their_prompt() -> None:
    assert as_completion("2+2?", "4") == "4"
    chat = as_completion([{"role": "user", "content": "2+2?"}], "4")
    assert chat == [{"role": "assistant", "content": "4"}]
    assert text_of(chat) == text_of("4") == "4"
    assert text_of([{"role": "assistant", "content": None}]) == ""
    assert text_of([{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]) == "a"


def test_batch_lists_must_agree() -> None:
    assert check_batch(["p"], ["c"], [[1]], {"answer": ["4"]}) == 1
    with pytest.raises(RewardError, match="answer has 2 entries for 1 completions"):
        check_batch(["p"], ["c"], [[1]], {"answer": ["4", "5"]})
    with pytest.raises(RewardError, match="prompts has 0 entries"):
        check_batch([], ["c"], [[1]], {})
    with pytest.raises(RewardError, match="'completions' of the dataset"):
        check_batch(["p"], ["c"], [[1]], {"completions": ["x"]})
