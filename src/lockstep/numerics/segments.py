"""Sums over segments (the tokens of a sample, the samples of a group) that are the same in every run.

`index_add` on a GPU adds in the order in which threads arrive, so two runs of one step differ in the last
bits and a resumed run is no longer equal to an uninterrupted one. Here every segment becomes one row of a
table, each cell written once, and the row is summed in float64: no atomics, one order. The table has one
float64 cell for each segment and position, which is small for the groups and micro-batches it is used for.

Shapes: N values, S segments. Used by the ratios of `correction/` and the advantages and losses of `algorithms/`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sum(value_N: Tensor, segment_N: Tensor, count: int) -> Tensor:
    """Float64 sums [S] of `value_N` [N] by `segment_N` (int64 in 0..count-1, in any order).

    An empty segment gives 0. Carries no gradient.
    """
    value_N = value_N.detach().double()
    length_S = torch.bincount(segment_N, minlength=count)
    if value_N.numel() == 0:
        return torch.zeros(count, dtype=torch.float64, device=value_N.device)
    start_S = length_S.cumsum(0) - length_S
    order_N = torch.argsort(segment_N, stable=True)
    row_N = segment_N[order_N]
    column_N = torch.arange(value_N.numel(), device=value_N.device) - start_S[row_N]
    table_SL = value_N.new_zeros(count, int(length_S.max()))
    table_SL[row_N, column_N] = value_N[order_N]
    return table_SL.sum(dim=1)
