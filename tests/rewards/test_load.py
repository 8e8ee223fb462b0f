"""Loading a reward: everything that can be known to be wrong is said before the first sample."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lockstep.errors import RewardError
from lockstep.rewards import evaluate, load
from lockstep.rewards.load import BUILTINS, load_function, load_reward
from lockstep.rewards.spec import RewardSpec

SOURCE = """
import helper_beside

LIMIT = 3

def with_everything(prompts, completions, completion_ids, answer, extra=None, **columns):
    return [1.0] * len(completions)

def swallows(completions, **kwargs):
    return [1.0] * len(completions)

def named_only(prompts, completions, completion_ids, answer):
    return [1.0] * len(completions)

def too_few(completions):
    return [1.0]

def no_completions(prompts, **columns):
    return []

def positional(prompts, completions, completion_ids, /, **columns):
    return []

class Judge:
    def __call__(self, prompts, completions, completion_ids, **columns):
        return [0.0] * len(completions)

class AsyncJudge:
    async def __call__(self, prompts, completions, completion_ids, **columns):
        return [0.0] * len(completions)

judge, async_judge = Judge(), AsyncJudge()

async def slow(prompts, completions, completion_ids, **columns):
    return [0.0] * len(completions)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "helper_beside.py").write_text("X = 1\n")
    path = tmp_path / "my_rewards.py"
    path.write_text(SOURCE)
    return path


def test_a_function_in_a_file_and_the_file_beside_it(file: Path) -> None:
    reward = load_reward(RewardSpec(f"{file}:with_everything"))
    assert (reward.name, reward.required, reward.optional, reward.takes_all) == (
        "with_everything",
        ("answer",),
        ("extra",),
        True,
    )
    assert not reward.is_async and not reward.isolated and not reward.is_builtin
    assert load_function(f"{file}:swallows").__globals__ is load_function(f"{file}:named_only").__globals__


def test_a_function_in_a_package() -> None:
    assert load_function("lockstep.rewards.builtin:exact_match") is BUILTINS["exact_match"]


def test_async_and_callable_objects(file: Path) -> None:
    assert load_reward(RewardSpec(f"{file}:slow")).is_async
    assert load_reward(RewardSpec(f"{file}:async_judge")).is_async
    assert not load_reward(RewardSpec(f"{file}:judge")).is_async


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("name_only", "there is no function 'name_only'.*did you mean named_only"),
        ("zzz", "it has .*with_everything"),
        ("LIMIT", "is a int, not a function"),
        ("Judge", "is a class, not a function"),
        ("too_few", "doesn't accept prompts, completion_ids by keyword"),
        ("positional", "by keyword"),
        ("no_completions", "no parameter 'completions'"),
    ],
)
def test_functions_that_cannot_be_rewards(file: Path, name: str, says: str) -> None:
    with pytest.raises(RewardError, match=says):
        load_reward(RewardSpec(f"{file}:{name}"))


def test_missing_and_broken_files(tmp_path: Path, file: Path) -> None:
    with pytest.raises(RewardError, match=r"doesn't exist.*did you mean my_rewards\.py"):
        load_function(f"{tmp_path}/my_reward.py:f")
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(RewardError, match=r"can't be imported.*SyntaxError"):
        load_function(f"{tmp_path}/broken.py:f")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(RewardError, match=r"can't be imported.*SystemExit"):
        load_function(f"{tmp_path}/exits.py:f")
    with pytest.raises(RewardError, match=r"can't be imported.*ModuleNotFoundError"):
        load_function("no_such_package.rewards:f")


def test_unknown_builtin_and_nameless_function() -> None:
    with pytest.raises(RewardError, match=r"no built-in reward 'last_numbr'.*did you mean last_number"):
        load_reward(RewardSpec("last_numbr"))
    with pytest.raises(RewardError, match="names no reward function"):
        load_function("rewards.py:")


def test_args_must_be_options_of_the_function(file: Path) -> None:
    with pytest.raises(RewardError, match=r"no option 'casfold'.*did you mean casefold"):
        load_reward(RewardSpec("exact_match", args={"casfold": True}))
    with pytest.raises(RewardError, match=r"args.prompts"):
        load_reward(RewardSpec(f"{file}:with_everything", args={"prompts": 1}))
    assert load_reward(RewardSpec(f"{file}:swallows", args={"anything": 1})).options == {"anything": 1}


def test_columns_are_chosen_by_the_signature(file: Path) -> None:
    data = {"answer": ["4"], "extra": ["e"], "level": [1]}
    assert load_reward(RewardSpec(f"{file}:named_only")).columns(data) == {"answer": ["4"]}
    assert load_reward(RewardSpec(f"{file}:with_everything")).columns(data) == data
    # An option of a built-in is no column, even where the data happens to have one of that name.
    assert load_reward(RewardSpec("exact_match")).columns({**data, "strip": [0]}) == {"answer": ["4"]}
    with pytest.raises(RewardError, match=r"named_only needs the column 'answer' \(the data has level\)"):
        load_reward(RewardSpec(f"{file}:named_only")).columns({"level": [1]})
    both = load_reward(RewardSpec(f"{file}:with_everything", args={"level": 2}))
    with pytest.raises(RewardError, match="'level' is both a column of the data and one of its args"):
        both.columns(data)


def test_verl_needs_its_function() -> None:
    with pytest.raises(RewardError, match=r"args\.function is missing"):
        load_reward(RewardSpec("verl"))


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RewardError, match=r"needs reasoning_gym.*pip install 'lockstep-rl\[gym\]'"):
        load.load_reward(RewardSpec("reasoning_gym"))


def test_a_limit_without_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with evaluate.Rewards([RewardSpec("last_number", timeout_s=3.0)]):
        pass
    assert "timeout_s of reward last_number has no effect" in caplog.text
