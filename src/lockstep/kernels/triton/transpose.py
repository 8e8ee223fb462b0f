"""Codes of a weight, transposed: what the input gradient multiplies with. Scales of square blocks turn with them, unchanged."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.sizes import cdiv

TILE = 128


@triton.jit
def _transpose(x_ptr, out_ptr, N, K, B: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    k = tl.program_id(1).to(tl.int64) * B + tl.arange(0, B)
    x = tl.load(x_ptr + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0)
    tl.store(out_ptr + k[:, None] * N + n[None, :], tl.trans(x), mask=(k < K)[:, None] & (n < N)[None, :])


def transpose_codes(codes_NK: Tensor, out_KN: Tensor | None = None) -> Tensor:
    """[K, N] of one-byte codes [N, K], contiguous; written to `out_KN` where it is given."""
    rows, columns = codes_NK.shape
    assert codes_NK.element_size() == 1 and codes_NK.is_contiguous()
    if out_KN is None:
        out_KN = torch.empty(columns, rows, dtype=codes_NK.dtype, device=codes_NK.device)
    _transpose[(cdiv(rows, TILE), cdiv(columns, TILE))](
        codes_NK.view(torch.uint8), out_KN.view(torch.uint8), rows, columns, TILE, num_warps=8
    )
    return out_KN
