"""The backward half of the Hopper backend: products of gradients, and thin methods over the kernels that make their operands.

Which product runs where:

    DGrad, FP8    cuBLASLt, 1x128 rows against the transposed weight codes, where both widths are whole blocks of 128;
                  else cuBLAS over BF16 roundings of the dequantized values (one more rounding, 2^-9 relative)
    WGrad, FP8    cuBLASLt, columns against columns, FP32 out, where both widths are multiples of 16; else cuBLAS, BF16 roundings
    BF16          cuBLAS; weight gradients with FP32 output

Gradients need no row law, so a library may choose its algorithm by the number of rows; it chooses by shape alone, so the same
step has the same bits in every run.

Transposed codes are made once a weight version, the first time a gradient wants them, and kept: a byte a weight.

Next: `hopper.py`, which adds the forward; `triton/columns.py` for the two forms of a gradient.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels import products
from lockstep.kernels.fused import Norms, Rows, Scales
from lockstep.kernels.library import add_columns, library_scale, scaled_mm, scaled_mm_columns, takes_columns
from lockstep.kernels.reference import PackedWeight, ReferenceKernels
from lockstep.kernels.triton import columns as _columns
from lockstep.kernels.triton import (
    head,
    head_backward,
    kv,
    norm,
    norm_backward,
    rope_backward,
    swiglu_backward,
    transpose,
)
from lockstep.kernels.triton.columns import Codes
from lockstep.numerics.formats import BLOCK, Operand
from lockstep.numerics.quantize import Quantized


@dataclass
class Transposed:
    """What DGrad reads of a weight [N, K], made from version `count` of it: codes [K, N] with their library scale, or, where
    blocks are ragged, BF16 values [N, K]."""

    count: int
    codes: Quantized | None
    scale: Tensor | None
    values: Tensor | None


class HopperGradients(ReferenceKernels):
    """Gradients on an NVIDIA GPU of compute capability 9.0; see `FusedKernels` for the operations."""

    def __init__(self) -> None:
        super().__init__(exact=False)
        self._transposed: dict[int, tuple[weakref.ref[PackedWeight], Transposed]] = {}

    # Linear layers -------------------------------------------------------------------------------------------

    def with_transpose(self, weight: PackedWeight) -> Transposed:
        """The transposed codes of a weight's present version."""
        kept = self._transposed.get(id(weight))
        if kept is not None and kept[0]() is weight and kept[1].count == weight.version.count:
            return kept[1]
        made = _transpose(weight, kept[1] if kept is not None and kept[0]() is weight else None)
        key, kept_by_id = id(weight), self._transposed
        kept_by_id[key] = (weakref.ref(weight, lambda _: kept_by_id.pop(key, None)), made)
        return made

    def ready(self, weight: PackedWeight) -> None:
        """See `FusedKernels`."""
        if weight.codes is not None:
            self.with_transpose(weight)

    def quantize_both(
        self, x_TN: Tensor, operand: Operand, *, rows: bool = True, columns: bool = True
    ) -> tuple[Quantized | None, Quantized | None]:
        """See `FusedKernels`; one pass over x."""
        return _pair(_columns.quantize_both(x_TN, pow2=operand.scale == "pow2", rows=rows, columns=columns))

    def regroup(self, x_TK: Quantized, operand: Operand) -> Quantized:
        """See `FusedKernels`; from codes to codes in one pass."""
        found = _columns.regroup(
            x_TK.codes, x_TK.scale, pow2=operand.scale == "pow2", square=_square(operand)
        )
        return Quantized(*found, _turned(operand))

    def kept_norm(
        self, h_TK: Tensor, delta_TK: Tensor | None, weight_K: Tensor, eps: float, operand: Operand
    ) -> tuple[Tensor, Quantized, Tensor]:
        """See `FusedKernels`."""
        total, out, inverse_T = norm.kept_norm(
            h_TK, weight_K, eps, delta_TK=delta_TK, pow2=operand.scale == "pow2"
        )
        return total, Quantized(*out, (1, BLOCK)), inverse_T

    def columns_of(
        self,
        x_TK: Tensor,
        rows: Operand,
        columns: Operand,
        *,
        inverse_T: Tensor | None = None,
        weight_K: Tensor | None = None,
    ) -> Quantized:
        """See `FusedKernels`; one pass over x."""
        found = _columns.columns_of(
            x_TK, inverse_T, weight_K, pow2_rows=rows.scale == "pow2", pow2=columns.scale == "pow2",
            square=_square(columns),
        )  # fmt: skip
        return Quantized(*found, _turned(columns))

    def linear_dgrad(self, grad_TN: Rows, weight: PackedWeight) -> Tensor:
        """grad w, [T, K], rounded to BF16."""
        if weight.codes is None:
            assert weight.plain is not None
            return _plain(grad_TN) @ weight.plain
        turned = self.with_transpose(weight)
        if isinstance(grad_TN, Quantized) and turned.codes is not None and turned.scale is not None:
            return scaled_mm(grad_TN, turned.codes, turned.scale)
        values = turned.values if turned.values is not None else weight.codes.dequantize().bfloat16()
        return _plain(grad_TN) @ values

    def linear_wgrad(self, grad_TN: Rows, x_TK: Rows) -> Tensor:
        """grad^T x in FP32, [N, K], of two columns [N, T'], [K, T'] or of two plain matrices [T, N], [T, K]."""
        if isinstance(grad_TN, Quantized) and isinstance(x_TK, Quantized):
            if takes_columns(grad_TN, x_TK):
                return scaled_mm_columns(grad_TN, x_TK)
            return torch.mm(_plain(grad_TN), _plain(x_TK).t(), out_dtype=torch.float32)
        return torch.mm(_plain(grad_TN).t(), _plain(x_TK), out_dtype=torch.float32)

    def add_wgrad(self, total_NK: Tensor, grad_TN: Rows, x_TK: Rows) -> None:
        """See `FusedKernels`."""
        if isinstance(grad_TN, Quantized) and isinstance(x_TK, Quantized):
            if not add_columns(total_NK, grad_TN, x_TK):
                total_NK += self.linear_wgrad(grad_TN, x_TK)
        else:
            torch.addmm(total_NK, _plain(grad_TN).t(), _plain(x_TK), out_dtype=torch.float32, out=total_NK)

    # Norm, rotary embedding, activation ------------------------------------------------------------------------

    def swiglu_grad(
        self, grad_TN: Tensor, gate_up: Rows, operand: Operand | None
    ) -> tuple[Quantized, Quantized] | Tensor:
        """See `FusedKernels`."""
        held = (gate_up.codes, gate_up.scale) if isinstance(gate_up, Quantized) else gate_up
        pow2 = operand is not None and operand.scale == "pow2"
        found = swiglu_backward.swiglu_backward(grad_TN, held, pow2=pow2, fp8=operand is not None)
        if isinstance(found, Tensor):
            return found
        rows, columns = _pair(found)
        assert rows is not None and columns is not None
        return rows, columns

    def norm_grad(
        self, grad_TK: Tensor, h_TK: Tensor, weight_K: Tensor, eps: float, dh_TK: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `FusedKernels`."""
        return norm_backward.norm_backward(grad_TK, h_TK, weight_K, eps, dh_TK)

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
        """See `FusedKernels`."""
        dq, dk, dv = (x.contiguous() for x in (dq_THD, dk_TGD, dv_TGD))
        return rope_backward.rope_backward(
            dq, dk, dv, qkv_TN, table_PD, positions_T, norms=norms, eps=eps, scales=scales
        )

    # Keys and values -------------------------------------------------------------------------------------------

    def watch_kv(
        self,
        k_TGD: Tensor,
        v_TGD: Tensor,
        scales: Scales | None,
        maxima_2G: Tensor,
        saturated: Tensor,
        seen_T: Tensor | None = None,
    ) -> None:
        """See `FusedKernels`; one launch."""
        kv.watch(k_TGD, v_TGD, scales, maxima_2G, saturated, seen_T)

    def quantize_kv(self, x_SGD: Tensor, scale_G: Tensor) -> Tensor:
        """See the reference; one launch."""
        return kv.kv_codes(x_SGD, scale_G)

    # Output head ----------------------------------------------------------------------------------------------

    def raw_logits(self, h_TK: Tensor, head_weight: PackedWeight) -> Tensor:
        """[T, V] FP32."""
        assert head_weight.plain is not None
        return products.bf16_product(h_TK, head_weight.plain, dtype=torch.float32)

    def score(
        self,
        h_CK: Tensor,
        head_weight: PackedWeight,
        targets_C: Tensor,
        temperature_C: Tensor,
        p_SV: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `FusedKernels`."""
        logits = self.raw_logits(h_CK, head_weight)
        normalizer = head.log_normalizer(logits, temperature_C)
        log_prob = head.target_log_prob(logits, temperature_C, normalizer, targets_C)
        return log_prob, normalizer, head_backward.entropy(logits, temperature_C, normalizer, p_SV)

    def logits_grad(
        self,
        h_CK: Tensor,
        head_weight: PackedWeight,
        targets_C: Tensor,
        temperature_C: Tensor,
        normalizer_C: Tensor,
        entropy_C: Tensor,
        grad_C: Tensor,
        grad_entropy_C: Tensor | None,
        out_CV: Tensor,
    ) -> None:
        """See `FusedKernels`. Logits come from cuBLAS here: faster, and a gradient needs no row law."""
        assert head_weight.plain is not None
        logits = torch.mm(h_CK, head_weight.plain.t(), out_dtype=torch.float32)
        head_backward.logits_grad(
            logits, targets_C, temperature_C, normalizer_C, entropy_C, grad_C, grad_entropy_C, out_CV
        )

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
        """See `FusedKernels`; one pass."""
        head_backward.stored_logits_grad(
            p_SV, targets_S, temperature_S, log_prob_S, entropy_S, grad_S, grad_entropy_S
        )


def _transpose(weight: PackedWeight, old: Transposed | None) -> Transposed:
    """Transposed codes, written over `old` ones of the same weight where there are any: captured passes read these places."""
    assert weight.codes is not None
    held, count = weight.codes, weight.version.count
    if old is not None and old.values is not None:
        old.values.copy_(held.dequantize())
        return Transposed(count, None, None, old.values)
    if old is not None and old.codes is not None and old.scale is not None:
        transpose.transpose_codes(held.codes, old.codes.codes)
        old.codes.scale.copy_(held.scale.t())
        old.scale.copy_(_library_scale(old.codes))
        return Transposed(count, old.codes, old.scale, None)
    shape = Quantized(held.codes.t(), held.scale.t().contiguous(), held.group)
    if library_scale(shape) is None:
        return Transposed(count, None, None, held.dequantize().bfloat16())
    whole = Quantized(transpose.transpose_codes(held.codes, None), shape.scale, held.group)
    return Transposed(count, whole, _library_scale(whole), None)


def _library_scale(weight: Quantized) -> Tensor:
    scale = library_scale(weight)
    assert scale is not None, "the library takes this shape"
    return scale


def _square(operand: Operand) -> bool:
    return operand.group == (BLOCK, BLOCK)


def _turned(operand: Operand) -> tuple[int, int]:
    """Groups of the transposed operand."""
    assert operand.group in ((BLOCK, 1), (BLOCK, BLOCK)), "columns are grouped along tokens"
    return operand.group[1], operand.group[0]


def _pair(found: tuple[Codes | None, Codes | None]) -> tuple[Quantized | None, Quantized | None]:
    rows, columns = (None if part is None else Quantized(part[0], part[1], (1, BLOCK)) for part in found)
    return rows, columns


def _plain(x: Rows) -> Tensor:
    x = x.dequantize() if isinstance(x, Quantized) else x
    return x if x.dtype == torch.bfloat16 else x.bfloat16()
