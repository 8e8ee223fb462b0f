"""The block-scaled product against integers: an e4m3 value is a multiple of 2^-9, so a block sum is a 43-bit integer."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.kernels.reference import ReferenceKernels, block_matmul
from lockstep.numerics.formats import E4M3, column_groups, row_groups, square_blocks
from lockstep.numerics.measures import sqnr_db
from lockstep.numerics.quantize import Quantized, quantize

SHAPES = [(1, 1, 1), (3, 127, 5), (17, 128, 128), (33, 129, 200), (64, 300, 131), (130, 640, 257)]


def random(rows: int, columns: int, seed: int) -> Tensor:
    """Rows of very different sizes, some far outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp2(torch.randint(-6, 7, (rows, 1), generator=generator).float())
    return torch.where(torch.rand(rows, columns, generator=generator) < 0.01, x * 50, x)


def integers(q: Quantized) -> np.ndarray:
    return np.asarray((q.codes.float() * 512).numpy(), np.int64)


def by_integers(x: Quantized, w: Quantized) -> Tensor:
    """The definition: exact block sums, each rounded to FP32, times the product of both scales, added ascending in FP32."""
    a, b = integers(x), integers(w)
    x_scale, w_scale = x.scale.numpy(), w.scale.numpy().repeat(w.group[0], 0)[: b.shape[0]]
    out = np.zeros((a.shape[0], b.shape[0]), np.float32)
    for block, start in enumerate(range(0, a.shape[1], 128)):
        sums = a[:, start : start + 128] @ b[:, start : start + 128].T
        product = (sums.astype(np.float64) * 2.0**-18).astype(np.float32)
        out += product * (x_scale[:, block, None] * w_scale[None, :, block])
    return torch.from_numpy(out)


@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block_products_are_exact(shape: tuple[int, int, int], scale: str) -> None:
    m, k, n = shape
    rows, squares, columns = (make(scale) for make in (row_groups, square_blocks, column_groups))  # type: ignore[arg-type]
    x, w = quantize(random(m, k, 1), rows), quantize(random(n, k, 2), squares)
    assert torch.equal(block_matmul(x, w), by_integers(x, w))
    # dgrad: the transposed weight; wgrad: both operands regrouped along the contracted dimension.
    dy = quantize(random(m, n, 3), rows)
    assert torch.equal(block_matmul(dy, w.transpose()), by_integers(dy, w.transpose()))
    left, right = (
        quantize(random(k, m, 4), columns).transpose(),
        quantize(random(k, n, 5), columns).transpose(),
    )
    assert torch.equal(block_matmul(left, right), by_integers(left, right))


def test_every_pair_of_codes_multiplies_exactly() -> None:
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8).view(E4M3)
    x = Quantized(codes[:, None], torch.ones(len(codes), 1), (1, 128))
    assert torch.equal(block_matmul(x, x), codes.float()[:, None] * codes.float()[None])


def test_cancelling_blocks_leave_the_exact_remainder() -> None:
    """448^2 - 448^2 + 2^-18: the order of summation must not matter, and nothing may be lost."""
    values = torch.zeros(1, 128)
    values[0, :3] = torch.tensor([448.0, 448.0, 2.0**-9])
    other = values.clone()
    other[0, 1] = -448.0
    for order in (torch.arange(128), torch.arange(127, -1, -1), torch.randperm(128)):
        x = Quantized(values[:, order].to(E4M3), torch.ones(1, 1), (1, 128))
        w = Quantized(other[:, order].to(E4M3), torch.ones(1, 1), (128, 128))
        assert block_matmul(x, w).item() == 2.0**-18


def test_block_sums_do_not_depend_on_the_order_within_a_block() -> None:
    x, w = (
        quantize(random(40, 128, 1), row_groups("fp32")),
        quantize(random(50, 128, 2), square_blocks("fp32")),
    )
    expected = block_matmul(x, w)
    for seed in range(5):
        order = torch.randperm(128, generator=torch.Generator().manual_seed(seed))
        turned = [Quantized(q.codes.view(torch.uint8)[:, order].view(E4M3), q.scale, q.group) for q in (x, w)]
        assert torch.equal(block_matmul(*turned), expected)


def test_the_value_is_within_fp32_rounding_of_the_rational_one() -> None:
    x, w = quantize(random(4, 700, 1), row_groups("fp32")), quantize(random(6, 700, 2), square_blocks("fp32"))
    out, a, b = block_matmul(x, w), integers(x), integers(w)
    for i in range(4):
        for j in range(6):
            terms = []
            for block, start in enumerate(range(0, 700, 128)):
                total = sum(
                    int(p) * int(q) for p, q in zip(a[i, start : start + 128], b[j, start : start + 128])
                )
                scales = Fraction(float(x.scale[i, block])) * Fraction(float(w.scale[0, block]))
                terms.append(Fraction(total, 2**18) * scales)
            error = abs(Fraction(float(out[i, j])) - sum(terms))
            assert error <= sum(map(abs, terms)) * (len(terms) + 3) / Fraction(2**24)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_reference_sums_are_within_tolerance_of_exact_ones(shape: tuple[int, int, int]) -> None:
    """Before rounding above 110 dB; after rounding to BF16 above 60 dB, fewer than 1 % of the elements differ, by one step."""
    m, k, n = shape
    fast, exact = ReferenceKernels(), ReferenceKernels(exact=True)
    x, w = quantize(random(m, k, 1), row_groups("fp32")), quantize(random(n, k, 2), square_blocks("fp32"))
    dy = quantize(random(m, n, 3), row_groups("fp32"))
    columns = [quantize(random(m, c, 4 + c), column_groups("fp32")) for c in (n, k)]
    pairs = [
        [kernels.linear(kernels.dense_input(x), kernels.pack(w)) for kernels in (fast, exact)],
        [kernels.linear_dgrad(dy, kernels.pack(w)) for kernels in (fast, exact)],
        [kernels.linear_wgrad(*columns) for kernels in (fast, exact)],
    ]
    for a, b in pairs:
        assert a.dtype == b.dtype == torch.float32 and a.shape == b.shape
        assert sqnr_db(b, a) > 110
        a, b = a.bfloat16(), b.bfloat16()
        differ = a != b
        assert sqnr_db(b, a) > 60
        assert float(differ.float().mean()) < 0.01
        size = b.float().abs().amax()
        assert bool(((a.float() - b.float()).abs()[differ] <= size * 2.0**-7).all())


def test_plain_products_in_both_precisions() -> None:
    x, w = random(70, 300, 1).bfloat16(), random(90, 300, 2).bfloat16()
    truth = x.double() @ w.double().t()
    for exact, floor in ((False, 110), (True, 140)):
        kernels = ReferenceKernels(exact=exact)
        out = kernels.linear(kernels.dense_input(x), kernels.pack(w))
        assert out.dtype == torch.float32 and sqnr_db(truth, out) > floor
        dy = random(70, 90, 3).bfloat16()
        assert sqnr_db(dy.double() @ w.double(), kernels.linear_dgrad(dy, kernels.pack(w))) > 110
        assert sqnr_db(dy.double().t() @ x.double(), kernels.linear_wgrad(dy, x)) > 110
