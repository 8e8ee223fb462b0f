"""FP8 scales of keys and values: one for each layer and KV head, the same on both sides of a run.

They are made from absolute maxima with headroom, never from percentiles (field failure 29, 35): an outlier that saturates
changes attention by more than a coarser step does. Maxima are gathered by whatever forward runs anyway; they stay on the
device until somebody reads them, so that no layer has to wait. The same maxima say whether every key and value was finite.

Next: `context.py`, where keys and values are seen; `../trainer/scale_history.py`, which decides when new scales are due.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import ContractError
from lockstep.kernels.fused import FusedKernels
from lockstep.numerics.formats import ScaleKind
from lockstep.numerics.quantize import scale_from_amax


@dataclass(frozen=True)
class KVScales:
    """k, v: [layers, KV heads] FP32, what a code is multiplied by. `version` counts calibrations, from 1."""

    k: Tensor
    v: Tensor
    version: int

    def of(self, version: int) -> KVScales:
        """These scales, for samples that were drawn with them. Raises ContractError for those of another version."""
        if version != self.version:
            raise ContractError(f"a sample was drawn with KV scales v{version}, these are v{self.version}")
        return self

    def on_host(self) -> Tensor:
        """[2, layers, KV heads], key scales first, in one transfer: a publication should not wait for several."""
        return torch.stack((self.k, self.v)).cpu()

    def refuse_unless_usable(self, layers: int, kv_heads: int) -> None:
        """Raises ContractError, naming layer and head, unless these are positive finite scales of such a model."""
        for name, scale in (("key", self.k), ("value", self.v)):
            if tuple(scale.shape) != (layers, kv_heads) or scale.dtype != torch.float32:
                raise ContractError(
                    f"KV scales v{self.version}: {name} scales are {scale.dtype} of shape {tuple(scale.shape)}, the model "
                    f"needs float32 of ({layers}, {kv_heads})"
                )
        held = self.on_host()
        bad = (~(torch.isfinite(held) & (held > 0))).nonzero()
        if len(bad):
            which, layer, head = bad[0].tolist()
            raise ContractError(
                f"KV scales v{self.version}: the {('key', 'value')[which]} scale of layer {layer}, head {head} is "
                f"{float(held[which, layer, head])}"
            )
        if self.version < 1:
            raise ContractError(f"KV scales have version {self.version}; versions count from 1")

    def same_values(self, other: KVScales) -> bool:
        """Whether the other scales are the same bits, whatever their version."""
        return torch.equal(self.on_host(), other.on_host())

    def to(self, device: torch.device) -> KVScales:
        """The same scales on a device."""
        return KVScales(self.k.to(device), self.v.to(device), self.version)


@dataclass(frozen=True)
class KVMaxima:
    """What a collector saw. k, v: [layers, KV heads] FP32 absolute maxima, on the CPU. `saturated` of `elements` keys and
    values were beyond the range of their scale; both are 0 where there were no scales to judge by."""

    k: Tensor
    v: Tensor
    saturated: int = 0
    elements: int = 0

    def with_those(self, other: KVMaxima) -> KVMaxima:
        """What both saw."""
        return KVMaxima(
            torch.maximum(self.k, other.k),
            torch.maximum(self.v, other.v),
            self.saturated + other.saturated,
            self.elements + other.elements,
        )

    def scales(self, *, headroom: float, kind: ScaleKind, version: int) -> KVScales:
        """Scales under which `headroom` times the maxima just fit. Raises ContractError when nothing was seen."""
        if not bool((self.k > 0).any()) or not bool((self.v > 0).any()):
            raise ContractError("KV calibration saw no keys and values")
        k, v = (scale_from_amax(x * headroom, kind) for x in (self.k, self.v))
        return KVScales(k, v, version)


class AmaxCollector:
    """Gathers per-head absolute maxima of keys and values while a forward runs anyway, without making a device wait."""

    def __init__(self, layers: int, kv_heads: int, device: torch.device | None = None) -> None:
        self._maxima = torch.zeros(2, layers, kv_heads, device=device)
        self._saturated = torch.zeros((), dtype=torch.long, device=device)
        self._elements = 0

    @staticmethod
    def for_scales(scales: KVScales) -> AmaxCollector:
        """One for the model and the device of these scales."""
        layers, kv_heads = scales.k.shape
        return AmaxCollector(layers, kv_heads, scales.k.device)

    def see(self, layer: int, k_SGD: Tensor, v_SGD: Tensor) -> None:
        """Takes keys and values [S, KV heads, D] of one layer into account. NaN and infinity stay in the maxima."""
        for total, x in zip(self._maxima[:, layer], (k_SGD, v_SGD), strict=True):
            torch.maximum(total, x.detach().abs().amax((0, 2)).float(), out=total)

    def count(self, *beyond: Tensor) -> None:
        """Counts the elements that a quantization found `beyond` the range of their scale, and all of them."""
        for mask in beyond:
            self._saturated += mask.sum()
            self._elements += mask.numel()

    def watch(
        self,
        layer: int,
        k_SGD: Tensor,
        v_SGD: Tensor,
        scales: tuple[Tensor, Tensor] | None,
        kernels: FusedKernels,
        seen_S: Tensor | None = None,
    ) -> None:
        """`see`, and with a layer's scales `count`, by an operation of a backend that fuses. seen_S: bool, the rows to see."""
        kernels.watch_kv(k_SGD, v_SGD, scales, self._maxima[:, layer], self._saturated, seen_S)
        if scales is not None:
            self._elements += k_SGD.numel() + v_SGD.numel()

    def clear(self) -> None:
        """Forgets what was seen."""
        self._maxima.zero_()
        self._saturated.zero_()
        self._elements = 0

    def add(self, other: AmaxCollector, elements: int) -> None:
        """Takes in what another one saw, `elements` of it under scales."""
        torch.maximum(self._maxima, other._maxima, out=self._maxima)
        self._saturated += other._saturated
        self._elements += elements

    def read(self) -> KVMaxima:
        """What was seen so far, in one transfer. Raises ContractError naming the first layer with a non-finite key or value:
        its code would have been a plausible number."""
        everything = torch.cat([self._maxima.flatten().double(), self._saturated.double()[None]]).cpu()
        k, v = everything[:-1].float().view(self._maxima.shape)
        for layer in range(len(k)):
            for name, x in (("key", k[layer]), ("value", v[layer])):
                if not bool(torch.isfinite(x).all()):
                    head = int((~torch.isfinite(x)).nonzero()[0])
                    raise ContractError(f"layer {layer}: non-finite {name} in KV head {head}")
        return KVMaxima(k, v, int(everything[-1]), self._elements)

    def scales(self, *, headroom: float, kind: ScaleKind, version: int) -> KVScales:
        """See `KVMaxima.scales`."""
        return self.read().scales(headroom=headroom, kind=kind, version=version)
