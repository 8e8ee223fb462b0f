"""The quantizer and the exact block product on a GPU: the very bytes of the CPU (Hopper; run with `-m gpu`)."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels.reference import block_matmul
from lockstep.numerics.formats import Operand, ScaleKind, column_groups, row_groups, square_blocks
from lockstep.numerics.quantize import quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Values over thirty binades, with zero blocks and an outlier."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-20, 10, (rows, 1), generator=generator).float())
    x[: rows // 3, : columns // 2] = 0
    x[-1, -1] = 3e4
    return x


@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("shape", [(128, 256), (1000, 576), (333, 4096), (4096, 4096)])
def test_the_same_bytes_as_on_the_cpu(shape: tuple[int, int], scale: ScaleKind) -> None:
    operands: list[Operand] = [row_groups(scale), column_groups(scale), square_blocks(scale)]
    for seed, operand in enumerate(operands):
        x = matrix(*shape, seed)
        for source in (x, x.bfloat16()):
            there = quantize(source.cuda(), operand)
            assert there.digest() == quantize(source, operand).digest(), operand
            assert torch.equal(there.dequantize().cpu(), quantize(source, operand).dequantize())


def test_block_sums_are_exact_on_both() -> None:
    x = quantize(torch.randn(200, 576, generator=torch.Generator().manual_seed(1)), row_groups("fp32"))
    w = quantize(torch.randn(320, 576, generator=torch.Generator().manual_seed(2)), square_blocks("fp32"))
    there_x, there_w = (type(q)(q.codes.cuda(), q.scale.cuda(), q.group) for q in (x, w))
    assert torch.equal(block_matmul(there_x, there_w).cpu(), block_matmul(x, w))
