"""Rows taken from a matrix by number, and the sums that flow back to them, in one order on every run.

A prompt's last row predicts the first token of every response that shares it, and a token's embedding is looked up many times:
several gradients meet in one row. On a GPU `index_add_` adds them in the order in which they happen to arrive; here they are
sorted first, and added in FP32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def add_rows(grad_NK: Tensor, rows_N: Tensor, count: int) -> Tensor:
    """[count, K] FP32: the sum of the gradients of each row."""
    if grad_NK.is_cuda:
        return torch.ops.aten.embedding_dense_backward(grad_NK.float(), rows_N, count, -1, False)  # type: ignore[no-any-return]
    total = torch.zeros(count, grad_NK.shape[1], device=grad_NK.device)
    add_rows_to(total, grad_NK, rows_N)
    return total


def add_rows_to(total_VK: Tensor, grad_NK: Tensor, rows_N: Tensor) -> None:
    """Adds each gradient to its row of an FP32 total; only these rows are touched."""
    if total_VK.is_cuda:  # where it accumulates, torch sorts first
        total_VK.index_put_((rows_N,), grad_NK.float(), accumulate=True)
    else:
        total_VK.index_add_(0, rows_N, grad_NK.float())


def take_rows(x_TK: Tensor, rows_N: Tensor) -> Tensor:
    """x[rows], [N, K], differentiable; rows may repeat."""
    if x_TK.is_cuda:
        return _Take.apply(x_TK, rows_N)  # type: ignore[no-any-return]
    return x_TK[rows_N]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, rows_N: Tensor) -> Tensor:
        ctx.save_for_backward(rows_N)
        ctx.count, ctx.dtype = len(x_TK), x_TK.dtype
        return x_TK.index_select(0, rows_N)

    @staticmethod
    def backward(ctx: Any, grad_NK: Tensor) -> Any:
        (rows_N,) = ctx.saved_tensors
        return add_rows(grad_NK, rows_N, ctx.count).to(ctx.dtype), None
