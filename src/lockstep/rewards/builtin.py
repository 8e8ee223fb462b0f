"""The built-in rewards that are plain text work and run in the trainer's process.

Each has the signature that users' functions have; options are keyword-only and come from `RewardSpec.args`. Those that
need symbolic algebra or a task's own code are in `graders.py` and run in worker processes. Next: `graders.py`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from lockstep.errors import RewardError
from lockstep.rewards import extract
from lockstep.rewards.contract import Completion, Prompt, Scores, shorten, text_of


def exact_match(
    prompts: list[Prompt],
    completions: list[Completion],
    completion_ids: list[list[int]],
    answer: list[Any],
    *,
    strip: bool = True,
    casefold: bool = False,
    tag: str = "",
) -> Scores:
    """1 where the completion is the answer, else 0; with `tag`, where the content of the last `<tag>` is."""

    def normal(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if casefold else text

    def found(completion: Completion) -> str | None:
        text = text_of(completion)
        return extract.in_tag(text, tag) if tag else text

    texts = [found(completion) for completion in completions]
    return [float(t is not None and normal(t) == normal(str(a))) for t, a in zip(texts, answer, strict=True)]


def last_number(
    prompts: list[Prompt],
    completions: list[Completion],
    completion_ids: list[list[int]],
    answer: list[Any],
) -> Scores:
    """1 where the last integer or decimal of the completion equals the answer, exactly, else 0.

    The answer is a number, or text that ends in "#### number" as in GSM8K. RewardError where it is neither.
    """
    wanted = [_number(index, value) for index, value in enumerate(answer)]
    found = [extract.last_number(text_of(completion)) for completion in completions]
    return [float(f is not None and f == w) for f, w in zip(found, wanted, strict=True)]


def _number(index: int, value: object) -> Decimal:
    number = extract.whole_number(str(value).rpartition("####")[2])
    if number is None:
        raise RewardError(
            f"reward last_number, sample {index}: the answer {shorten(value)} is not a number",
            fix="point data.answer_column at a column of numbers, or use exact_match or math_verify",
        )
    return number


def format_tags(
    prompts: list[Prompt],
    completions: list[Completion],
    completion_ids: list[list[int]],
    *,
    tags: list[str] | tuple[str, ...] = ("think", "answer"),
    prefilled: bool = False,
) -> Scores:
    """1 where the completion is `<think>..</think><answer>..</answer>` and nothing else, each tag once, in order; else 0.

    White space around the tags is free. `prefilled` says that the chat template has already written the first opening
    tag, so the completion begins inside it.
    """
    if not tags:
        raise RewardError(
            "reward format_tags: tags is empty", fix="name at least one tag, as in [think, answer]"
        )
    parts = [rf"<{re.escape(tag)}>.*?</{re.escape(tag)}>" for tag in tags]
    pattern = re.compile(r"\s*" + r"\s*".join(parts) + r"\s*", re.DOTALL)
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]

    def score(text: str) -> float:
        text = f"<{tags[0]}>{text}" if prefilled else text
        return float(pattern.fullmatch(text) is not None and all(text.count(mark) == 1 for mark in marks))

    return [score(text_of(completion)) for completion in completions]


def length(
    prompts: list[Prompt],
    completions: list[Completion],
    completion_ids: list[list[int]],
    *,
    soft: int,
    hard: int,
    penalty: float = 1.0,
) -> Scores:
    """0 up to `soft` tokens, falling linearly to `-penalty` at `hard` tokens and beyond.

    The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), with L_max = hard and L_cache = hard - soft.
    """
    if not 0 <= soft < hard:
        raise RewardError(f"reward length: soft {soft} and hard {hard}", why="0 <= soft < hard must hold")
    return [-penalty * min(1.0, max(0.0, (len(ids) - soft) / (hard - soft))) for ids in completion_ids]
