"""Conversations of several turns, token in, token out: what was sampled is never tokenized again.

A conversation holds token ids. A turn's sampled ids are appended as they are, whatever text they spell (field failure 59:
decoding and encoding is no bijection, so a retokenized turn has other ids than were sampled, and log-probabilities of nothing).
Only what the template puts between turns, with the user's or the tool's words, is tokenized, and only once; it is context, masked
out of the loss.

That needs a template that leaves the past alone. Many don't: they strip `<think>` from earlier turns, trim blanks, or write a
prefilled prompt otherwise afterwards (field failure 60). So each turn the whole chat is rendered, and the text so far must be
its beginning. Where it isn't, a new segment starts: a sample of its own, whose prompt is the chat as rendered now. Nothing is
ever cut by a length.

Next: `template.py`, which tells what a template does; docs/samples.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from lockstep.errors import ContractError, DataError
from lockstep.models.tokenizer import chat_text
from lockstep.nn.sampling_mask import SamplingMask
from lockstep.rollout.types import Completion, FinishReason, Request, SamplingParams, VersionSpan

log = logging.getLogger(__name__)

Message = Mapping[str, Any]


class Conversations:
    """Begins conversations under one tokenizer and template, and counts what became of them.

    stop_ids: tokens that end a turn. template: variables for the chat template (`tools`, `enable_thinking`, ...).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        template: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.stop_ids = tokenizer, frozenset(stop_ids)
        self.template = dict(template or {})
        self.segments = self.rewritten = 0
        self._said = False
        self._anchor = _anchor(tokenizer)

    def start(
        self, messages: Sequence[Message], *, prompt_index: int = 0, sample_index: int = 0
    ) -> Conversation:
        """A conversation that begins with these messages; the last one is to be answered."""
        return Conversation(self, list(messages), prompt_index, sample_index)

    def metrics(self) -> dict[str, float]:
        """`data/segments` and `data/rewritten_history` since the last call."""
        found = {"data/segments": float(self.segments), "data/rewritten_history": float(self.rewritten)}
        self.segments = self.rewritten = 0
        return found

    def render(self, messages: Sequence[Message]) -> str:
        """The chat with the prompt for an answer."""
        return chat_text(self.tokenizer, messages, **self.template)

    def text(self, ids: Sequence[int]) -> str:
        """A view of token ids, special tokens included."""
        return str(
            self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def encode(self, text: str) -> list[int]:
        """Ids of the beginning of a chat."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def encode_after(self, text: str) -> list[int]:
        """Ids of text that follows other tokens: behind a special token, since some tokenizers put a blank in front of what
        they take for a beginning."""
        if not self._anchor:
            return self.encode(text)
        return self.encode(self._anchor + text)[1:]

    def note_rewrite(self, held: str, rendered: str) -> None:
        """Counts a rewritten past, and says so the first time."""
        if not self._said:
            log.warning(
                "the chat template of %s rewrites earlier turns (%s): such a turn starts a new segment; "
                "`lockstep doctor --template` tells which turns do",
                self.tokenizer.name_or_path or "this model",
                difference(held, rendered),
            )
        self.rewritten += 1
        self._said = True


@dataclass
class _Segment:
    """A sample in the making: its prompt and its response so far."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    masks: list[SamplingMask | None] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    last: Completion | None = None

    def sampled(self, turn: Completion) -> None:
        """A turn's tokens, as they were drawn."""
        start = len(self.ids)
        for span in turn.spans:
            self._span(span.version, start + span.end)
        self._append(turn.token_ids, turn.logprobs, trained=True, mask=turn.sampling_mask)
        self.last = turn

    def said(self, ids: list[int]) -> None:
        """Tokens that nobody sampled, after a turn; they are counted to its weight version."""
        self._span(self.spans[-1].version, len(self.ids) + len(ids))
        self._append(ids, [math.nan] * len(ids), trained=False, mask=None)

    def _append(
        self, ids: Sequence[int], logprobs: Sequence[float], *, trained: bool, mask: SamplingMask | None
    ) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.trained += [trained] * len(ids)
        self.masks.append(mask)
        self.lengths.append(len(ids))

    def _span(self, version: int, end: int) -> None:
        """The next span; one with the last."""
        start = self.spans[-1].end if self.spans else 0
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version, start, end))

    def completion(self, prompt_index: int, sample_index: int) -> Completion | None:
        """The sample up to its last sampled token; None without one."""
        if self.last is None:
            return None
        count = len(self.ids) if self.trained[-1] else len(self.ids) - self.lengths[-1]
        turns = len(self.lengths) if self.trained[-1] else len(self.lengths) - 1
        spans = [replace(s, end=min(s.end, count)) for s in self.spans if s.start < count]
        reason: FinishReason = self.last.finish_reason
        return Completion(
            tuple(self.prompt_ids),
            prompt_index,
            sample_index,
            tuple(self.ids[:count]),
            tuple(self.logprobs[:count]),
            reason,
            tuple(spans),
            self.last.scale_version,
            self.last.params,
            None if turns == 1 else tuple(self.trained[:count]),
            SamplingMask.join(self.masks[:turns], self.lengths[:turns]),
            routes=self.last.routes,
        )


