"""1x128 quantization of rows on the GPU: the very bytes of `numerics/quantize.py`, row by row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lockstep.numerics.formats import AMAX_FLOOR, E4M3_MAX, ScaleKind, row_groups
from lockstep.numerics.quantize import quantize

pytestmark = pytest.mark.gpu
WIDTHS = [128, 576, 4096, 12_288, 18_944, 130, 200, 1000, 127]
KINDS = ["fp32", "pow2"]


def kinds_of_rows(columns: int) -> dict[str, Tensor]:
    """One BF16 row of each kind that has gone wrong somewhere."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(columns, generator=generator)
    outlier, half = x * 1e-3, x.clone()
    outlier[columns // 2] = 3e4
    half[: columns // 2] = 0
    rows = {
        "usual": x,
        "zero": torch.zeros(columns),
        "negative zero": -torch.zeros(columns),
        "subnormal": x * 1e-39,
        "below the floor": x * 1e-16,
        "huge": x * 1e37,
        "one outlier": outlier,
        "a zero group": half,
        "equal": torch.full((columns,), 0.3),
        "largest codes": torch.full((columns,), E4M3_MAX),
        "negative": -x.abs(),
        "forty binades": x * torch.exp2(torch.linspace(-20, 20, columns)),
    }
    return {name: row.bfloat16() for name, row in rows.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", WIDTHS)
def test_bytes_of_the_definition(columns: int, kind: ScaleKind, hopper: SimpleNamespace) -> None:
    rows = kinds_of_rows(columns)
    x = torch.stack(list(rows.values()))
    codes, scale = hopper.quantize.quantize_rows(x.cuda(), pow2=kind == "pow2")
    expected = quantize(x, row_groups(kind))
    for i, name in enumerate(rows):
        got, want = codes[i].view(torch.uint8).cpu(), expected.codes[i].view(torch.uint8)
        assert torch.equal(got, want), f"codes of the row {name!r}"
        assert torch.equal(scale[i].cpu(), expected.scale[i]), f"scales of the row {name!r}"


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 63, 64, 1001])
def test_a_row_depends_on_itself_and_storage_is_padded(rows: int, hopper: SimpleNamespace) -> None:
    x = torch.randn(rows, 1152, generator=torch.Generator().manual_seed(rows)).bfloat16().cuda()
    codes, scale = hopper.quantize.quantize_rows(x, pow2=False)
    padded = -(-rows // 4) * 4
    assert scale.stride() == (1, padded) and codes.untyped_storage().nbytes() >= padded * 1152
    for row in {0, rows // 2, rows - 1}:
        one, its_scale = hopper.quantize.quantize_rows(x[row : row + 1], pow2=False)
        assert torch.equal(one.view(torch.uint8), codes[row : row + 1].view(torch.uint8))
        assert torch.equal(its_scale, scale[row : row + 1])


def test_rows_of_a_wider_matrix(hopper: SimpleNamespace) -> None:
    whole = torch.randn(70, 3000, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    part = whole[:, 123 : 123 + 640]
    for got, want in zip(
        hopper.quantize.quantize_rows(part, pow2=False),
        hopper.quantize.quantize_rows(part.contiguous(), pow2=False),
    ):
        assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def test_no_rows(hopper: SimpleNamespace) -> None:
    codes, scale = hopper.quantize.quantize_rows(torch.empty(0, 256, device="cuda").bfloat16(), pow2=False)
    assert codes.shape == (0, 256) and scale.shape == (0, 2)


def test_a_zero_row_gets_the_floor_and_zero_codes(hopper: SimpleNamespace) -> None:
    codes, scale = hopper.quantize.quantize_rows(torch.zeros(2, 256).bfloat16().cuda(), pow2=False)
    assert not codes.view(torch.uint8).any()
    assert torch.equal(scale.cpu(), torch.full((2, 2), AMAX_FLOOR) / torch.tensor(E4M3_MAX))
