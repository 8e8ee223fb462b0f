"""Attention contexts of a backend that fuses: they take a projected row and do norm, rotation, storage and attention.

`DevicePages` is the engine's: keys and values go to pages of the cache, and a step either has one query for each sequence
(decode) or tiles of queries (prefill). `DevicePacked` is the training forward's: the same kernels over pages made for this
pass. Both end in the loop of `kernels/triton/attention_loop.py`, and a row gets the same bits from either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from lockstep.kernels.attention_form import PLAIN, AttentionForm
from lockstep.kernels.fused import FusedKernels
from lockstep.nn.kv_scales import AmaxCollector, KVScales
from lockstep.nn.routes import Routes
from lockstep.numerics.formats import BLOCK, ScaleKind
from lockstep.numerics.quantize import Quantized

if TYPE_CHECKING:
    from lockstep.kernels.packed_index import PackedIndex, PrefillIndex, StaticIndex
    from lockstep.kernels.triton.attention import DecodeIndex
    from lockstep.nn.attention import Attention


class DeviceContext(Protocol):
    """What `models/fused.py` needs of a context."""

    positions_T: Tensor
    routes: Routes | None

    def attend_rows(self, layer: int, qkv_TN: Tensor, attention: Attention) -> Quantized | Tensor:
        """Attention output [T, H D] of projected rows [T, (H + 2 G) D], as the output projection takes it."""

    def finish(self) -> None:
        """Called after the last layer."""


class DevicePages:
    """Rows of running sequences. k_pages [layers, pages, G, 64, D], v_pages [layers, pages, G, D, 64]. slots_T: where each
    row's key and value go. flag: int32 [1], raised by a non-finite key or value on its way into FP8."""

    def __init__(
        self,
        positions_T: Tensor,
        slots_T: Tensor,
        index: PrefillIndex | DecodeIndex,
        k_pages: Tensor,
        v_pages: Tensor,
        scales: KVScales | None,
        flag: Tensor | None = None,
        routes: Routes | None = None,
    ) -> None:
        self.positions_T, self.slots_T, self.index = positions_T, slots_T, index
        self.k_pages, self.v_pages, self.scales, self.flag = k_pages, v_pages, scales, flag
        self.routes = routes

    def attend_rows(self, layer: int, qkv_TN: Tensor, attention: Attention) -> Quantized | Tensor:
        """See `DeviceContext`."""
        from lockstep.kernels.triton import attention as kernel
        from lockstep.kernels.triton import rope

        scales = layer_scales(self.scales, layer)
        k_pages, v_pages = self.k_pages[layer], self.v_pages[layer]
        q_THD = rope.rope_and_write(
            qkv_TN,
            attention.rope.table_PD,
            self.positions_T,
            self.slots_T,
            k_pages,
            v_pages,
            heads=attention.heads,
            norms=norm_weights(attention),
            eps=norm_eps(attention),
            scales=scales,
            flag=self.flag,
            early=True,
        )
        codes = code_scale(attention)
        if isinstance(self.index, kernel.DecodeIndex):
            out = kernel.decode(q_THD, k_pages, v_pages, self.index, scales, codes=codes, early=True)
            return output_rows(out, attention)
        out, _ = kernel.prefill(q_THD, k_pages, v_pages, self.index, scales, codes=codes)
        return output_rows(out, attention)

    def finish(self) -> None:
        """The engine reads `flag` when it reads results."""