class Conversation:
    """One conversation. `take` a sampled turn, `add` what is said to it, and so on; `samples` are for the trainer."""

    _segment: _Segment
    _text: str

    def __init__(
        self, chats: Conversations, messages: list[Message], prompt_index: int, sample_index: int
    ) -> None:
        self.chats, self.messages = chats, messages
        self.prompt_index, self.sample_index = prompt_index, sample_index
        self.sampled_tokens = 0
        self._done: list[Completion] = []
        self._answered = False
        self._begin(chats.render(messages))

    @property
    def ids(self) -> tuple[int, ...]:
        """Everything so far: what the next turn is sampled after."""
        return tuple(self._segment.prompt_ids + self._segment.ids)

    def request(self, params: SamplingParams) -> Request:
        """What to ask an engine for. No turn gets the random numbers of another."""
        if self._answered:
            raise DataError("there is nothing to answer", fix="add a user's or a tool's message first")
        return Request(self.ids, self.prompt_index, 1, params, self.sample_index, self.sampled_tokens)

    def take(self, turn: Completion, message: Message | None = None) -> Message:
        """Takes a sampled turn: its ids stay as they are. Returns the message that it is to the template: `message`, or its
        text without the token that ended it.

        Raises ContractError when it wasn't sampled after exactly these ids, or not as the turns before it in its segment.
        """
        if self._answered:
            raise DataError("two answers in a row", fix="add a user's or a tool's message first")
        if not turn.token_ids or not turn.spans:
            raise ContractError("a turn has no tokens, or no weight version")
        if turn.prompt_ids != self.ids:
            raise ContractError("a turn was sampled after other tokens than the conversation's")
        last = self._segment.last
        if last is not None and (
            replace(last.params, max_tokens=turn.params.max_tokens) != turn.params
            or last.scale_version != turn.scale_version
        ):
            raise ContractError("turns of a segment differ in sampling parameters or KV scales")
        ids = turn.token_ids
        self._segment.sampled(turn)
        self._text += self.chats.text(ids)
        self.sampled_tokens += len(ids)
        content = self.chats.text(ids[:-1] if ids[-1] in self.chats.stop_ids else ids)
        said: Message = {"role": "assistant", "content": content} if message is None else message
        self.messages.append(said)
        self._answered = True
        return said

    def add(self, *messages: Message) -> bool:
        """What a user or a tool says to the last turn. False when the template rewrote the past: a new segment began."""
        if not self._answered or not messages:
            raise DataError("messages are added to an answer", fix="take a sampled turn first")
        self.messages += messages
        self._answered = False
        rendered = self.chats.render(self.messages)
        if rendered.startswith(self._text) and rendered != self._text:
            self._segment.said(self.chats.encode_after(rendered[len(self._text) :]))
            self._text = rendered
            return True
        self.chats.note_rewrite(self._text, rendered)
        self._done += self._finished()
        self._begin(rendered)
        return False

    def samples(self) -> list[Completion]:
        """The segments so far, each a sample that keeps the contract: sampled tokens are trained, the others are not."""
        return self._done + self._finished()

    def _begin(self, rendered: str) -> None:
        self._segment, self._text = _Segment(self.chats.encode(rendered)), rendered
        self.chats.segments += 1

    def _finished(self) -> list[Completion]:
        completion = self._segment.completion(self.prompt_index, self.sample_index)
        return [] if completion is None else [completion]


def difference(held: str, rendered: str) -> str:
    """Where a rendered chat departs from the text that was held, in a few words."""
    at = next((i for i, (a, b) in enumerate(zip(held, rendered)) if a != b), min(len(held), len(rendered)))
    return f"where {held[at : at + 24]!r} stood it writes {rendered[at : at + 24]!r}"


def _anchor(tokenizer: PreTrainedTokenizerBase) -> str:
    """A special token that stands for itself alone, whatever follows; empty when there is none."""
    for token in tokenizer.added_tokens_decoder.values():
        text = str(token.content)
        if token.special and not token.rstrip and not token.lstrip and not token.single_word:
            alone = list(tokenizer.encode(text, add_special_tokens=False))
            behind = list(tokenizer.encode(text + "\n x", add_special_tokens=False))
            if len(alone) == 1 and behind[:1] == alone:
                return text
    return ""
