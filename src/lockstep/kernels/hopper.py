"""The Hopper backend: Triton kernels and the library's block-scaled GEMM behind the reference's interface.

What a row gets is decided by the instruction, never by the number of rows. Several kernels exist for an FP8 product, and
`products.py` proves that they give the same bits before it chooses one.

cuBLASLt splits K at few rows when it has a workspace, and then a row's bits depend on its batch. So the workspace is set to
zero before the first call; see docs/architecture.md.

Next: `triton/attention.py` and `triton/attention_loop.py` for the loop, `../models/fused.py` for the forward pass made of these.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.kernels import in_place, products
from lockstep.kernels.attention_form import PAGE, PLAIN, AttentionForm
from lockstep.kernels.attention_index import Run
from lockstep.kernels.attention_library import attention_grad
from lockstep.kernels.hopper_backward import HopperGradients
from lockstep.kernels.library import library_scale
from lockstep.kernels.packed_index import PackedIndex, Room, StaticIndex, Tables, tables_of
from lockstep.kernels.reference import PackedWeight
from lockstep.kernels.renew import Renewed, Source
from lockstep.kernels.table import WORKSPACE
from lockstep.kernels.triton import attention, head, norm, rope, swiglu
from lockstep.kernels.triton import quantize as rows
from lockstep.kernels.triton.fingerprint import fingerprints
from lockstep.kernels.triton.truncation import truncation_threshold
from lockstep.kernels.truncation import Truncation
from lockstep.numerics.fingerprint import Fingerprint
from lockstep.numerics.formats import BLOCK, E4M3, Operand, ScaleKind
from lockstep.numerics.quantize import Quantized

Rows = Quantized | Tensor
"""Activations as a product takes them: 1x128 codes with scales, or BF16."""
Index = PackedIndex | StaticIndex


class HopperKernels(HopperGradients):
    """Operations on an NVIDIA GPU of compute capability 9.0."""

    fused = True

    def __init__(self) -> None:
        super().__init__()
        self.name = "hopper"
        os.environ.setdefault(WORKSPACE, "0")
        if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
            raise ConfigError(
                "the Hopper kernels need an NVIDIA GPU of compute capability 9.0",
                where="kernels",
                fix="use kernels: reference",
            )
        self.fp8_linear = products.fp8_linear

    # Linear layers -------------------------------------------------------------------------------------------

    def pack(self, weight: Quantized | Tensor) -> PackedWeight:
        """Codes with their scales also as the library wants them; nothing dense is kept."""
        if isinstance(weight, Quantized):
            return PackedWeight(weight, None, None, library_scale(weight))
        return PackedWeight(None, weight, None)

    def fuse(self, parts: Sequence[PackedWeight]) -> list[PackedWeight] | None:
        """See the reference. Where a weight ends inside a block, the rows of the stack get scales of their own."""
        return in_place.stacked(parts)

    def reserve(self, sources: Sequence[Source]) -> list[PackedWeight] | None:
        """See the reference."""
        return in_place.reserve(sources)

    def refresh(self, sources: Iterable[Source]) -> Iterator[Renewed]:
        """See the reference; working copies stay where they are."""
        return in_place.refresh(sources)

    def fingerprints(self, held: Sequence[tuple[Tensor, Tensor | None]]) -> list[Fingerprint]:
        """See the reference; the host waits once."""
        return fingerprints(held)

    def quantize_rows(self, x_TK: Tensor, operand: Operand) -> Quantized:
        """1x128 codes; storage is padded to what the library multiplies."""
        assert operand.group == (1, BLOCK)
        x_TK = x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous()
        return Quantized(*rows.quantize_rows(x_TK, pow2=operand.scale == "pow2"), (1, BLOCK))

    def dense_input(self, x_TK: Rows) -> Rows:
        """The operand itself: products read codes."""
        return x_TK

    def linear(self, x_TK: Rows, weight: PackedWeight) -> Tensor:
        """x w^T, rounded once to BF16, [T, N]. Where only one operand has codes (probes), their values are rounded to BF16."""
        if not isinstance(x_TK, Quantized) or weight.codes is None:
            x = x_TK.dequantize().bfloat16() if isinstance(x_TK, Quantized) else x_TK
            plain = weight.plain if weight.codes is None else weight.codes.dequantize().bfloat16()
            assert plain is not None
            return products.bf16_product(x, plain)
        w = weight.codes
        return self.fp8_linear(x_TK.codes, x_TK.scale, w.codes, w.scale, weight.library_scale, w.group[0])

    # Norm, rotary embedding, activation ------------------------------------------------------------------------

    def rms_norm(self, x_TK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        """See the reference; one program a row."""
        shape = x_TK.shape
        _, out = norm.rms_norm(x_TK.reshape(-1, shape[-1]).contiguous(), weight_K, eps, fp8=False)
        assert isinstance(out, Tensor)
        return out.view(shape)

    def add_norm(
        self, h_TK: Tensor, delta_TK: Tensor | None, weight_K: Tensor, eps: float, operand: Operand | None
    ) -> tuple[Tensor, Rows]:
        """(h + delta, its norm as the next product takes it)."""
        pow2 = operand is not None and operand.scale == "pow2"
        total, out = norm.rms_norm(h_TK, weight_K, eps, delta_TK=delta_TK, fp8=operand is not None, pow2=pow2)
        return total, out if isinstance(out, Tensor) else Quantized(*out, (1, BLOCK))

    def rope_rows(
        self,
        qkv_TN: Tensor,
        table_PD: Tensor,
        positions_T: Tensor,
        *,
        heads: int,
        kv_heads: int,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(q [T, H, D], k, v [T, G, D]) of projected rows, after norm and rotation."""
        return rope.rope_rows(
            qkv_TN, table_PD, positions_T, heads=heads, kv_heads=kv_heads, norms=norms, eps=eps
        )

    def swiglu(self, gate_TN: Tensor, up_TN: Tensor) -> Tensor:
        """See the reference."""
        out = swiglu.swiglu(torch.cat([gate_TN, up_TN], -1), fp8=False)
        assert isinstance(out, Tensor)
        return out

    def swiglu_rows(self, gate_up_TN: Tensor, operand: Operand | None) -> Rows:
        """silu(gate) up of rows that hold both, as the next product takes it."""
        pow2 = operand is not None and operand.scale == "pow2"
        out = swiglu.swiglu(gate_up_TN, fp8=operand is not None, pow2=pow2)
        return out if isinstance(out, Tensor) else Quantized(*out, (1, BLOCK))

    def swiglu_kept(self, gate_up_TN: Tensor, operand: Operand) -> tuple[Quantized, Quantized]:
        """See `FusedKernels`."""
        y, kept = swiglu.swiglu_kept(gate_up_TN, pow2=operand.scale == "pow2")
        return Quantized(*y, (1, BLOCK)), Quantized(*kept, (1, BLOCK))

    # Attention ------------------------------------------------------------------------------------------------

    def index(  # type: ignore[override]
        self, runs: Sequence[Run], group: int, device: torch.device | None = None
    ) -> PackedIndex:
        """Pages, block tables and query tiles of packed runs."""
        return PackedIndex(tuple(runs), group, tables_of(runs, device))

    def static_index(self, room: Room, group: int, device: torch.device) -> StaticIndex:
        """See `FusedKernels`."""
        return StaticIndex(room, group, device)

    def attention(  # type: ignore[override]
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, index: Index, form: AttentionForm = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """(o [T, H, D], base-2 log-sum-exp [T, H] FP32) of packed rows; keys and values are copied to pages first."""
        k_pages, v_pages = packed_pages(k_SGD, v_SGD, index.tables, None)
        scales = _scales(form)
        out, lse = attention.prefill(
            q_THD.contiguous(), k_pages, v_pages, index.tables.prefill, scales, lse=True
        )
        assert isinstance(out, Tensor)
        return out, lse

    def attention_grad(  # type: ignore[override]
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_SGD: Tensor,
        v_SGD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        index: Index,
        form: AttentionForm = PLAIN,
        *,
        deterministic: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `attention_library.attention_grad`."""
        return attention_grad(
            grad_THD, q_THD, k_SGD, v_SGD, out_THD, lse_TH, index, form, deterministic=deterministic
        )

    def attend(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        index: Index,
        scales: tuple[Tensor, Tensor] | None,
        *,
        codes: ScaleKind | None = None,
        lse: bool = False,
    ) -> tuple[Rows, Tensor]:
        """See `FusedKernels`; keys and values go to pages of their own first, as the engine's do."""
        k_pages, v_pages = packed_pages(k_TGD, v_TGD, index.tables, scales)
        out, lse_TH = attention.prefill(
            q_THD, k_pages, v_pages, index.tables.prefill, scales, codes=codes, lse=lse
        )
        return (Quantized(*out, (1, BLOCK)) if isinstance(out, tuple) else out), lse_TH

    # Output head ----------------------------------------------------------------------------------------------

    def logits(self, h_TK: Tensor, head_weight: PackedWeight, temperature_T: Tensor) -> Tensor:
        """Logits over each row's temperature, [T, V] FP32."""
        return self.raw_logits(h_TK, head_weight).div_(temperature_T[:, None])

    def log_normalizer(self, logits_TV: Tensor) -> Tensor:
        """log sum exp [T] FP32, by the launches that the sampler uses."""
        return head.log_normalizer(logits_TV, torch.ones(len(logits_TV), device=logits_TV.device))

    def sample(
        self,
        logits_RV: Tensor,
        temperature_R: Tensor,
        state_R: Tensor,
        position_R: Tensor,
        threshold_R: Tensor | None,
    ) -> Tensor:
        """See `FusedKernels`."""
        return head.sample(logits_RV, temperature_R, state_R, position_R, threshold_R)

    def threshold(self, logits_RV: Tensor, truncation: Truncation) -> Tensor:
        """See `truncation.threshold`; by the launch that the captured step uses."""
        ones = torch.ones(len(logits_RV), device=logits_RV.device)
        return truncation_threshold(logits_RV.contiguous(), ones, *truncation.parts)


def packed_pages(
    k_SGD: Tensor, v_SGD: Tensor, tables: Tables, scales: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Keys and values of packed rows in BF16 pages. Under `scales`, and for rows that are codes already, pages hold the codes'
    values, exact in FP16: widened once here instead of in every tile of queries."""
    _, heads, dim = k_SGD.shape
    if k_SGD.dtype == E4M3:
        k_SGD, v_SGD = (x.float().half() for x in (k_SGD, v_SGD))
    shape, kind = (tables.pages, heads), k_SGD.dtype if scales is None else torch.float16
    k_pages = k_SGD.new_empty(*shape, PAGE, dim, dtype=kind)
    # A key that isn't there has p = 0, and 0 * value must be 0.
    v_pages = v_SGD.new_zeros(*shape, dim, PAGE, dtype=kind)
    rope.write_pages(
        k_SGD.contiguous(), v_SGD.contiguous(), tables.rows_W, tables.slots_W, k_pages, v_pages, scales
    )
    return k_pages, v_pages


def _scales(form: AttentionForm) -> tuple[Tensor, Tensor] | None:
    if form.query_scale is not None:
        raise ConfigError(
            "FP8 queries and probabilities have no Hopper kernel yet",
            where="flow.attention",
            fix="set flow.attention to bf16, or kernels to reference",
        )
    if form.k_scale_G is None or form.v_scale_G is None:
        return None
    return form.k_scale_G, form.v_scale_G
