"""Prompts become ids once; overlong ones are counted, never cut."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lockstep.data.example import Example
from lockstep.data.tokenize import encode_all, encode_prompt, encode_target
from lockstep.errors import CheckpointError, DataError

WORDS = [
    "<s>",
    "</s>",
    "<unk>",
    "<user>",
    "<assistant>",
    "<system>",
    "think",
    "what",
    "is",
    "one",
    "two",
    "three",
    "plus",
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ '<' + m.role + '> ' + m.content + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if deep %} think{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE, **special)


def words(ids: list[int] | tuple[int, ...]) -> list[str]:
    return [WORDS[i] for i in ids]


def test_text_is_encoded_as_it_is_and_a_chat_through_its_template(tokenizer: PreTrainedTokenizerFast) -> None:
    assert words(encode_prompt(tokenizer, "one plus two")) == ["<s>", "one", "plus", "two"]
    chat = [{"role": "system", "content": "is"}, {"role": "user", "content": "what"}]
    assert words(encode_prompt(tokenizer, chat)) == ["<system>", "is", "<user>", "what", "<assistant>"]
    assert words(encode_prompt(tokenizer, chat, {"deep": True}))[-2:] == ["<assistant>", "think"]


def test_a_target_ends_with_the_given_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert words(encode_target(tokenizer, "three", 1)) == ["three", "</s>"]


def test_overlong_prompts_are_dropped_and_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["one", "one plus two", "two", "one plus two plus three"]
    examples = [Example(text, {}, i) for i, text in enumerate(texts)]
    kept, dropped = encode_all(examples, tokenizer, max_prompt_tokens=3)
    assert [encoded.example.index for encoded in kept] == [0, 2] and dropped == 2
    assert words(kept[1].ids) == ["<s>", "two"]
    kept, dropped = encode_all(examples, tokenizer)
    assert len(kept) == 4 and dropped == 0
    with pytest.raises(DataError, match=r"no prompt is left.*the shortest of 4 has 2 tokens.*above 1"):
        encode_all(examples, tokenizer, max_prompt_tokens=1)


def test_a_refusing_template_names_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    chats = [[{"role": "user", "content": "one"}], [{"role": "tool", "content": "one"}]]
    with pytest.raises(DataError, match=r"prompt 1: the chat template refuses.*no tools"):
        encode_all([Example(chat, {}, i) for i, chat in enumerate(chats)], tokenizer)


def test_no_template_and_no_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(CheckpointError, match="no chat template"):
        encode_prompt(bare, [{"role": "user", "content": "a"}])
    with pytest.raises(DataError, match="no tokens"):
        encode_prompt(bare, "")
