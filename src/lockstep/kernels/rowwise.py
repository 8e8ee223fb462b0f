"""Products and sums whose value for a row does not depend on the other rows: the row law, on a CPU.

A BLAS may pick another algorithm for another number of rows, and then the same row gets other bits. So rows are computed
in pieces whose sizes come from a short ladder, and a size is only used for a matrix shape after this process has *proven*
it: on the matrix at hand, every row gives the bits it gives in the base size of 64 rows, at every place in the piece. An
algorithm's order of summation does not depend on the data, so the proof holds for all data of that shape. Sizes that fail
are not used; 64 always is. Missing rows are padded with zeros.

Next: `reference.py`, every operation built on these.
"""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 64
LADDER = (16, 32, 48, 96, 128, 192, 256, 384, 512)
LARGE = 8_000_000
LARGE_LADDER = (16, 32, 256)
"""Fewer rungs for matrices of more elements (output heads), where a proof takes a second."""

_proven: dict[tuple[object, ...], tuple[int, ...]] = {}


def row_matmul(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """x w^T, [M, N], in the common type of both (FP32 or FP64), each row independent of the others."""
    rows = x_MK.shape[0]
    out = x_MK.new_empty(rows, w_NK.shape[0])
    if rows == 0:
        return out
    rungs = proven_rungs(w_NK)
    start = 0
    while start < rows:
        size, used = next_piece(rows - start, rungs)
        if used == size:
            torch.mm(x_MK[start : start + size], w_NK.t(), out=out[start : start + size])
        else:
            out[start : start + used] = (_padded(x_MK[start : start + used], size) @ w_NK.t())[:used]
        start += used
    return out


def next_piece(remaining: int, rungs: tuple[int, ...]) -> tuple[int, int]:
    """(size of the next piece, rows of it that are real): a padded rung when little is wasted, else the largest full one."""
    above = next((r for r in rungs if r >= remaining), None)
    if above is not None and (above <= 1.34 * remaining or above == rungs[0]):
        return above, remaining
    size = max(r for r in rungs if r <= remaining)
    return size, size


def proven_rungs(w_NK: Tensor) -> tuple[int, ...]:
    """Ascending piece sizes that give the base size's bits for this matrix shape, in this process."""
    key = (tuple(w_NK.shape), w_NK.stride(), w_NK.dtype, w_NK.device.type, torch.get_num_threads())
    if key not in _proven:
        _proven[key] = _prove(w_NK)
    return _proven[key]


def _prove(w_NK: Tensor) -> tuple[int, ...]:
    columns, depth = w_NK.shape
    generator = torch.Generator().manual_seed(columns * 1_000_003 + depth)
    ladder = LARGE_LADDER if columns * depth > LARGE else LADDER
    rows = max([256, *ladder])
    x_MK = torch.randn(rows, depth, generator=generator, dtype=w_NK.dtype).to(w_NK.device)
    expected = torch.cat([piece @ w_NK.t() for piece in x_MK.split(BASE)])
    good = [BASE]
    for size in ladder:
        if torch.equal(torch.cat([piece @ w_NK.t() for piece in x_MK.split(size)]), expected):
            good.append(size)
    return tuple(sorted(good))


def _padded(x: Tensor, rows: int) -> Tensor:
    out = x.new_zeros(rows, *x.shape[1:])
    out[: x.shape[0]] = x
    return out


def batch_proven(rows: int, b_BKN: Tensor) -> bool:
    """Whether batched products of `rows` rows with such b give, for any batch, the bits of single 64-row products."""
    depth, columns = b_BKN.shape[1:]
    dtype, device, turned = b_BKN.dtype, b_BKN.device, b_BKN.stride(-1) != 1
    key = ("bmm", rows, depth, columns, turned, dtype, device.type, torch.get_num_threads())
    if key not in _proven:
        generator = torch.Generator().manual_seed(rows * 7919 + depth * 31 + columns)
        a = torch.randn(9, BASE, depth, generator=generator, dtype=dtype).to(device)
        b = torch.randn(9, depth, columns, generator=generator, dtype=dtype).to(device)
        b = b.mT.contiguous().mT if turned else b
        expected = torch.stack([a[i] @ b[i] for i in range(9)])
        pieces = range(0, BASE, rows)
        same = all(
            torch.equal(torch.cat([torch.bmm(a[:n, s : s + rows], b[:n]) for s in pieces], 1), expected[:n])
            for n in (1, 2, 3, 9)
        )
        _proven[key] = (rows,) if same else ()
    return bool(_proven[key])


def row_bmm(a_BMK: Tensor, b_BKN: Tensor) -> Tensor:
    """Batched a b, [B, M, N], each row independent of the others and of the batch. M divides 64."""
    batch, rows, _ = a_BMK.shape
    if batch_proven(rows, b_BKN):
        return torch.bmm(a_BMK, b_BKN)
    return torch.stack([(_padded(a_BMK[i], BASE) @ b_BKN[i])[:rows] for i in range(batch)])


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension by halving: a fixed order made of elementwise additions, so no library chooses one."""
    count = x.shape[-1]
    while count > 1:
        half = count // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        if count % 2:
            folded[..., 0] += x[..., count - 1]
        x, count = folded, half
    return x[..., 0]
