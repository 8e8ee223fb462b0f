"""How scales are laid out for the library; its products themselves are tested on a GPU."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels.library import column_scale
from lockstep.numerics.formats import BLOCK, column_groups, square_blocks
from lockstep.numerics.quantize import Quantized, quantize


@pytest.mark.parametrize("tokens", [BLOCK, 3 * BLOCK, 4 * BLOCK])
@pytest.mark.parametrize("width", [576, 128, 1536, 200])
def test_scales_of_columns(width: int, tokens: int) -> None:
    """Those of blocks lie as `columns.empty_columns` has them; a ragged width, or a single group, gets one for each column."""
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(width + tokens))
    made, groups = quantize(x, square_blocks("fp32")).transpose(), tokens // BLOCK
    padded = torch.zeros(made.scale.shape[0], -(-groups // 4) * 4)
    padded[:, :groups] = made.scale
    held = Quantized(made.codes, padded[:, :groups], made.group)
    scale, square = column_scale(held)
    assert square == (width % BLOCK == 0 and groups > 1)
    if square:
        assert scale.is_contiguous() and torch.equal(scale, padded)
    else:
        assert scale.shape == (width, groups) and scale.stride() == (1, width)
        assert torch.equal(Quantized(made.codes, scale, (1, BLOCK)).dequantize(), held.dequantize())


def test_scales_of_single_columns_stay() -> None:
    made = quantize(torch.randn(256, 192), column_groups("fp32")).transpose()
    scale, square = column_scale(made)
    assert scale is made.scale and not square
