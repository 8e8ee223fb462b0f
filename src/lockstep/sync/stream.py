"""Buckets: records in layer order, cut into bounded pieces that never split a record, as bytes without pickle.

The cut is a function of the layout and of one number, so sender and receiver compute the same one, and the receiver knows the
size of every bucket before it allocates the first. A record larger than the bound travels alone: a weight and its scales are
never apart (slime 561). A bucket is a safetensors file in memory, its e4m3 codes viewed as bytes (gloo and others refuse float8).

Next: `transport.py`, which carries the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lockstep.errors import ContractError
from lockstep.numerics.formats import E4M3
from lockstep.sync.manifest import Entry, Layout
from lockstep.sync.records import Record


def cut_buckets(sizes: Sequence[int], limit: int) -> list[range]:
    """Consecutive indices of records of these sizes, in buckets of at most `limit` bytes; a larger record is alone in its."""
    found: list[range] = []
    start = held = 0
    for i, size in enumerate(sizes):
        if i > start and held + size > limit:
            found.append(range(start, i))
            start, held = i, 0
        held += size
    if start < len(sizes):
        found.append(range(start, len(sizes)))
    return found


def plan(layout: Layout, limit: int) -> list[list[Entry]]:
    """The entries of each bucket, in the order they are sent."""
    sizes = [layout.nbytes(e) for e in layout.entries]
    return [[layout.entries[i] for i in bucket] for bucket in cut_buckets(sizes, limit)]


def largest_bucket(layout: Layout, limit: int) -> int:
    """Bytes of tensors in the largest bucket."""
    return max(sum(layout.nbytes(e) for e in bucket) for bucket in plan(layout, limit))


def payload_limit(entries: Sequence[Entry], layout: Layout) -> int:
    """Most bytes that a bucket of these entries takes with its header."""
    header = sum(2 * len(e.name.encode()) + 400 for e in entries)
    return sum(layout.nbytes(e) for e in entries) + header + 64


def pack_bucket(records: Iterable[Record]) -> bytes:
    """The records as safetensors bytes."""
    tensors: dict[str, Tensor] = {}
    for record in records:
        for name, tensor in record.tensors().items():
            assert name not in tensors, f"{name} twice in a bucket"
            plain = tensor.view(torch.uint8) if tensor.dtype == E4M3 else tensor
            tensors[name] = plain.cpu().contiguous()
    return bytes(save(tensors))


def unpack_bucket(payload: bytes) -> dict[str, Tensor]:
    """The tensors of a bucket, codes as bytes. Raises ContractError when it is no safetensors file."""
    try:
        return dict(load(payload))
    except (SafetensorError, ValueError, KeyError) as error:
        raise ContractError(f"a bucket can't be read: {error}") from error
