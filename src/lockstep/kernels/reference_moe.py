"""Mixture of experts outside its matrix products: the softmax of the router, the choice, the weighted sum.

All three act on a row alone. The softmax takes its sum as a tree and the weighted sum adds in ascending rank, so no library
chooses an order; ties go to the lowest expert number, since `topk` of torch promises nothing about them.

Shapes: T rows, E experts, k experts of a row by falling score, K hidden size. Next: `../nn/moe.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.rowwise import tree_sum


def router_scores(logits_TE: Tensor) -> Tensor:
    """Softmax over all experts, [T, E] FP32, of FP32 logits."""
    weight = (logits_TE - logits_TE.amax(-1, keepdim=True)).exp()
    return weight / tree_sum(weight)[:, None]


def top_experts(scores_TE: Tensor, count: int) -> Tensor:
    """Numbers [T, k] int64 of the experts with the highest scores, highest first; of equal ones the lower number."""
    order = torch.sort(scores_TE, dim=-1, descending=True, stable=True).indices
    return order[:, :count].contiguous()


def combine(y_TkK: Tensor, weight_Tk: Tensor) -> Tensor:
    """sum over ranks of weight times expert output, in FP32 by ascending rank, rounded once to y's type: [T, K]."""
    out = y_TkK[:, 0].float() * weight_Tk[:, :1]
    for rank in range(1, y_TkK.shape[1]):
        out += y_TkK[:, rank].float() * weight_Tk[:, rank, None]
    return out.to(y_TkK.dtype)
