"""Which attention context a packed forward gets: the one place that knows there are two kinds of backend.

Next: `context.py` for the reference's, `device_context.py` for the one of kernels that fuse.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.kernels.table import Kernels
from lockstep.nn.context import AttentionContext, PackedContext
from lockstep.nn.device_context import DevicePacked
from lockstep.nn.kv_scales import AmaxCollector, KVScales
from lockstep.nn.routes import Routes


def packed_context(
    positions_T: Tensor,
    index: Any,
    kernels: Kernels,
    *,
    scales: KVScales | None = None,
    collector: AmaxCollector | None = None,
    quantize: bool = True,
    routes: Routes | None = None,
) -> AttentionContext:
    """The context of rows side by side; see `PackedContext` for the arguments. index: what `kernels.index` made of their runs.

    On a backend that fuses, reserve rotary tables for every position first: its kernels read them as they are.
    """
    if kernels.fused:
        made = DevicePacked(positions_T, index, scales, routes, collector=collector, quantize=quantize)
        return made  # type: ignore[return-value]
    return PackedContext(
        positions_T, index, kernels, scales=scales, collector=collector, quantize=quantize, routes=routes
    )
