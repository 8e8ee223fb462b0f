"""Every operation of the model in plain torch: the definition of each value, and the CPU backend.

Two precisions of summation. `exact` takes FP8 block sums of 128 in float64, where they are exact (an e4m3 product needs 8
bits, a block sum 43), so the result doesn't depend on the order of summation on any machine; scales and the sum over
blocks are FP32 in ascending order, rounded once. `fast` multiplies dequantized FP32 values in an order that is the same for
every row (`rowwise.py`). Both obey the row law; only `fast` is quick enough to train with on a CPU.

A device backend (`Kernels` in `table.py`) must match `exact` within tolerance and obey the row law exactly.

Shapes: T rows (tokens), K inputs, N outputs, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.attention_form import PLAIN, AttentionForm
from lockstep.kernels.attention_index import AttentionIndex, Run, build_index
from lockstep.kernels.reference_attention import attention_backward, attention_forward
from lockstep.kernels.reference_moe import combine, router_scores, top_experts
from lockstep.kernels.renew import Renewed, Source, renew
from lockstep.kernels.rowwise import row_matmul, tree_sum
from lockstep.kernels.truncation import Truncation, threshold
from lockstep.numerics.fingerprint import Fingerprint, fingerprint
from lockstep.numerics.formats import BLOCK, E4M3_MAX, Operand
from lockstep.numerics.quantize import Quantized, quantize, to_codes, values_of, widen


@dataclass
class Version:
    """How often the values of a working copy were replaced where they lie. Whoever keeps something made from them (transposed
    codes) keeps `count` with it, and makes it anew when the two differ. known: a device backend's note on how it does that."""

    count: int = 0
    known: Any = None


