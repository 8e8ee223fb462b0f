"""The tokenizer of a local folder, and the only places where text becomes token ids or a chat becomes text.

Rollouts are token in, token out: a prompt is encoded once, here, and text is a view from then on. Loading never reaches
for a hub and never runs code that a folder brings. Two faults that are silent elsewhere: transformers 5 picks a class by
model type and may rebuild it from vocabulary and merges alone, so that another pre-tokenizer cuts the text (a
DeepSeek distillation of Qwen is cut like Qwen); the folder's own `tokenizer.json` decides here. And every id must have a row
in the embedding.
Next: `tiny.py`, which writes a folder small enough to read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lockstep.errors import CheckpointError
from lockstep.models.checkpoint import listing, read_json
from lockstep.models.spec import ModelSpec

log = logging.getLogger(__name__)

Message = Mapping[str, Any]
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Spaces before digits, contractions, runs of newlines, accents, scripts without spaces: what pre-tokenizers treat apart.
_PROBE = "Let's add  12 +   345 = ?\n\n\tx_1 = f(y); don't, I'LL — naïve café, 你好，世界 🙂  end "
_MARK = "reply"


def load_tokenizer(folder: str | Path, spec: ModelSpec | None = None) -> PreTrainedTokenizerBase:
    """The folder's tokenizer; with `spec`, also checked to fit the embedding. Raises `CheckpointError`."""
    folder = Path(folder)
    if not any((folder / name).exists() for name in _FILES):
        why = f"none of {', '.join(_FILES)} is there"
        raise CheckpointError(
            "no tokenizer", where=str(folder), why=why, fix="copy the base model's tokenizer files here"
        )
    config = folder / "tokenizer_config.json"
    if config.exists() and read_json(config).get("auto_map"):
        fix = "use a checkpoint whose tokenizer is part of transformers"
        raise CheckpointError("the tokenizer brings its own code", where=str(config), fix=fix)
    tokenizer = _load(AutoTokenizer, folder)
    if not _encodes_like_file(tokenizer, folder):
        picked = type(tokenizer).__name__
        log.warning("%s: %s encodes unlike tokenizer.json; taking tokenizer.json as it is", folder, picked)
        tokenizer = _load(PreTrainedTokenizerFast, folder)
        if not _encodes_like_file(tokenizer, folder):
            what = f"neither {picked} nor PreTrainedTokenizerFast encodes like tokenizer.json"
            raise CheckpointError(
                what, where=str(folder), fix="upgrade transformers, or save the tokenizer again"
            )
    if spec is not None and len(tokenizer) > spec.vocab_size:
        what = f"the tokenizer has {len(tokenizer)} tokens, the embedding {spec.vocab_size} rows"
        raise CheckpointError(what, where=str(folder), fix="take tokenizer and weights from the same model")
    return tokenizer


def _load(kind: Any, folder: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the Rust backend raises bare Exception for a damaged file
        raise CheckpointError("the tokenizer can't be loaded", where=str(folder), why=str(error)) from error
    return tokenizer


def _encodes_like_file(tokenizer: PreTrainedTokenizerBase, folder: Path) -> bool:
    path = folder / "tokenizer.json"
    if not path.exists():
        return True
    own = Tokenizer.from_file(str(path)).encode(_PROBE, add_special_tokens=False).ids
    return list(tokenizer.encode(_PROBE, add_special_tokens=False)) == own


def stop_ids(folder: str | Path, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> tuple[int, ...]:
    """Every token that ends a reply, without doubles: those of `generation_config.json`, of `config.json`, the
    tokenizer's own, and the one with which the chat template ends a reply (a base model's config may not know it, and
    then a chat never stops). Raises `CheckpointError` when there is none.
    """
    path = Path(folder) / "generation_config.json"
    listed = read_json(path).get("eos_token_id") if path.exists() else None
    ids = list(listed) if isinstance(listed, list) else [listed]
    ids += [*spec.eos_ids, tokenizer.eos_token_id, end_of_turn_id(tokenizer)]
    found = tuple(dict.fromkeys(token for token in ids if token is not None))
    if not found:
        raise CheckpointError(
            "no token ends a reply", where=str(folder), fix="set eos_token_id in generation_config.json"
        )
    outside = [str(token) for token in found if not 0 <= token < spec.vocab_size]
    if outside:
        what = f"stop tokens {listing(outside)} are outside the vocabulary of {spec.vocab_size}"
        raise CheckpointError(what, where=str(folder), fix="correct eos_token_id in generation_config.json")
    return found


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that follows an assistant's reply in the chat template, if there is one."""
    if not tokenizer.chat_template:
        return None
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _MARK}]
    tail = chat_text(tokenizer, chat, add_generation_prompt=False).rpartition(_MARK)[2]
    ids = tokenizer.encode(tail, add_special_tokens=False)
    special = set(tokenizer.all_special_ids) | {
        token for token, added in tokenizer.added_tokens_decoder.items() if added.special
    }
    return int(ids[0]) if ids and ids[0] in special else None


def pad_id(tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> int:
    """The token to fill ragged batches with: the tokenizer's, else the config's, else an end token.

    Any id in the embedding would do, since padding is masked by position and never by its id.
    """
    candidates = (tokenizer.pad_token_id, spec.pad_id, tokenizer.eos_token_id, *spec.eos_ids)
    found = next((token for token in candidates if token is not None), None)
    if found is None:
        raise CheckpointError(
            "neither a padding nor an end token is known", fix="set pad_token in tokenizer_config.json"
        )
    return int(found)


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    **template: Any,
) -> str:
    """The chat as the model saw chats in training; `template` reaches the template (`tools`, `enable_thinking`, ...)."""
    if not tokenizer.chat_template:
        fix = "give prompts as text, or use the instruct variant of the model"
        raise CheckpointError("the tokenizer has no chat template", where=tokenizer.name_or_path, fix=fix)
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **template,
        )
    except TemplateError as error:
        roles = [str(message.get("role")) for message in messages]
        what = f"the chat template refuses messages with roles {roles}"
        raise CheckpointError(what, where=tokenizer.name_or_path, why=str(error)) from error
    return str(text)


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Message], **template: Any
) -> list[int]:
    """Token ids of a prompt. Text gets the tokenizer's own start token; a chat gets what its template writes, once."""
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    return list(tokenizer.encode(chat_text(tokenizer, prompt, **template), add_special_tokens=False))
