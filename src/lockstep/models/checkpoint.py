"""Hugging Face safetensors folders, in and out, strict both ways.

Reading: headers first, so that a folder with a missing, extra, misshapen or wrongly typed tensor is refused as a whole
before one value is used; then the values in model order, each checked to be finite. Nothing is guessed and no pickle is
opened. Writing: shards beside the target, flushed, then one rename, so that a folder at the target is always complete.
Names and shapes come from `spec.expected_tensors`. Next: `decoder.py`, whose `state_dict` has the same names.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lockstep.errors import CheckpointError
from lockstep.models.spec import ModelSpec, expected_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
READABLE_DTYPES = ("F32", "BF16", "F16")
SCALE_SUFFIX = "_scale_inv"
"""DeepSeek's name for the scales of a block-quantized tensor: they are what a code is multiplied by."""
_DOWNLOAD = "download the folder again, complete (for example `hf download NAME --local-dir DIR`)"


def listing(names: Iterable[str], limit: int = 8) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or `CheckpointError` with the reason."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError("can't be read", where=str(path), why=str(error), fix=_DOWNLOAD) from error
    if not isinstance(value, dict):
        raise CheckpointError("is not a JSON object", where=str(path), fix=_DOWNLOAD)
    return value


def load_config(folder: str | Path) -> ModelSpec:
    """What model the folder's `config.json` describes; raises `CheckpointError` for what we can't compute exactly."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            "no such folder", where=str(folder), why="models are read from local folders", fix=_DOWNLOAD
        )
    if (folder / "adapter_config.json").exists():
        fix = "merge it into its base model and save that (peft: merge_and_unload, save_pretrained)"
        raise CheckpointError("holds a LoRA adapter, not a model", where=str(folder), fix=fix)
    path = folder / "config.json"
    return ModelSpec.from_hf(read_json(path), where=str(path))


def load_tensors(
    folder: str | Path, spec: ModelSpec, fp8: Mapping[str, tuple[int, int]] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that `spec` expects, in model order and in its stored type (FP32, BF16 or FP16), on the CPU.

    `fp8` names tensors that must be stored as e4m3 codes, with the shape of the FP32 scales that follow each of them.
    Names, shapes, types and a redundant tied head are checked before this returns; finiteness as values are read. The
    tensors are views of the mapped file: copy what you keep. Raises `CheckpointError` listing the names.
    """
    folder = Path(folder)
    files = _tensor_files(folder)
    headers = _read_headers(folder, sorted(set(files.values())), files)
    expected, types = with_scales(expected_tensors(spec), fp8 or {})
    redundant_head = spec.tie_embeddings and HEAD in headers
    if redundant_head:
        expected[HEAD] = expected[EMBEDDING]
    _check_headers(folder, spec, expected, types, headers)
    if redundant_head:
        _check_tied_head(folder, files)
        del expected[HEAD]
    return _stream(folder, files, list(expected))


def with_scales(
    shapes: Mapping[str, tuple[int, ...]], fp8: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[str, ...]]]:
    """The shapes with those of scales after their codes, and the stored types of both."""
    expected: dict[str, tuple[int, ...]] = {}
    types: dict[str, tuple[str, ...]] = {}
    for name, shape in shapes.items():
        expected[name] = shape
        if name in fp8:
            expected[name + SCALE_SUFFIX] = fp8[name]
            types |= {name: ("F8_E4M3",), name + SCALE_SUFFIX: ("F32",)}
    return expected, types


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index says; a single file is listed by its own header."""
    index, single = folder / INDEX, folder / SINGLE
    if index.exists() and single.exists():
        why = f"{SINGLE} and {INDEX} are both there, and may be different models"
        raise CheckpointError(
            "two checkpoints in one folder", where=str(folder), why=why, fix="remove the stale one"
        )
    if single.exists():
        with _open(single) as handle:
            return dict.fromkeys(handle.keys(), SINGLE)
    if not index.exists():
        _refuse_without_safetensors(folder)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError("has no weight_map of names to files", where=str(index), fix=_DOWNLOAD)
    outside = sorted({name for name in weight_map.values() if Path(name).name != name})
    if outside:
        raise CheckpointError(f"points outside the folder: {listing(outside)}", where=str(index))
    missing = sorted({name for name in weight_map.values() if not (folder / name).exists()})
    if missing:
        raise CheckpointError(f"shards are missing: {listing(missing)}", where=str(folder), fix=_DOWNLOAD)
    return weight_map


def _refuse_without_safetensors(folder: Path) -> NoReturn:
    pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in sorted(folder.glob(pattern))]
    if pickles:
        fix = "convert it once: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        why = "pickles can run code when opened"
        raise CheckpointError(
            f"only pickled weights: {listing(pickles)}", where=str(folder), why=why, fix=fix
        )
    if list(folder.glob("*.gguf")):
        fix = "import it: lockstep.models.gguf.import_gguf(FILE, NEW_DIR)"
        raise CheckpointError("only GGUF weights", where=str(folder), fix=fix)
    raise CheckpointError(f"neither {SINGLE} nor {INDEX} is there", where=str(folder), fix=_DOWNLOAD)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            "is not a complete safetensors file", where=str(path), why=str(error), fix=_DOWNLOAD
        ) from error


def _read_headers(
    folder: Path, shards: Sequence[str], files: Mapping[str, str]
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, type) of all that the shards really hold; the index must say the same."""
    headers: dict[str, tuple[tuple[int, ...], str]] = {}
    strays: list[str] = []
    for shard in shards:
        with _open(folder / shard) as handle:
            for name in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                if files.get(name) != shard:
                    strays.append(f"{name} in {shard}")
                    continue
                view = handle.get_slice(name)
                headers[name] = (tuple(view.get_shape()), view.get_dtype())
    absent = [f"{name} not in {shard}" for name, shard in files.items() if name not in headers]
    if strays or absent:
        what = f"the index and the shards disagree: {listing(absent + strays)}"
        raise CheckpointError(what, where=str(folder / INDEX), fix=_DOWNLOAD)
    return headers


