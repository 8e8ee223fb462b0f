"""A mixture of experts: a router scores all experts for a row, the best k compute it, their outputs are added by score.

    scores_TE = softmax(x_TK r_EK^T)                   FP32, over all experts
    ids_Tk    = the k best of a row, lower numbers first among equals
    w_Tk      = scores at ids, divided by their sum when the model says so
    y_TK      = sum over rank of w * expert(x), FP32, ascending rank, rounded once

The row law holds: rows are sorted by expert, each expert is a gated MLP over its rows (`mlp.py`, quantized as the flow
says), and a row's k outputs meet again in the order of its own ranks. How many rows an expert has, and which, changes no bit.

The router is no `Linear` and therefore never quantized: what the flow quantizes is decided by what a module *is*, a linear
of attention, MLP or expert, and never by a name in a skip list, where `mlp.gate` matches `mlp.gate_proj` (field failures 5
and 6). Its weight is BF16, its logits and the softmax FP32, like the output head's.

Next: `routes.py`, the record of the choice; `../kernels/reference_moe.py` for the arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.kernels.rowwise import tree_sum
from lockstep.kernels.table import Kernels
from lockstep.nn.mlp import MLP
from lockstep.nn.routes import Routes
from lockstep.nn.working import Working
from lockstep.numerics.flow import Flow
from lockstep.numerics.formats import BF16


class MoE(nn.Module):
    """[T, K] to [T, K] through the `count` best of `experts` gated MLPs."""

    def __init__(
        self,
        *,
        hidden: int,
        intermediate: int,
        experts: int,
        count: int,
        normalize: bool,
        flow: Flow,
        layer: int,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.layer, self.count, self.normalize, self.kernels = layer, count, normalize, kernels
        self.gate = Router(experts, hidden, flow=flow, kernels=kernels)
        self.experts = Experts(
            MLP(hidden, intermediate, flow=flow, layer=layer, kernels=kernels) for _ in range(experts)
        )

    def forward(self, x_TK: Tensor, routes: Routes | None = None) -> Tensor:
        """[T, K] to [T, K]. `routes` records the choice or imposes one; see `Routes.choose` for what it raises."""
        scores_TE = self.gate(x_TK)
        routes = Routes() if routes is None else routes
        ids_Tk = routes.choose(self.layer, scores_TE.detach(), self.count, self.kernels)
        weight_Tk = scores_TE.gather(1, ids_Tk)
        if self.normalize:
            weight_Tk = weight_Tk / tree_sum(weight_Tk)[:, None]
        order_R, counts = by_expert(ids_Tk, len(self.experts))
        y_RK = self.experts(_Dispatch.apply(x_TK, order_R, self.count), counts)
        return _Combine.apply(y_RK, weight_Tk, order_R, self.kernels)  # type: ignore[no-any-return]


class Router(Working):
    """Scores [T, E] FP32 of every expert: the whole softmax, differentiable."""

    def __init__(self, experts: int, hidden: int, *, flow: Flow, kernels: Kernels) -> None:
        super().__init__(kernels, BF16, flow.activation)
        self.weight = nn.Parameter(torch.empty(experts, hidden))

    def forward(self, x_TK: Tensor) -> Tensor:
        """[T, K] to [T, E]."""
        return _Scores.apply(x_TK, self.weight, self)  # type: ignore[no-any-return]


class Experts(nn.ModuleList):
    """Gated MLPs, each over its own rows."""

    def forward(self, x_RK: Tensor, counts: list[int]) -> Tensor:
        """[R, K] to [R, K]; rows are sorted by expert, `counts` of them each. An expert without rows isn't run."""
        parts = zip(self, x_RK.split(counts), strict=True)
        return torch.cat([expert(rows) for expert, rows in parts if len(rows)])


def by_expert(ids_Tk: Tensor, experts: int) -> tuple[Tensor, list[int]]:
    """(order [R = T k] that sorts the flattened choices by expert, then by row; choices of each expert)."""
    flat = ids_Tk.flatten()
    return flat.argsort(stable=True), torch.bincount(flat, minlength=experts).tolist()


def _by_row(y_RK: Tensor, order_R: Tensor, count: int) -> Tensor:
    """[T, k, K]: sorted rows back in their places."""
    out = torch.empty_like(y_RK)
    out[order_R] = y_RK
    return out.view(-1, count, y_RK.shape[-1])


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight: Tensor, router: Router) -> Tensor:
        kernels, ones_T = router.kernels, torch.ones(len(x_TK), device=x_TK.device)
        scores = kernels.router_scores(kernels.logits(x_TK, router.working, ones_T))
        ctx.router = router
        ctx.save_for_backward(x_TK, scores)
        return scores

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> Any:
        x_TK, scores = ctx.saved_tensors
        kernels = ctx.router.kernels
        d_logits = scores * (grad_TE - (grad_TE * scores).sum(1, keepdim=True))
        dx = kernels.linear_dgrad(d_logits, ctx.router.working).to(x_TK.dtype)
        dw = kernels.linear_wgrad(d_logits, x_TK) if ctx.needs_input_grad[1] else None
        return dx, dw, None


class _Dispatch(torch.autograd.Function):
    """Rows [T, K] to sorted copies [R, K]; backwards the copies' gradients are added in FP32 by ascending rank."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, order_R: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(order_R)
        ctx.count = count
        return x_TK[order_R // count]

    @staticmethod
    def backward(ctx: Any, grad_RK: Tensor) -> Any:
        (order_R,) = ctx.saved_tensors
        grad_TkK = _by_row(grad_RK, order_R, ctx.count)
        dx = grad_TkK[:, 0].float()
        for rank in range(1, ctx.count):
            dx = dx + grad_TkK[:, rank].float()
        return dx.to(grad_RK.dtype), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RK: Tensor, weight_Tk: Tensor, order_R: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(y_RK, weight_Tk, order_R)
        return kernels.combine(_by_row(y_RK, order_R, weight_Tk.shape[1]), weight_Tk)

    @staticmethod
    def backward(ctx: Any, grad_TK: Tensor) -> Any:
        y_RK, weight_Tk, order_R = ctx.saved_tensors
        grad, y_TkK = grad_TK.float(), _by_row(y_RK, order_R, weight_Tk.shape[1])
        d_weight = torch.stack([(grad * y.float()).sum(1) for y in y_TkK.unbind(1)], 1)
        dy = torch.stack([(grad * w[:, None]).to(y_RK.dtype) for w in weight_Tk.unbind(1)], 1)
        return dy.flatten(0, 1)[order_R], d_weight, None, None
