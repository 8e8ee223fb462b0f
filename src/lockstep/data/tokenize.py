"""Prompts become token ids, once, before the run. Overlong prompts are left out and counted, never cut.

How a text or a chat becomes ids is `models/tokenizer.py`'s business; here every prompt of a source is taken through it.
Next: `packing.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lockstep.data.example import Example
from lockstep.data.prompt import Prompt
from lockstep.errors import CheckpointError, DataError
from lockstep.models.tokenizer import prompt_ids


@dataclass(frozen=True)
class EncodedPrompt:
    """An example and the token ids of its prompt."""

    example: Example
    ids: tuple[int, ...]


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, template_args: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a prompt. Text is encoded as it is (with the tokenizer's own start token); messages go through the
    chat template with the generation prompt. DataError when that gives no token."""
    ids = prompt_ids(tokenizer, prompt, **(template_args or {}))
    if not ids:
        raise DataError("the prompt has no tokens", why=f"prompt {prompt!r:.60}")
    return ids


def encode_all(
    examples: Iterable[Example],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> tuple[list[EncodedPrompt], int]:
    """The prompts of at most `max_prompt_tokens` tokens in their order, and how many longer ones were dropped.

    DataError when a chat template refuses a prompt (naming its row), and when nothing is left.
    """
    kept: list[EncodedPrompt] = []
    dropped, shortest = 0, 0
    for example in examples:
        try:
            ids = encode_prompt(tokenizer, example.prompt, template_args)
        except CheckpointError as error:
            where = f"prompt {example.index}"
            raise DataError(error.what, where=where, why=error.why, fix=error.fix) from error
        if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
            dropped += 1
            shortest = min(shortest or len(ids), len(ids))
        else:
            kept.append(EncodedPrompt(example, tuple(ids)))
    if not kept:
        why = f"the shortest of {dropped} has {shortest} tokens" if dropped else "there are none"
        fix = f"raise data.max_prompt_tokens above {max_prompt_tokens}" if dropped else ""
        raise DataError("no prompt is left", why=why, fix=fix)
    return kept, dropped


def encode_target(tokenizer: PreTrainedTokenizerBase, text: str, end_id: int) -> list[int]:
    """Token ids of a completion to imitate: the text without special tokens, then the token that ends a reply."""
    return [*tokenizer.encode(text, add_special_tokens=False), end_id]
