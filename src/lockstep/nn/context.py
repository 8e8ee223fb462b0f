"""The attention context: the only seam between a training forward and a decode step.

Both sides run the same decoder. What differs is where keys and values live: beside the queries, packed (`PackedContext`,
with gradients), or in cache pages (`PagedContext`). Either way a layer hands over its q, k, v and gets its output back
from the same kernel, over the same quantized keys and values.

Next: `../kernels/reference_attention.py` for the loop, `../rollout/runner.py` for the cache.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.kernels.attention_index import AttentionIndex
from lockstep.kernels.reference import saturated
from lockstep.kernels.table import Kernels
from lockstep.nn.kv_scales import AmaxCollector, KVScales


class AttentionContext(Protocol):
    """Where keys and values live. positions_T: int64 position of every row in its sequence."""

    positions_T: Tensor

    def attend(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Attention output [T, H, D] of the rows at hand."""


class PackedContext:
    """Rows of several sequences side by side; keys and values are the rows themselves."""

    def __init__(
        self,
        positions_T: Tensor,
        index: AttentionIndex,
        kernels: Kernels,
        *,
        scales: KVScales | None = None,
        collector: AmaxCollector | None = None,
    ) -> None:
        self.positions_T, self.index, self.kernels = positions_T, index, kernels
        self.scales, self.collector = scales, collector

    def attend(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """See `AttentionContext`."""
        if self.collector is not None:
            self.collector.see(layer, k_TGD, v_TGD)
        scales = (None, None) if self.scales is None else (self.scales.k[layer], self.scales.v[layer])
        return _PackedAttention.apply(q_THD, k_TGD, v_TGD, *scales, self.index, self.kernels)  # type: ignore[no-any-return]


class PagedContext:
    """Rows of running sequences; keys and values are written to a store of slots and read back through it.

    k_store, v_store: [layers, slots, KV heads, D] in BF16, or e4m3 when there are scales. slots_T: the slot of each row.
    """

    def __init__(
        self,
        positions_T: Tensor,
        slots_T: Tensor,
        index: AttentionIndex,
        kernels: Kernels,
        k_store: Tensor,
        v_store: Tensor,
        scales: KVScales | None,
    ) -> None:
        self.positions_T, self.slots_T, self.index, self.kernels = positions_T, slots_T, index, kernels
        self.k_store, self.v_store, self.scales = k_store, v_store, scales

    def attend(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """See `AttentionContext`."""
        k_scale = v_scale = None
        if self.scales is not None:
            k_scale, v_scale = self.scales.k[layer], self.scales.v[layer]
            k_TGD, v_TGD = self.kernels.quantize_kv(k_TGD, k_scale), self.kernels.quantize_kv(v_TGD, v_scale)
        k_store, v_store = self.k_store[layer], self.v_store[layer]
        _write(k_store, self.slots_T, k_TGD)
        _write(v_store, self.slots_T, v_TGD)
        return self.kernels.attention(q_THD, k_store, v_store, self.index, k_scale, v_scale)[0]


def _write(store_SGD: Tensor, slots_T: Tensor, rows_TGD: Tensor) -> None:
    if rows_TGD.element_size() == 1:
        store_SGD, rows_TGD = store_SGD.view(torch.uint8), rows_TGD.view(torch.uint8)
    store_SGD[slots_T] = rows_TGD


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        k_scale_G: Tensor | None,
        v_scale_G: Tensor | None,
        index: AttentionIndex,
        kernels: Kernels,
    ) -> Tensor:
        keys, values = k_TGD, v_TGD
        if k_scale_G is not None and v_scale_G is not None:
            keys, values = kernels.quantize_kv(k_TGD, k_scale_G), kernels.quantize_kv(v_TGD, v_scale_G)
        out, lse = kernels.attention(q_THD, keys, values, index, k_scale_G, v_scale_G)
        ctx.index, ctx.kernels = index, kernels
        clipped: list[Tensor | None] = [None, None]
        if k_scale_G is not None and v_scale_G is not None:
            clipped = [saturated(k_TGD, k_scale_G), saturated(v_TGD, v_scale_G)]
        ctx.save_for_backward(q_THD, keys, values, out, lse, k_scale_G, v_scale_G, *clipped)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, keys, values, out, lse, k_scale, v_scale, k_clipped, v_clipped = ctx.saved_tensors
        dq, dk, dv = ctx.kernels.attention_grad(grad, q, keys, values, out, lse, ctx.index, k_scale, v_scale)
        if k_clipped is not None:
            dk, dv = dk.masked_fill_(k_clipped, 0.0), dv.masked_fill_(v_clipped, 0.0)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None, None
