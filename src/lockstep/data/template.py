"""What a chat template does to earlier turns: the check behind `lockstep doctor --template`.

Short chats of the kinds that templates are known to treat apart are rendered turn by turn, as `turns.py` does it with sampled
ones. Where the text so far is not the beginning of the next rendering, a conversation starts a new segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lockstep.data.turns import difference
from lockstep.errors import CheckpointError
from lockstep.models.tokenizer import chat_text, end_of_turn_id

Message = Mapping[str, Any]

_USER = {"role": "user", "content": "What is 6 times 7?"}
_NEXT = {"role": "user", "content": "And plus 1?"}
_TOOL = {"role": "tool", "content": "42"}
_PLAIN, _THOUGHT = "It is 42.", "<think>\n6 times 7.\n</think>\n\nIt is 42."

PROBES: dict[str, tuple[list[Message], str, Message]] = {
    "plain turns": ([_USER], _PLAIN, _NEXT),
    "with a system message": ([{"role": "system", "content": "Be brief."}, _USER], _PLAIN, _NEXT),
    "reasoning, then a user": ([_USER], _THOUGHT, _NEXT),
    "reasoning, then a tool": ([_USER], _THOUGHT, _TOOL),
    "blanks at both ends": ([_USER], "\n " + _PLAIN + " \n", _NEXT),
    "an empty turn": ([_USER], "", _NEXT),
    "a turn cut by length": ([_USER], _PLAIN, _NEXT),
}
"""Kind of chat -> messages so far, the sampled answer, what is said to it."""


@dataclass(frozen=True)
class Verdict:
    """What became of one kind of chat. appended: the past stayed as it was; None when the template refuses such a chat."""

    name: str
    appended: bool | None
    detail: str = ""

    def line(self) -> str:
        """For people."""
        word = {True: "appended", False: "REWRITTEN", None: "refused"}[self.appended]
        return f"{self.name:24} {word}" + (f": {self.detail}" if self.detail else "")


def check_template(
    tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None = None
) -> list[Verdict]:
    """A verdict for each kind of chat. Raises CheckpointError when there is no chat template."""
    chat_text(tokenizer, [_USER], **(template or {}))
    end = end_of_turn_id(tokenizer)
    tail = "" if end is None else str(tokenizer.decode([end], skip_special_tokens=False))
    return [
        _verdict(tokenizer, name, before, answer, "" if "cut" in name else tail, after, template or {})
        for name, (before, answer, after) in PROBES.items()
    ]


def _verdict(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    before: Sequence[Message],
    answer: str,
    end: str,
    after: Message,
    template: Mapping[str, Any],
) -> Verdict:
    try:
        held = chat_text(tokenizer, before, **template) + answer + end
        chat = [*before, {"role": "assistant", "content": answer}, after]
        rendered = chat_text(tokenizer, chat, **template)
    except CheckpointError as error:
        return Verdict(name, None, error.why)
    if rendered.startswith(held) and rendered != held:
        return Verdict(name, True)
    return Verdict(name, False, difference(held, rendered))
