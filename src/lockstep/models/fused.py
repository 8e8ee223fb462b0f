"""The forward pass of a decoder on a backend that fuses neighbouring operations; here without gradient.

It walks over the very modules of `decoder.py` and reads their working copies; what is fused is launches, not arithmetic: a
norm rounds its rows before they are quantized, whether one kernel does both or two.

    h, x = h + delta, quantized norm;   qkv = x W;   q, k, v to their places;   attention;   delta = o W; the MLP alike

Next: `fused_layer.py`, the same steps with gradient; `../nn/device_context.py` for attention, `../kernels/fused.py` for the
operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.fused import FusedKernels, Rows
from lockstep.kernels.reference import PackedWeight
from lockstep.kernels.table import Kernels
from lockstep.nn.linear import Projection
from lockstep.nn.mlp import MLP
from lockstep.nn.moe import MoE
from lockstep.nn.norm import RMSNorm
from lockstep.numerics.formats import Operand

if TYPE_CHECKING:
    from lockstep.models.decoder import Decoder, DecoderLayer
    from lockstep.nn.device_context import DeviceContext


def hidden(decoder: Decoder, ids_T: Tensor, context: DeviceContext) -> Tensor:
    """Final normed hidden states [T, K] of token ids [T], without gradient."""
    embedding = decoder.model.embed_tokens.working.plain
    assert embedding is not None
    h_TK, delta_TK = F.embedding(ids_T, embedding), None
    for number, layer in enumerate(decoder.model.layers):
        h_TK, delta_TK = _layer(layer, number, h_TK, delta_TK, context)  # type: ignore[arg-type]
    context.finish()
    return normed(decoder.model.norm, h_TK, delta_TK, None)[1]  # type: ignore[return-value]


def _layer(
    layer: DecoderLayer, number: int, h_TK: Tensor, delta_TK: Tensor | None, context: DeviceContext
) -> tuple[Tensor, Tensor]:
    """(residual stream, what is to be added to it) after one decoder layer."""
    attention, mlp = layer.self_attn, layer.mlp
    h_TK, x = normed(layer.input_layernorm, h_TK, delta_TK, operand(attention.qkv))
    out = context.attend_rows(number, project(attention.qkv, x), attention)
    delta_TK = project(attention.o_proj.alone, out)
    if isinstance(mlp, MoE):
        h_TK, rows = normed(layer.post_attention_layernorm, h_TK, delta_TK, None)
        return h_TK, mlp(rows, context.routes)
    assert isinstance(mlp, MLP)
    h_TK, x = normed(layer.post_attention_layernorm, h_TK, delta_TK, operand(mlp.gate_up))
    return h_TK, project(mlp.down_proj.alone, gated(mlp, project(mlp.gate_up, x)))


def fused_kernels(kernels: Kernels) -> FusedKernels:
    """A module's backend, known to fuse."""
    known: Any = kernels
    return known  # type: ignore[no-any-return]


def operand(projection: Projection) -> Operand | None:
    """How a projection wants its input: 1x128 codes, or None for BF16."""
    first = projection.linears[0]
    return first.flow.fprop.lhs if first.fp8 else None


def weight_of(projection: Projection) -> PackedWeight:
    """The working copies of a projection as one weight [sum N, K]."""
    stack = projection.stacked()
    return stack if stack is not None else projection.linears[0].working


def project(projection: Projection, x: Rows) -> Tensor:
    """All outputs of a projection side by side, [T, sum N], biases added after the rounding."""
    linears = projection.linears
    y_TN = fused_kernels(linears[0].kernels).linear(x, weight_of(projection))
    start = 0
    for linear, size in zip(linears, projection.sizes, strict=True):
        if linear.working_bias is not None:
            y_TN[:, start : start + size] += linear.working_bias
        start += size
    return y_TN


def gated(mlp: MLP, gate_up_TN: Tensor) -> Rows:
    """silu(gate) up, as the down projection takes it."""
    return fused_kernels(mlp.kernels).swiglu_rows(gate_up_TN, operand(mlp.down_proj.alone))


def normed(
    norm: RMSNorm, h_TK: Tensor, delta_TK: Tensor | None, wanted: Operand | None
) -> tuple[Tensor, Rows]:
    """(h + delta, its norm: BF16, or codes as `wanted`)."""
    assert norm.working.plain is not None
    return fused_kernels(norm.kernels).add_norm(h_TK, delta_TK, norm.working.plain, norm.eps, wanted)
