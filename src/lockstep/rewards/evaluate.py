"""Scores a batch with every reward at once: async functions, worker processes and plain functions side by side.

The three kinds overlap: coroutines wait on their own event loop, workers compute in their own processes, and plain functions
take the calling thread meanwhile. Then each score is checked, and the weighted sum is taken over the rewards that apply to
the sample. An error anywhere ends the others before it is raised. Next: `worker.py`.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self

from lockstep.errors import RewardError, UserError
from lockstep.rewards.contract import LARGEST, Completion, Prompt, Scores, check_batch, check_scores
from lockstep.rewards.event_loop import EventLoopThread
from lockstep.rewards.load import LoadedReward, load_reward
from lockstep.rewards.spec import RewardSpec
from lockstep.rewards.worker import MEMORY_BYTES, Job, Outcome, WorkerPool

log = logging.getLogger(__name__)

MAX_DEFAULT_WORKERS = 8


@dataclass(frozen=True)
class RewardBatch:
    """The scores of one batch."""

    total: list[float | None]
    """Weighted sum over the rewards that apply; None for a sample to which none does. The loop drops and counts those."""

    parts: dict[str, list[float | None]]
    """Each reward's own scores, unweighted, by the name it has in the metrics."""

    outcomes: list[Outcome]
    """How each call in a worker process ended."""

    @property
    def metrics(self) -> dict[str, float]:
        """`reward`; `rewards/<name>/mean`, `/std` (of the samples it applies to) and `/none` (samples it doesn't apply to);
        `rewards/unscored`, `rewards/timeouts`, `rewards/crashes` and `rewards/errors` (samples in this batch)."""
        return metrics_of(self.total, self.parts, self.outcomes)

    @staticmethod
    def joined(batches: Sequence[RewardBatch]) -> RewardBatch:
        """One batch of several, of the same rewards."""
        return RewardBatch(
            [score for batch in batches for score in batch.total],
            {name: [s for batch in batches for s in batch.parts[name]] for name in batches[0].parts},
            [outcome for batch in batches for outcome in batch.outcomes],
        )


class Rewards:
    """Every reward of a run, loaded, with the processes they need. Close it, or use it as a context manager.

    `workers` is the number of worker processes, by default half the CPUs, at most 8; none is started unless a reward
    needs them. Raises RewardError for whatever can be known to be wrong before the first batch.
    """

    def __init__(self, specs: Sequence[RewardSpec], *, workers: int | None = None) -> None:
        if not any(spec.weight for spec in specs):
            raise RewardError("no reward has a weight other than 0", fix="give at least one reward a weight")
        self._rewards = [load_reward(spec) for spec in specs]
        self.names = _distinct([reward.name for reward in self._rewards])
        self._isolated = [reward for reward in self._rewards if reward.isolated]
        for reward in self._rewards:
            _check_setting(reward)
        self._pool: WorkerPool | None = None
        self._loop: EventLoopThread | None = None
        if self._isolated:
            count = workers or min(MAX_DEFAULT_WORKERS, max(1, (os.cpu_count() or 2) // 2))
            foreign = any(not reward.is_builtin for reward in self._isolated)
            specs_there = [reward.spec for reward in self._isolated]
            self._pool = WorkerPool(specs_there, count, memory_bytes=0 if foreign else MEMORY_BYTES)
        if any(reward.is_async and not reward.isolated for reward in self._rewards):
            self._loop = EventLoopThread()

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]],
        columns: dict[str, list[Any]],
    ) -> RewardBatch:
        """Scores of the samples: `columns` has one list for each column of the data, one entry a sample.

        Raises RewardError for anything a reward function does against its contract; the workers are closed then.
        """
        count = check_batch(prompts, completions, completion_ids, columns)
        if count == 0:
            parts: dict[str, Scores] = {name: [] for name in self.names}
            return RewardBatch([], parts, [])
        base = {
            "prompts": list(prompts),
            "completions": list(completions),
            "completion_ids": [list(ids) for ids in completion_ids],
        }
        try:
            parts, outcomes = self._evaluate(base, columns, count)
        except BaseException:
            self.close()
            raise
        weights = [reward.spec.weight for reward in self._rewards]
        total = [weighted_sum(weights, [part[i] for part in parts.values()]) for i in range(count)]
        return RewardBatch(total, parts, outcomes)

    def _evaluate(
        self, base: dict[str, Any], columns: dict[str, list[Any]], count: int
    ) -> tuple[dict[str, Scores], list[Outcome]]:
        calls = [{**base, **reward.columns(columns), **reward.options} for reward in self._rewards]
        jobs = self._jobs(base, columns, count)
        with ThreadPoolExecutor(max_workers=1) as thread:
            pooled = thread.submit(self._pool.run, jobs) if self._pool is not None else None
            try:
                futures = [
                    self._start(reward, call, count)
                    for reward, call in zip(self._rewards, calls, strict=True)
                ]
                results = [
                    None if reward.isolated else self._result(reward, call, future, count)
                    for reward, call, future in zip(self._rewards, calls, futures, strict=True)
                ]
                outcomes = pooled.result() if pooled is not None else []
            except BaseException:
                self.close()  # ends the pool's run, which leaving the `with` would otherwise wait for
                raise
        parts, rest = {}, iter(outcomes)
        for name, reward, result in zip(self.names, self._rewards, results, strict=True):
            parts[name] = (
                result if result is not None else [_settle(reward, i, next(rest)) for i in range(count)]
            )
        return parts, outcomes

    def _jobs(self, base: dict[str, Any], columns: dict[str, list[Any]], count: int) -> list[Job]:
        """One job a sample and isolated reward, reward by reward."""
        jobs = []
        for position, reward in enumerate(self._isolated):
            chosen = reward.columns(columns)
            _check_json(reward.name, chosen)
            for i in range(count):
                request = {
                    "reward": position,
                    "prompt": base["prompts"][i],
                    "completion": base["completions"][i],
                    "ids": base["completion_ids"][i],
                    "columns": {name: values[i] for name, values in chosen.items()},
                }
                jobs.append(Job(request, reward.spec.timeout_s))
        return jobs

    def _start(self, reward: LoadedReward, call: dict[str, Any], count: int) -> Future[Any] | None:
        """Send an async reward on its way; the others wait for their turn."""
        if self._loop is None or reward.isolated or not reward.is_async:
            return None
        return self._loop.submit(reward.function(**call), reward.spec.timeout_s * count)

    def _result(
        self, reward: LoadedReward, call: dict[str, Any], future: Future[Any] | None, count: int
    ) -> Scores:
        try:
            scores = reward.function(**call) if future is None else future.result()
        except UserError:
            raise
        except Exception as error:  # whatever a user's function raises, say which one it was
            why = ""
            if future is not None and isinstance(error, TimeoutError):
                why = f"the call may take timeout_s = {reward.spec.timeout_s:g} s a sample"
            what = f"reward {reward.name} raised {type(error).__name__}: {error}"
            raise RewardError(what, where=reward.spec.use, why=why) from error
        return check_scores(reward.name, scores, count)

    def close(self) -> None:
        """End the worker processes and the event loop. Closing twice is fine."""
        if self._pool is not None:
            self._pool.close()
        if self._loop is not None:
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _settle(reward: LoadedReward, index: int, outcome: Outcome) -> float | None:
    """The score that an outcome stands for.

    Late samples and those that killed their worker get `timeout_score`, and so do those over which a built-in's foreign code
    raised: a completion can make a parser fail. What a user's own function raises is an error in that function.
    """
    if outcome.kind == "score":
        return outcome.score
    if outcome.kind == "refused" or (outcome.kind == "raised" and not reward.is_builtin):
        verb = "raised " if outcome.kind == "raised" else ""
        what = f"reward {reward.name}, sample {index}: {verb}{outcome.detail}"
        raise RewardError(what, where=reward.spec.use)
    return reward.spec.timeout_score


