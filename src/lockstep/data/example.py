"""An example is a prompt and the columns that its rewards will get; `load` makes all of a source, every row checked.

Checked once, before the first step: a bad row names its file and line now instead of stopping a run in its second day.
Next: `stream.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data.prompt import Prompt, column, shape_prompt
from lockstep.data.rows import read_rows
from lockstep.data.spec import DataSpec
from lockstep.errors import DataError

RESERVED = ("prompts", "completions", "completion_ids")
"""Names that a reward function's own arguments have."""


@dataclass(frozen=True)
class Example:
    """One prompt (text, or chat messages), the columns for its rewards, and its number in the source, from 0."""

    prompt: Prompt
    columns: dict[str, Any]
    index: int


def load(spec: DataSpec, seed: int = 0) -> list[Example]:
    """All examples of the source in its order, at most `spec.limit`; `seed` is the run's, used when the spec has none.

    DataError with file and line for the first row that is malformed, and when there are none.
    """
    examples = [
        Example(shape_prompt(values, spec, where), reward_columns(values, spec, where), index)
        for index, (where, values) in enumerate(read_rows(spec, seed))
    ]
    if not examples:
        raise DataError("there are no rows", where=spec.path or spec.source)
    return examples


def reward_columns(values: dict[str, Any], spec: DataSpec, where: str) -> dict[str, Any]:
    """The columns of a row that rewards get: those asked for, or all but the prompt, and the answer as `answer`."""
    names = spec.columns or tuple(name for name in values if name != spec.prompt_column)
    kept = {name: values[name] if name in values else column(values, name, where) for name in names}
    taken = [name for name in RESERVED if name in kept]
    if taken:
        why = f"{taken[0]!r} is an argument of every reward"
        raise DataError(
            "a column has a reserved name",
            where=where,
            why=why,
            fix="list the columns to keep in data.columns",
        )
    if not spec.answer_column:
        return kept
    if spec.answer_column not in values:
        try:
            column(values, spec.answer_column, where)
        except DataError as error:
            fix = error.fix or "set data.answer_column, to '' where no reward needs an answer"
            raise DataError(error.what, where=where, why=error.why, fix=fix) from None
    answer = values[spec.answer_column]
    if answer is None and spec.source != "reasoning_gym":
        raise DataError(f"column {spec.answer_column!r} is null", where=where)
    if "answer" in kept and kept["answer"] != answer:
        raise DataError(
            f"rewards get column {spec.answer_column!r} as answer, but another column has that name",
            where=where,
            fix="list the columns to keep in data.columns, without answer",
        )
    return {**kept, "answer": answer}


def batch_columns(examples: Iterable[Example]) -> dict[str, list[Any]]:
    """The columns of a batch, one entry an example; None where an example doesn't have the column."""
    batch = list(examples)
    names = dict.fromkeys(name for example in batch for name in example.columns)
    return {name: [example.columns.get(name) for example in batch] for name in names}


def fingerprint(examples: Sequence[Example]) -> str:
    """Hash of prompts and columns, 16 hex digits, so that a resumed run can tell that its data has changed."""
    digest = hashlib.sha256()
    for example in examples:
        text = json.dumps([example.prompt, example.columns], sort_keys=True, default=repr)
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()[:16]
