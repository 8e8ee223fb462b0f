"""RMSNorm (arXiv 1910.07467): FP32 inside, rounded once, over the last dimension. Used for the stream and for q/k heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.kernels.table import Kernels
from lockstep.nn.working import Working
from lockstep.numerics.flow import Flow
from lockstep.numerics.formats import BF16


class RMSNorm(Working):
    """x [..., K] to the same shape and type; the weight's working copy is BF16."""

    def __init__(self, size: int, eps: float, *, flow: Flow, kernels: Kernels) -> None:
        super().__init__(kernels, BF16, flow.activation)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return _Norm.apply(x, self.weight, self)  # type: ignore[no-any-return]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: RMSNorm) -> Tensor:
        ctx.norm = norm
        ctx.save_for_backward(x)
        assert norm.working.plain is not None
        return norm.kernels.rms_norm(x, norm.working.plain, norm.eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        x, dy = saved.float(), grad.float()
        inverse = (x.square().mean(-1, keepdim=True) + ctx.norm.eps).rsqrt()
        normed = x * inverse
        weighted = dy * ctx.norm.working.plain.float()
        dx = inverse * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
        dw = (dy * normed).flatten(0, -2).sum(0)
        return dx.to(saved.dtype), dw, None
