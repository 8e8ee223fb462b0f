"""Attention over 64-token pages: launches of the loop, over tiles of queries (prefill, packed training) and one query a sequence
(decode).

Keys come in steps of 64 (a page), ascending, within chunks of CHUNK keys whose states join in ascending order; a row gets the
same bits from every launch. For head sizes 64 and 128, `wide_attention.py` takes the place of the plain prefill kernel, and
`paged_attention.py` that of the plain decode kernel over e4m3 pages. The former reads pages of 16-bit values; of e4m3 ones it
gets a copy.

Next: `attention_loop.py` for the definition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.attention_form import CHUNK, PAGE, WIDENED
from lockstep.kernels.operation import operation
from lockstep.kernels.packed_index import PrefillIndex
from lockstep.kernels.triton import paged_attention, wide_attention
from lockstep.kernels.triton.attention_loop import decode_kernel, join_kernel, prefill_kernel
from lockstep.kernels.triton.quantize import empty_codes
from lockstep.kernels.triton.sizes import cdiv, power_of_2
from lockstep.kernels.triton.widen import widen_pages
from lockstep.numerics.formats import ScaleKind

Codes = tuple[Tensor, Tensor]
"""e4m3 codes and their scales."""
WIDE = True
"""Whether prefill goes through `wide_attention.py` where that takes the shapes. No bit may depend on it."""
PAGED = True
"""Whether decode goes through `paged_attention.py` where that takes the shapes. No bit may depend on it."""
LOG2E = 1.0 / math.log(2.0)
JOINED = 4
"""Heads of a program that joins chunks, and its warps. No bit depends on it."""


def prefill(
    q_THD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    index: PrefillIndex,
    scales: tuple[Tensor, Tensor] | None,
    *,
    lse: bool = False,
    codes: ScaleKind | None = None,
) -> tuple[Tensor | Codes, Tensor]:
    """(o [T, H, D], base-2 log-sum-exp [T, H] FP32 if asked for) of packed queries over their pages. With `codes`, o is 1x128
    codes [T, H D] and their scales [T, H]; D must be 128. Pages hold codes, their values in FP16, or BF16; `scales` belong to
    codes and their values."""
    k_scale, v_scale = scales if scales is not None else (None, None)
    found = _prefill_rows(
        q_THD,
        k_pages,
        v_pages,
        index.tiles_N4,
        index.table,
        k_scale,
        v_scale,
        longest=index.longest,
        block=index.block,
        lse=lse,
        codes=codes,
    )
    return (found[0] if codes is None else (found[0], found[1])), (found[-1] if lse else found[0])


def _results(q_THD: Tensor, codes: str | None, lse: bool = False) -> list[Tensor]:
    """Storage for the output like the queries, or for its codes and scales; then for the log-sum-exp if it is wanted."""
    rows, heads, dim = q_THD.shape
    assert codes is None or dim == 128, "a head is a group of 128"
    out = (torch.empty_like(q_THD),) if codes is None else empty_codes(rows, heads * dim, q_THD.device)
    return [*out, *([torch.empty(rows, heads, dtype=torch.float32, device=q_THD.device)] if lse else ())]


@operation("prefill_attention", fake=_results)
def _prefill_rows(
    q_THD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tiles_N4: Tensor,
    table: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    longest: int,
    block: int,
    lse: bool,
    codes: str | None,
) -> list[Tensor]:
    rows, heads, dim = q_THD.shape
    kv_heads = k_pages.shape[1]
    found = _results(q_THD, codes, lse)
    out, out_scale, lse_TH = found[0], found[0] if codes is None else found[1], found[-1]
    scales = (out, out) if k_scale is None or v_scale is None else (k_scale, v_scale)
    scaled = k_scale is not None
    if (
        WIDE
        and k_pages.element_size() == 1
        and len(table) <= WIDENED
        and wide_attention.shapes(q_THD, kv_heads, block)
    ):
        k_pages, v_pages = widen_pages(k_pages, v_pages, table)
        table = torch.arange(len(table), dtype=torch.int32, device=table.device)
    if rows and WIDE and wide_attention.takes(q_THD, k_pages, block):
        wide_attention.launch(
            q_THD,
            k_pages,
            v_pages,
            out,
            lse_TH,
            tiles_N4,
            table,
            scales,
            out_scale,
            base=dim**-0.5 * LOG2E,
            block=block,
            chunks=longest > CHUNK,
            steps=CHUNK // PAGE,
            scaled=scaled,
            lse=lse,
            codes=codes is not None,
            pow2=codes == "pow2",
        )
    elif rows:
        prefill_kernel[(heads, len(tiles_N4))](
            q_THD,
            _raw(k_pages),
            _raw(v_pages),
            out,
            lse_TH,
            tiles_N4,
            table,
            *scales,
            out_scale,
            out_scale.stride(1),
            dim**-0.5 * LOG2E,
            heads,
            kv_heads,
            dim,
            power_of_2(dim),
            block,
            longest > CHUNK,
            CHUNK // PAGE,
            k_pages.element_size() == 1,
            scaled,
            lse,
            codes is not None,
            codes == "pow2",
            num_warps=8 if block == 128 else 4,
            num_stages=3,
        )
    return found


@dataclass(frozen=True)
class DecodeIndex:
    """One query a sequence. lengths_B: int32 keys of each, table_BP: int32 pages, longest: bound on every length."""

    lengths_B: Tensor
    table_BP: Tensor
    longest: int


def decode(
    q_BHD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    index: DecodeIndex,
    scales: tuple[Tensor, Tensor] | None,
    *,
    codes: ScaleKind | None = None,
    early: bool = False,
) -> Tensor | Codes:
    """o [B, H, D] (or its codes, as in `prefill`): the last position of every sequence. early: the kernel launched just before
    wrote nothing of what is read here but queries, and keys and values of last positions."""
    k_scale, v_scale = scales if scales is not None else (None, None)
    found = _decode_rows(
        q_BHD,
        k_pages,
        v_pages,
        index.lengths_B,
        index.table_BP,
        k_scale,
        v_scale,
        longest=index.longest,
        codes=codes,
        early=early,
    )
    return found[0] if codes is None else (found[0], found[1])


@operation("decode_attention", fake=lambda q_BHD, codes: _results(q_BHD, codes))
def _decode_rows(
    q_BHD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    lengths_B: Tensor,
    table_BP: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    longest: int,
    codes: str | None,
    early: bool,
) -> list[Tensor]:
    batch, heads, dim = q_BHD.shape
    kv_heads = k_pages.shape[1]
    found = _results(q_BHD, codes)
    out, out_scale, scaled = found[0], found[-1], k_scale is not None
    splits = cdiv(longest, CHUNK)
    k_scale, v_scale = (out, out) if k_scale is None or v_scale is None else (k_scale, v_scale)
    part = state = out
    if splits > 1:
        part = torch.empty(batch * heads * splits, dim, dtype=torch.float32, device=out.device)
        state = torch.empty(batch * heads * splits, 2, dtype=torch.float32, device=out.device)
    dim_p = power_of_2(dim)
    if PAGED and paged_attention.takes(q_BHD, k_pages):
        paged_attention.launch(
            q_BHD,
            k_pages,
            v_pages,
            out,
            part,
            state,
            lengths_B,
            table_BP,
            (k_scale, v_scale),
            out_scale,
            base=dim**-0.5 * LOG2E,
            splits=splits,
            steps=CHUNK // PAGE,
            codes=codes is not None,
            pow2=codes == "pow2",
            early=early,
        )
    else:
        decode_kernel[(kv_heads, batch, splits)](
            q_BHD,
            _raw(k_pages),
            _raw(v_pages),
            out,
            part,
            state,
            table_BP,
            lengths_B,
            k_scale,
            v_scale,
            out_scale,
            out_scale.stride(1),
            dim**-0.5 * LOG2E,
            table_BP.stride(0),
            splits,
            heads,
            kv_heads,
            dim,
            dim_p,
            max(16, power_of_2(heads // kv_heads)),
            CHUNK // PAGE,
            splits > 1,
            scaled,
            codes is not None,
            codes == "pow2",
            num_warps=4,
            num_stages=5,
            launch_pdl=True,
        )
    if splits > 1:
        join_kernel[(cdiv(heads, JOINED), batch)](
            part,
            state,
            out,
            lengths_B,
            v_scale,
            out_scale,
            out_scale.stride(1),
            splits,
            heads,
            kv_heads,
            dim,
            dim_p,
            CHUNK // PAGE,
            JOINED,
            scaled,
            codes is not None,
            codes == "pow2",
            num_warps=JOINED,
            launch_pdl=True,
        )
    return found


def _raw(pages: Tensor) -> Tensor:
    return pages.view(torch.uint8) if pages.element_size() == 1 else pages
