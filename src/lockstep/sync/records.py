"""Records: what is shipped. A weight and its scales are one thing, in the layout of a DeepSeek checkpoint.

A quantized record holds `NAME` (e4m3 codes, the tensor's own shape) and `NAME_scale_inv` (FP32, one for each 128x128 block of
the whole tensor; despite its name it is what a code is multiplied by). Everything else is one plain tensor. Records are made
from the working copies each time, in checkpoint order, and never from what kernels made of them: a layout that was reordered
once would be reordered again (prime-rl 2341). What isn't finite is refused by name, and a tensor that should be quantized and
isn't is never sent in another precision (verl's fallback after an exception).

`shard` cuts a record for tensor parallelism. Blocks are those of the whole tensor, made before any cut, so a shard narrower
than a block carries the scales it touches and an offset into the first (vllm 52997); quantizing the shards instead would give
every rank other codes.

Next: `stream.py`, which puts records into buckets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import ContractError
from lockstep.models.checkpoint import SCALE_SUFFIX
from lockstep.models.decoder import Decoder
from lockstep.nn.linear import Linear
from lockstep.nn.working import Working
from lockstep.numerics.formats import E4M3
from lockstep.numerics.quantize import Quantized, widen
from lockstep.sync.manifest import Entry
from lockstep.sync.roles import Slot, slots


@dataclass(frozen=True)
class Record:
    """One tensor of a publication: codes with their scales, or plain values."""

    name: str
    value: Quantized | Tensor

    @property
    def main(self) -> Tensor:
        """The tensor that carries the name: codes or values."""
        return self.value.codes if isinstance(self.value, Quantized) else self.value

    @property
    def nbytes(self) -> int:
        """Bytes of everything in it."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors under their names in a checkpoint."""
        if isinstance(self.value, Quantized):
            return {self.name: self.value.codes, self.name + SCALE_SUFFIX: self.value.scale}
        return {self.name: self.value}

    def digest(self) -> str:
        """SHA-256 over name, types, shapes and bytes: equal on every machine for equal records."""
        h = hashlib.sha256()
        for name, tensor in self.tensors().items():
            h.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            h.update(tensor.contiguous().view(torch.uint8).cpu().numpy().data)
        return h.hexdigest()

    def check_finite(self) -> None:
        """Raises ContractError that names the tensor when a value, code or scale is NaN or infinite, or a scale is not
        positive."""
        for name, tensor in self.tensors().items():
            if tensor.dtype == E4M3:
                broken = int(((tensor.view(torch.uint8) & 0x7F) == 0x7F).sum())
            elif name == self.name:
                broken = int((~torch.isfinite(tensor)).sum())
            else:
                broken = int((~(torch.isfinite(tensor) & (tensor > 0))).sum())
            if broken:
                kind = "scales that are not positive and finite" if name != self.name else "non-finite values"
                raise ContractError(f"{name}: {broken} {kind} of {tensor.numel()}")

    @classmethod
    def read(cls, entry: Entry, block: tuple[int, int] | None, tensors: Mapping[str, Tensor]) -> Record:
        """The record of this entry from tensors that arrived, codes viewed as bytes.

        Raises ContractError when codes or scales are missing, have another shape or type, aren't finite, or are not those
        the entry's digest was made of.
        """
        main, scale = tensors.get(entry.name), tensors.get(entry.name + SCALE_SUFFIX)
        if main is None:
            raise ContractError(f"{entry.name}: scales came without their codes")
        if entry.quantized:
            if scale is None:
                raise ContractError(f"{entry.name}: codes came without their scales")
            assert block is not None
            main = _expect(entry.name, main, torch.uint8, entry.shape).view(E4M3)
            name = entry.name + SCALE_SUFFIX
            scale = _expect(name, scale, torch.float32, entry.scale_shape(block))
            record = cls(entry.name, Quantized(main, scale, block))
        else:
            record = cls(entry.name, _expect(entry.name, main, getattr(torch, entry.dtype), entry.shape))
        record.check_finite()
        if record.digest() != entry.digest:
            raise ContractError(f"{entry.name}: its digest is not the manifest's")
        return record


