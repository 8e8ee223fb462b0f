"""Experts of every cached token, beside its keys and values, for a trainer that repeats the engine's choice.

Slots are those of the KV cache: whatever shares, forks, recalls or overwrites a page does so to the routes in it, and what a
finished sample was routed by is read off its block table. Next: `cache.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.models.spec import ModelSpec
from lockstep.nn.routes import Routes


class RouteStore:
    """[sparse layers, slots, k] int16, layers as in `ModelSpec.sparse_layers`."""

    def __init__(self, spec: ModelSpec, slots: int, device: torch.device) -> None:
        assert spec.moe is not None and spec.moe.num_experts < 1 << 15
        self.layers = spec.sparse_layers
        shape = (len(self.layers), slots, spec.moe.experts_per_token)
        self.ids = torch.full(shape, -1, dtype=torch.int16, device=device)

    def write(self, slots_T: Tensor, routes: Routes) -> None:
        """Notes the routes of a forward whose rows have these slots."""
        for number, layer in enumerate(self.layers):
            self.ids[number, slots_T] = routes.ids[layer].to(torch.int16)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copies `count` slots."""
        self.ids[:, target : target + count] = self.ids[:, source : source + count]

    def read(self, slots_T: Tensor) -> Tensor:
        """[T, sparse layers, k] int16 on the CPU."""
        return self.ids[:, slots_T.to(self.ids.device)].transpose(0, 1).contiguous().cpu()
