"""Tokenizers from local folders: the file decides, the ends are known, a chat is encoded once."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from lockstep.errors import CheckpointError
from lockstep.models.checkpoint import load_config
from lockstep.models.tiny import make_tiny
from lockstep.models.tokenizer import chat_text, end_of_turn_id, load_tokenizer, pad_id, prompt_ids, stop_ids

SMOLLM2 = os.environ.get("LOCKSTEP_SMOLLM2", "")
USER = [{"role": "user", "content": "1+2="}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny(tmp_path / "m", layers=1)
    return tmp_path / "m"


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    merged = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))


def test_loads_and_fits_the_embedding(folder: Path) -> None:
    spec = load_config(folder)
    assert len(load_tokenizer(folder, spec)) == spec.vocab_size
    edit(folder / "config.json", vocab_size=spec.vocab_size - 1)
    with pytest.raises(
        CheckpointError, match=f"{spec.vocab_size} tokens, the embedding {spec.vocab_size - 1}"
    ):
        load_tokenizer(folder, load_config(folder))


def test_what_is_no_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer("Qwen/Qwen3-8B")  # a name on a hub is not a folder, and nothing is downloaded
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["x.Slow", "x.Fast"]})
    with pytest.raises(CheckpointError, match="its own code"):
        load_tokenizer(folder)
    edit(folder / "tokenizer_config.json", auto_map=None)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CheckpointError, match="can't be loaded"):
        load_tokenizer(folder)


def test_tokenizer_json_decides_over_the_class_that_transformers_picks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A qwen2 folder makes transformers 5 rebuild Qwen2's pre-tokenizer, whatever the file says."""
    make_tiny(tmp_path / "m", layers=1, family="qwen2")
    path = tmp_path / "m" / "tokenizer.json"
    own = Tokenizer.from_file(str(path))
    own.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), own.pre_tokenizer])
    own.save(str(path))
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(tmp_path / "m")
    assert "taking tokenizer.json as it is" in caplog.text
    assert json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"]["type"] == "Sequence"
    text = "12 é +3"
    assert tokenizer.encode(text) == own.encode(text).ids
    assert tokenizer.chat_template and tokenizer.eos_token == "<eos>"


def test_stop_ids_join_every_source(folder: Path) -> None:
    spec, tokenizer = load_config(folder), load_tokenizer(folder)
    assert stop_ids(folder, tokenizer, spec) == (2,)
    edit(folder / "generation_config.json", eos_token_id=[5, 2])
    assert stop_ids(folder, tokenizer, spec) == (5, 2)
    edit(folder / "generation_config.json", eos_token_id=4)
    tokenizer.chat_template = tokenizer.chat_template.replace("eos_token", "'<unk>'")
    assert end_of_turn_id(tokenizer) == 3
    assert stop_ids(folder, tokenizer, spec) == (4, 2, 3)
    (folder / "generation_config.json").unlink()
    assert stop_ids(folder, tokenizer, spec) == (2, 3)


def test_a_reply_must_be_able_to_end(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None)
    edit(folder / "config.json", eos_token_id=None)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="no token ends a reply"):
        stop_ids(folder, load_tokenizer(folder), load_config(folder))
    edit(folder / "generation_config.json", eos_token_id=[100_000])
    with pytest.raises(CheckpointError, match="outside the vocabulary"):
        stop_ids(folder, load_tokenizer(folder), load_config(folder))


def test_pad_id_falls_back_to_an_end_token(folder: Path) -> None:
    def found(**changes: Any) -> int:
        edit(folder / "tokenizer_config.json", **changes)
        return pad_id(load_tokenizer(folder), load_config(folder))

    assert found() == 0
    assert found(pad_token=None) == 0  # config.json still knows
    edit(folder / "config.json", pad_token_id=None)
    assert found() == 2
    edit(folder / "config.json", eos_token_id=None)
    with pytest.raises(CheckpointError, match="neither a padding nor an end token"):
        found(eos_token=None)


def test_chat_is_encoded_once_with_one_start_token(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert chat_text(tokenizer, USER) == "<bos><user>1+2=<eos><assistant>"
    assert chat_text(tokenizer, USER, add_generation_prompt=False) == "<bos><user>1+2=<eos>"
    ids = prompt_ids(tokenizer, USER)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", "<user>", *"1+2=", "<eos>", "<assistant>"]
    assert tokenizer.convert_ids_to_tokens(prompt_ids(tokenizer, "1+2=")) == [*"1+2="]


def test_template_faults_name_themselves(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(CheckpointError, match="roles must alternate"):
        chat_text(tokenizer, USER)
    tokenizer.chat_template = None
    with pytest.raises(CheckpointError, match="no chat template"):
        prompt_ids(tokenizer, USER)


@pytest.mark.skipif(not SMOLLM2, reason="LOCKSTEP_SMOLLM2 must name a folder written by fetch_smollm2")
class TestSmolLM2:
    def test_one_digit_split_survives(self) -> None:
        tokenizer = load_tokenizer(SMOLLM2, load_config(SMOLLM2))
        assert tokenizer.tokenize("a   12") == ["a", "ĠĠĠ", "1", "2"]
        text = "x =  7\n\n  8, don't naïve 你好 🙂"
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_chat_and_ends(self) -> None:
        spec = load_config(SMOLLM2)
        tokenizer = load_tokenizer(SMOLLM2, spec)
        text = chat_text(tokenizer, USER)
        assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        assert text.endswith("<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n")
        assert stop_ids(SMOLLM2, tokenizer, spec) == (2,) and pad_id(tokenizer, spec) == 2
