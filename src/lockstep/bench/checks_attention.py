"""Checks of attention: prefill against the reference, decode against prefill.

The reference is `kernels/reference_attention.py` with float64 products, over the same codes and the same slots. Prefill with
tiles of 64 and of 128 queries, cut at other places, over codes and over their values in BF16, and decode with and without
split keys must give the same bits; output codes must be those of the output.

Next: `kernels_check.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lockstep.bench.check import Check, Size, near, poisoned, same
from lockstep.bench.paged import Paged, in_pages, make_paged, random_queries
from lockstep.bench.shapes import AttentionShape, attentions
from lockstep.kernels.attention_form import PLAIN, AttentionForm
from lockstep.kernels.attention_index import Run, build_index
from lockstep.kernels.reference import ReferenceKernels
from lockstep.numerics.formats import BLOCK, row_groups
from lockstep.numerics.quantize import quantize

LENGTHS = (1, 64, 65, 700, 2047, 2048, 2049, 4500)
SMALL_LENGTHS = (3, 70, 2050)
CHUNK = 2048
SMALL_SHAPES = (AttentionShape("small", 4, 2, 128), AttentionShape("small", 3, 1, 80))
QUERIES = 130
SMALL_QUERIES = 3
REFERENCE_QUERIES = 4
"""Last positions of each sequence that are compared with the reference."""


def attention_checks(size: Size) -> Iterator[Check]:
    """Every shape, with BF16 and with FP8 keys and values."""
    for shape in SMALL_SHAPES if size.small else attentions(extra=True):
        for fp8 in (False, True):
            yield from _shape_checks(shape, fp8, size)


def _shape_checks(shape: AttentionShape, fp8: bool, size: Size) -> Iterator[Check]:
    lengths = SMALL_LENGTHS if size.small else LENGTHS
    paged = make_paged(lengths, shape, fp8=fp8, device=torch.device("cuda"))
    case = f"H {shape.heads} G {shape.kv_heads} D {shape.head_dim} {'fp8' if fp8 else 'bf16'} cache"
    queries = [min(n, SMALL_QUERIES if size.small else QUERIES) for n in lengths]
    q = random_queries(sum(queries), shape, torch.device("cuda"))
    whole, lse = prefill(q, paged, queries, 128)
    yield same("attention", f"tiles of 64, {case}", whole, prefill(q, paged, queries, 64)[0])
    yield same(
        "attention", f"tiles cut elsewhere, {case}", whole, prefill(q, paged, queries, 64, first=37)[0]
    )
    yield from _reference_checks(paged, queries, q, whole, lse, case)
    for split in (True, False):
        sequences, seen, rows = decode_rows(paged, queries, None if split else CHUNK)
        found = decode(q[rows], paged, sequences, seen, None if split else CHUNK)
        name = "decode over split keys" if split else "decode in one piece"
        yield same("attention", f"{name}, {case}", whole[rows], found)
    if paged.scales is not None:
        wide = replace(paged, pages=in_pages(*(x.float().half() for x in paged.rows)))
        found, its_lse = prefill(q, wide, queries, 128)
        yield same("attention", f"codes widened in FP16 pages, {case}", whole, found)
        yield same("log_sum_exp", f"codes widened in FP16 pages, {case}", lse, its_lse)
    if shape.head_dim == BLOCK:
        yield from _codes_checks(paged, queries, q, whole, case)


def prefill(
    q: Tensor, paged: Paged, queries: list[int], block: int, *, first: int = 0, longest: int | None = None
) -> tuple[Tensor, Tensor]:
    """(output [T, H, D], base-2 log-sum-exp [T, H]) of the last `queries` positions of every sequence."""
    from lockstep.kernels.triton import attention

    index = paged.prefill_index(queries, block, first=first, longest=longest)
    with poisoned():
        out, lse = attention.prefill(q, *paged.pages, index, paged.scales, lse=True)
    assert isinstance(out, Tensor)
    return out, lse


def decode(
    q: Tensor, paged: Paged, sequences: list[int], seen: list[int], longest: int | None = None
) -> Tensor:
    """Output [B, H, D] of one query a row."""
    from lockstep.kernels.triton import attention

    index = paged.decode_index(sequences, seen, longest=longest)
    with poisoned():
        out = attention.decode(q.contiguous(), *paged.pages, index, paged.scales)
    assert isinstance(out, Tensor)
    return out


def decode_rows(
    paged: Paged, queries: list[int], most: int | None = None
) -> tuple[list[int], list[int], list[int]]:
    """(sequence, keys seen, packed query row) of every query, or of those that see at most `most` keys."""
    found, row = [], 0
    for b, (length, count) in enumerate(zip(paged.lengths, queries, strict=True)):
        for i in range(count):
            keys = length - count + i + 1
            if most is None or keys <= most:
                found.append((b, keys, row + i))
        row += count
    return [f[0] for f in found], [f[1] for f in found], [f[2] for f in found]


def _codes_checks(paged: Paged, queries: list[int], q: Tensor, out: Tensor, case: str) -> Iterator[Check]:
    """Output as 1x128 codes, a head each."""
    from lockstep.kernels.triton import attention

    expected = quantize(out.flatten(1).cpu(), row_groups("fp32"))
    index = paged.prefill_index(queries, 128)
    with poisoned():
        codes, _ = attention.prefill(q, *paged.pages, index, paged.scales, codes="fp32")
    yield same("attention", f"prefill codes, {case}", expected.codes, codes[0])
    yield same("attention", f"prefill scales, {case}", expected.scale, codes[1])
    for most in (None, CHUNK):
        sequences, seen, rows = decode_rows(paged, queries, most)
        index_B = paged.decode_index(sequences, seen, longest=most)
        with poisoned():
            codes = attention.decode(q[rows].contiguous(), *paged.pages, index_B, paged.scales, codes="fp32")
        want = expected.codes.view(torch.uint8)[rows].view(expected.codes.dtype)
        name = "split keys" if most is None else "one piece"
        yield same("attention", f"decode codes, {name}, {case}", want, codes[0])
        yield same("attention", f"decode scales, {name}, {case}", expected.scale[rows], codes[1])


def _reference_checks(
    paged: Paged, queries: list[int], q: Tensor, out: Tensor, lse: Tensor, case: str
) -> Iterator[Check]:
    """The last positions of every sequence, on the CPU."""
    runs: list[Run] = []
    rows: list[int] = []
    row = 0
    for b, (length, count) in enumerate(zip(paged.lengths, queries, strict=True)):
        few = min(count, REFERENCE_QUERIES)
        runs.append(Run(len(rows), few, length - few, paged.slots(b)))
        rows += range(row + count - few, row + count)
        row += count
    form = PLAIN
    if paged.scales is not None:
        k_scale, v_scale = paged.scales
        form = AttentionForm(k_scale.cpu(), v_scale.cpu())
    k_SGD, v_SGD = (x.cpu() for x in paged.rows)
    index = build_index(runs, paged.shape.group)
    kernels = ReferenceKernels(exact=True)
    expected, expected_lse = kernels.attention(q[rows].cpu(), k_SGD, v_SGD, index, form)
    yield near("attention", case, expected, out[rows])
    yield near("log_sum_exp", case, expected_lse, lse[rows])
