"""Matrix products on the GPU: the library's bits, the same bits in every batch, and the right values."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lockstep.bench.gemm import check_bits
from lockstep.bench.machine import WORKSPACE
from lockstep.bench.products import make_rows, make_weight, product, random_rows
from lockstep.bench.shapes import CHECKED_ROWS, LinearShape, heads, linears
from lockstep.kernels.reference import block_matmul
from lockstep.numerics.formats import BLOCK, square_blocks
from lockstep.numerics.quantize import Quantized, quantize

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPES = linears()
RAGGED = linears(["smollm2-135m"], ragged=True)
OFFSETS = (1, 3, 64, 100, 777, 1983)


def ids(shape: LinearShape) -> str:
    return f"{shape.inputs}x{shape.outputs}"


@pytest.mark.parametrize("shape", SHAPES, ids=ids)
def test_every_product_gives_a_row_the_same_bits_in_every_batch(
    shape: LinearShape, hopper: SimpleNamespace
) -> None:
    if os.environ[WORKSPACE] != "0":
        pytest.skip(f"{WORKSPACE} is {os.environ[WORKSPACE]}: the library may split K")
    weight = make_weight(shape, CUDA)
    bits = check_bits(weight)
    assert {"triton", "bf16-row"} <= set(bits.changed) and bits.elements > 1e7
    assert not any(bits.changed.values()), bits.changed
    if not shape.ragged:
        assert {"library", "narrow"} <= set(bits.changed)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], *RAGGED], ids=ids)
def test_a_row_keeps_its_bits_at_every_offset(shape: LinearShape, hopper: SimpleNamespace) -> None:
    weight = make_weight(shape, CUDA)
    x = random_rows(2048, shape.inputs, CUDA)
    for choice in ("triton", "bf16-row"):
        whole = product(choice, make_rows(x), weight)
        for rows in (1, 7, 16, 33, 64, 65):
            for offset in OFFSETS:
                part = product(choice, make_rows(x[offset : offset + rows]), weight)
                assert torch.equal(part, whole[offset : offset + rows]), (choice, rows, offset)
        order = torch.randperm(2048, device=CUDA)
        assert torch.equal(product(choice, make_rows(x[order]), weight), whole[order]), choice


@pytest.mark.parametrize("shape", RAGGED, ids=ids)
def test_ragged_shapes_in_every_batch(shape: LinearShape, hopper: SimpleNamespace) -> None:
    weight = make_weight(shape, CUDA)
    x = random_rows(max(CHECKED_ROWS), shape.inputs, CUDA)
    for choice in ("triton", "bf16-row"):
        whole = product(choice, make_rows(x), weight)
        for rows in CHECKED_ROWS:
            assert torch.equal(product(choice, make_rows(x[:rows]), weight), whole[:rows]), (choice, rows)


@pytest.mark.parametrize("rows", [5, 100, 700])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], *RAGGED], ids=ids)
def test_fp8_values(shape: LinearShape, rows: int, hopper: SimpleNamespace) -> None:
    weight = make_weight(shape, CUDA)
    x = make_rows(random_rows(rows, shape.inputs, CUDA))
    found = product("triton", x, weight)
    exact = block_matmul(Quantized(x.codes.codes, x.codes.scale, (1, BLOCK)), weight.codes)
    assert_near(found, exact, equal=0.85, relative=0.0025)


def assert_near(found: Tensor, exact: Tensor, *, equal: float, relative: float) -> None:
    """Share of BF16 results that are the exact one's rounding, and the error of all of them."""
    assert bool(torch.isfinite(found).all())
    assert float((found == exact.bfloat16()).double().mean()) > equal
    error = (found.double() - exact.double()).square().sum() / exact.double().square().sum()
    assert float(error.sqrt()) < relative


def test_blocks_that_are_zero_huge_or_tiny(hopper: SimpleNamespace) -> None:
    x, w = random_rows(70, 1024, CUDA).float(), torch.randn(512, 1024, device=CUDA) * 0.02
    x[3], x[4, :128], x[5], x[6] = 0, 0, x[5] * 1e12, x[6] * 1e-12
    w[:128, :128], w[128:256] = 0, w[128:256] * 1e6
    codes, scale = hopper.quantize.quantize_rows(x.bfloat16(), pow2=False)
    q = quantize(w, square_blocks("fp32"))
    found = hopper.gemm.fp8_matmul(codes, scale, q.codes, q.scale, w_group=BLOCK)
    exact = block_matmul(Quantized(codes, scale, (1, BLOCK)), q)
    assert bool((found[3] == 0).all())
    for row in (0, 4, 5, 6):
        assert_near(found[row], exact[row], equal=0.8, relative=0.004)


@pytest.mark.parametrize("shape", [SHAPES[0], *RAGGED, heads(["smollm2-135m"])[0]], ids=ids)
def test_bf16_values(shape: LinearShape, hopper: SimpleNamespace) -> None:
    x = random_rows(300, shape.inputs, CUDA)
    w = (torch.randn(shape.outputs, shape.inputs, device=CUDA) * 0.02).bfloat16()
    found = hopper.gemm.bf16_matmul(x, w, dtype=torch.float32)
    exact = x.double() @ w.double().t()
    error = (found.double() - exact).square().sum() / exact.square().sum()
    assert float(error.sqrt()) < 1e-4
    for rows in (1, 16, 64, 65, 129):
        assert torch.equal(hopper.gemm.bf16_matmul(x[:rows], w, dtype=torch.float32), found[:rows])
    assert torch.equal(hopper.gemm.bf16_matmul(x, w), found.bfloat16())


def test_no_rows(hopper: SimpleNamespace) -> None:
    weight = make_weight(LinearShape("", 256, 128), CUDA)
    x = make_rows(torch.empty(0, 256, dtype=torch.bfloat16, device=CUDA))
    for choice in ("triton", "bf16-row"):
        assert product(choice, x, weight).shape == (0, 128)
