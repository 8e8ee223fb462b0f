"""A metric that knows how it is combined over micro-batches and ranks.

A mean of means is wrong when the parts differ in size, so a part is carried as a sum and a count until the
very end. The two numbers stay tensors on their device: merging never waits for the GPU, only `result` does.

Over ranks: add `value` and `weight` for `mean`, `share` and `sum`; for `max` take the larger `value` and add `weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ReduceKind = Literal["mean", "share", "sum", "max"]


@dataclass(frozen=True, eq=False)
class Reduced:
    """One part of a metric: `value` (scalar: a sum, or a maximum for `max`) over `weight` items (scalar)."""

    value: Tensor
    weight: Tensor
    how: ReduceKind

    def merge(self, other: Reduced) -> Reduced:
        """The metric over both parts, whatever their sizes. Raises ValueError if they reduce differently."""
        if self.how != other.how:
            raise ValueError(
                f"a metric reduced by {self.how} can't be merged with one reduced by {other.how}"
            )
        combine = torch.maximum if self.how == "max" else torch.add
        return Reduced(combine(self.value, other.value), self.weight + other.weight, self.how)

    def result(self) -> float:
        """The number to log: NaN for a mean of nothing, 0 for a share of nothing, minus infinity for a maximum of
        nothing."""
        if self.how not in ("mean", "share"):
            return float(self.value)
        weight = float(self.weight)
        return float(self.value) / weight if weight else (float("nan") if self.how == "mean" else 0.0)


def mean_over(value_N: Tensor, counted_N: Tensor) -> Reduced:
    """Mean of `value_N` [N] over the items where `counted_N` (bool [N]) holds."""
    value_N = torch.where(counted_N, value_N.detach().double(), 0.0)
    return Reduced(value_N.sum(), counted_N.double().sum(), "mean")


def share_of(holds_N: Tensor, counted_N: Tensor) -> Reduced:
    """Share of the items where `counted_N` (bool [N]) holds for which `holds_N` (bool [N]) does too."""
    return Reduced((holds_N & counted_N).double().sum(), counted_N.double().sum(), "share")


def max_over(value_N: Tensor, counted_N: Tensor) -> Reduced:
    """Maximum of `value_N` [N], N at least 1, over the items where `counted_N` (bool [N]) holds."""
    value_N = torch.where(counted_N, value_N.detach().double(), -torch.inf)
    return Reduced(value_N.amax(), counted_N.double().sum(), "max")


def merge_metrics(parts: Iterable[Mapping[str, Reduced]]) -> dict[str, Reduced]:
    """All parts' metrics by name; a name that only some parts have is merged over those."""
    merged: dict[str, Reduced] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged
