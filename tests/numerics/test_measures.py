"""Error measures against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.numerics.formats import row_groups, square_blocks
from lockstep.numerics.measures import measure, sqnr_db
from lockstep.numerics.quantize import quantize


def test_sqnr_is_the_definition() -> None:
    x = torch.tensor([3.0, 4.0])
    assert sqnr_db(x, torch.tensor([3.0, 3.5])) == pytest.approx(20.0)
    assert sqnr_db(x, x) == math.inf
    assert sqnr_db(x, torch.zeros(2)) == pytest.approx(0.0)
    assert sqnr_db(x.bfloat16(), x * 1.1) == pytest.approx(20.0, abs=1e-4)


def test_saturated_counts_elements_at_the_largest_code() -> None:
    x = torch.ones(4, 128)
    x[:, 64:] = 0.25
    assert measure(x, quantize(x, row_groups("fp32"))).saturated == 0.5
    assert measure(x * 448, quantize(x * 448, row_groups("pow2"))).saturated == 0.5
    assert measure(x * 300, quantize(x * 300, row_groups("pow2"))).saturated == 0.0


def test_underflowed_counts_non_zero_values_that_became_zero() -> None:
    x = torch.zeros(2, 128)
    x[0, 0] = 448.0  # scale 1: the smallest code is 2^-9, half of it rounds to zero (even)
    x[0, 1:4] = 2.0**-10
    x[0, 4] = 2.0**-10 * 1.001
    error = measure(x, quantize(x, square_blocks("fp32")))
    assert error.underflowed == pytest.approx(3 / 5)
    assert error.max_rel == pytest.approx(2.0**-10 / 448)
    assert measure(torch.zeros(3, 3), quantize(torch.zeros(3, 3), row_groups("fp32"))).underflowed == 0.0


def test_zero_matrices_have_no_error() -> None:
    error = measure(torch.zeros(5, 7), quantize(torch.zeros(5, 7), row_groups("fp32")))
    assert error.max_rel == 0.0 and error.sqnr_db == math.inf


def test_gaussian_values_keep_about_31_db() -> None:
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    for operand in (row_groups("fp32"), row_groups("pow2"), square_blocks("fp32")):
        error = measure(x, quantize(x, operand))
        assert 30.5 < error.sqnr_db < 33.0
        assert error.underflowed < 0.003 and 0 < error.max_rel < 1 / 16
