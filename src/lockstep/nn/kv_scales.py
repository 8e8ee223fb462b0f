"""FP8 scales of keys and values: one for each layer and KV head, the same on both sides of a run.

Calibrated from absolute maxima on real prompts, with headroom, never from percentiles (field failure 29, 35): an outlier that
saturates changes attention by more than a coarser step does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.numerics.formats import ScaleKind
from lockstep.numerics.quantize import scale_from_amax


@dataclass(frozen=True)
class KVScales:
    """k, v: [layers, KV heads] FP32, what a code is multiplied by. `version` counts calibrations, from 1."""

    k: Tensor
    v: Tensor
    version: int


class AmaxCollector:
    """Gathers per-head absolute maxima of keys and values while a forward runs anyway."""

    def __init__(self, layers: int, kv_heads: int) -> None:
        self.k = torch.zeros(layers, kv_heads)
        self.v = torch.zeros(layers, kv_heads)

    def see(self, layer: int, k_SGD: Tensor, v_SGD: Tensor) -> None:
        """Takes keys and values [S, KV heads, D] of one layer into account."""
        for total, x in ((self.k, k_SGD), (self.v, v_SGD)):
            total[layer] = torch.maximum(total[layer], x.detach().float().abs().amax((0, 2)).cpu())

    def scales(self, *, headroom: float, kind: ScaleKind, version: int) -> KVScales:
        """Scales under which `headroom` times the maxima just fit. Raises ValueError on non-finite maxima."""
        for x in (self.k, self.v):
            if not bool(torch.isfinite(x).all()) or not bool((x > 0).any()):
                raise ValueError("KV calibration saw no finite keys and values")
        k, v = (scale_from_amax(x * headroom, kind) for x in (self.k, self.v))
        return KVScales(k, v, version)
