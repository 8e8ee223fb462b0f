"""A master and the working copy that follows it: what a publication asks of a backend, and the reference's answer.

The reference makes new tensors, one after the other. A device backend writes into the storage that is there, since captured
graphs and stacks point at it, and reads what came of it once for all tensors (`triton/refresh.py`). Codes, scales and counts
are the same.

Next: `../nn/working.py`, which asks; `../numerics/quantize.py`, the definition of the codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lockstep.numerics.fingerprint import Fingerprint
from lockstep.numerics.formats import Operand
from lockstep.numerics.quantize import Quantized, quantize

if TYPE_CHECKING:
    from lockstep.kernels.reference import PackedWeight


class Source(NamedTuple):
    """master: FP32, a matrix [N, K] or a vector; `operand` says what is made of it, `activation` in which type it stays where
    it isn't quantized. held: the working copy so far, or storage for it when `fresh`. bias: it stands beside a weight, and no
    product reads it."""

    name: str
    master: Tensor
    operand: Operand
    activation: torch.dtype
    held: PackedWeight | None
    fresh: bool = False
    bias: bool = False


class Renewed(NamedTuple):
    """The working copy now. changed: codes (or values) that differ from the last version in any bit, all of them when there was
    none. max_rel: the largest quantization error as a share of the largest value. fingerprint: where it came for free."""

    packed: PackedWeight
    changed: int
    max_rel: float
    fingerprint: Fingerprint | None = None


def renew(source: Source, pack: Callable[[Quantized | Tensor], PackedWeight]) -> Renewed:
    """The reference's refresh of one tensor. Raises ValueError when the master holds NaN or infinity."""
    held = source.held
    if source.operand.is_fp8:
        try:
            codes = quantize(source.master, source.operand)
        except ValueError as error:
            raise ValueError(f"{source.name}: {error}") from error
        old = None if held is None or held.codes is None else held.codes.codes
        packed = pack(codes)
        dense = packed.dense if packed.dense is not None else codes.dequantize()
        peak = float(source.master.abs().max())
        error_max = float((dense - source.master.float()).abs().max())
        return Renewed(packed, _changed(old, codes.codes), error_max / peak if peak else 0.0)
    values = source.master.to(source.activation)
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{source.name}: {non_finite(source)}")
    return Renewed(pack(values), _changed(None if held is None else held.plain, values), 0.0)


def non_finite(source: Source) -> str:
    """What is wrong with a master that isn't finite, in the words of every backend."""
    if source.operand.is_fp8:
        return "non-finite value in a tensor to be quantized"
    return f"non-finite value in a {'bias' if source.bias else 'weight'}"


def _changed(old: Tensor | None, new: Tensor) -> int:
    if old is None or old.shape != new.shape or old.dtype != new.dtype:
        return new.numel()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[new.element_size()]
    return int((old.view(bits) != new.view(bits)).sum())
