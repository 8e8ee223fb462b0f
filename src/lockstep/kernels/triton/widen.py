"""Pages of e4m3 codes as FP16 pages that hold the codes' values, exactly: for a kernel that reads each page many times.

Next: `numbers.py` for how a page stores its codes, `attention.py`, which asks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.operation import operation
from lockstep.kernels.triton.numbers import load_widened


@triton.jit
def _tile(codes_ptr, out_ptr, R: tl.constexpr, L: tl.constexpr, VALUES: tl.constexpr):
    """One page of one head: R rows of L codes, both powers of two."""
    x = load_widened(codes_ptr.to(tl.pointer_type(tl.int32)), R, R, L, L, VALUES)
    tl.store(out_ptr + tl.arange(0, R)[:, None] * L + tl.arange(0, L)[None, :], x)


@triton.jit
def _widen(k_ptr, v_ptr, table_ptr, k_out_ptr, v_out_ptr, G, D: tl.constexpr):
    entry, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    page = tl.load(table_ptr + entry).to(tl.int64)
    at, to = (page * G + g) * (64 * D), (entry * G + g) * (64 * D)
    _tile(k_ptr + at, k_out_ptr + to, 64, D, False)
    _tile(v_ptr + at, v_out_ptr + to, D, 64, True)


def _pages(k_pages: Tensor, v_pages: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Storage for these pages in FP16."""
    k, v = (
        torch.empty(len(table), *pages.shape[1:], dtype=torch.float16, device=pages.device)
        for pages in (k_pages, v_pages)
    )
    return k, v


@operation("widen_pages", fake=_pages)
def widen_pages(k_pages: Tensor, v_pages: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """FP16 pages [n, G, 64, D] and [n, G, D, 64], the i-th from page `table[i]` of e4m3 pages; D a power of two."""
    k, v = _pages(k_pages, v_pages, table)
    kv_heads, dim = k_pages.shape[1], k_pages.shape[3]
    if len(table):
        raw = (pages.view(torch.uint8) for pages in (k_pages, v_pages))
        _widen[(len(table), kv_heads)](*raw, table, k, v, kv_heads, dim, num_warps=4)
    return k, v
