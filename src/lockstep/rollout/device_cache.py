"""The paged KV cache in the layout of the device kernels: keys [64, D] and values [D, 64] for each page and KV head.

One page more than the block manager counts is kept as a spare, where rows that no longer run write.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.attention_form import PAGE
from lockstep.models.spec import ModelSpec
from lockstep.numerics.flow import Flow
from lockstep.numerics.formats import E4M3
from lockstep.rollout.cache import PagedCache

MAX_STOPS = 8
"""Stop tokens of a row that the device looks for."""
MAX_KEPT = 4096
"""Ids of a draw that the device records; requests for more go step by step."""


class DeviceCache(PagedCache):
    """k: [layers, pages + 1, G, 64, D]. v: [layers, pages + 1, G, D, 64]."""

    @property
    def spare(self) -> int:
        """The page nobody reads."""
        return self.num_pages

    def storage(self, spec: ModelSpec, flow: Flow, device: torch.device) -> tuple[Tensor, Tensor]:
        """See `PagedCache.storage`."""
        dtype = E4M3 if flow.kv_fp8 else flow.activation
        lead = (spec.num_layers, self.num_pages + 1, spec.num_kv_heads)
        k = torch.zeros(
            *lead, PAGE, spec.head_dim, dtype=torch.uint8 if flow.kv_fp8 else dtype, device=device
        )
        v = torch.zeros(*lead, spec.head_dim, PAGE, dtype=k.dtype, device=device)
        return k.view(dtype), v.view(dtype)

    def copy_page(self, source: int, target: int) -> None:
        """See `PagedCache.copy_page`."""
        for store in (self.k, self.v):
            raw = store.view(torch.uint8) if store.dtype == E4M3 else store
            raw[:, target] = raw[:, source]
