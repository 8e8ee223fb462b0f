"""A backend that fuses, made of the reference's operations: what the fused forward and backward do can be tested on a CPU,
against the plain modules, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.kernels.attention_form import PLAIN, AttentionForm
from lockstep.kernels.fused import Norms, Rows, Scales
from lockstep.kernels.reference import PackedWeight, ReferenceKernels, saturated
from lockstep.nn.head import target_log_prob
from lockstep.numerics.formats import BLOCK, Operand, ScaleKind, column_groups, row_groups
from lockstep.numerics.quantize import Quantized, quantize, values_of


class FusedReference(ReferenceKernels):
    """`FusedKernels` in plain torch, each operation rounded where the plain modules round. `calls` counts them by name."""

    fused = True

    def __init__(self) -> None:
        super().__init__()
        self.name = "fused-reference"
        self.calls: dict[str, int] = {}

    def note(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    # Forward

    def dense_input(self, x_TK: Rows) -> Rows:
        return x_TK

    def linear(self, x_TK: Rows, weight: PackedWeight) -> Tensor:
        self.note("linear")
        return super().linear(super().dense_input(x_TK), weight).to(torch.bfloat16)

    def logits(self, h_TK: Tensor, head: PackedWeight, temperature_T: Tensor) -> Tensor:
        logits = super().linear(super().dense_input(h_TK), head).contiguous()
        return logits.div_(temperature_T[:, None])

    def add_norm(
        self, h_TK: Tensor, delta_TK: Tensor | None, weight_K: Tensor, eps: float, operand: Operand | None
    ) -> tuple[Tensor, Rows]:
        self.note("add_norm")
        total = h_TK if delta_TK is None else h_TK + delta_TK
        out = self.rms_norm(total, weight_K, eps)
        return total, out if operand is None else self.quantize_rows(out, operand)

    def kept_norm(
        self, h_TK: Tensor, delta_TK: Tensor | None, weight_K: Tensor, eps: float, operand: Operand
    ) -> tuple[Tensor, Quantized, Tensor]:
        total, out = self.add_norm(h_TK, delta_TK, weight_K, eps, operand)
        assert isinstance(out, Quantized)
        return total, out, (total.float().square().mean(1) + eps).rsqrt()

    def swiglu_rows(self, gate_up_TN: Tensor, operand: Operand | None) -> Rows:
        out = self.swiglu(*(x.contiguous() for x in gate_up_TN.chunk(2, 1)))
        return out if operand is None else self.quantize_rows(out, operand)

    def swiglu_kept(self, gate_up_TN: Tensor, operand: Operand) -> tuple[Quantized, Quantized]:
        self.note("swiglu_kept")
        y = self.swiglu_rows(gate_up_TN, operand)
        assert isinstance(y, Quantized)
        return y, self.quantize_rows(gate_up_TN, operand)

    def rope_rows(
        self,
        qkv_TN: Tensor,
        table_PD: Tensor,
        positions_T: Tensor,
        *,
        heads: int,
        kv_heads: int,
        norms: Norms | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._split(qkv_TN, heads, kv_heads)
        if norms is not None:
            q, k = self.rms_norm(q, norms[0], eps), self.rms_norm(k, norms[1], eps)
        cos, sin = table_PD[positions_T].unbind(1)
        return self.rope(q, cos, sin), self.rope(k, cos, sin), v

    def attend(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        index: Any,
        scales: Scales | None,
        *,
        codes: ScaleKind | None = None,
        lse: bool = False,
    ) -> tuple[Rows, Tensor]:
        self.note("attend")
        form = PLAIN
        if scales is not None:
            k_TGD, v_TGD = self.quantize_kv(k_TGD, scales[0]), self.quantize_kv(v_TGD, scales[1])
            form = AttentionForm(*scales)
        out, lse_TH = self.attention(q_THD, k_TGD, v_TGD, index, form)
        return (out if codes is None else quantize(out.flatten(1), row_groups(codes))), lse_TH

    def watch_kv(
        self,
        k_TGD: Tensor,
        v_TGD: Tensor,
        scales: Scales | None,
        maxima_2G: Tensor,
        saturated_1: Tensor,
        seen_T: Tensor | None = None,
    ) -> None:
        self.note("watch_kv")
        for i, x in enumerate((k_TGD, v_TGD) if seen_T is None else (k_TGD[seen_T], v_TGD[seen_T])):
            maxima_2G[i].copy_(torch.maximum(maxima_2G[i], x.abs().amax((0, 2)).float()))
            if scales is not None:
                saturated_1 += saturated(x, scales[i]).sum()

    # Backward

    def quantize_both(
        self, x_TN: Tensor, operand: Operand, *, rows: bool = True, columns: bool = True
    ) -> tuple[Quantized | None, Quantized | None]:
        return (
            self.quantize_rows(x_TN, operand) if rows else None,
            quantize(x_TN, column_groups(operand.scale)).transpose() if columns else None,
        )

    def regroup(self, x_TK: Quantized, operand: Operand) -> Quantized:
        return quantize(x_TK.dequantize(), operand).transpose()

    def columns_of(
        self,
        x_TK: Tensor,
        rows: Operand,
        columns: Operand,
        *,
        inverse_T: Tensor | None = None,
        weight_K: Tensor | None = None,
    ) -> Quantized:
        self.note("columns_of")
        if inverse_T is not None and weight_K is not None:
            x_TK = (x_TK.float() * inverse_T[:, None] * weight_K.float()).to(x_TK.dtype)
        return self.regroup(self.quantize_rows(x_TK, rows), columns)

    def linear_dgrad(self, grad_TN: Rows, weight: PackedWeight) -> Tensor:
        return super().linear_dgrad(grad_TN, weight).to(torch.bfloat16)

    def linear_wgrad(self, grad_TN: Rows, x_TK: Rows) -> Tensor:
        parts = [x.transpose() if isinstance(x, Quantized) else x for x in (grad_TN, x_TK)]
        return values_of(parts[0]).t() @ values_of(parts[1])

    def add_wgrad(self, total_NK: Tensor, grad_TN: Rows, x_TK: Rows) -> None:
        total_NK += self.linear_wgrad(grad_TN, x_TK)

    def swiglu_grad(
        self, grad_TN: Tensor, gate_up: Rows, operand: Operand | None
    ) -> tuple[Quantized, Quantized] | Tensor:
        gate, up = values_of(gate_up).chunk(2, 1)
        sigmoid, dy = gate.sigmoid(), grad_TN.float()
        silu = gate * sigmoid
        d_gate = dy * up * (sigmoid + silu * (1 - sigmoid))
        found = torch.cat([d_gate, dy * silu], 1).to(grad_TN.dtype)
        if operand is None:
            return found
        rows, columns = self.quantize_both(found, operand)
        assert rows is not None and columns is not None
        return rows, columns

    def norm_grad(
        self, grad_TK: Tensor, h_TK: Tensor, weight_K: Tensor, eps: float, dh_TK: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, dy = h_TK.float(), grad_TK.float()
        inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        normed = x * inverse
        weighted = dy * weight_K.float()
        dx = inverse * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
        dx, dw = dx.to(h_TK.dtype), (dy * normed).flatten(0, -2).sum(0)
        return (dx if dh_TK is None else dh_TK + dx), dw

    def rope_grad(
        self,
        dq_THD: Tensor,
        dk_TGD: Tensor,
        dv_TGD: Tensor,
        qkv_TN: Tensor,
        table_PD: Tensor,
        positions_T: Tensor,
        *,
        norms: Norms | None,
        eps: float,
        scales: Scales | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        heads, kv_heads = dq_THD.shape[1], dk_TGD.shape[1]
        q, k, v = self._split(qkv_TN, heads, kv_heads)
        if scales is not None:
            _, turned, _ = self.rope_rows(
                qkv_TN, table_PD, positions_T, heads=heads, kv_heads=kv_heads, norms=norms, eps=eps
            )
            dk_TGD = dk_TGD.masked_fill(saturated(turned, scales[0]), 0.0)
            dv_TGD = dv_TGD.masked_fill(saturated(v, scales[1]), 0.0)
        cos, sin = table_PD[positions_T].unbind(1)
        dq, dk = (self.rope(x.to(qkv_TN.dtype), cos, -sin) for x in (dq_THD, dk_TGD))
        dq_weight = dk_weight = None
        if norms is not None:
            dq, dq_weight = self.norm_grad(dq, q, norms[0], eps, None)
            dk, dk_weight = self.norm_grad(dk, k, norms[1], eps, None)
        parts = [x.flatten(1) for x in (dq, dk, dv_TGD.to(qkv_TN.dtype))]
        return torch.cat(parts, 1), dq_weight, dk_weight

    def _split(self, qkv_TN: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = qkv_TN.unflatten(1, (heads + 2 * kv_heads, -1))
        q, k, v = rows.split([heads, kv_heads, kv_heads], 1)
        return q.contiguous(), k.contiguous(), v.contiguous()

    # Output head

    def score(
        self,
        h_CK: Tensor,
        head: PackedWeight,
        targets_C: Tensor,
        temperature_C: Tensor,
        p_SV: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.note("score")
        logits = self.logits(h_CK, head, temperature_C)
        normalizer = self.log_normalizer(logits)
        if p_SV is not None:
            p_SV.copy_((logits - normalizer[:, None])[: len(p_SV)].exp())
        log_prob = target_log_prob(logits, normalizer, targets_C)
        return log_prob, normalizer, self.entropy(logits, normalizer)

    def logits_grad(
        self,
        h_CK: Tensor,
        head: PackedWeight,
        targets_C: Tensor,
        temperature_C: Tensor,
        normalizer_C: Tensor,
        entropy_C: Tensor,
        grad_C: Tensor,
        grad_entropy_C: Tensor | None,
        out_CV: Tensor,
    ) -> None:
        self.note("logits_grad")
        log_p = self.logits(h_CK, head, temperature_C) - normalizer_C[:, None]
        d = (F.one_hot(targets_C, log_p.shape[1]) - log_p.exp()) * grad_C[:, None]
        if grad_entropy_C is not None:
            d -= grad_entropy_C[:, None] * log_p.exp() * (log_p + entropy_C[:, None])
        out_CV.copy_(d / temperature_C[:, None])

    def stored_logits_grad(
        self,
        p_SV: Tensor,
        targets_S: Tensor,
        temperature_S: Tensor,
        log_prob_S: Tensor,
        entropy_S: Tensor,
        grad_S: Tensor,
        grad_entropy_S: Tensor | None,
    ) -> None:
        self.note("stored_logits_grad")
        at, own, p = targets_S[:, None], log_prob_S[:, None], p_SV.float()
        d = (-p).scatter(1, at, -own.expm1()) * grad_S[:, None]
        if grad_entropy_S is not None:
            log_p, p = p.clamp(min=1e-38).log().scatter(1, at, own), p.scatter(1, at, own.exp())
            d -= grad_entropy_S[:, None] * p * (log_p + entropy_S[:, None])
        p_SV.copy_(d / temperature_S[:, None])


@pytest.fixture(scope="session")
def fused() -> SimpleNamespace:
    """The backend, by name."""
    return SimpleNamespace(Kernels=FusedReference, BLOCK=BLOCK)
