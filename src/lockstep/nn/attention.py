"""Grouped-query self-attention; where keys and values live is the context's affair (`context.py`)."""

from __future__ import annotations

from torch import Tensor, nn

from lockstep.kernels.table import Kernels
from lockstep.nn.context import AttentionContext
from lockstep.nn.linear import Linear, Projection
from lockstep.nn.norm import RMSNorm
from lockstep.nn.rope import Rope
from lockstep.numerics.flow import Flow


class Attention(nn.Module):
    """[T, K] to [T, K]. H query heads and G key/value heads of size D; optional RMSNorm on q and k (Qwen3)."""

    def __init__(
        self,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm_eps: float | None,
        rope: Rope,
        flow: Flow,
        layer: int,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, heads, kv_heads, head_dim

        def linear(inputs: int, outputs: int, bias: bool) -> Linear:
            return Linear(inputs, outputs, bias=bias, flow=flow, layer=layer, kernels=kernels)

        self.q_proj = linear(hidden, heads * head_dim, qkv_bias)
        self.k_proj = linear(hidden, kv_heads * head_dim, qkv_bias)
        self.v_proj = linear(hidden, kv_heads * head_dim, qkv_bias)
        self.o_proj = linear(heads * head_dim, hidden, out_bias)
        self.qkv = Projection(self.q_proj, self.k_proj, self.v_proj)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, flow=flow, kernels=kernels)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps, flow=flow, kernels=kernels)
        self.rope = rope
        self.query_scale = flow.query_scale

    def forward(self, x_TK: Tensor, context: AttentionContext, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """[T, K] to [T, K]."""
        q, k, v = self.qkv(x_TK)
        q_THD = q.view(-1, self.heads, self.head_dim)
        k_TGD, v_TGD = (x.view(-1, self.kv_heads, self.head_dim) for x in (k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TGD = self.q_norm(q_THD), self.k_norm(k_TGD)
        q_THD, k_TGD = self.rope.rotate(q_THD, cos_sin), self.rope.rotate(k_TGD, cos_sin)
        out_THD = context.attend(self.layer, q_THD, k_TGD, v_TGD, self.query_scale)
        return self.o_proj(out_THD.flatten(1))  # type: ignore[no-any-return]