@dataclass(frozen=True)
class PackedWeight:
    """A weight as the kernels want it. One of `codes` and `plain` is its value; `dense` is FP32 code times scale. The reference's
    stack of several weights (`fuse`) has `dense` only.

    codes: quantized [N, K]. plain: BF16 (or the activation type) [N, K]. dense: [N, K] FP32, None in `exact`.
    library_scale: the scales in the layout of a device's GEMM library, where there is one.
    stack: the stack that this weight is a view of. row_scale: [N, K / 128], its part of a stack's scales where these are one a
    row. version: see `Version`; a device backend refreshes in place.
    """

    codes: Quantized | None
    plain: Tensor | None
    dense: Tensor | None
    library_scale: Tensor | None = None
    stack: PackedWeight | None = field(default=None, compare=False, repr=False)
    row_scale: Tensor | None = None
    version: Version = field(default_factory=Version, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, or of the plain values: what publication ships."""
        parts = (self.codes.codes, self.codes.scale) if self.codes is not None else (self.plain,)
        return sum(p.numel() * p.element_size() for p in parts if p is not None)


class ReferenceKernels:
    """The operations. Stateless; `exact` selects float64 sums. `fused`: the backend has the operations of `models/fused.py`."""

    fused = False

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact
        self.name = "exact" if exact else "reference"
        self.sum_type = torch.float64 if exact else torch.float32

    # Linear layers -------------------------------------------------------------------------------------------

    def pack(self, weight: Quantized | Tensor) -> PackedWeight:
        """Prepares a quantized or plain weight [N, K] for `linear`."""
        if isinstance(weight, Quantized):
            return PackedWeight(weight, None, None if self.exact else weight.dequantize())
        return PackedWeight(None, weight, weight.to(self.sum_type))

    def fuse(self, parts: Sequence[PackedWeight]) -> list[PackedWeight] | None:
        """Weights that share an input as views of one `stack`, one below the other along N; None where this backend multiplies
        them singly."""
        if self.exact:
            return None
        dense = [p.dense for p in parts if p.dense is not None]
        stack = PackedWeight(None, None, torch.cat(dense))
        assert stack.dense is not None
        views = stack.dense.split([len(d) for d in dense])
        return [replace(p, dense=view, stack=stack) for p, view in zip(parts, views, strict=True)]

    # Publication ----------------------------------------------------------------------------------------------

    def reserve(self, sources: Sequence[Source]) -> list[PackedWeight] | None:
        """Storage for working copies that don't exist yet and will be views of one stack; None where `refresh` makes them anew
        each time."""
        return None

    def refresh(self, sources: Iterable[Source]) -> Iterator[Renewed]:
        """The working copy of each master, in order. Raises ValueError that names the first master with NaN or infinity.

        Take each before asking for the next: the old copy can go then.
        """
        return (renew(source, self.pack) for source in sources)

    def fingerprints(self, held: Sequence[tuple[Tensor, Tensor | None]]) -> list[Fingerprint]:
        """`numerics/fingerprint.py` of each (codes, scale) or (values, None)."""
        return [fingerprint(value, scale) for value, scale in held]

    def quantize_rows(self, x_TK: Tensor, operand: Operand) -> Quantized:
        """1x128 codes of activations or output gradients."""
        return quantize(x_TK, operand)

    def dense_input(self, x_TK: Quantized | Tensor) -> Quantized | Tensor:
        """The operand as `linear` multiplies it; make it once when several weights share an input."""
        if isinstance(x_TK, Quantized):
            return x_TK if self.exact else x_TK.dequantize()
        return x_TK.to(self.sum_type)

    def linear(self, x_TK: Quantized | Tensor, weight: PackedWeight) -> Tensor:
        """x w^T in FP32, before the one rounding, [T, N]. `x_TK` comes from `dense_input`. Where only one operand has codes
        (probes), its values are multiplied as plain ones are."""
        if isinstance(x_TK, Quantized) and weight.codes is not None:
            return block_matmul(x_TK, weight.codes)
        x = x_TK.dequantize().to(self.sum_type) if isinstance(x_TK, Quantized) else x_TK
        dense = weight.dense if weight.dense is not None else _value(weight).to(self.sum_type)
        return row_matmul(x, dense).float()

    def linear_dgrad(self, grad_TN: Quantized | Tensor, weight: PackedWeight) -> Tensor:
        """grad w in FP32, [T, K]. Quantized gradients meet the codes of the forward pass, transposed."""
        if isinstance(grad_TN, Quantized) and self.exact:
            assert weight.codes is not None
            return block_matmul(grad_TN, weight.codes.transpose())
        dense = weight.dense if weight.dense is not None else _value(weight)
        grad = grad_TN.dequantize() if isinstance(grad_TN, Quantized) else grad_TN
        return (grad.to(dense.dtype) @ dense).float()

    def linear_wgrad(self, grad_TN: Quantized | Tensor, x_TK: Quantized | Tensor) -> Tensor:
        """grad^T x in FP32, [N, K]. Quantized operands are grouped along tokens: gradients 128x1, x 128x1 or 128x128."""
        if isinstance(grad_TN, Quantized) and isinstance(x_TK, Quantized) and self.exact:
            return block_matmul(grad_TN.transpose(), x_TK.transpose())
        return values_of(grad_TN).t() @ values_of(x_TK)

    # Norm, rotary embedding, activation ------------------------------------------------------------------------

    def rms_norm(self, x_TK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean x^2 + eps) * weight in FP32, rounded once to x's type. Last dimension is normalised."""
        x = x_TK.float()
        inverse = 1.0 / (tree_sum(x * x) / x.shape[-1] + eps).sqrt()
        return (x * inverse[..., None] * weight_K.float()).to(x_TK.dtype)

    def rope(self, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Rotates the two halves of each head (Su et al., arXiv 2104.09864, in Llama's layout). cos, sin: [T, D / 2] FP32."""
        half = x_THD.shape[-1] // 2
        x = x_THD.float()
        a, b = x[..., :half], x[..., half:]
        cos, sin = cos_TD[:, None], sin_TD[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_THD.dtype)

    def swiglu(self, gate_TN: Tensor, up_TN: Tensor) -> Tensor:
        """silu(gate) up in FP32, rounded once. silu is spelled out: torch's rounds otherwise at a vector's end."""
        gate = gate_TN.float()
        return (gate / (1.0 + (-gate).exp()) * up_TN.float()).to(gate_TN.dtype)

    # Mixture of experts ---------------------------------------------------------------------------------------

    def router_scores(self, logits_TE: Tensor) -> Tensor:
        """See `reference_moe.router_scores`."""
        return router_scores(logits_TE)

    def top_experts(self, scores_TE: Tensor, count: int) -> Tensor:
        """See `reference_moe.top_experts`."""
        return top_experts(scores_TE, count)

    def combine(self, y_TkK: Tensor, weight_Tk: Tensor) -> Tensor:
        """See `reference_moe.combine`."""
        return combine(y_TkK, weight_Tk)

    # Attention ------------------------------------------------------------------------------------------------

    def index(self, runs: Sequence[Run], group: int, device: torch.device | None = None) -> AttentionIndex:
        """What `attention` walks over: which rows attend to which keys."""
        return build_index(runs, group, device)

    def quantize_kv(self, x_SGD: Tensor, scale_G: Tensor) -> Tensor:
        """e4m3 codes of keys or values under fixed per-head scales; larger values saturate.

        A code of an infinite value would be a plausible number. Looking for one here would make a device wait at every
        layer, so the attention context looks once a forward pass (`nn/kv_scales.py`).
        """
        return to_codes(x_SGD.float() / scale_G[None, :, None])

    def attention(
        self,
        q_THD: Tensor,
        k_SGD: Tensor,
        v_SGD: Tensor,
        index: AttentionIndex,
        form: AttentionForm = PLAIN,
    ) -> tuple[Tensor, Tensor]:
        """See `reference_attention.attention_forward`."""
        return attention_forward(q_THD, k_SGD, v_SGD, index, form, self.sum_type)

    def attention_grad(
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_SGD: Tensor,
        v_SGD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        index: AttentionIndex,
        form: AttentionForm = PLAIN,
        *,
        deterministic: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `reference_attention.attention_backward`; it is deterministic either way."""
        return attention_backward(grad_THD, q_THD, k_SGD, v_SGD, out_THD, lse_TH, index, form, self.sum_type)

    # Output head ----------------------------------------------------------------------------------------------

    def logits(self, h_TK: Tensor, head: PackedWeight, temperature_T: Tensor) -> Tensor:
        """Logits over each row's temperature [T], [T, V] FP32."""
        logits = self.linear(self.dense_input(h_TK), head).contiguous()
        return logits.div_(temperature_T[:, None])

    def log_normalizer(self, logits_TV: Tensor) -> Tensor:
        """log sum exp [T] FP32 of FP32 logits."""
        peak = logits_TV.amax(-1)
        return peak + tree_sum((logits_TV - peak[:, None]).exp_()).log()

    def threshold(self, logits_RV: Tensor, truncation: Truncation) -> Tensor:
        """The least logit [R] FP32 that truncation leaves, of FP32 logits over their temperature."""
        return threshold(logits_RV, truncation)

    def entropy(self, logits_TV: Tensor, log_normalizer_T: Tensor) -> Tensor:
        """Entropy [T] FP32, in nats; overwrites the logits."""
        log_p = logits_TV.sub_(log_normalizer_T[:, None])
        return -tree_sum(log_p.exp().mul_(log_p))


def block_matmul(x_TK: Quantized, w_NK: Quantized) -> Tensor:
    """Block-scaled x w^T: exact block sums of 128 along K in float64, times both scales, added in FP32 ascending. [T, N].

    Takes 1x128 x 128x128 and 1x128 x 1x128 (after `transpose`, 128x1 operands group along the contracted dimension).
    """
    assert x_TK.group == (1, BLOCK) and w_NK.group[1] == BLOCK, (x_TK.group, w_NK.group)
    x, w = widen(x_TK.codes).double(), widen(w_NK.codes).double()
    w_scale = w_NK.scale
    if w_NK.group[0] > 1:
        w_scale = w_scale.repeat_interleave(w_NK.group[0], 0)[: w.shape[0]]
    out = torch.zeros(x.shape[0], w.shape[0], device=x.device)
    for block, start in enumerate(range(0, x.shape[1], BLOCK)):
        product = (x[:, start : start + BLOCK] @ w[:, start : start + BLOCK].t()).float()
        out += product * (x_TK.scale[:, block, None] * w_scale[None, :, block])
    return out


def saturated(x_SGD: Tensor, scale_G: Tensor) -> Tensor:
    """Elements beyond the range of their FP8 scale: these are counted, and get no gradient."""
    return x_SGD.float().abs() > scale_G[None, :, None] * E4M3_MAX


def _value(weight: PackedWeight) -> Tensor:
    if weight.codes is None:
        assert weight.plain is not None
        return weight.plain
    return weight.codes.dequantize()
