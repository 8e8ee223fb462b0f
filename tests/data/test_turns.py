"""Token in, token out (field failures 59 and 60): sampled ids stay as they are, a rewritten past starts a new segment."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.data.turns import Conversation, Conversations, difference
from lockstep.errors import ContractError, DataError
from lockstep.nn.sampling_mask import SamplingMask
from lockstep.rollout.types import Completion, Request, SamplingParams, VersionSpan
from lockstep.trainer.sample import Expected, defect

APPEND = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
STRIPS_THINK = (
    "{% set last = namespace(i=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.i = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' and loop.index0 < last.i and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TRIMS = APPEND.replace("m.content }}", "m.content | trim }}")
PREFILLS = APPEND.replace("<|assistant|>\n{% endif", "<|assistant|>\n<think>\n{% endif")
NO_MARKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SPECIAL = ("<unk>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>")
CHARS = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
MERGES = [("a", "b"), ("ab", "c"), ("Ċ", "Ċ"), ("x", "Ċ"), ("Ġ", "x")]
END = 1
PARAMS = SamplingParams(8, 0.9)


def bpe(template: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which several texts have more than one spelling: "abc" is one token, or two, or three."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *CHARS, *("".join(m) for m in MERGES)])}
    backend = Tokenizer(models.BPE(vocab, MERGES, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<|end|>", chat_template=template
    )


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def tool(content: str) -> dict[str, str]:
    return {"role": "tool", "content": content}


def ids_of(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> tuple[int, ...]:
    """Ids of tokens by name."""
    found = tokenizer.convert_tokens_to_ids(list(tokens))
    assert 0 not in found
    return tuple(found)


def draw(request: Request, ids: Sequence[int], version: int = 7) -> Completion:
    """A turn with these ids, as an engine would give it."""
    logprobs = tuple(-0.25 * (1 + i) for i in range(len(ids)))
    reason: Any = "stop" if ids[-1] == END else "length"
    spans = (VersionSpan(version, 0, len(ids)),)
    return Completion(
        request.prompt_ids,
        request.prompt_index,
        request.first_sample,
        tuple(ids),
        logprobs,
        reason,
        spans,
        2,
        request.params,
    )


def start(
    template: str, *messages: dict[str, str], **more: Any
) -> tuple[PreTrainedTokenizerFast, Conversations, Conversation]:
    tokenizer = bpe(template)
    chats = Conversations(tokenizer, (END,), more or None)
    return tokenizer, chats, chats.start(messages or [user("x?")], prompt_index=4, sample_index=2)


def assert_valid(samples: Sequence[Completion]) -> None:
    """Each keeps the sample contract, and trains exactly what has a log-probability."""
    for c in samples:
        assert defect(c, Expected(7, 2, 10**6)) is None
        assert [not math.isnan(p) for p in c.logprobs] == list(c.trained) and c.trained[-1]


def test_an_append_only_chat_is_one_sample_case_59() -> None:
    tokenizer, chats, chat = start(APPEND, {"role": "system", "content": "s"}, user("x?"))
    first = draw(chat.request(PARAMS), ids_of(tokenizer, "a", "b", "c", "<|end|>"))
    assert chat.take(first) == {"role": "assistant", "content": "abc"}
    assert chat.add(user("y"))
    second = draw(chat.request(PARAMS), ids_of(tokenizer, "ab", "c"))
    assert second.prompt_ids[: len(first.prompt_ids) + 4] == first.prompt_ids + first.token_ids
    chat.take(second)
    assert chat.add(tool("42"), user("z"))
    third = draw(chat.request(PARAMS), ids_of(tokenizer, "z", "<|end|>"))
    chat.take(third)
    [sample] = chat.samples()
    assert_valid([sample])
    glue = [ids_of(tokenizer, "Ċ", "<|user|>", "Ċ", "y", "<|end|>", "Ċ", "<|assistant|>", "Ċ")]
    glue += [
        ids_of(tokenizer, "<|end|>", "Ċ", "<|tool|>", "Ċ", "4", "2", "<|end|>", "Ċ")
        + ids_of(tokenizer, "<|user|>", "Ċ", "z", "<|end|>", "Ċ", "<|assistant|>", "Ċ")
    ]
    turns = [first.token_ids, glue[0], second.token_ids, glue[1], third.token_ids]
    assert sample.token_ids == sum(turns, ())
    assert list(sample.trained) == [i % 2 == 0 for i, turn in enumerate(turns) for _ in turn]
    assert sample.trained_logprobs == first.logprobs + second.logprobs + third.logprobs
    assert sample.spans == (VersionSpan(7, 0, len(sample.token_ids)),)
    assert (sample.prompt_ids, sample.prompt_index, sample.sample_index) == (first.prompt_ids, 4, 2)
    assert (sample.finish_reason, sample.scale_version, sample.params) == ("stop", 2, PARAMS)
    assert chats.metrics() == {"data/segments": 1.0, "data/rewritten_history": 0.0}


def test_sampled_ids_are_never_tokenized_again_case_59() -> None:
    """ "abc" was sampled as three tokens and would be encoded as one; a trailing newline would merge with the template's."""
    tokenizer, _, chat = start(APPEND)
    sampled = ids_of(tokenizer, "a", "b", "c", "x", "Ċ", "<|end|>")
    prompt = chat.ids
    text = tokenizer.decode(sampled)
    assert tuple(tokenizer.encode(text, add_special_tokens=False)) != sampled, "decode-encode is no bijection"
    chat.take(draw(chat.request(PARAMS), sampled))
    assert chat.add(user("y"))
    assert chat.ids[: len(prompt) + len(sampled)] == prompt + sampled
    whole = tokenizer.apply_chat_template(chat.messages, tokenize=False, add_generation_prompt=True)
    again = tuple(tokenizer.encode(whole, add_special_tokens=False))
    assert again[: len(chat.ids)] != chat.ids and tokenizer.decode(again) == tokenizer.decode(chat.ids)


