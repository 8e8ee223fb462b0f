"""The task: add a list of numbers one after the other, and write every sum down.

    Add up step by step: 17 4 23 ...
    17+4=21
    21+23=44
    ...

Twenty to thirty lines of about ten tokens: chains of several hundred tokens in which every token may be wrong and nothing after a
mistake counts. The reward is the share of lines that are right before the first that isn't, so it has something to say from
the beginning and is 1 only when all are right.

Problems are drawn from a seed; held-out ones are those whose list of numbers hashes into a fixed fifth, so training never saw
them. Rows are written as JSON lines, since that is what `lockstep train` reads. Next: `arms.py`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HOLDOUT = 0.2
"""Share of all lists that is for evaluation only."""


@dataclass(frozen=True)
class Task:
    """How long and how large: lists of `shortest` to `longest` numbers from 2 to `most`."""

    shortest: int = 20
    longest: int = 28
    most: int = 49


def write_rows(path: Path, task: Task, *, count: int, seed: int, held_out: bool) -> None:
    """`count` distinct problems as JSON lines with `prompt`, `answer` and `numbers`; the same arguments give the same bytes."""
    draw = random.Random(f"{seed} {held_out}")
    seen: set[tuple[int, ...]] = set()
    lines = []
    while len(lines) < count:
        length = draw.randint(task.shortest, task.longest)
        numbers = tuple(draw.randint(2, task.most) for _ in range(length))
        if numbers in seen or is_held_out(numbers) != held_out:
            continue
        seen.add(numbers)
        row = {"prompt": prompt_of(numbers), "answer": answer_of(numbers), "numbers": list(numbers)}
        lines.append(json.dumps(row) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def is_held_out(numbers: Sequence[int]) -> bool:
    """Whether this list is for evaluation, whatever the seed."""
    word = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()[:8]
    return int.from_bytes(word, "big") < HOLDOUT * 2**64


def prompt_of(numbers: Sequence[int]) -> str:
    """What the model is given."""
    return f"Add up step by step: {' '.join(map(str, numbers))}\n"


def answer_of(numbers: Sequence[int]) -> str:
    """What it should write: a line for each number but the first."""
    lines, total = [], numbers[0]
    for number in numbers[1:]:
        lines.append(f"{total}+{number}={total + number}")
        total += number
    return "\n".join(lines)


def right_lines(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], answer: list[str]
) -> list[float]:
    """The share of the answer's lines that a completion has right before its first mistake. Lines after the last one count as a
    mistake: a completion of more lines than the answer gets the share of one line less."""
    return [share(completion, wanted) for completion, wanted in zip(completions, answer, strict=True)]


def share(completion: str, answer: str) -> float:
    """Of one completion, in [0, 1]."""
    wanted, written = answer.split("\n"), completion.rstrip("\n").split("\n")
    right = 0
    for ours, theirs in zip(wanted, written, strict=False):
        if ours != theirs:
            break
        right += 1
    beyond = right == len(wanted) and len(written) > len(wanted)
    return (right - beyond) / len(wanted)
