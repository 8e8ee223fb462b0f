"""Several rewards together: weights, None, async, isolation, errors, metrics, shutdown."""

from __future__ import annotations

import asyncio
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import RewardError
from lockstep.rewards.evaluate import Rewards, weighted_sum
from lockstep.rewards.spec import RewardSpec

SOURCE = """
import asyncio, os, time

def words(prompts, completions, completion_ids, **columns):
    return [float(len(c.split())) for c in completions]

def only_math(prompts, completions, completion_ids, topic, **columns):
    return [1.0 if t == "math" else None for t in topic]

def tokens(completion_ids, completions, prompts, scale=1.0):
    return [scale * len(ids) for ids in completion_ids]

async def judge(prompts, completions, completion_ids, pause=0.5, **columns):
    await asyncio.sleep(pause)
    return [0.5] * len(completions)

async def critic(prompts, completions, completion_ids, **columns):
    await asyncio.sleep(0.5)
    return [0.25] * len(completions)

loops = []
async def keeps_loop(prompts, completions, completion_ids, **columns):
    loops.append(asyncio.get_running_loop())
    return [float(len(set(map(id, loops))))] * len(completions)

def raises(prompts, completions, completion_ids, **columns):
    raise ZeroDivisionError("by nothing")

async def async_raises(prompts, completions, completion_ids, **columns):
    raise LookupError("no judge")

def returns_nan(prompts, completions, completion_ids, **columns):
    return [0.0] * (len(completions) - 1) + [float("nan")]

def sleeps(prompts, completions, completion_ids, **columns):
    time.sleep(30)

def process(prompts, completions, completion_ids, **columns):
    return [float(os.getpid())] * len(completions)

def seen(prompts, completions, completion_ids, **columns):
    assert prompts[0][-1]["role"] == "user" and completions[0][0]["role"] == "assistant"
    return [float(sorted(columns) == ["answer", "level"])] * len(completions)

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    assert data_source == "gsm8k" and extra_info == {"index": 3}
    return {"score": float(solution_str == ground_truth) + bonus, "acc": 1}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluate") / "functions.py"
    path.write_text(SOURCE)
    return path


def score(rewards: Rewards, completions: list[Any], **columns: list[Any]) -> Any:
    count = len(completions)
    return rewards.score(["q"] * count, completions, [[1, 2, 3]] * count, columns)


def test_weighted_sum_and_parts(file: Path) -> None:
    specs = [
        RewardSpec("last_number", weight=2.0),
        RewardSpec(f"{file}:tokens", weight=-0.5, args={"scale": 2.0}),
    ]
    with Rewards(specs) as rewards:
        batch = score(rewards, ["it is 4", "5"], answer=["4", "4"])
    assert batch.parts == {"last_number": [1.0, 0.0], "tokens": [6.0, 6.0]}
    assert batch.total == [-1.0, -3.0]
    assert batch.metrics["reward"] == -2.0
    assert batch.metrics["rewards/last_number/mean"] == batch.metrics["rewards/last_number/std"] == 0.5


def test_none_is_skipped_and_all_none_is_none(file: Path) -> None:
    with Rewards([RewardSpec(f"{file}:only_math"), RewardSpec(f"{file}:words", weight=0.0)]) as rewards:
        batch = score(rewards, ["a b", "c"], topic=["math", "art"])
    assert batch.total == [1.0, None]  # a reward that only measures doesn't make a sample one to train on
    assert batch.parts["words"] == [2.0, 1.0]
    assert batch.metrics["rewards/unscored"] == batch.metrics["rewards/only_math/none"] == 1
    assert batch.metrics["reward"] == batch.metrics["rewards/only_math/mean"] == 1.0
    with Rewards([RewardSpec(f"{file}:only_math"), RewardSpec(f"{file}:words", weight=0.5)]) as rewards:
        assert score(rewards, ["a b", "c"], topic=["math", "art"]).total == [2.0, 0.5]


def test_no_sample_scored_means_no_mean(file: Path) -> None:
    with Rewards([RewardSpec(f"{file}:only_math")]) as rewards:
        batch = score(rewards, ["x"], topic=["art"])
        empty = score(rewards, [], topic=[])
    assert batch.total == [None] and "reward" not in batch.metrics
    assert empty.total == [] and empty.parts == {"only_math": []}
    assert all(math.isfinite(value) for value in (*batch.metrics.values(), *empty.metrics.values()))


def test_async_functions_run_side_by_side_with_everything(file: Path) -> None:
    names = ("judge", "critic", "words")
    with Rewards([RewardSpec(f"{file}:{name}") for name in names]) as rewards:
        start = time.monotonic()
        batch = score(rewards, ["a b"])
        assert time.monotonic() - start < 0.95  # 0.5 each, together
    assert batch.total == [2.75]


def test_async_functions_keep_their_loop_and_work_inside_a_running_one(file: Path) -> None:
    with Rewards([RewardSpec(f"{file}:keeps_loop")]) as rewards:

        async def inside() -> Any:
            return score(rewards, ["a"])

        assert score(rewards, ["a"]).total == asyncio.run(inside()).total == [1.0]


def test_an_async_function_that_never_returns_is_an_error(file: Path) -> None:
    with (
        Rewards([RewardSpec(f"{file}:judge", timeout_s=0.1, args={"pause": 30.0})]) as rewards,
        pytest.raises(RewardError, match=r"judge raised TimeoutError.*timeout_s = 0.1 s a sample"),
    ):
        score(rewards, ["a", "b"])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", "reward raises raised ZeroDivisionError: by nothing"),
        ("async_raises", "reward async_raises raised LookupError: no judge"),
        ("returns_nan", "reward returns_nan, sample 1: nan"),
    ],
)
@pytest.mark.parametrize("isolate", [False, True])
def test_what_goes_wrong_names_the_function(file: Path, name: str, says: str, isolate: bool) -> None:
    with (
        Rewards([RewardSpec(f"{file}:{name}", isolate=isolate)], workers=1) as rewards,
        pytest.raises(RewardError) as caught,
    ):
        score(rewards, ["a", "b"] if not isolate else ["a"])
    expected = (
        says.replace(" raised", ", sample 0: raised").replace("sample 1", "sample 0") if isolate else says
    )
    assert expected in str(caught.value)


def test_an_error_ends_the_workers_at_once(file: Path) -> None:
    rewards = Rewards([RewardSpec(f"{file}:raises"), RewardSpec(f"{file}:sleeps", isolate=True)], workers=1)
    assert rewards._pool is not None
    pids = rewards._pool.processes()
    start = time.monotonic()
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        score(rewards, ["a"])
    assert time.monotonic() - start < 8
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    rewards.close()


def test_an_isolated_function_has_a_hard_limit_and_its_own_process(file: Path) -> None:
    specs = [
        RewardSpec(f"{file}:sleeps", isolate=True, timeout_s=0.3, timeout_score=-1.0),
        RewardSpec(f"{file}:process", isolate=True, weight=0.0),
        RewardSpec(f"{file}:judge", isolate=True, args={"pause": 0.0}),
    ]
    with Rewards(specs, workers=2) as rewards:
        batch = score(rewards, ["a", "b"], answer=["1", "2"])
    assert batch.total == [-0.5, -0.5]
    assert batch.metrics["rewards/timeouts"] == 2
    assert os.getpid() not in batch.parts["process"]


def test_columns_that_cannot_be_sent_to_a_worker(file: Path) -> None:
    with (
        Rewards([RewardSpec(f"{file}:process", isolate=True)], workers=1) as rewards,
        pytest.raises(RewardError, match="process: 'answer' can't be sent"),
    ):
        score(rewards, ["a"], answer=[object()])
    with pytest.raises(RewardError, match=r"process \(args\): 'x' can't be sent"):
        Rewards([RewardSpec(f"{file}:process", isolate=True, args={"x": {1, 2}})], workers=1)


def test_chat_batches_and_free_columns_reach_the_function(file: Path) -> None:
    prompt = [{"role": "user", "content": "2+2?"}]
    with Rewards([RewardSpec(f"{file}:seen")]) as rewards:
        batch = rewards.score(
            [prompt], [[{"role": "assistant", "content": "4"}]], [[7]], {"answer": ["4"], "level": [1]}
        )
    assert batch.total == [1.0]


def test_a_verl_function_is_called_as_verl_calls_it(file: Path) -> None:
    spec = RewardSpec("verl", args={"function": f"{file}:compute_score", "bonus": 0.25})
    columns = {"answer": ["4", "4"], "data_source": ["gsm8k"] * 2, "extra_info": [{"index": 3}] * 2}
    with Rewards([spec]) as rewards:
        batch = score(rewards, ["4", "5"], **columns)
    assert batch.total == [1.25, 0.25]
    assert rewards.names == ["compute_score"]


def test_equal_names_are_told_apart() -> None:
    specs = [RewardSpec("format_tags"), RewardSpec("format_tags", args={"tags": ["answer"]})]
    with Rewards(specs) as rewards:
        batch = score(rewards, ["<answer>1</answer>"])
    assert batch.parts == {"format_tags": [0.0], "format_tags_2": [1.0]}


def test_specs_without_weight_are_refused() -> None:
    with pytest.raises(RewardError, match="no reward has a weight"):
        Rewards([RewardSpec("last_number", weight=0.0)])


def test_weighted_sum_is_exact_and_finite() -> None:
    assert weighted_sum([1.0] * 10, [0.1] * 10) == 1.0
    assert weighted_sum([1.0], [None]) is None
    with pytest.raises(RewardError, match="finite FP32"):
        weighted_sum([1e30], [1e30])
