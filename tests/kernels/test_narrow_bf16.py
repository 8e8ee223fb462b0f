"""The BF16 product by bulk copies has the bits of the plain one, for every number of rows, ragged widths included."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.gpu
SHAPES = [(4096, 4096), (6144, 4096), (4096, 12288), (576, 576), (330, 1536), (49152, 576), (1024, 136)]
"""(outputs, inputs)."""
FORMS = (
    {"stages": 6},
    {"stages": 9, "tokens": 32},
    {"stages": 8, "tile": 128},
    {"stages": 3, "tokens": 64},
    {"stages": 12, "tile": 32, "left": 1},
    {"stages": 12, "tile": 64, "left": 1},
    {"stages": 8, "tile": 128, "left": 1},
    {"stages": 4, "tile": 128, "tokens": 256},
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_have_the_bits_of_the_plain_product(shape: tuple[int, int], hopper: SimpleNamespace) -> None:
    from lockstep.kernels.triton.narrow_bf16 import narrow_bf16_matmul
    from lockstep.kernels.triton.narrow_gemm import fits

    outputs, inputs = shape
    generator = torch.Generator("cuda").manual_seed(outputs + inputs)
    x = torch.randn(256, inputs, generator=generator, device="cuda").bfloat16()
    w = torch.randn(outputs, inputs, generator=generator, device="cuda").bfloat16()
    expected = hopper.gemm.bf16_matmul(x, w)
    for rows in (1, 3, 16, 31, 32, 33, 64, 65, 128, 200, 256):
        for form in (form for form in FORMS if fits(rows, len(w), **form)):
            found = narrow_bf16_matmul(x[:rows], w, **form)
            assert torch.equal(found, expected[:rows]), (rows, form)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_many_rows(shape: tuple[int, int], hopper: SimpleNamespace) -> None:
    """Of one band of tiles, and of several with a part of one."""
    from lockstep.kernels.products import WIDE_BF16
    from lockstep.kernels.triton.narrow_bf16 import narrow_bf16_matmul

    outputs, inputs = shape
    generator = torch.Generator("cuda").manual_seed(outputs)
    x = torch.randn(4400, inputs, generator=generator, device="cuda").bfloat16()
    w = torch.randn(outputs, inputs, generator=generator, device="cuda").bfloat16()
    expected = hopper.gemm.bf16_matmul(x, w, dtype=torch.float32)
    for rows in (257, 1000, 2048, 2049, 4400):
        for form in WIDE_BF16:
            found = narrow_bf16_matmul(x[:rows], w, dtype=torch.float32, **form)
            assert torch.equal(found, expected[:rows]), (rows, form)


def test_what_bulk_copies_cannot_read_is_left_to_the_plain_product(hopper: SimpleNamespace) -> None:
    from lockstep.kernels.products import PRODUCTS
    from lockstep.kernels.triton.narrow_bf16 import takes

    x, w = (torch.randn(n, 100, device="cuda").bfloat16() for n in (8, 64))
    assert not takes(x, w), "rows of 200 bytes are not aligned to 16"
    assert torch.equal(PRODUCTS.plain(x, w), hopper.gemm.bf16_matmul(x, w))


def test_the_choice_keeps_the_bits(hopper: SimpleNamespace) -> None:
    from lockstep.kernels.products import Products

    products = Products()
    x, w = (torch.randn(n, 4096, device="cuda").bfloat16() for n in (3000, 4096))
    for dtype in (torch.bfloat16, torch.float32):
        expected = hopper.gemm.bf16_matmul(x, w, dtype=dtype)
        for rows in (1, 17, 64, 130, 256, 300, 3000):
            assert torch.equal(products.plain(x[:rows], w, dtype), expected[:rows])