def weighted_sum(weights: Sequence[float], scores: Sequence[float | None]) -> float | None:
    """Sum of weight times score over the scores that are not None; None when no weighted reward applies.

    A reward of weight 0 is only measured: it alone doesn't make a sample one to train on.
    """
    terms = [w * s for w, s in zip(weights, scores, strict=True) if w != 0 and s is not None]
    if any(abs(term) > LARGEST for term in terms):
        raise RewardError(
            f"weight times score is {max(terms, key=abs)}", why="rewards must be finite FP32 numbers"
        )
    return math.fsum(terms) if terms else None


def metrics_of(total: Scores, parts: dict[str, Scores], outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The metrics of a batch. A mean over no sample is left out rather than made up."""
    metrics: dict[str, float] = {}
    scored = [score for score in total if score is not None]
    if scored:
        metrics["reward"] = math.fsum(scored) / len(scored)
    for name, part in parts.items():
        values = [score for score in part if score is not None]
        metrics[f"rewards/{name}/none"] = float(len(part) - len(values))
        if values:
            mean = math.fsum(values) / len(values)
            metrics[f"rewards/{name}/mean"] = mean
            metrics[f"rewards/{name}/std"] = math.sqrt(
                math.fsum((v - mean) ** 2 for v in values) / len(values)
            )
    metrics["rewards/unscored"] = float(len(total) - len(scored))
    for key, kind in (("timeouts", "timeout"), ("crashes", "crash"), ("errors", "raised")):
        metrics[f"rewards/{key}"] = float(sum(outcome.kind == kind for outcome in outcomes))
    return metrics


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, with a number after those that have been there before: reward, reward_2."""
    result: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate in result:
            number += 1
            candidate = f"{name}_{number}"
        result.append(candidate)
    return result


def _check_setting(reward: LoadedReward) -> None:
    """Warn of a limit that has no effect; refuse options that can't reach a worker."""
    if reward.isolated:
        _check_json(f"{reward.name} (args)", reward.spec.args)
        return
    defaults = {f.name: f.default for f in fields(RewardSpec)}
    for name in ("timeout_s", "timeout_score"):
        async_limit = name == "timeout_s" and reward.is_async
        if getattr(reward.spec, name) != defaults[name] and not async_limit:
            log.warning(
                "%s of reward %s has no effect: it runs in this process; isolate: true gives it a limit",
                name,
                reward.name,
            )


def _check_json(name: str, values: dict[str, Any]) -> None:
    for key, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            why = f"{error}; only JSON values are sent to a worker process"
            raise RewardError(
                f"reward {name}: {key!r} can't be sent", why=why, fix="drop the column or turn it into text"
            ) from error
