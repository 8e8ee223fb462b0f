"""Products and sums whose value for a row does not depend on the other rows: the row law, on a CPU.

A BLAS may pick another algorithm for another number of rows, and then the same row gets other bits. So rows are computed
in pieces whose sizes come from a short ladder, and a size is only used for a matrix shape after this process has *proven*
it: on the matrix at hand, every row gives the bits it gives in the base size of 64 rows, at every place in the piece, with
the weight as the right operand or, faster for few rows, as the left. An
algorithm's order of summation does not depend on the data, so the proof holds for all data of that shape. Sizes that fail
are not used; 64 always is. Missing rows are padded with zeros.

Next: `reference.py`, every operation built on these.
"""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 64
LADDER = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
LARGE = 8_000_000
LARGE_LADDER = (16, 32, 64, 128, 256)
"""Fewer rungs for matrices of more elements (output heads), where a proof takes a second."""

Rungs = dict[int, bool]
"""Piece sizes, ascending, and whether the piece is computed with the weight as the left operand."""

_proven: dict[tuple[object, ...], Rungs] = {}


def row_matmul(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """x w^T, [M, N], in the common type of both (FP32 or FP64), each row independent of the others."""
    x_MK, w_NK = _aligned(x_MK), _aligned(w_NK)
    rows = x_MK.shape[0]
    if rows == 0:
        return x_MK.new_empty(0, w_NK.shape[0])
    rungs = proven_rungs(w_NK)
    pieces = []
    start = 0
    while start < rows:
        size, used = next_piece(rows - start, tuple(rungs))
        x = x_MK[start : start + used]
        x = x if used == size else _padded(x, size)
        pieces.append(_product(x, w_NK, swapped=rungs[size])[:used])
        start += used
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _product(x_MK: Tensor, w_NK: Tensor, *, swapped: bool) -> Tensor:
    """x w^T. Few rows against a large weight that is not in cache run up to twice as fast with the weight on the left."""
    return (w_NK @ x_MK.t()).t() if swapped else x_MK @ w_NK.t()


def _aligned(x: Tensor) -> Tensor:
    """Every row on a boundary that a BLAS can't tell from another's: MKL sums rows that start elsewhere in another order."""
    if x.shape[1] % 8:
        x = torch.nn.functional.pad(x, (0, 8 - x.shape[1] % 8))
    return x if x.data_ptr() % 32 == 0 and x.is_contiguous() else x.contiguous().clone()


def next_piece(remaining: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    """(size of the next piece, rows of it that are real): a padded one when little is wasted, else the largest full one."""
    above = next((r for r in sizes if r >= remaining), None)
    if above is not None and (above <= 1.34 * remaining or above == sizes[0]):
        return above, remaining
    size = max(r for r in sizes if r <= remaining)
    return size, size


def proven_rungs(w_NK: Tensor) -> Rungs:
    """Piece sizes that give the base size's bits for this matrix shape, in this process."""
    key = (tuple(w_NK.shape), w_NK.stride(), w_NK.dtype, w_NK.device.type, torch.get_num_threads())
    if key not in _proven:
        _proven[key] = _prove(w_NK)
    return _proven[key]


def _prove(w_NK: Tensor) -> Rungs:
    columns, depth = w_NK.shape
    generator = torch.Generator().manual_seed(columns * 1_000_003 + depth)
    ladder = LARGE_LADDER if columns * depth > LARGE else LADDER
    x_MK = torch.randn(max(256, *ladder), depth, generator=generator, dtype=w_NK.dtype).to(w_NK.device)
    expected = torch.cat([_product(piece, w_NK, swapped=False) for piece in x_MK.split(BASE)])
    good: Rungs = {}
    for size in ladder:
        for swapped in (True, False):
            pieces = [
                _product(piece, w_NK, swapped=swapped) for piece in x_MK.split(size) if len(piece) == size
            ]
            if torch.equal(torch.cat(pieces), expected[: size * len(pieces)]):
                good[size] = swapped
                break
    assert BASE in good, "the base size defines the bits"
    return good


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
        _proven[key] = {rows: False} if same else {}
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