class DevicePacked:
    """Rows of several sequences side by side, with or without gradient.

    scales, collector, quantize: as in `PackedContext`. seen_T: bool, rows that a collector may see, all if None. Keys and
    values under scales become codes on their way; whoever gives a collector reads it, else `finish` looks for non-finite ones.
    """

    def __init__(
        self,
        positions_T: Tensor,
        index: PackedIndex | StaticIndex,
        scales: KVScales | None = None,
        routes: Routes | None = None,
        *,
        collector: AmaxCollector | None = None,
        quantize: bool = True,
        seen_T: Tensor | None = None,
    ) -> None:
        self.positions_T, self.index, self.routes = positions_T, index, routes
        self.scales, self.collector, self.quantize = scales, collector, quantize
        self.seen_T = seen_T
        self.own: AmaxCollector | None = None
        if scales is not None and collector is None and quantize:
            self.own = self.collector = AmaxCollector.for_scales(scales)

    def attend_rows(self, layer: int, qkv_TN: Tensor, attention: Attention) -> Quantized | Tensor:
        """See `DeviceContext`."""
        q, k, v = self._rows(qkv_TN, attention)
        self._watch(layer, k, v, attention)
        codes, scales = code_scale(attention), self._used(layer)
        out, _ = fused_kernels(attention).attend(q, k, v, self.index, scales, codes=codes)
        return out if isinstance(out, Quantized) else output_rows(out, attention)

    def attend(
        self, layer: int, qkv_TN: Tensor, attention: Attention, *, again: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(output [T, H, D] BF16, base-2 log-sum-exp [T, H]) for a forward with gradient. `output_rows` makes of it what
        `attend_rows` gives. again: nothing is gathered, since these rows were seen before."""
        q, k, v = self._rows(qkv_TN, attention)
        if not again:
            self._watch(layer, k, v, attention)
        out, lse = fused_kernels(attention).attend(q, k, v, self.index, self._used(layer), lse=True)
        assert isinstance(out, Tensor)
        return out, lse

    def gradient(
        self,
        layer: int,
        grad_THD: Tensor,
        qkv_TN: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        attention: Attention,
        *,
        deterministic: bool = True,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of the projected rows [T, N] and of the weights of the q and k norm, from that of the output; queries, keys
        and codes are made again. Saturated elements get none. deterministic: see `Decoder`."""
        kernels, scales = fused_kernels(attention), self._used(layer)
        q, k, v = self._rows(qkv_TN, attention)
        form = PLAIN
        if scales is not None:
            k, v = kernels.quantize_kv(k, scales[0]), kernels.quantize_kv(v, scales[1])
            form = AttentionForm(*scales)
        dq, dk, dv = kernels.attention_grad(
            grad_THD, q, k, v, out_THD, lse_TH, self.index, form, deterministic=deterministic
        )
        return kernels.rope_grad(
            dq,
            dk,
            dv,
            qkv_TN,
            attention.rope.table_PD,
            self.positions_T,
            norms=norm_weights(attention),
            eps=norm_eps(attention),
            scales=scales,
        )

    def finish(self) -> None:
        """Raises ContractError, naming the layer, when a key or value on its way into FP8 was not finite."""
        if self.own is not None:
            self.own.read()

    def _rows(self, qkv_TN: Tensor, attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
        return fused_kernels(attention).rope_rows(
            qkv_TN,
            attention.rope.table_PD,
            self.positions_T,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            norms=norm_weights(attention),
            eps=norm_eps(attention),
        )

    def _used(self, layer: int) -> tuple[Tensor, Tensor] | None:
        return layer_scales(self.scales, layer) if self.quantize else None

    def _watch(self, layer: int, k_TGD: Tensor, v_TGD: Tensor, attention: Attention) -> None:
        if self.collector is not None:
            scales = layer_scales(self.scales, layer)
            self.collector.watch(layer, k_TGD, v_TGD, scales, fused_kernels(attention), self.seen_T)


def fused_kernels(attention: Attention) -> FusedKernels:
    """The backend of an attention module, which fuses."""
    kernels: Any = attention.o_proj.kernels
    return kernels  # type: ignore[no-any-return]


def code_scale(attention: Attention) -> ScaleKind | None:
    """The kind of scale under which the kernel itself writes 1x128 codes: where a head is a group, and codes are wanted."""
    projection = attention.o_proj
    return projection.flow.fprop.lhs.scale if projection.fp8 and attention.head_dim == BLOCK else None


def output_rows(out: Tensor | tuple[Tensor, Tensor], attention: Attention) -> Quantized | Tensor:
    """What the kernel wrote, as the output projection takes it."""
    if isinstance(out, tuple):
        return Quantized(*out, (1, BLOCK))
    projection, rows = attention.o_proj, out.flatten(1)
    return projection.kernels.quantize_rows(rows, projection.flow.fprop.lhs) if projection.fp8 else rows


def layer_scales(scales: KVScales | None, layer: int) -> tuple[Tensor, Tensor] | None:
    """Scales of keys and values of one layer, [KV heads] each."""
    return None if scales is None else (scales.k[layer], scales.v[layer])


def norm_weights(attention: Attention) -> tuple[Tensor, Tensor] | None:
    """Working copies of the q and k norm, where the model has them."""
    if attention.q_norm is None or attention.k_norm is None:
        return None
    q, k = attention.q_norm.working.plain, attention.k_norm.working.plain
    assert q is not None and k is not None
    return q, k


def norm_eps(attention: Attention) -> float:
    """Epsilon of the q and k norm."""
    return 0.0 if attention.q_norm is None else attention.q_norm.eps
