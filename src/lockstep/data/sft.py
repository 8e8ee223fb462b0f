"""Texts to imitate, for the supervised warm start before reinforcement learning.

A target is the completion that the row itself brings: `completion` (text or one assistant message), the last assistant
message of `messages`, or else the answer, which is what the arithmetic source has. Tokenize with `tokenize.encode_prompt`
and `encode_target`, so that the prompt has the very ids it will have in the rollout. Next: `tokenize.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.data.prompt import Prompt, check_messages, column, shape, shape_prompt
from lockstep.data.rows import read_rows
from lockstep.data.spec import DataSpec
from lockstep.errors import DataError


@dataclass(frozen=True)
class Target:
    """A prompt, the completion to imitate, and the number of the row, from 0."""

    prompt: Prompt
    completion: str
    index: int


def targets(spec: DataSpec, seed: int = 0) -> list[Target]:
    """All targets of the source in its order. DataError with file and line for a malformed row, and when there are none."""
    found = [
        Target(*_pair(values, spec, where), index)
        for index, (where, values) in enumerate(read_rows(spec, seed))
    ]
    if not found:
        raise DataError("there are no rows", where=spec.path or spec.source)
    return found


def _pair(values: dict[str, Any], spec: DataSpec, where: str) -> tuple[Prompt, str]:
    if "completion" in values:
        return shape_prompt(values, spec, where), _reply(
            column(values, "completion", where), "completion", where
        )
    if "messages" in values:
        messages = check_messages(column(values, "messages", where), "messages", where)
        return shape(messages[:-1], "messages", spec, where), _reply(messages[-1:], "messages", where)
    if spec.answer_column and spec.answer_column in values:
        answer = str(column(values, spec.answer_column, where))
        return shape_prompt(values, spec, where), _reply(answer, spec.answer_column, where)
    raise DataError(
        "there is no text to imitate",
        where=where,
        why=f"columns are {', '.join(values)}",
        fix="add a column completion or messages, or name the answer in data.answer_column",
    )


def _reply(value: object, name: str, where: str) -> str:
    """The text of a reply: text, or a list of one assistant message."""
    if isinstance(value, str):
        text = value
    else:
        messages = check_messages(value, name, where)
        if len(messages) != 1 or messages[0]["role"] != "assistant":
            roles = [message["role"] for message in messages]
            raise DataError(
                f"{name} doesn't end in one assistant message", where=where, why=f"roles are {roles}"
            )
        text = messages[0]["content"]
    if not text.strip():
        raise DataError(f"{name} is empty", where=where)
    return text
