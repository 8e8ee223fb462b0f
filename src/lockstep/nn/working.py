"""Master weights and their working copies.

The optimizer moves FP32 masters. The forward pass never reads a master: it reads the *working copy*, made once a weight
version straight from the master, on every side (two sources change 2 % of the codes, field failure 14). The source of FP8 codes
is the FP32 master and not its BF16 rounding: a pretrained BF16 weight sits in the middle of its rounding interval, and at a
learning rate of 5e-6 it takes dozens of steps until it leaves it. Codes from the masters follow from the first step, since
weights lie anywhere between two code thresholds.

Next: `linear.py`, where the working copy is FP8 codes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.kernels.reference import PackedWeight
from lockstep.kernels.table import Kernels
from lockstep.numerics.formats import Operand
from lockstep.numerics.quantize import quantize


@dataclass(frozen=True)
class Refreshed:
    """What one refresh did to one tensor. `changed` counts codes (or BF16 values) that differ from the last version;
    `max_rel` is the largest quantization error as a share of the tensor's largest value."""

    name: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int
    numel: int
    changed: int
    max_rel: float


class Working(nn.Module):
    """A module with one FP32 master `weight` and its working copy `packed`."""

    weight: nn.Parameter

    def __init__(self, kernels: Kernels, operand: Operand, activation: torch.dtype) -> None:
        super().__init__()
        self.kernels, self.operand, self.activation = kernels, operand, activation
        self.packed: PackedWeight | None = None

    @property
    def working(self) -> PackedWeight:
        """The working copy; a module that was never refreshed has none."""
        assert self.packed is not None, "refresh the decoder before its first forward"
        return self.packed

    def refresh(self, name: str) -> Refreshed:
        """Remakes the working copy from the master. Raises ValueError when the master holds NaN or infinity."""
        source = self.weight.detach()
        source = source if self.operand.is_fp8 else source.to(self.activation)
        old = self.packed
        if self.operand.is_fp8:
            try:
                codes = quantize(source, self.operand)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            changed = codes.codes.numel()
            if old is not None and old.codes is not None:
                before, after = old.codes.codes.view(torch.uint8), codes.codes.view(torch.uint8)
                changed = int((before != after).sum())
            self.packed = self.kernels.pack(codes)
            dense = self.packed.dense if self.packed.dense is not None else codes.dequantize()
            peak = float(source.abs().max())
            error_max = float((dense - source.float()).abs().max())
            rel = error_max / peak if peak else 0.0
        else:
            if not bool(torch.isfinite(source).all()):
                raise ValueError(f"{name}: non-finite value in a weight")
            same = old is not None and old.plain is not None
            changed = int((old.plain != source).sum()) if same else source.numel()  # type: ignore[union-attr]
            self.packed, rel = self.kernels.pack(source), 0.0
        shape = tuple(self.weight.shape)
        return Refreshed(name, str(self.operand), shape, self.packed.nbytes, source.numel(), changed, rel)

    def update_digest(self, h: hashlib._Hash) -> None:
        """Feeds the working copy's bytes (codes and scales, or plain values) into a hash."""
        packed = self.working
        if packed.codes is not None:
            parts = [packed.codes.codes.view(torch.uint8), packed.codes.scale]
        else:
            assert packed.plain is not None
            parts = [packed.plain.contiguous().view(torch.uint8)]
        for part in parts:
            h.update(part.contiguous().cpu().numpy().data)
