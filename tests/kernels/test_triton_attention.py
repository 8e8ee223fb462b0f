"""Attention on the GPU: prefill in any tiles and decode, split or not, give the same bits; and the right values.

More than ten million values for each shape and kind of cache: what breaks equality breaks it about once in a million.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lockstep.bench.checks_attention import decode, decode_rows, prefill
from lockstep.bench.paged import Paged, make_paged, random_queries
from lockstep.bench.shapes import LENGTHS, AttentionShape, attentions
from lockstep.numerics.measures import sqnr_db

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CHUNK = 2048
SHAPES = attentions(extra=True)
CASES = [(shape, fp8) for shape in SHAPES for fp8 in (False, True)]
NAMES = [
    f"{shape.heads}-{shape.kv_heads}-{shape.head_dim}-{'fp8' if fp8 else 'bf16'}" for shape, fp8 in CASES
]
VALUES = 14_000_000


def inputs(shape: AttentionShape, fp8: bool) -> tuple[Paged, list[int], Tensor]:
    """Keys of sequences around every boundary; the last queries of each, about VALUES values in all."""
    paged = make_paged(LENGTHS, shape, fp8=fp8, device=CUDA)
    most = max(200, VALUES // (len(LENGTHS) * shape.heads * shape.head_dim))
    queries = [min(n, most) for n in LENGTHS]
    return paged, queries, random_queries(sum(queries), shape, CUDA)


@pytest.mark.parametrize(("shape", "fp8"), CASES, ids=NAMES)
def test_one_row_the_same_bits_everywhere(shape: AttentionShape, fp8: bool, hopper: SimpleNamespace) -> None:
    paged, queries, q = inputs(shape, fp8)
    whole, lse = prefill(q, paged, queries, 128)
    assert bool(torch.isfinite(whole).all()) and bool(torch.isfinite(lse).all())
    compared = 0

    def compare(name: str, found: Tensor, expected: Tensor) -> None:
        nonlocal compared
        different = int((found.view(torch.int16) != expected.view(torch.int16)).sum())
        compared += found.numel()
        assert different == 0, f"{name}: {different} of {found.numel()} values differ"

    for block, first in ((64, 0), (64, 1), (64, 37), (128, 5), (128, 100)):
        found, its_lse = prefill(q, paged, queries, block, first=first)
        compare(f"prefill, tiles of {block}, the first of {first}", found, whole)
        assert torch.equal(its_lse, lse)
    sequences, seen, rows = decode_rows(paged, queries)
    compare("decode over split keys", decode(q[rows], paged, sequences, seen), whole[rows])
    sequences, seen, rows = decode_rows(paged, queries, CHUNK)
    compare("decode in one piece", decode(q[rows], paged, sequences, seen, CHUNK), whole[rows])
    compare("decode of short ones, split", decode(q[rows], paged, sequences, seen, 9000), whole[rows])
    assert compared > 1e7


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_decode_does_not_know_its_batch(fp8: bool, hopper: SimpleNamespace) -> None:
    paged, queries, q = inputs(SHAPES[0], fp8)
    sequences, seen, rows = decode_rows(paged, queries)
    whole = decode(q[rows], paged, sequences, seen)
    for size in (1, 2, 7, 64):
        for start in range(0, len(rows) - size, len(rows) // 9):
            at = slice(start, start + size)
            longest = max(seen[at])
            part = decode(q[rows[at]], paged, sequences[at], seen[at], longest)
            assert torch.equal(part, whole[at]), (size, start)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_short_sequences_beside_a_long_one(fp8: bool, hopper: SimpleNamespace) -> None:
    lengths, shape = (300, 2048, 70), SHAPES[0]
    paged = make_paged(lengths, shape, fp8=fp8, device=CUDA)
    queries = [100, 100, 70]
    q = random_queries(sum(queries), shape, CUDA)
    alone, lse = prefill(q, paged, queries, 64)
    beside, its_lse = prefill(q, paged, queries, 64, longest=9000)
    assert torch.equal(alone, beside) and torch.equal(lse, its_lse)


@pytest.mark.parametrize(("shape", "fp8"), CASES, ids=NAMES)
def test_values(shape: AttentionShape, fp8: bool, hopper: SimpleNamespace) -> None:
    """Against attention in float64 over the same keys and values."""
    paged, queries, q = inputs(shape, fp8)
    whole, lse = prefill(q, paged, queries, 128)
    row = 0
    for b, (length, count) in enumerate(zip(LENGTHS, queries)):
        few = min(count, 40)
        at = slice(row + count - few, row + count)
        exact, exact_lse = softmax_attention(q[at], *paged.values(b), length)
        assert sqnr_db(exact, whole[at]) > 48, length
        assert float((lse[at].double() - exact_lse).abs().max()) < 0.01, length
        row += count


def softmax_attention(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """(output [T, H, D], base-2 log-sum-exp [T, H]) in float64; the queries are the last positions."""
    rows, heads, dim = q_THD.shape
    group = heads // k_SGD.shape[1]
    q = q_THD.double().view(rows, -1, group, dim)
    s = torch.einsum("tgqd,sgd->gqts", q, k_SGD) * dim**-0.5
    position = torch.arange(length - rows, length, device=q.device)
    s = s.masked_fill(torch.arange(length, device=q.device)[None] > position[:, None], -torch.inf)
    out = torch.einsum("gqts,sgd->tgqd", s.softmax(-1), v_SGD).reshape(rows, heads, dim)
    lse = torch.logsumexp(s, -1).permute(2, 0, 1).reshape(rows, heads)
    return out, lse / math.log(2.0)
