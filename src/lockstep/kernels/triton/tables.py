"""Many tensors in few launches: those of one shape share a launch, which finds their addresses in a table on the device and
leaves its findings in another. The findings of a wave of launches are read together, so the host waits once for each.

Next: `refresh.py` and `fingerprint.py`, which use it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.upload import upload

FIELDS = 8
"""Addresses of each tensor, at most."""
FOUND = 8
"""Numbers that a kernel finds out about each tensor, at most. Those at LARGEST are maxima, the others are sums modulo 2^64."""
LARGEST = slice(1, 3)
SHARDS = 64
"""Places where a tensor's tiles leave their findings in turn: atomic operations on one address follow each other."""


@dataclass(frozen=True)
class Group:
    """Tensors of one launch: what they have in common, their addresses [n, FIELDS], and zeros [n, SHARDS, FOUND] for the
    findings."""

    kind: Any
    addresses: Tensor
    found: Tensor

    def __len__(self) -> int:
        return len(self.found)


class Table:
    """Fill with `add`, launch what `groups` gives, as often as is good: a wave each. `close` a wave once its kernels were
    launched, then `read` the findings of all waves. Whoever fills it keeps the tensors alive until then."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, list[tuple[int, ...]]] = {}
        self._numbers: dict[Hashable, list[int]] = {}
        self._count = 0
        self._open: list[tuple[Tensor, list[int]]] = []
        self._closed: list[_Wave] = []

    def add(self, kind: Hashable, *addresses: int) -> None:
        """One more tensor: the addresses of what belongs to it."""
        self._waiting.setdefault(kind, []).append(addresses)
        self._numbers.setdefault(kind, []).append(self._count)
        self._count += 1

    def groups(self, device: torch.device) -> list[Group]:
        """What was added since the last call, one group for each kind; nothing waits for the device."""
        rows = [row + (0,) * (FIELDS - len(row)) for members in self._waiting.values() for row in members]
        if not rows:
            return []
        table = upload(torch.tensor(rows, dtype=torch.int64), device)
        found = torch.zeros(len(rows), SHARDS, FOUND, dtype=torch.int64, device=device)
        sizes = [len(members) for members in self._waiting.values()]
        parts = zip(self._waiting, table.split(sizes), found.split(sizes), strict=True)
        groups = [Group(*part) for part in parts]
        self._open.append((found, [i for members in self._numbers.values() for i in members]))
        self._waiting, self._numbers = {}, {}
        return groups

    def close(self) -> None:
        """The waves that were launched are complete: their findings set out for the host."""
        for shards, order in self._open:
            totals = shards.sum(1)
            totals[:, LARGEST] = shards[:, :, LARGEST].amax(1)
            self._closed.append(_Wave.of(totals, order))
        self._open = []

    def read(self) -> Iterator[tuple[list[int], list[float]]]:
        """The findings in the order of `add`, each with the maxima among them as the FP32 numbers with these bits. Waits for
        one wave after the other."""
        for wave in self._closed:
            yield from zip(*wave.rows(), strict=True)


@dataclass(frozen=True)
class _Wave:
    """Findings [n, FOUND] on their way, of the tensors with these numbers."""

    found: Tensor
    order: list[int]
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, totals: Tensor, order: list[int]) -> _Wave:
        if not totals.is_cuda:
            return cls(totals, order, None)
        found = torch.empty(totals.shape, dtype=totals.dtype, pin_memory=True)
        found.copy_(totals, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(found, order, arrived)

    def rows(self) -> tuple[list[list[int]], list[list[float]]]:
        """In the order of `add`: a wave has what was added between two others."""
        if self.arrived is not None:
            self.arrived.synchronize()
        found = self.found[torch.tensor(self.order).argsort()]
        return found.tolist(), found[:, LARGEST].int().view(torch.float32).tolist()