def _check_headers(
    folder: Path,
    spec: ModelSpec,
    expected: Mapping[str, tuple[int, ...]],
    readable: Mapping[str, tuple[str, ...]],
    headers: Mapping[str, tuple[tuple[int, ...], str]],
) -> None:
    missing = [name for name in expected if name not in headers]
    extra = [name for name in headers if name not in expected]
    shapes, types = [], []
    for name in (name for name in expected if name in headers):
        shape, stored = headers[name]
        if shape != expected[name]:
            shapes.append(f"{name} is {list(shape)}, expected {list(expected[name])}")
        if stored not in readable.get(name, READABLE_DTYPES):
            types.append(f"{name} is {stored}")
    found = {"missing": missing, "unexpected": extra, "wrong shape": shapes, "wrong type": types}
    problems = [f"{what}: {listing(names)}" for what, names in found.items() if names]
    if not problems:
        return
    fix = "the tensors must be exactly those that config.json describes"
    if missing == [HEAD] and not spec.tie_embeddings:
        fix = "if the head is the embedding, set tie_word_embeddings to true in config.json"
    elif any(name.endswith("experts.gate_up_proj") for name in extra):
        fix = "save it with one tensor an expert, as on the hub: save_pretrained(DIR, save_original_format=True)"
    elif not readable and (types or any(name.endswith(("_scale", "_scale_inv")) for name in extra)):
        fix = f"give the BF16 checkpoint ({', '.join(READABLE_DTYPES)} can be read); the flow quantizes"
    raise CheckpointError("; ".join(problems), where=str(folder), why=f"family {spec.family}", fix=fix)


def _check_tied_head(folder: Path, files: Mapping[str, str]) -> None:
    with _open(folder / files[EMBEDDING]) as first, _open(folder / files[HEAD]) as second:
        embedding, head = first.get_tensor(EMBEDDING).float(), second.get_tensor(HEAD).float()
    changed = int((embedding != head).sum())
    if changed:
        raise CheckpointError(
            f"config.json says tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING} "
            f"in {changed} of {head.numel()} values",
            where=str(folder),
            why="two names for one tensor must hold one value",
            fix="set tie_word_embeddings to false to use both, or remove the wrong one",
        )


def _finite(tensor: torch.Tensor) -> bool:
    wide = tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
    return bool(torch.isfinite(wide).all())


