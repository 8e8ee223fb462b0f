"""The attention context: the only seam between a training forward and a decode step.

Both sides run the same decoder. What differs is where keys and values live: beside the queries, packed (`PackedContext`,
with gradients), or in cache pages (`PagedContext`). Either way a layer hands over its q, k, v and gets its output back
from the same kernel, over the same quantized keys and values.

Next: `../kernels/reference_attention.py` for the loop, `../rollout/runner.py` for the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.kernels.attention_form import PLAIN, AttentionForm
from lockstep.kernels.attention_index import AttentionIndex
from lockstep.kernels.reference import saturated
from lockstep.kernels.table import Kernels
from lockstep.nn.kv_scales import AmaxCollector, KVScales
from lockstep.nn.routes import Routes
from lockstep.numerics.formats import ScaleKind


class AttentionContext(Protocol):
    """Where keys and values live. positions_T: int64 position of every row in its sequence. routes: what records the
    experts of every row, or imposes them; None when nobody asks."""

    positions_T: Tensor
    routes: Routes | None

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, query_scale: ScaleKind | None = None
    ) -> Tensor:
        """Attention output [T, H, D] of the rows at hand. query_scale: see `AttentionForm`; without effect on BF16 keys."""

    def finish(self) -> None:
        """Called after the last layer. Raises ContractError, naming the layer, when a key or value on its way into FP8 was
        not finite."""


@dataclass(frozen=True)
class _Stored:
    """Keys and values as the kernel reads them, and which elements saturated."""

    keys_SGD: Tensor
    values_SGD: Tensor
    clipped: tuple[Tensor, Tensor] | None


class PackedContext:
    """Rows of several sequences side by side; keys and values are the rows themselves.

    scales: what keys and values are quantized by; with `quantize` False they stay BF16, and scales only count how many a
    quantization would saturate. Whoever gives a `collector` reads it, once for as many forwards as they like; else
    `finish` looks for non-finite keys and values.
    """

    def __init__(
        self,
        positions_T: Tensor,
        index: AttentionIndex,
        kernels: Kernels,
        *,
        scales: KVScales | None = None,
        collector: AmaxCollector | None = None,
        quantize: bool = True,
        routes: Routes | None = None,
    ) -> None:
        self.positions_T, self.index, self.kernels, self.routes = positions_T, index, kernels, routes
        self.scales, self.collector, self.quantize = scales, collector, quantize
        self.own: AmaxCollector | None = None
        if scales is not None and collector is None and quantize:
            self.own = self.collector = AmaxCollector.for_scales(scales)

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, query_scale: ScaleKind | None = None
    ) -> Tensor:
        """See `AttentionContext`."""
        form = _form(self.scales if self.quantize else None, layer, query_scale)
        stored = self._store(layer, k_TGD, v_TGD)
        return _PackedAttention.apply(q_THD, k_TGD, v_TGD, stored, form, self.index, self.kernels)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _store(self, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> _Stored:
        clipped = None
        if self.scales is not None and (self.quantize or self.collector is not None):
            k_scale, v_scale = self.scales.k[layer], self.scales.v[layer]
            clipped = (saturated(k_TGD, k_scale), saturated(v_TGD, v_scale))
        if self.collector is not None:
            self.collector.see(layer, k_TGD, v_TGD)
            self.collector.count(*clipped or ())
        if clipped is None or not self.quantize:
            return _Stored(k_TGD, v_TGD, None)
        keys, values = self.kernels.quantize_kv(k_TGD, k_scale), self.kernels.quantize_kv(v_TGD, v_scale)
        return _Stored(keys, values, clipped)

    def finish(self) -> None:
        """See `AttentionContext`."""
        if self.own is not None:
            self.own.read()


class PagedContext:
    """Rows of running sequences; keys and values are written to a store of slots and read back through it.

    k_store, v_store: [layers, slots, KV heads, D] in BF16, or e4m3 when there are scales. slots_T: the slot of each row.
    collector: as in `PackedContext`.
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
        collector: AmaxCollector | None = None,
        *,
        routes: Routes | None = None,
    ) -> None:
        self.positions_T, self.slots_T, self.index, self.kernels = positions_T, slots_T, index, kernels
        self.routes = routes
        self.k_store, self.v_store, self.scales = k_store, v_store, scales
        self.collector, self.own = collector, None
        if scales is not None and collector is None:
            self.own = self.collector = AmaxCollector.for_scales(scales)

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, query_scale: ScaleKind | None = None
    ) -> Tensor:
        """See `AttentionContext`."""
        if self.scales is not None:
            if self.collector is not None:
                self.collector.see(layer, k_TGD, v_TGD)
            k_scale, v_scale = self.scales.k[layer], self.scales.v[layer]
            k_TGD, v_TGD = self.kernels.quantize_kv(k_TGD, k_scale), self.kernels.quantize_kv(v_TGD, v_scale)
        k_store, v_store = self.k_store[layer], self.v_store[layer]
        _write(k_store, self.slots_T, k_TGD)
        _write(v_store, self.slots_T, v_TGD)
        form = _form(self.scales, layer, query_scale)
        return self.kernels.attention(q_THD, k_store, v_store, self.index, form)[0]

    def finish(self) -> None:
        """See `AttentionContext`."""
        if self.own is not None:
            self.own.read()


def _form(scales: KVScales | None, layer: int, query_scale: ScaleKind | None) -> AttentionForm:
    return PLAIN if scales is None else AttentionForm(scales.k[layer], scales.v[layer], query_scale)


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
        stored: _Stored,
        form: AttentionForm,
        index: AttentionIndex,
        kernels: Kernels,
    ) -> Tensor:
        keys, values = (k_TGD, v_TGD) if stored.clipped is None else (stored.keys_SGD, stored.values_SGD)
        out, lse = kernels.attention(q_THD, keys, values, index, form)
        ctx.form, ctx.index, ctx.kernels = form, index, kernels
        ctx.save_for_backward(q_THD, keys, values, out, lse, *stored.clipped or (None, None))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, keys, values, out, lse, k_clipped, v_clipped = ctx.saved_tensors
        dq, dk, dv = ctx.kernels.attention_grad(grad, q, keys, values, out, lse, ctx.index, ctx.form)
        if k_clipped is not None:
            dk, dv = dk.masked_fill_(k_clipped, 0.0), dv.masked_fill_(v_clipped, 0.0)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None, None