def _expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ContractError(f"{name}: shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype != dtype:
        raise ContractError(f"{name}: type {tensor.dtype}, expected {dtype}")
    return tensor


def records(decoder: Decoder, places: Iterable[Slot] | None = None) -> Iterator[Record]:
    """Records of the decoder's working copies, checked to be finite: of all its tensors in checkpoint order, or of these.

    Raises ContractError that names the tensor: not finite, not refreshed, or in another precision than its role's.
    """
    for slot in slots(decoder) if places is None else places:
        record = record_at(decoder, slot)
        record.check_finite()
        yield record


def record_at(decoder: Decoder, slot: Slot) -> Record:
    """The record of one slot. Raises ContractError as `records` does, but for finiteness."""
    module = decoder.get_submodule(slot.path)
    assert isinstance(module, Working)
    if slot.leaf == "bias":
        assert isinstance(module, Linear)
        if module.working_bias is None:
            raise ContractError(f"{slot.name}: has no working copy; refresh the decoder first")
        return Record(slot.name, module.working_bias.contiguous())
    if module.packed is None:
        raise ContractError(f"{slot.name}: has no working copy; refresh the decoder first")
    codes, plain = module.packed.codes, module.packed.plain
    if slot.quantized:
        if codes is None or codes.group != decoder.flow.fprop.rhs.group:
            raise ContractError(
                f"{slot.name}: role {slot.role} is quantized in this flow, but its working copy holds no codes of "
                f"{decoder.flow.fprop.rhs}; it is not sent in another precision"
            )
        codes = Quantized(codes.codes.contiguous(), codes.scale.contiguous(), codes.group)
        return Record(slot.name, codes)
    if plain is None:
        raise ContractError(f"{slot.name}: role {slot.role} is not quantized, but its working copy is")
    return Record(slot.name, plain.contiguous())


@dataclass(frozen=True)
class Shard:
    """Rows (dim 0) or columns (dim 1) `start` to `start + length` of a record.

    main: the slice. scale: the scales of every block it touches, None for plain values. offset: how far into its first
    block the slice starts, 0 to 127.
    """

    name: str
    dim: int
    start: int
    length: int
    main: Tensor
    scale: Tensor | None
    offset: int
    group: tuple[int, int] | None

    def values(self) -> Tensor:
        """FP32 values: those of the whole record, cut."""
        if self.scale is None or self.group is None:
            return self.main.float()
        rows, columns = self.main.shape
        first = (self.offset, 0) if self.dim == 0 else (0, self.offset)
        scale = self.scale.repeat_interleave(self.group[0], 0)[first[0] : first[0] + rows]
        scale = scale.repeat_interleave(self.group[1], 1)[:, first[1] : first[1] + columns]
        return widen(self.main.contiguous()) * scale


def shard(record: Record, rank: int, world: int, dim: int) -> Shard:
    """The part of `rank`, the record cut along `dim` into `world` parts whose sizes differ by one at most.

    Raises ValueError for a rank, world or dim that doesn't exist, and when there are more ranks than rows.
    """
    size = record.main.shape[dim] if 0 <= dim < record.main.dim() else 0
    if not 0 <= rank < world or not size:
        raise ValueError(f"{record.name}: no part {rank} of {world} along dimension {dim}")
    if world > size:
        raise ValueError(f"{record.name}: {size} rows or columns can't be cut for {world} ranks")
    return cut(record, rank * size // world, (rank + 1) * size // world, dim)


def cut(record: Record, start: int, end: int, dim: int) -> Shard:
    """Rows or columns `start` to `end`; any boundary will do. Raises ValueError when they are outside the record."""
    value = record.value
    if not 0 <= start < end <= record.main.shape[dim]:
        raise ValueError(f"{record.name}: nothing from {start} to {end} along dimension {dim}")
    main = record.main.narrow(dim, start, end - start)
    if not isinstance(value, Quantized):
        return Shard(record.name, dim, start, end - start, main, None, 0, None)
    block = value.group[dim]
    first, last = start // block, (end - 1) // block
    scale = value.scale.narrow(dim, first, last - first + 1)
    return Shard(record.name, dim, start, end - start, main, scale, start - first * block, value.group)
