"""The decode kernel over e4m3 pages has the bits of the loop's own, whatever its arrangement."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.bench.paged import Paged, make_paged, random_queries
from lockstep.bench.shapes import AttentionShape
from lockstep.numerics.formats import ScaleKind

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 700, 1536, 2047, 2048, 2049, 2112, 4100, 6144)
HEADS = ((32, 8, 128), (28, 4, 128), (16, 8, 128), (64, 8, 128), (9, 3, 64), (14, 2, 64))


def decoded(attention: Any, q: Tensor, paged: Paged, codes: ScaleKind | None) -> list[Tensor]:
    """Output, or codes and scales, as bytes."""
    index = paged.decode_index(range(len(paged.lengths)), paged.lengths)
    found = attention.decode(q, *paged.pages, index, paged.scales, codes=codes)
    parts = [found] if isinstance(found, Tensor) else list(found)
    return [part.contiguous().view(torch.uint8) for part in parts]


@pytest.mark.parametrize("longest", [2048, 6144], ids=["one chunk", "several"])
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: "-".join(map(str, h)))
def test_the_bits_of_the_loop(
    heads: tuple[int, int, int], longest: int, hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, shape = hopper.attention, AttentionShape("paged", *heads)
    paged = make_paged([n for n in LENGTHS if n <= longest] * 8, shape, fp8=True, device=CUDA)
    q = random_queries(len(paged.lengths), shape, CUDA)
    assert attention.paged_attention.takes(q, paged.pages[0])
    kinds: tuple[ScaleKind | None, ...] = (None, "fp32", "pow2") if shape.head_dim == 128 else (None,)
    for codes in kinds:
        with monkeypatch.context() as patch:
            patch.setattr(attention, "PAGED", False)
            expected = decoded(attention, q, paged, codes)
        for _ in range(3):
            found = decoded(attention, q, paged, codes)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), codes


@pytest.mark.parametrize("stages", [3, 4])
def test_no_arrangement_changes_a_bit(
    stages: int, hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, shape = hopper.attention, AttentionShape("paged", 32, 8, 128)
    paged = make_paged(LENGTHS * 8, shape, fp8=True, device=CUDA)
    q = random_queries(len(paged.lengths), shape, CUDA)
    expected = decoded(attention, q, paged, None)
    launch = attention.paged_attention.launch
    monkeypatch.setattr(attention.paged_attention, "launch", partial(launch, stages=stages))
    assert torch.equal(decoded(attention, q, paged, None)[0], expected[0])


@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64)], ids=lambda h: "-".join(map(str, h)))
def test_it_begins_while_keys_are_written(heads: tuple[int, int, int], hopper: SimpleNamespace) -> None:
    """Right behind the kernel that writes queries and last keys, as in a decode step; that one is made slow by many rows."""
    attention, shape = hopper.attention, AttentionShape("paged", *heads)
    paged = make_paged([1, 63, 64, 65, 128, 129, 700, 2049, 4100] * 14, shape, fp8=True, device=CUDA)
    index = paged.decode_index(range(len(paged.lengths)), paged.lengths)
    slots = torch.tensor([int(paged.slots(b)[-1]) for b in range(len(paged.lengths))], device=CUDA)
    position = torch.tensor(paged.lengths, device=CUDA) - 1
    table = torch.randn(int(position.max()) + 1, 2, shape.head_dim // 2, device=CUDA)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    generator = torch.Generator("cuda").manual_seed(0)
    differ = torch.zeros((), dtype=torch.long, device=CUDA)
    for _ in range(200):
        qkv = (torch.randn(len(slots), width, generator=generator, device=CUDA) * 1.5).bfloat16()
        found = []
        for early in (True, False):
            pages = [x.view(torch.uint8).clone().view(x.dtype) for x in paged.pages]
            q = hopper.rope.rope_and_write(
                qkv,
                table,
                position,
                slots,
                *pages,
                heads=shape.heads,
                norms=None,
                eps=0.0,
                scales=paged.scales,
            )
            if not early:
                torch.cuda.synchronize()
            found.append(attention.decode(q, *pages, index, paged.scales, early=early))
        differ += (found[0] != found[1]).any()
    assert int(differ) == 0


def test_queries_beyond_fp16(hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries become FP16 alike in every kernel: small ones are rounded to its grid, large ones saturate."""
    attention, shape = hopper.attention, AttentionShape("paged", 32, 8, 128)
    paged = make_paged([1, 64, 65, 700, 2048], shape, fp8=True, device=CUDA)
    q = random_queries(5, shape, CUDA)
    q[:, ::4] *= 2.0**-17
    q[:, 1::4, :2] = torch.tensor([1e5, -3e38], device=CUDA)
    q[:, 2::4, 5] = 2.0**-40
    as_halves = q.float().clamp(-65504, 65504).half().bfloat16()
    assert not torch.equal(as_halves, q) and (as_halves.abs() < 1e5).all()
    tiles = paged.prefill_index([1] * 5, 64)
    found = []
    for rows in (q, as_halves):
        for wide in (True, False):
            with monkeypatch.context() as patch:
                patch.setattr(attention, "PAGED", wide)
                patch.setattr(attention, "WIDE", wide)
                found.append(decoded(attention, rows, paged, None)[0])
                out = attention.prefill(rows, *paged.pages, tiles, paged.scales)[0]
                found.append(out.view(torch.uint8))
    assert all(torch.equal(one, found[0]) for one in found[1:])
    assert found[0].view(torch.bfloat16).isfinite().all()


def test_what_it_takes(hopper: SimpleNamespace) -> None:
    takes = hopper.attention.paged_attention.takes
    pages = torch.empty(1, 2, 64, 128, dtype=torch.uint8, device=CUDA)
    q = torch.empty(1, 16, 128, dtype=torch.bfloat16, device=CUDA)
    assert takes(q, pages)
    assert not takes(torch.empty(1, 18, 128, device=CUDA), pages)  # nine heads a group
    assert not takes(q[..., :80], pages[..., :80])
    assert not takes(q, pages.bfloat16())
