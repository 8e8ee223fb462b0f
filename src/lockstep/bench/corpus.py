"""A text to train on that every machine has: Python's own language reference, as `help()` shows it.

Half a million characters of English technical prose with code in it, which ship with the interpreter. Sequences of one length
are cut out of it one after the other; every eighth is held out.

Next: `gradients.py`, `sft.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.models.spec import ModelSpec
from lockstep.models.tokenizer import load_tokenizer
from lockstep.rollout.types import Completion, SamplingParams

HELD_OUT = 8


def reference_text() -> str:
    """All topics, in the order of their names. Raises DataError where the interpreter comes without them."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "this Python comes without its language reference (pydoc_data)",
            where="bench corpus",
            fix="install the complete standard library",
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def sequences(tokenizer: Any, text: str, length: int) -> list[tuple[int, ...]]:
    """Token ids of consecutive stretches of `length` tokens; a rest is dropped."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return [tuple(ids[start : start + length]) for start in range(0, len(ids) - length + 1, length)]


def load_corpus(folder: Path, spec: ModelSpec, length: int) -> tuple[list[Completion], list[Completion]]:
    """(sequences to train on, held-out ones), each a completion of its own first token.

    Raises DataError when the text has not sixteen such sequences.
    """
    made = sequences(load_tokenizer(folder, spec), reference_text(), length)
    if len(made) < 2 * HELD_OUT:
        raise DataError(
            f"the text has {len(made)} sequences of {length} tokens", where="--length", fix="lower it"
        )
    found = to_imitate(made)
    train = [c for i, c in enumerate(found) if i % HELD_OUT]
    return train, found[::HELD_OUT]


def to_imitate(made: Sequence[tuple[int, ...]]) -> list[Completion]:
    """Completions whose every token but the first is to be predicted."""
    return [
        Completion(
            ids[:1],
            number,
            0,
            ids[1:],
            (0.0,) * (len(ids) - 1),
            "length",
            (),
            0,
            SamplingParams(len(ids) - 1),
        )
        for number, ids in enumerate(made)
    ]
