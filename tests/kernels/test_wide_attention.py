"""The wide prefill kernel has the bits of the plain one, whatever its arrangement, and so those of decode.

More than ten million values for each shape: what breaks equality breaks it about once in a million.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.bench.attention_backward import packed_runs
from lockstep.bench.checks_attention import decode, decode_rows, prefill
from lockstep.bench.paged import Paged, in_pages, make_paged, random_queries
from lockstep.bench.shapes import LENGTHS, AttentionShape

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
HEADS = ((32, 8, 128), (8, 8, 128), (28, 4, 128), (14, 2, 64), (8, 4, 64))
SHAPES = [AttentionShape("wide", *heads) for heads in HEADS]
NAMES = ["-".join(map(str, heads)) for heads in HEADS]
VALUES = 14_000_000
PLANS = (
    {"pingpong": True},
    {"stages": 2},
    {"held": False, "spill": False},
    {"persistent": False},
    {"held": False, "pingpong": True},
)


def inputs(shape: AttentionShape, fp8: bool = False) -> tuple[Paged, list[int], Tensor]:
    """Keys of sequences around every boundary; the last queries of each. Codes are widened to FP16 pages."""
    paged = make_paged(LENGTHS, shape, fp8=fp8, device=CUDA)
    if fp8:
        paged = replace(paged, pages=in_pages(*(x.float().half() for x in paged.rows)))
    most = max(200, VALUES // (len(LENGTHS) * shape.heads * shape.head_dim))
    queries = [min(n, most) for n in LENGTHS]
    return paged, queries, random_queries(sum(queries), shape, CUDA)


@pytest.fixture(autouse=True)
def through_the_wide_kernel(hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is the default."""
    monkeypatch.setattr(hopper.attention, "WIDE", True)


def plain(monkeypatch: pytest.MonkeyPatch, hopper: SimpleNamespace, *arguments: Any) -> tuple[Tensor, Tensor]:
    """`prefill` without the wide kernel."""
    with monkeypatch.context() as patch:
        patch.setattr(hopper.attention, "WIDE", False)
        return prefill(*arguments)


def differing(found: Tensor, expected: Tensor) -> int:
    """Values that are not the same bits."""
    kind = torch.int16 if found.element_size() == 2 else torch.int32
    return int((found.view(kind) != expected.view(kind)).sum())


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "scaled"])
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_the_bits_of_the_plain_kernel(
    shape: AttentionShape, fp8: bool, hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged, queries, q = inputs(shape, fp8)
    wide = hopper.attention.wide_attention
    assert wide.takes(q, paged.pages[0], 128)
    expected, expected_lse = plain(monkeypatch, hopper, q, paged, queries, 128)
    assert bool(torch.isfinite(expected).all())
    for block, first in ((128, 0), (128, 5), (128, 100), (64, 0), (64, 37)):
        found, lse = prefill(q, paged, queries, block, first=first)
        assert differing(found, expected) == 0, (block, first)
        assert differing(lse, expected_lse) == 0, (block, first)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_no_arrangement_changes_a_bit(
    plan: dict[str, Any], hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged, queries, q = inputs(SHAPES[0])
    expected, _ = plain(monkeypatch, hopper, q, paged, queries, 128)
    wide = hopper.attention.wide_attention
    monkeypatch.setattr(wide, "launch", partial(wide.launch, plan=replace(wide.PLAN, **plan)))
    for block in (128, 64):
        assert differing(prefill(q, paged, queries, block)[0], expected) == 0


@pytest.mark.parametrize("heads, groups, dim", [(9, 3, 64), (28, 4, 128), (16, 8, 128), (32, 8, 128)])
def test_many_short_tiles(
    heads: int, groups: int, dim: int, hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several small tiles a program, again and again, as a step of short samples has them: the stores of one tile are still on
    their way when the next one's queries are loaded, and those of the one after it copied."""
    from lockstep.kernels.hopper import packed_pages
    from lockstep.kernels.packed_index import tables_of

    runs = packed_runs((prompt, (48,) * 7) for prompt in (34, 41, 47, 53, 60) * 2)
    rows = sum(run.count for run in runs)
    index = tables_of(runs, CUDA)
    assert len(index.prefill.tiles_N4) * groups > 132, "several a program"
    q = torch.randn(rows, heads, dim, device=CUDA).bfloat16()
    k, v = (torch.randn(rows, groups, dim, device=CUDA).bfloat16() for _ in range(2))
    scales = torch.full((groups,), 0.01, device=CUDA), torch.full((groups,), 0.01, device=CUDA)
    pages = packed_pages(k, v, index, scales)
    with monkeypatch.context() as patch:
        patch.setattr(hopper.attention, "WIDE", False)
        expected, _ = hopper.attention.prefill(q, *pages, index.prefill, scales, lse=True)
    differ = torch.zeros((), dtype=torch.long, device=CUDA)
    for _ in range(1000):
        found, _ = hopper.attention.prefill(q, *pages, index.prefill, scales, lse=True)
        differ += (found != expected).any()
    assert int(differ) == 0


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_pages_of_codes(
    shape: AttentionShape, hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reads a copy in FP16; where there are too many for one, the plain kernel reads the codes."""
    paged = make_paged(LENGTHS, shape, fp8=True, device=CUDA)
    queries = [min(n, 200) for n in LENGTHS]
    q = random_queries(sum(queries), shape, CUDA)
    expected, expected_lse = plain(monkeypatch, hopper, q, paged, queries, 128)
    for most in (1 << 20, 1):
        monkeypatch.setattr(hopper.attention, "WIDENED", most)
        for block in (128, 64):
            found, lse = prefill(q, paged, queries, block)
            assert differing(found, expected) == 0 and differing(lse, expected_lse) == 0, (most, block)


def test_decode_agrees(hopper: SimpleNamespace) -> None:
    paged, queries, q = inputs(SHAPES[0])
    found, _ = prefill(q, paged, queries, 128)
    sequences, seen, rows = decode_rows(paged, queries)
    assert differing(decode(q[rows], paged, sequences, seen), found[rows]) == 0


def test_codes(hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    paged, queries, q = inputs(SHAPES[0])
    attention = hopper.attention
    index = paged.prefill_index(queries, 128)
    for kind in ("fp32", "pow2"):
        found, _ = attention.prefill(q, *paged.pages, index, paged.scales, codes=kind)
        with monkeypatch.context() as patch:
            patch.setattr(attention, "WIDE", False)
            expected, _ = attention.prefill(q, *paged.pages, index, paged.scales, codes=kind)
        assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(found[1], expected[1])


def test_what_it_takes(hopper: SimpleNamespace) -> None:
    takes = hopper.attention.wide_attention.takes
    pages = torch.empty(1, 2, 64, 128, dtype=torch.bfloat16, device=CUDA)
    q = torch.empty(1, 4, 128, dtype=torch.bfloat16, device=CUDA)
    assert takes(q, pages, 128) and takes(q, pages, 64)
    assert not takes(q[:, :2], pages, 64)  # a warpgroup without a head
    assert not takes(q[..., :80], pages, 128)
    assert not takes(q, pages.view(torch.uint8), 128)