def _stream(
    folder: Path, files: Mapping[str, str], names: Sequence[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    with ExitStack() as stack:
        handles = {
            shard: stack.enter_context(_open(folder / shard)) for shard in sorted({files[n] for n in names})
        }
        for position, name in enumerate(names):
            tensor = handles[files[name]].get_tensor(name)
            if not _finite(tensor):
                bad = [n for n in names[position:] if not _finite(handles[files[n]].get_tensor(n))]
                raise CheckpointError(
                    f"NaN or infinite values in {listing(bad)}", where=str(folder), fix=_DOWNLOAD
                )
            yield name, tensor


def save(
    folder: str | Path,
    spec: ModelSpec,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    max_shard_bytes: int = 5_000_000_000,
    tokenizer: PreTrainedTokenizerBase | None = None,
    extra_config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    expected: Mapping[str, tuple[int, ...]] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a folder that transformers, vLLM and `load_tensors` read; all of it appears at once, or nothing does.

    Every value is cast to `dtype`; with `None` each tensor keeps its own (FP8 codes beside FP32 scales, say, with their
    names and shapes in `expected`). `extra_config` is merged into `config.json`. At most one shard is held in memory.
    Raises `CheckpointError` for a missing, extra, doubled, misshapen or non-finite tensor, and for a target that exists
    and isn't empty unless `overwrite`.
    """
    target = Path(os.path.abspath(folder))
    if target.exists() and not target.is_dir():
        raise CheckpointError("is a file, not a folder", where=str(target))
    if target.exists() and any(target.iterdir()) and not overwrite:
        raise CheckpointError(
            "the folder isn't empty", where=str(target), fix="name another folder, or remove this one"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = _sibling(target, "partial")
    partial.mkdir()
    try:
        checked = _checked(tensors, dict(expected or expected_tensors(spec)), dtype, where=str(target))
        saved = _write_shards(partial, checked, max_shard_bytes)
        config = {**spec.to_hf(), "dtype": str(dtype or saved).removeprefix("torch."), **(extra_config or {})}
        _write_json(partial / "config.json", config)
        _write_json(partial / "generation_config.json", dict(generation_config or _generation_config(spec)))
        if tokenizer is not None:
            _save_tokenizer(partial, tokenizer)
        _flush(partial)
        _swap(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _save_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Files of transformers 5, with the class name that transformers 4 knows too."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = read_json(path)
    if config.get("tokenizer_class") == "TokenizersBackend":
        _write_json(path, {**config, "tokenizer_class": "PreTrainedTokenizerFast"})


def _sibling(target: Path, purpose: str) -> Path:
    return target.with_name(f".{target.name}.{purpose}-{os.getpid()}-{secrets.token_hex(4)}")


def _generation_config(spec: ModelSpec) -> dict[str, Any]:
    config = spec.to_hf()
    return {
        key: config[key]
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if config[key] is not None
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class _ShardWriter:
    """Collects tensors up to a size and writes them; the files get their final names when their number is known."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.pending: dict[str, torch.Tensor] = {}
        self.pending_bytes = self.total_bytes = 0
        self.shards: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.pending_bytes + size > self.max_bytes:
            self.flush()
        self.pending[name] = tensor
        self.pending_bytes += size
        self.total_bytes += size

    def flush(self) -> None:
        self.shards.append(list(self.pending))
        path = self.folder / f"part-{len(self.shards)}"
        save_file(self.pending, path, metadata={"format": "pt"})
        path.chmod(self.folder.stat().st_mode & 0o666)  # safetensors makes the file private to its owner
        self.pending, self.pending_bytes = {}, 0

    def close(self) -> None:
        self.flush()
        count = len(self.shards)
        names = (
            [SINGLE]
            if count == 1
            else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        )
        for i, name in enumerate(names, start=1):
            (self.folder / f"part-{i}").rename(self.folder / name)
        if count > 1:
            weight_map = {key: name for name, keys in zip(names, self.shards, strict=True) for key in keys}
            _write_json(
                self.folder / INDEX, {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            )


def _checked(
    tensors: Iterable[tuple[str, torch.Tensor]],
    expected: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype | None,
    *,
    where: str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as they will be stored: each expected one exactly once, on the CPU, cast, dense and finite."""
    left = dict(expected)
    for name, tensor in tensors:
        if name not in left:
            what = f"{name} came twice" if name in expected else f"{name} doesn't belong to this model"
            raise CheckpointError(what, where=where)
        shape = left.pop(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name} is {list(tensor.shape)}, expected {list(shape)}", where=where)
        value = tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
        if not _finite(value):
            raise CheckpointError(f"{name} holds NaN or infinite values as {value.dtype}", where=where)
        if value.untyped_storage().nbytes() != value.numel() * value.element_size():
            value = value.clone()  # a view of a larger tensor, which safetensors refuses to share
        yield name, value
    if left:
        raise CheckpointError(f"tensors were not given: {listing(left)}", where=where)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> torch.dtype:
    """Write them all; returns the type of the embedding, which stands for the model's in `config.json`."""
    writer, embedding_dtype = _ShardWriter(folder, max_bytes), torch.float32
    for name, value in tensors:
        writer.add(name, value)
        embedding_dtype = value.dtype if name == EMBEDDING else embedding_dtype
    writer.close()
    return embedding_dtype


def _flush(folder: Path) -> None:
    """Make the files durable before they get their name."""
    for path in (*(p for p in folder.rglob("*") if p.is_file()), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _swap(partial: Path, target: Path) -> None:
    """Rename `partial` to `target`; what was there is set aside first, and put back should the rename fail."""
    if not target.exists():
        partial.rename(target)
        return
    aside = _sibling(target, "old")
    target.rename(aside)
    try:
        partial.rename(target)
    except OSError:
        aside.rename(target)
        raise
    shutil.rmtree(aside)
