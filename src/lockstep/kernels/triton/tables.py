"""Many tensors in few launches: those of one shape share a launch, which finds their addresses in a table on the device and
leaves its findings in another. The findings of all launches are read together, so the host waits once.

Next: `refresh.py` and `fingerprint.py`, which use it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    """Fill with `add`, launch what `groups` gives, as often as is good; then `read` the findings of all."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, list[int]] = {}
        self._tensors: list[tuple[Tensor | None, ...]] = []
        self._order: list[int] = []
        self._found: list[Tensor] = []

    def add(self, kind: Hashable, *tensors: Tensor | None) -> None:
        """One more tensor with what belongs to it. These are kept alive until the findings are read."""
        self._waiting.setdefault(kind, []).append(len(self._tensors))
        self._tensors.append(tensors)

    def groups(self, device: torch.device) -> list[Group]:
        """What was added since the last call, one group for each kind; nothing waits for the device."""
        order = [i for members in self._waiting.values() for i in members]
        if not order:
            return []
        rows = [[0 if t is None else t.data_ptr() for t in self._tensors[i]] for i in order]
        rows = [row + [0] * (FIELDS - len(row)) for row in rows]
        table = torch.tensor(rows, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
        found = torch.zeros(len(rows), SHARDS, FOUND, dtype=torch.int64, device=device)
        sizes = [len(members) for members in self._waiting.values()]
        parts = zip(self._waiting, table.split(sizes), found.split(sizes), strict=True)
        groups = [Group(*part) for part in parts]
        self._order += order
        self._found.append(found)
        self._waiting = {}
        return groups

    def read(self) -> list[list[int]]:
        """The findings in the order of `add`. Waits for the device, once."""
        if not self._found:
            return []
        shards = torch.cat(self._found)
        totals = shards.sum(1)
        totals[:, LARGEST] = shards[:, :, LARGEST].amax(1)
        found: list[list[int]] = [[]] * len(self._order)
        for i, row in zip(self._order, totals.tolist(), strict=True):
            found[i] = row
        self._tensors.clear()
        return found
