"""Shards: cut anywhere, with the scales of the whole tensor's blocks (field failure 12)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.numerics.formats import row_groups, square_blocks
from lockstep.numerics.quantize import Quantized, quantize
from lockstep.sync.records import Record, cut, shard

KINDS = st.sampled_from(["fp32", "pow2"])


def outlier_matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Blocks of very different sizes, so that a scale of the wrong block shows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    blocks = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) * 8
    return x * blocks.exp2().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    dim=st.integers(0, 1),
    world=st.integers(1, 9),
    kind=KINDS,
    seed=st.integers(0, 99),
)
def test_parts_are_the_whole_cut_case_12(
    rows: int, columns: int, dim: int, world: int, kind: str, seed: int
) -> None:
    whole = quantize(outlier_matrix(rows, columns, seed), square_blocks(kind))  # type: ignore[arg-type]
    record = Record("w", whole)
    world = min(world, (rows, columns)[dim])
    parts = [shard(record, rank, world, dim) for rank in range(world)]
    assert torch.equal(
        torch.cat([p.main.view(torch.uint8) for p in parts], dim), whole.codes.view(torch.uint8)
    )
    assert torch.equal(torch.cat([p.values() for p in parts], dim), whole.dequantize())
    assert max(p.length for p in parts) - min(p.length for p in parts) <= 1
    for part in parts:
        assert part.scale is not None and part.offset == part.start % 128
        first, last = part.start // 128, (part.start + part.length - 1) // 128
        assert part.scale.shape[dim] == last - first + 1, "only the blocks it touches"


@settings(max_examples=40, deadline=None)
@given(data=st.data(), size=st.integers(2, 280), dim=st.integers(0, 1))
def test_any_boundary_will_do_case_12(data: st.DataObject, size: int, dim: int) -> None:
    start = data.draw(st.integers(0, size - 1))
    end = data.draw(st.integers(start + 1, size))
    shape = (size, 70) if dim == 0 else (70, size)
    whole = quantize(outlier_matrix(*shape, seed=size), square_blocks("fp32"))
    part = cut(Record("w", whole), start, end, dim)
    assert torch.equal(part.values(), whole.dequantize().narrow(dim, start, end - start))


def test_a_shard_narrower_than_a_block_shares_its_scale_case_12() -> None:
    """Qwen3-0.6B's key projection on eight ranks has 128 rows each; on sixteen, 64: two ranks in a block."""
    whole = quantize(outlier_matrix(256, 256, 1), square_blocks("fp32"))
    record = Record("w", whole)
    first, second = shard(record, 0, 4, 0), shard(record, 1, 4, 0)
    assert first.length == second.length == 64 and (first.offset, second.offset) == (0, 64)
    assert first.scale is not None and second.scale is not None
    assert torch.equal(first.scale, second.scale) and torch.equal(first.scale, whole.scale[:1])


def test_quantizing_after_the_cut_gives_other_codes_case_12() -> None:
    """Why blocks must be made first: what a rank would make of its own rows."""
    source = outlier_matrix(256, 128, 2)
    source[64:128] *= 0.7
    record = Record("w", quantize(source, square_blocks("fp32")))
    part, own = shard(record, 1, 4, 0), quantize(source[64:128], square_blocks("fp32"))
    assert isinstance(record.value, Quantized)
    assert not torch.equal(part.main.view(torch.uint8), own.codes.view(torch.uint8))


def test_plain_tensors_and_biases_are_cut_too() -> None:
    bias = torch.arange(10, dtype=torch.bfloat16)
    parts = [shard(Record("b", bias), rank, 3, 0) for rank in range(3)]
    assert [p.length for p in parts] == [3, 3, 4] and all(p.scale is None and p.offset == 0 for p in parts)
    assert torch.equal(torch.cat([p.main for p in parts]), bias)


@pytest.mark.parametrize(("rank", "world", "dim"), [(2, 2, 0), (-1, 2, 0), (0, 0, 0), (0, 2, 1), (0, 11, 0)])
def test_parts_that_do_not_exist_are_refused_by_name(rank: int, world: int, dim: int) -> None:
    with pytest.raises(ValueError, match="b: "):
        shard(Record("b", torch.ones(10)), rank, world, dim)
    with pytest.raises(ValueError, match="b: nothing from 4 to 4"):
        cut(Record("b", torch.ones(10)), 4, 4, 0)


def test_rows_of_a_row_grouped_matrix_are_cut_as_well() -> None:
    whole = quantize(outlier_matrix(9, 200, 5), row_groups("fp32"))
    part = cut(Record("x", whole), 4, 7, 0)
    assert part.offset == 0 and torch.equal(part.values(), whole.dequantize()[4:7])
