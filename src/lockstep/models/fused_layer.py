"""The forward pass with gradient on a backend that fuses: one autograd function for each decoder layer.

    (h, delta)  ->  (h, delta)        residual stream [T, K], and what is to be added to it

Its forward runs the very steps of `fused.py`, so log-probabilities of the training forward are the engine's bit for bit. What
it keeps for a token, in a layer of hidden size K, N = qkv outputs, H D attention outputs and I intermediate:

    h, h2       inputs of the two norms                       2 K + 2 K bytes
    inverses    what rows of these were multiplied by         4 + 4 (FP8 layers only)
    qkv         before norm and rotation                      2 N
    out, lse    attention's output, log-sum-exp               2 H D + 4 H
    gate_up     BF16, or 1x128 codes with `Decoder.save_fp8`  4 I, or 2 I
    y           codes of the SwiGLU output (FP8 layers only)  I

Everything else (norm outputs, queries and keys, codes) is made again in the backward pass, by the same kernels. With
`Decoder.checkpointing` only h is kept and the layer runs again, without its last product: same bits, less memory, about a
third more time.

Weight gradients leave through autograd, in FP32, like those of the plain modules; hooks on parameters see them.

Next: `fused_backward.py`, what happens to a gradient on its way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.models.fused import fused_kernels, gated, normed, operand, project
from lockstep.models.fused_backward import Saved, layer_backward
from lockstep.nn.device_context import DevicePacked, output_rows
from lockstep.nn.linear import Projection
from lockstep.nn.mlp import MLP
from lockstep.nn.norm import RMSNorm
from lockstep.numerics.formats import BLOCK

if TYPE_CHECKING:
    from lockstep.kernels.fused import Rows
    from lockstep.models.decoder import Decoder, DecoderLayer


def hidden(decoder: Decoder, ids_T: Tensor, context: DevicePacked) -> Tensor:
    """Final normed hidden states [T, K] of token ids [T], differentiable.

    Raises ConfigError for what has no gradient on such a backend: experts, FP8 queries, one FP8 operand against a BF16 one.
    """
    refuse(decoder)
    h_TK: Tensor = decoder.model.embed_tokens(ids_T)
    if decoder.graphs is not None:
        if decoder.graphs.takes(context):
            out_TK = decoder.graphs.hidden(decoder, h_TK, context)
            context.finish()
            return out_TK
        decoder.graphs.launched += 1
    delta_TK: Tensor | None = None
    for number in range(len(decoder.model.layers)):
        h_TK, delta_TK = Step.of(decoder, number, context).apply(h_TK, delta_TK)
    context.finish()
    norm = decoder.model.norm
    return _FinalNorm.apply(h_TK, delta_TK, norm.weight, norm)  # type: ignore[no-any-return]


def refuse(decoder: Decoder) -> None:
    """Raises ConfigError for what can't be trained here."""
    fix = "use kernels: reference to train it"
    if decoder.spec.moe is not None:
        raise ConfigError("experts have no gradient on the GPU yet", where="kernels", fix=fix)
    if decoder.flow.attention_fp8:
        raise ConfigError("FP8 queries have no gradient on the GPU yet", where="flow.attention", fix=fix)
    if decoder.flow.fprop.is_mixed:
        raise ConfigError("one FP8 operand against a BF16 one is for probes without gradient", where="flow")


