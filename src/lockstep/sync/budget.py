"""Bytes a publication needs on the engine's side, counted from the layout before anything is allocated.

Old weights, new weights and the KV cache exist side by side at the worst moment (vllm 15254, verl 302), so they are added up
together with the bucket in flight, and checked at the handshake and again before each publication. The KV cache comes last:
it is allocated after the first weights are in place, from what the sum has left for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lockstep.errors import CapacityError
from lockstep.kernels.table import Kernels
from lockstep.numerics.flow import Flow
from lockstep.numerics.formats import BLOCK
from lockstep.numerics.quantize import Quantized, quantize
from lockstep.sync.manifest import Layout
from lockstep.sync.stream import largest_bucket


@dataclass(frozen=True)
class Budget:
    """Parts in bytes, by name, that will exist at once, and how much there is for them."""

    parts: Mapping[str, int]
    limit: int

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    def check(self, where: str) -> None:
        """Raises CapacityError with every part when they don't fit."""
        if self.total > self.limit:
            parts = ", ".join(f"{name} {size:,}" for name, size in self.parts.items() if size)
            raise CapacityError(
                f"{self.total:,} bytes are needed at once and {self.limit:,} are there: {parts}",
                where=where,
                fix="give the engine more memory, a smaller KV cache or smaller buckets",
            )


def start_budget(layout: Layout, flow: Flow, kernels: Kernels, *, bucket: int, kv: int, limit: int) -> Budget:
    """What the engine needs at its worst moment: a publication over weights in use, beside the KV cache."""
    weights = weight_bytes(layout, flow, kernels)
    parts = {
        "weights in use": weights,
        "new weights": weights,
        "a bucket": bucket_bytes(layout, bucket),
        "KV cache": kv,
    }
    return Budget(parts, limit)


def next_budget(layout: Layout, flow: Flow, kernels: Kernels, *, bucket: int, kv: int, limit: int) -> Budget:
    """What the next publication allocates, against what is free now; `kv` is 0 once the cache is there."""
    weights = weight_bytes(layout, flow, kernels)
    return Budget({"new weights": weights, "a bucket": bucket_bytes(layout, bucket), "KV cache": kv}, limit)


def bucket_bytes(layout: Layout, limit: int) -> int:
    """A bucket as it is read, as bytes, and as tensors."""
    return 3 * largest_bucket(layout, limit)


def weight_bytes(layout: Layout, flow: Flow, kernels: Kernels) -> int:
    """Bytes of all working copies as these kernels hold them."""
    rates = {kind: _bytes_per_value(flow, kernels, kind) for kind in {e.quantized for e in layout.entries}}
    return sum(int(e.numel * rates[e.quantized]) for e in layout.entries)


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)


def _bytes_per_value(flow: Flow, kernels: Kernels, quantized: bool) -> float:
    """Measured on one block, so that no backend has to declare it."""
    sample = torch.zeros(BLOCK, BLOCK)
    operand = flow.fprop.rhs
    packed = kernels.pack(quantize(sample, operand) if quantized else sample.to(flow.activation))
    return sum(_held(getattr(packed, f.name)) for f in fields(packed)) / sample.numel()


def _held(part: object) -> int:
    if isinstance(part, Quantized):
        return _held(part.codes) + _held(part.scale)
    return part.numel() * part.element_size() if isinstance(part, Tensor) else 0
