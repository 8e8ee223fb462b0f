"""What a reward function gets and what it must return: TRL's signature, checked.

    f(prompts, completions, completion_ids, **columns) -> list[float | None]

Everything is passed by keyword, and every list has one entry a sample. Prompts and completions are plain text for text
prompts and lists of chat messages for chat prompts, as in TRL, so a function written for TRL runs unchanged. None says
"this reward doesn't apply to this sample". What comes back is checked here rather than later in a tensor, because there
nobody can say any more which function and which sample a NaN came from. Next: `load.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from numbers import Real
from typing import Any, Protocol

from lockstep.errors import RewardError

Message = dict[str, Any]
Prompt = str | list[Message]
Completion = str | list[Message]
Scores = list[float | None]

LARGEST = 3.4028234663852886e38
"""Rewards become FP32 numbers; this is the largest."""

RESERVED = ("prompts", "completions", "completion_ids")


class RewardFunction(Protocol):
    """TRL's reward signature; may also be `async def`."""

    def __call__(
        self,
        *,
        prompts: list[Prompt],
        completions: list[Completion],
        completion_ids: list[list[int]],
        **columns: list[Any],
    ) -> Scores | Awaitable[Scores]:
        """Scores, one a sample."""
        ...


def as_completion(prompt: Prompt, text: str) -> Completion:
    """The completion in the shape its prompt asks for: text for text, one assistant message for a chat."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def text_of(completion: Completion) -> str:
    """The text of a completion: itself, or the content of its last assistant message ("" where there is none)."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role") == "assistant":
            return str(message.get("content") or "")
    return ""


def shorten(value: object, width: int = 80) -> str:
    """`repr`, cut to `width` characters, for messages."""
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def check_scores(name: str, scores: object, count: int) -> Scores:
    """The scores of function `name` for `count` samples as floats and Nones.

    Raises RewardError naming the function, the sample and the value for a wrong type, a wrong length, a non-number, NaN
    and infinity.
    """
    if not isinstance(scores, (list, tuple)):
        raise RewardError(
            f"reward {name} returned {type(scores).__name__} {shorten(scores)}",
            why="expected a list",
            fix="return a list with one number or None for each completion",
        )
    if len(scores) != count:
        raise RewardError(
            f"reward {name} returned {len(scores)} scores for {count} completions",
            fix="return one number or None for each completion, in their order",
        )
    return [check_score(name, index, score) for index, score in enumerate(scores)]


def check_score(name: str, index: int, score: object) -> float | None:
    """One score as a float or None; RewardError otherwise."""
    if score is None:
        return None
    if not isinstance(score, Real):
        raise RewardError(
            f"reward {name}, sample {index}: {shorten(score)} is a {type(score).__name__}, not a number",
            fix="return a Python number (tensor.item(), array.tolist()), or None where the reward doesn't apply",
        )
    value = float(score)
    if not abs(value) <= LARGEST:
        raise RewardError(
            f"reward {name}, sample {index}: {value}",
            why="a reward must be a finite FP32 number",
            fix="return None where the reward doesn't apply",
        )
    return value


def check_batch(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]],
    columns: dict[str, list[Any]],
) -> int:
    """The number of samples. RewardError where lists disagree in length or a column has a reserved name."""
    count = len(completions)
    sized: dict[str, int] = {"prompts": len(prompts), "completion_ids": len(completion_ids)}
    for name, values in columns.items():
        if name in RESERVED:
            raise RewardError(
                f"column {name!r} of the dataset has the name of an argument of every reward", fix="rename it"
            )
        sized[name] = len(values)
    for name, size in sized.items():
        if size != count:
            raise RewardError(f"{name} has {size} entries for {count} completions")
    return count
