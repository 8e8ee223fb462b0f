"""The built-in rewards that run foreign code and therefore only ever run in a worker process.

math-verify sets signal.alarm, which raises off the main thread and can't interrupt a long multiplication: a power tower in a
completion would hold the trainer for as long as it likes. Here its own alarms are off, and the pool kills the process
instead. reasoning-gym tasks score with their own `score_answer`, some of which build large puzzles. A worker calls each
function with a batch of one. Next: `worker.py`.
"""

from __future__ import annotations

import ast
import json
import logging
from functools import lru_cache
from typing import Any, Literal

from lockstep.errors import RewardError
from lockstep.rewards import extract
from lockstep.rewards.contract import Completion, Prompt, Scores, text_of


def math_verify(
    prompts: list[Prompt],
    completions: list[Completion],
    completion_ids: list[list[int]],
    answer: list[Any],
) -> Scores:
    """1 where math-verify finds the completion's final expression equal to the answer, else 0; None for an unreadable answer.

    The answer may be LaTeX with or without delimiters, or a plain number. An answer in which math-verify finds no
    expression can't be compared with anything: None, counted as `rewards/math_verify/none`.
    """
    return [_equal(text_of(c), str(a)) for c, a in zip(completions, answer, strict=True)]


def _equal(completion: str, answer: str) -> float | None:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its own time limit is off
    delimited = any(mark in answer for mark in ("$", "\\boxed", "\\[", "\\("))
    gold = parse(answer if delimited else f"${answer}$", parsing_timeout=None)
    gold = gold or parse(answer, parsing_timeout=None)
    if not gold:
        return None
    found = parse(completion, parsing_timeout=None)
    return float(bool(found) and verify(gold, found, timeout_seconds=None))


def reasoning_gym(
    prompts: list[Prompt],
    completions: list[Completion],
    completion_ids: list[list[int]],
    task: list[str],
    task_config: list[str],
    task_entry: list[str],
    *,
    extract_from: Literal["auto", "tag", "text"] = "auto",
) -> Scores:
    """The task's own `score_answer` of the extracted answer, in [0, 1].

    The columns come from the `reasoning_gym` data source: the task's name, its configuration (JSON) and the entry as a
    Python literal (JSON would turn the tuples that some tasks compare with into lists). `extract_from`: `auto` takes the
    `<answer>` tag, else the box, else what follows "the answer is", else the whole text; `tag` only the tag; `text` the
    whole text. It matters: "The answer is 3" as a whole scores 0.067 where "3" scores 1.
    """
    scores: Scores = []
    for completion, name, config, entry in zip(completions, task, task_config, task_entry, strict=True):
        answer = _extract(text_of(completion), extract_from)
        dataset = _gym_dataset(name, config)
        scores.append(float(dataset.score_answer(answer, ast.literal_eval(entry))))
    return scores


def _extract(text: str, source: str) -> str | None:
    if source == "auto":
        return extract.final_answer(text)
    if source == "tag":
        return extract.in_tag(text, "answer")
    if source == "text":
        return text.strip()
    raise RewardError(f"reward reasoning_gym: extract_from is {source!r}", fix="use auto, tag or text")


@lru_cache(maxsize=64)
def _gym_dataset(name: str, config: str) -> Any:
    """The task that made the entry; only its configuration and `score_answer` are used."""
    from reasoning_gym import create_dataset

    return create_dataset(name, **json.loads(config))


def warm_up(used: set[str]) -> None:
    """Import what these built-ins need, so that a worker's first sample has its time for itself."""
    if "math_verify" in used:
        _equal("$x^2 + 2x + 1$", "(x+1)^2")
    if "reasoning_gym" in used:
        import reasoning_gym  # noqa: F401
