"""Hugging Face folders in DeepSeek's block-FP8 layout, out and back in: the records of a decoder, written down.

What is exported are the bytes the engine computes with, made from the masters like any publication: codes under a tensor's name,
scales under `..._scale_inv`, everything else in BF16, and a `quantization_config` from which transformers, vLLM and SGLang know
the scheme. Modules that stay in BF16 are listed by exact path. Reading is as strict: the configuration must describe a flow that
this package has, and the tensors must be those of that flow, codes with scales, nothing more.

Next: `records.py`; `../models/checkpoint.py` for the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.kernels.table import Kernels
from lockstep.models.checkpoint import SCALE_SUFFIX, listing, load_tensors, read_json, save, with_scales
from lockstep.models.decoder import Decoder
from lockstep.models.spec import ModelSpec, expected_tensors
from lockstep.numerics.flow import Flow, fp8_flow
from lockstep.numerics.formats import BLOCK
from lockstep.numerics.quantize import Quantized
from lockstep.sync.load_plan import Held, LoadPlan, release_masters
from lockstep.sync.manifest import Layout, layout_of
from lockstep.sync.records import Record, records
from lockstep.sync.roles import QUANTIZED_ROLES, slots

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UE8M0 = "ue8m0"
"""DeepSeek-V3.1's word for scales that are powers of two; they are stored in FP32 all the same."""


def quantization_config(decoder: Decoder) -> dict[str, Any]:
    """The entry of `config.json`. Raises CheckpointError when the decoder's flow quantizes nothing."""
    if not layout_of(decoder).quantized:
        raise CheckpointError(
            "the flow quantizes nothing", where="export", fix="use an fp8 flow, or export BF16"
        )
    config: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": skipped_modules(decoder),
    }
    return config | ({"scale_fmt": _UE8M0} if decoder.flow.scale == "pow2" else {})


def skipped_modules(decoder: Decoder) -> list[str]:
    """Exact paths of the matrices that are not quantized, embedding left aside: it is no linear layer to anybody."""
    plain = QUANTIZED_ROLES | {"router", "head"}
    return [s.path for s in slots(decoder) if s.role in plain and not s.quantized]


def save_fp8(
    folder: str | Path,
    decoder: Decoder,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes the decoder's working copies; it must be refreshed, and its flow must quantize something.

    Raises ContractError for a tensor that isn't finite, CheckpointError as `models.checkpoint.save` does.
    """
    extra = {"quantization_config": quantization_config(decoder)}
    expected, _ = with_scales(expected_tensors(decoder.spec), _scale_shapes(layout_of(decoder)))
    tensors = (item for record in records(decoder) for item in record.tensors().items())
    return save(
        folder,
        decoder.spec,
        tensors,
        dtype=None,
        tokenizer=tokenizer,
        extra_config=extra,
        expected=expected,
        overwrite=overwrite,
    )


def load_fp8(folder: str | Path, kernels: Kernels) -> Decoder:
    """A decoder whose working copies are the folder's bytes; it has no masters and can't be trained or refreshed.

    Raises CheckpointError when the folder isn't exactly such an export.
    """
    path = Path(folder) / "config.json"
    config = read_json(path)
    quantization = config.pop("quantization_config", None)
    spec = ModelSpec.from_hf(config, where=str(path))
    decoder = Decoder(spec, _flow_of(quantization, spec, str(path)), kernels)
    if (skipped := skipped_modules(decoder)) != (listed := list(quantization["modules_to_not_convert"])):
        odd = sorted(set(skipped) ^ set(listed))
        raise CheckpointError(
            f"modules_to_not_convert fits no flow: {listing(odd)}",
            where=str(path),
            why="a layer is quantized as a whole or not at all, routers and head never",
        )
    release_masters(decoder)
    loading = LoadPlan.of(decoder)
    values: dict[str, Held] = {}
    for record in _read(folder, decoder):
        record.check_finite()
        values[record.name] = loading.prepare(decoder, record)
    loading.install(decoder, values)
    decoder.version = 1
    return decoder


def _read(folder: str | Path, decoder: Decoder) -> Iterator[Record]:
    """The folder's tensors as records; nothing points into its files."""
    layout = layout_of(decoder)
    pending: Tensor | None = None
    for name, tensor in load_tensors(folder, decoder.spec, _scale_shapes(layout)):
        if name in layout.quantized:
            pending = tensor.clone()
        elif name.endswith(SCALE_SUFFIX):
            assert pending is not None and layout.block is not None
            yield Record(name.removesuffix(SCALE_SUFFIX), Quantized(pending, tensor.clone(), layout.block))
        else:
            if tensor.dtype != decoder.flow.activation:
                raise CheckpointError(
                    f"{name} is {tensor.dtype}, expected {decoder.flow.activation}", where=str(folder)
                )
            yield Record(name, tensor.clone())


def _scale_shapes(layout: Layout) -> dict[str, tuple[int, int]]:
    block = layout.block
    return {e.name: e.scale_shape(block) for e in layout.entries if e.quantized} if block is not None else {}


def _flow_of(quantization: Any, spec: ModelSpec, where: str) -> Flow:
    """The flow a quantization_config describes; layers whose linears are all listed stay in BF16."""
    wanted = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    given = quantization if isinstance(quantization, Mapping) else {}
    wrong = [
        f"{key} is {given.get(key)!r}, expected {value!r}"
        for key, value in wanted.items()
        if given.get(key) != value
    ]
    wrong += [
        f"unknown {key}"
        for key in sorted(given.keys() - wanted.keys() - {"modules_to_not_convert", "scale_fmt"})
    ]
    if given.get("scale_fmt") not in (None, _UE8M0):
        wrong.append(f"scale_fmt is {given['scale_fmt']!r}")
    listed = given.get("modules_to_not_convert")
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        wrong.append("modules_to_not_convert is no list of names")
    if wrong:
        raise CheckpointError(
            f"quantization_config: {'; '.join(wrong)}", where=where, why="only our own export is read"
        )
    skipped = set(listed or ())
    keep = {i for i in range(spec.num_layers) if f"model.layers.{i}.self_attn.q_proj" in skipped}
    return fp8_flow(scale="pow2" if given.get("scale_fmt") else "fp32", keep_bf16=frozenset(keep))
