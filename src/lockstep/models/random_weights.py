"""A model folder of a published shape with random weights: what a run costs and whether it is exact, without a download.

It is a real checkpoint with the character tokenizer of `tiny.py`; most of its vocabulary has no text. Tensors are drawn side by
side, each from a generator of its own, so the same arguments give the same bytes whatever the number of threads.

Next: `tiny.py`.
"""

from __future__ import annotations

import difflib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.models.checkpoint import save
from lockstep.models.spec import PRESETS, ModelSpec, expected_tensors
from lockstep.models.tiny import INIT_STD, char_tokenizer

TOKENIZER_IDS = {"pad_id": 0, "bos_id": 1, "eos_ids": (2,)}


def random_spec(*, shape: str, layers: int | None = None) -> ModelSpec:
    """The shape named `shape`, with so many layers instead of all. Raises CheckpointError for an unknown one."""
    if shape not in PRESETS:
        near = difflib.get_close_matches(shape, PRESETS, n=1)
        known = f"did you mean {near[0]}?" if near else "one of " + ", ".join(PRESETS)
        raise CheckpointError(f"no model shape named {shape!r}", where="random model", fix=known)
    spec = replace(PRESETS[shape], **TOKENIZER_IDS)  # type: ignore[arg-type]
    try:
        return spec if layers is None else replace(spec, num_layers=layers)
    except ValueError as error:
        raise CheckpointError(str(error), where="random model") from error


def make_random(
    out_dir: str | Path, *, shape: str, layers: int | None = None, seed: int = 0, overwrite: bool = False
) -> ModelSpec:
    """Writes the folder in BF16 and returns its shape. Raises CheckpointError for an unknown shape or a folder in use."""
    spec = random_spec(shape=shape, layers=layers)
    names = list(expected_tensors(spec).items())

    def draw(number: int) -> tuple[str, Tensor]:
        name, size = names[number]
        if name.endswith("norm.weight"):
            return name, torch.ones(size, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        return name, torch.empty(size).normal_(0.0, INIT_STD, generator=generator).bfloat16()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tensors = list(pool.map(draw, range(len(names))))
    tokenizer = char_tokenizer(max_position=spec.max_position)
    save(out_dir, spec, tensors, dtype=torch.bfloat16, tokenizer=tokenizer, overwrite=overwrite)
    return spec
