"""What a backend that fuses must have: the operations of `models/fused.py` and of its backward pass.

A forward operation takes whole rows and gives a product's operand as the product wants it, so that a norm, an activation or
attention can write codes itself. A backward operation gives a gradient in the two forms that a linear layer's gradients take:

    rows      1x128 codes [T, N] along N, against the weight's transposed codes (DGrad)
    columns   the matrix transposed, 1x128 codes [N, T'] along tokens, T' = T rounded up to 128 (WGrad)

Where a product is in BF16, both are the BF16 gradient [T, N] itself. Gradients need not obey the row law, but they have the
same bits in every run. `hopper.py` is such a backend; the tests have one made of the reference's operations.

Shapes: T rows, K inputs, N outputs, H heads, G key/value heads, D head size, V vocabulary, C rows of a chunk, S rows whose
probabilities are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.kernels.attention_form import AttentionForm
from lockstep.kernels.attention_index import Run
from lockstep.kernels.packed_index import Room
from lockstep.kernels.reference import PackedWeight
from lockstep.numerics.formats import Operand, ScaleKind
from lockstep.numerics.quantize import Quantized

Rows = Quantized | Tensor
"""Activations or gradients as a product takes them: codes with scales, or BF16."""
Scales = tuple[Tensor, Tensor]
"""FP32 scales [G] of keys and of values."""
Norms = tuple[Tensor, Tensor]
"""BF16 weights [D] of the q and the k norm."""


class StaticIndex(Protocol):
    """An attention index whose storage stays while its runs change."""

    def fill(self, runs: Sequence[Run]) -> None:
        """Puts in runs that the room holds."""


class FusedKernels(Protocol):
    """Operations of a backend with `fused = True`."""

    # Forward -------------------------------------------------------------------------------------------------

    def add_norm(
        self, h_TK: Tensor, delta_TK: Tensor | None, weight_K: Tensor, eps: float, operand: Operand | None
    ) -> tuple[Tensor, Rows]:
        """(h + delta, its norm as the next product takes it)."""

    def kept_norm(
        self, h_TK: Tensor, delta_TK: Tensor | None, weight_K: Tensor, eps: float, operand: Operand
    ) -> tuple[Tensor, Quantized, Tensor]:
        """`add_norm`, and 1 / sqrt(mean square + eps) of every row, [T] FP32: what `columns_of` makes the norm of again."""

    def linear(self, x_TK: Rows, weight: PackedWeight) -> Tensor:
        """x w^T, rounded once to BF16, [T, N]."""

    def quantize_rows(self, x_TK: Tensor, operand: Operand) -> Quantized:
        """1x128 codes."""

    def swiglu_rows(self, gate_up_TN: Tensor, operand: Operand | None) -> Rows:
        """silu(gate) up of rows that hold both, as the next product takes it."""

    def swiglu_kept(self, gate_up_TN: Tensor, operand: Operand) -> tuple[Quantized, Quantized]:
        """(`swiglu_rows`, `quantize_rows` of gate and up) in one pass; both halves are whole groups."""

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
        """(q [T, H, D], k, v [T, G, D]) of projected rows, after norm and rotation."""

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
        """(o [T, H, D] in BF16, base-2 log-sum-exp [T, H] if asked for). Under `scales` keys and values go through FP8. With
        `codes`, o is 1x128 codes [T, H D]: what `quantize_rows` makes of it, and D is 128."""

    def watch_kv(
        self,
        k_TGD: Tensor,
        v_TGD: Tensor,
        scales: Scales | None,
        maxima_2G: Tensor,
        saturated: Tensor,
        seen_T: Tensor | None = None,
    ) -> None:
        """Raises `maxima_2G` (FP32) to the absolute maxima of keys and values; NaN and infinity stay in them. `saturated` (int64,
        one element) grows by the number of elements beyond the range of `scales`. seen_T: bool, the rows that count."""

    def sample(
        self,
        logits_RV: Tensor,
        temperature_R: Tensor,
        state_R: Tensor,
        position_R: Tensor,
        threshold_R: Tensor | None,
    ) -> Tensor:
        """A token of each row [R] int64: argmax(logits / temperature + noise), greedy at 0. The noise is `rollout/noise.py`'s
        of a state and a position (int64). threshold_R: what is less, over the temperature, isn't drawn."""

    # Packs in fixed storage ------------------------------------------------------------------------------------

    def static_index(self, room: Room, group: int, device: torch.device) -> StaticIndex:
        """An index with this room, for `group` query heads a key/value head; nothing is in it yet."""

    # Backward ------------------------------------------------------------------------------------------------

    def ready(self, weight: PackedWeight) -> None:
        """Makes what an input gradient reads of the weight's present version now, not when it is first read. It stays in its
        place from one version to the next."""

    def quantize_both(
        self, x_TN: Tensor, operand: Operand, *, rows: bool = True, columns: bool = True
    ) -> tuple[Quantized | None, Quantized | None]:
        """(rows, columns) of a gradient, each on demand; the rows are those of `quantize_rows`."""

    def regroup(self, x_TK: Quantized, operand: Operand) -> Quantized:
        """Columns of 1x128 rows, from the values of their codes, in groups of 128x1 or 128x128 as `operand` has them."""

    def columns_of(
        self,
        x_TK: Tensor,
        rows: Operand,
        columns: Operand,
        *,
        inverse_T: Tensor | None = None,
        weight_K: Tensor | None = None,
    ) -> Quantized:
        """`regroup` of `quantize_rows`, of x or with both of its norm's factors of that norm."""

    def linear_dgrad(self, grad_TN: Rows, weight: PackedWeight) -> Tensor:
        """grad w, [T, K], rounded to BF16. Codes meet the codes of the forward pass, transposed."""

    def linear_wgrad(self, grad: Rows, x: Rows) -> Tensor:
        """grad^T x in FP32, [N, K], of two columns or of two plain matrices [T, N], [T, K]."""

    def add_wgrad(self, total_NK: Tensor, grad: Rows, x: Rows) -> None:
        """Adds grad^T x, both as for `linear_wgrad`, to an FP32 total; of two columns with the bits of product and addition."""

    def swiglu_grad(
        self, grad_TN: Tensor, gate_up: Rows, operand: Operand | None
    ) -> tuple[Quantized, Quantized] | Tensor:
        """Gradient of gate and up, side by side [T, 2 N]: its rows and columns, or BF16 without an `operand`."""

    def norm_grad(
        self, grad_TK: Tensor, h_TK: Tensor, weight_K: Tensor, eps: float, dh_TK: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(dh plus the gradient of the norm's input [T, K] BF16, gradient of its weight [K] FP32)."""

    def attention_grad(
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_SGD: Tensor,
        v_SGD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        index: Any,
        form: AttentionForm,
        *,
        deterministic: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv); keys and values as `form` says. deterministic: the same bits in every run."""

    def quantize_kv(self, x_SGD: Tensor, scale_G: Tensor) -> Tensor:
        """e4m3 codes of keys or values; larger values saturate."""

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
        """(gradient of the projected rows [T, N] BF16, of the q and the k norm's weight [D] FP32). Elements beyond the range of
        `scales` get none."""

    # Output head ---------------------------------------------------------------------------------------------

    def score(
        self,
        h_CK: Tensor,
        head: PackedWeight,
        targets_C: Tensor,
        temperature_C: Tensor,
        p_SV: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probability of each target, log-normalizer, entropy) [C] FP32, by the sampler's launches. p_SV: BF16, is given the
        probabilities of the first S <= C rows; the results have the same bits with and without it."""

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
        """Writes the gradient of the raw logits in BF16, from that of log-probabilities and (if any) entropies."""

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
        """`logits_grad` without a product: over the probabilities that `score` stored. The target's own comes from log_prob_S."""