@dataclass(frozen=True)
class Step:
    """One layer of one forward pass."""

    layer: DecoderLayer
    number: int
    context: DevicePacked
    checkpointing: bool
    save_fp8: bool
    deterministic: bool

    @classmethod
    def of(cls, decoder: Decoder, number: int, context: DevicePacked) -> Step:
        """As the decoder's attributes say."""
        layer: Any = decoder.model.layers[number]
        return cls(layer, number, context, decoder.checkpointing, decoder.save_fp8, decoder.deterministic)

    def apply(self, h_TK: Tensor, delta_TK: Tensor | None) -> tuple[Tensor, Tensor]:
        """(residual stream, what is to be added to it), differentiable in both and in the layer's parameters."""
        return _Layer.apply(h_TK, delta_TK, self, *parameters_of(self.layer))  # type: ignore[no-any-return]

    def forward(self, h_TK: Tensor, delta_TK: Tensor | None) -> tuple[Tensor, Tensor, Saved | Tensor]:
        """`apply`'s results, and what the backward pass starts from: everything it reads, or the layer's input alone."""
        h_TK, x, inverse_T = _normed(self.layer.input_layernorm, h_TK, delta_TK, self.layer.self_attn.qkv)
        saved, y = self.run(h_TK, x, inverse_T)
        assert isinstance(self.layer.mlp, MLP)
        return (
            saved.h2_TK,
            project(self.layer.mlp.down_proj.alone, y),
            saved.h_TK if self.checkpointing else saved,
        )

    def run(
        self, h_TK: Tensor, x: Rows, inverse_T: Tensor | None, *, again: bool = False
    ) -> tuple[Saved, Rows]:
        """(what backward reads, input of the last product) from the residual stream and its first norm."""
        layer, attention, mlp = self.layer, self.layer.self_attn, self.layer.mlp
        assert isinstance(mlp, MLP)
        qkv = project(attention.qkv, x)
        out, lse = self.context.attend(self.number, qkv, attention, again=again)
        delta_TK = project(attention.o_proj.alone, output_rows(out, attention))
        h2_TK, x, inverse2_T = _normed(layer.post_attention_layernorm, h_TK, delta_TK, mlp.gate_up)
        gate_up = project(mlp.gate_up, x)
        kept, y = self._gated(mlp, gate_up, keep=again or not self.checkpointing)
        y8 = None if isinstance(y, Tensor) else y
        return Saved(h_TK, inverse_T, qkv, out, lse, h2_TK, inverse2_T, kept, y8), y

    def restored(self, kept: Saved | Tensor) -> Saved:
        """What backward reads, from what `forward` kept."""
        return self.again(kept) if isinstance(kept, Tensor) else kept

    def again(self, h_TK: Tensor) -> Saved:
        """Everything backward reads, made anew from the residual stream."""
        _, x, inverse_T = _normed(self.layer.input_layernorm, h_TK, None, self.layer.self_attn.qkv)
        return self.run(h_TK, x, inverse_T, again=True)[0]

    def _gated(self, mlp: MLP, gate_up_TN: Tensor, *, keep: bool) -> tuple[Rows, Rows]:
        """(gate and up as they wait for the backward pass, SwiGLU's output). Where `keep` and both are whole blocks, they wait in
        FP8."""
        wanted, output = operand(self.layer.self_attn.qkv), operand(mlp.down_proj.alone)
        whole = gate_up_TN.shape[1] % (2 * BLOCK) == 0
        if not keep or not self.save_fp8 or wanted is None or not whole:
            return gate_up_TN, gated(mlp, gate_up_TN)
        kernels = fused_kernels(mlp.kernels)
        if output == wanted:
            y, kept = kernels.swiglu_kept(gate_up_TN, wanted)
            return kept, y
        return kernels.quantize_rows(gate_up_TN, wanted), gated(mlp, gate_up_TN)


def _normed(
    norm: RMSNorm, h_TK: Tensor, delta_TK: Tensor | None, projection: Projection
) -> tuple[Tensor, Rows, Tensor | None]:
    """(h + delta, its norm as the projection takes it, for codes also what every row was multiplied by)."""
    wanted = operand(projection)
    if wanted is None:
        return *normed(norm, h_TK, delta_TK, None), None
    assert norm.working.plain is not None
    return fused_kernels(norm.kernels).kept_norm(h_TK, delta_TK, norm.working.plain, norm.eps, wanted)


def parameters_of(layer: DecoderLayer) -> tuple[Tensor, ...]:
    """All parameters of a dense layer."""
    attention, mlp = layer.self_attn, layer.mlp
    norms = (layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm)
    assert isinstance(mlp, MLP)
    projections = (attention.qkv, attention.o_proj.alone, mlp.gate_up, mlp.down_proj.alone)
    linears = [linear for projection in projections for linear in projection.linears]
    weights = [m.weight for m in (*norms, *linears) if m is not None]
    return (*weights, *(linear.bias for linear in linears if linear.bias is not None))


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TK: Tensor, delta_TK: Tensor | None, step: Step, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        h2_TK, delta_TK, saved = step.forward(h_TK, delta_TK)
        # What backward reads lies outside of autograd's keeping, so that each tensor can go as soon as it was read. Outputs
        # are detached, else they would keep this node, and it them.
        if isinstance(saved, Saved):
            saved.h2_TK = h2_TK.detach()
        ctx.step, ctx.parameters, ctx.saved = step, parameters, saved
        return h2_TK, delta_TK

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_h_TK: Tensor, grad_delta_TK: Tensor) -> Any:
        step, parameters, kept = ctx.step, ctx.parameters, ctx.saved
        assert kept is not None, "a layer's tensors are gone after its backward pass: there is no second one"
        ctx.saved = None
        saved = step.restored(kept)
        del kept
        wanted = {id(p) for p, needed in zip(parameters, ctx.needs_input_grad[3:], strict=True) if needed}
        dh_TK, grads = layer_backward(step, saved, grad_h_TK, grad_delta_TK, wanted)
        return (
            dh_TK,
            (dh_TK if ctx.needs_input_grad[1] else None),
            None,
            *(grads.get(id(p)) for p in parameters),
        )


class _FinalNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_TK: Tensor, delta_TK: Tensor | None, weight: Tensor, norm: RMSNorm) -> Tensor:
        total_TK, out = normed(norm, h_TK, delta_TK, None)
        ctx.norm, ctx.added = norm, delta_TK is not None
        ctx.save_for_backward(total_TK)
        assert isinstance(out, Tensor)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TK: Tensor) -> Any:
        (total_TK,) = ctx.saved_tensors
        norm = ctx.norm
        dh_TK, dw = fused_kernels(norm.kernels).norm_grad(
            grad_TK.contiguous(), total_TK, norm.working.plain, norm.eps, None
        )
        return dh_TK, (dh_TK if ctx.added else None), (dw if ctx.needs_input_grad[2] else None), None
