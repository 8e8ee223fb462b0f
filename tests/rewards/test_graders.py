"""math-verify and reasoning-gym through workers: right answers, other spellings, and texts made to hang a parser."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lockstep.data.example import load
from lockstep.data.spec import DataSpec
from lockstep.rewards.evaluate import Rewards
from lockstep.rewards.spec import RewardSpec

pytest.importorskip("math_verify")

TOWERS = ["9**9**9**9", "The answer is $9^{9^{9^{9}}}$"]


@pytest.fixture(scope="module")
def math() -> Any:
    with Rewards([RewardSpec("math_verify", timeout_s=20.0)], workers=1) as rewards:
        yield rewards


def score(rewards: Rewards, completions: list[Any], answers: list[Any]) -> Any:
    prompts = ["q" if isinstance(c, str) else [{"role": "user", "content": "q"}] for c in completions]
    return rewards.score(prompts, completions, [[1]] * len(completions), {"answer": answers})


def test_math_verify_knows_other_spellings(math: Rewards) -> None:
    pairs = [
        (r"so $\frac{1}{2}$", "0.5", 1.0),
        ("The answer is 0.5", r"\frac{1}{2}", 1.0),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        ("$12,345$", "12345", 1.0),
        ("The answer is 4", "5", 0.0),
        ("no idea", "5", 0.0),
        ("", "5", 0.0),
        ([{"role": "assistant", "content": r"\boxed{7}"}], 7, 1.0),
        ("$5$", "", None),
    ]
    batch = score(math, [c for c, _, _ in pairs], [a for _, a, _ in pairs])
    assert batch.parts["math_verify"] == [wanted for _, _, wanted in pairs]
    assert batch.metrics["rewards/math_verify/none"] == 1
    assert batch.metrics["rewards/timeouts"] == batch.metrics["rewards/crashes"] == 0


def test_a_power_tower_costs_its_time_and_nothing_else() -> None:
    with Rewards([RewardSpec("math_verify", timeout_s=1.5, timeout_score=-0.5)], workers=2) as rewards:
        score(rewards, ["3"] * 4, ["3"] * 4)
        start = time.monotonic()
        batch = score(rewards, ["3", *TOWERS, "3"], ["3"] * 4)
        assert time.monotonic() - start < 30
    assert batch.total[0] == batch.total[3] == 1.0
    # A tower runs out of time, or out of the worker's memory, which math-verify takes for "not equal".
    assert all(value in (-0.5, 0.0) for value in batch.total[1:3])
    assert batch.metrics["rewards/timeouts"] == sum(value == -0.5 for value in batch.total) >= 1


def test_it_also_works_off_the_main_thread(math: Rewards) -> None:
    """signal.alarm, which math-verify uses, raises there; the workers are processes, so nobody notices."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(score, math, ["3"], ["3"]).result().total == [1.0]


def test_reasoning_gym_scores_with_the_tasks_own_code() -> None:
    pytest.importorskip("reasoning_gym")
    # The entries of rearc hold tuples; as JSON's lists they would make every right answer score 0.05.
    examples = load(DataSpec("reasoning_gym", args={"task": "rearc", "size": 2}), seed=1)
    answer = examples[0].columns["answer"]
    completions = [answer, f"Let me think. <answer>{answer}</answer>", "<answer>?</answer>"]
    columns = {name: [value] * 3 for name, value in examples[0].columns.items()}
    specs = [
        RewardSpec("reasoning_gym", args={"extract_from": source}, timeout_s=30.0)
        for source in ("auto", "tag")
    ]
    with Rewards(specs, workers=1) as rewards:
        batch = rewards.score([examples[0].prompt] * 3, completions, [[1]] * 3, columns)
    auto, tag = batch.parts.values()
    assert auto[:2] == [1.0, 1.0] and tag[1] == 1.0
    assert all(value is not None and value < 0.5 for value in (auto[2], tag[0], tag[2]))