def test_a_merge_across_the_boundary_stays_apart_case_59() -> None:
    """Without marks between turns: a turn that ends in a newline, cut by length, before the template's own newline."""
    tokenizer, _, chat = start(NO_MARKS)
    sampled = ids_of(tokenizer, "y", "Ċ")
    chat.take(draw(chat.request(PARAMS), sampled))
    assert chat.add(user("z"))
    after = chat.ids[-len(tokenizer.encode("\nuser: z\nassistant: ")) :]
    assert tokenizer.convert_ids_to_tokens(after[:2]) == ["Ċ", "u"]
    whole = tokenizer.apply_chat_template(chat.messages, tokenize=False, add_generation_prompt=True)
    assert "ĊĊ" in tokenizer.tokenize(whole), "encoded as a whole the two newlines are one token"
    assert tokenizer.decode(chat.ids) == whole and tuple(tokenizer.encode(whole)) != chat.ids
    chat.take(draw(chat.request(PARAMS), ids_of(tokenizer, "x")))
    [sample] = chat.samples()
    assert_valid([sample])
    assert sample.token_ids[:2] == sampled


def test_a_template_that_strips_thoughts_starts_a_new_segment_case_60(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer, chats, chat = start(STRIPS_THINK)
    thought = [*tokenizer.encode("<think>q</think>abc"), END]
    first = draw(chat.request(PARAMS), thought)
    with caplog.at_level(logging.WARNING):
        chat.take(first)
        assert not chat.add(user("y"))
        assert chat.ids == tuple(tokenizer.encode(chats.render(chat.messages))), (
            "the chat as it is rendered now"
        )
        assert "<think>" not in tokenizer.decode(chat.ids)
        second = draw(chat.request(PARAMS), ids_of(tokenizer, "a", "b", "<|end|>"))
        chat.take(second)
        assert chat.add(tool("1")), "a tool's result leaves thoughts where they are"
        chat.take(draw(chat.request(PARAMS), thought))
        assert not chat.add(user("z")), "but a user's next question doesn't"
    one, two = chat.samples()
    assert_valid([one, two])
    assert (one.prompt_ids, one.token_ids) == (first.prompt_ids, first.token_ids) and one.loss_mask is None
    assert two.prompt_ids == second.prompt_ids and two.token_ids[:3] == second.token_ids
    assert two.token_ids[-len(thought) :] == tuple(thought) and two.trained_tokens == 3 + len(thought)
    assert (one.prompt_index, one.sample_index) == (two.prompt_index, two.sample_index) == (4, 2)
    assert chats.metrics() == {"data/segments": 3.0, "data/rewritten_history": 2.0}
    assert chats.metrics() == {"data/segments": 0.0, "data/rewritten_history": 0.0}
    with caplog.at_level(logging.WARNING):
        again = chats.start([user("x?")])
        again.take(draw(again.request(PARAMS), thought))
        assert not again.add(user("y"))
    assert [r.message.count("rewrites earlier turns (where '<think>q") for r in caplog.records] == [1], (
        "said once"
    )


@pytest.mark.parametrize(
    ("template", "sampled", "appended"),
    [
        (TRIMS, "ab \n", False),
        (TRIMS, "ab", True),
        (PREFILLS, "q</think>ab", False),
        (APPEND, "ab \n", True),
        (APPEND, "", True),
        (NO_MARKS, "ab", True),
    ],
)
def test_whatever_else_a_template_rewrites_case_60(template: str, sampled: str, appended: bool) -> None:
    tokenizer, _, chat = start(template)
    ids = tokenizer.encode(sampled) + ([END] if template != NO_MARKS else [])
    chat.take(draw(chat.request(PARAMS), ids))
    assert chat.add(user("y")) is appended
    chat.take(draw(chat.request(PARAMS), ids_of(tokenizer, "a")))
    assert_valid(chat.samples())
    assert len(chat.samples()) == (1 if appended else 2)
    whole = tokenizer.apply_chat_template(chat.messages[:-1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(chat.ids[:-1]) == whole, (
        "what the model reads next is always the chat as rendered"
    )


def test_another_end_token_than_the_templates_is_a_rewritten_past_case_60() -> None:
    tokenizer, chats, _ = start(APPEND)
    chats.stop_ids = frozenset({END, 4})
    chat = chats.start([user("x")])
    chat.take(draw(chat.request(PARAMS), ids_of(tokenizer, "a", "<|tool|>")))
    assert chat.messages[-1]["content"] == "a" and not chat.add(user("y"))


def test_variables_reach_the_template() -> None:
    _, chats, chat = start(
        APPEND.replace("<|assistant|>\n{% endif", "<|assistant|>\n{{ mood }}{% endif"), mood="gay"
    )
    assert chats.text(chat.ids).endswith("gay")


def test_a_turn_must_follow_the_conversations_ids_case_59() -> None:
    tokenizer, _, chat = start(APPEND)
    request = chat.request(PARAMS)
    ids = ids_of(tokenizer, "a")
    with pytest.raises(ContractError, match="other tokens"):
        chat.take(draw(replace(request, prompt_ids=request.prompt_ids[:-1]), ids))
    with pytest.raises(ContractError, match="no tokens"):
        chat.take(replace(draw(request, ids), token_ids=()))
    with pytest.raises(DataError, match="added to an answer"):
        chat.add(user("y"))
    chat.take(draw(request, ids))
    for act in (lambda: chat.take(draw(request, ids)), lambda: chat.request(PARAMS)):
        with pytest.raises(DataError, match="add a user's"):
            act()
    chat.add(user("y"))
    with pytest.raises(ContractError, match="sampling parameters"):
        chat.take(draw(chat.request(replace(PARAMS, temperature=0.5)), ids))
    with pytest.raises(ContractError, match="KV scales"):
        chat.take(replace(draw(chat.request(PARAMS), ids), scale_version=3))
    chat.take(draw(chat.request(replace(PARAMS, max_tokens=3)), ids))


def test_an_unanswered_message_is_not_part_of_the_sample() -> None:
    tokenizer, _, chat = start(APPEND)
    assert chat.samples() == []
    first = draw(chat.request(PARAMS), ids_of(tokenizer, "a", "<|end|>"))
    chat.take(first)
    chat.add(user("y"))
    [sample] = chat.samples()
    assert (sample.token_ids, sample.logprobs, sample.loss_mask) == (first.token_ids, first.logprobs, None)
    assert sample.spans == first.spans


def test_requests_of_later_turns_have_noise_of_their_own() -> None:
    tokenizer, _, chat = start(STRIPS_THINK)
    positions = []
    for ids in (
        [*tokenizer.encode("<think>q</think>ab"), END],
        [*ids_of(tokenizer, "a"), END],
        ids_of(tokenizer, "b"),
    ):
        request = chat.request(PARAMS)
        assert (request.prompt_index, request.first_sample, request.samples) == (4, 2, 1)
        positions.append(request.first_position)
        chat.take(draw(request, ids))
        chat.add(user("y"))
    assert positions == [0, 18, 20], "counted over all segments"


def test_versions_and_kept_ids_of_each_turn_stay_with_it_case_64() -> None:
    """Two turns under two versions: both spans are there, glue counts to the turn before it, and the door refuses the mixture."""
    _, _, chat = start(APPEND)
    params = SamplingParams(8, top_k=2, max_kept=2)
    kept = SamplingMask.of([(torch.tensor([3, 9]).int(), 0.5)])
    chat.take(replace(draw(chat.request(params), [9]), sampling_mask=kept))
    chat.add(user("y"))
    glue = len(chat.ids) - len(chat._segment.prompt_ids) - 1
    chat.take(replace(draw(chat.request(params), [3], version=8), sampling_mask=kept))
    [sample] = chat.samples()
    assert sample.spans == (VersionSpan(7, 0, 1 + glue), VersionSpan(8, 1 + glue, 2 + glue))
    found = defect(sample, Expected(7, 2, 200))
    assert found is not None and found.reason == "mixed_versions"
    assert sample.sampling_mask is not None
    assert sample.sampling_mask.counts_N.tolist() == [2, *[0] * glue, 2]
    assert defect(replace(sample, spans=(VersionSpan(7, 0, 2 + glue),)), Expected(7, 2, 200)) is None


def metaspace() -> PreTrainedTokenizerFast:
    """A tokenizer that puts a blank in front of every text, as SentencePiece's does."""
    pieces = [*SPECIAL, "▁", *(chr(c) for c in range(33, 127)), "\n", "▁x", "▁y"]
    backend = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "x"), ("▁", "y")], unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", chat_template=NO_MARKS)


def test_no_blank_appears_between_turns_case_59() -> None:
    tokenizer = metaspace()
    chats = Conversations(tokenizer, (END,))
    names = tokenizer.convert_ids_to_tokens
    assert names(chats.encode("user")) == ["▁", *"user"] and names(chats.encode_after("user")) == list("user")
    chat = chats.start([user("x")])
    chat.take(draw(chat.request(PARAMS), ids_of(tokenizer, "a")))
    assert chat.add(user("y"))
    assert names(list(chat.ids)) == ["▁", *"user:", "▁x", "\n", *"assistant:", "▁", "a", "\n", *"user:", "▁y", "\n",
                                     *"assistant:", "▁"]  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([APPEND, STRIPS_THINK, TRIMS, PREFILLS]),
    st.lists(
        st.tuples(
            st.lists(
                st.sampled_from(
                    ["a", "b", "ab", "abc", "x", "Ċ", "ĊĊ", "Ġ", "Ġx", "xĊ", "<think>", "</think>"]
                ),
                max_size=6,
            ),
            st.booleans(),
            st.sampled_from(["user", "tool"]),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_any_chat_at_all(template: str, turns: list[tuple[list[str], bool, str]]) -> None:
    """Every sampled id is trained once, in order, under its log-probability; prompts and glue are the rest, and every turn was
    sampled after exactly what its sample says."""
    tokenizer, _, chat = start(template)
    sampled: list[tuple[int, float]] = []
    seen: list[tuple[int, ...]] = []
    for names, ends, role in turns:
        ids = [i for n in names for i in (tokenizer.encode(n) if "think" in n else ids_of(tokenizer, n))]
        ids = [*ids, END] if ends or not ids else ids
        turn = draw(chat.request(PARAMS), ids)
        seen.append(turn.prompt_ids + turn.token_ids)
        sampled += zip(turn.token_ids, turn.logprobs)
        chat.take(turn)
        chat.add({"role": role, "content": "q"})
    samples = chat.samples()
    assert_valid(samples)
    found = [(t, p) for c in samples for t, p, m in zip(c.token_ids, c.logprobs, c.trained) if m]
    assert found == sampled
    wholes = [c.prompt_ids + c.token_ids for c in samples]
    assert all(any(whole[: len(s)] == s for whole in wholes) for s in seen)


def test_the_difference_is_shown_where_it_begins() -> None:
    assert difference("abcdef", "abXdef") == "where 'cdef' stood it writes 'Xdef'"
    assert difference("abc", "ab") == "where 'c' stood it writes ''"
