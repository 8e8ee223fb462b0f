"""The short divisions of `kernels/triton/columns.py`, in exact arithmetic: they give the e4m3 codes of the true quotient."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lockstep.numerics.formats import AMAX_FLOOR, E4M3_MAX
from lockstep.numerics.quantize import to_codes

Values = npt.NDArray[np.float32]
ULPS = (-1, 0, 1)
"""By how much an approximate reciprocal may be off."""


def fma(a: Values, b: Values, c: Values) -> Values:
    """a b + c, rounded once to FP32: the exact sum is rounded to odd in float64 first, which loses nothing."""
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    even = (bits & 1) == 0
    outward = (error > 0) == (total > 0)
    odd = np.where(even & (error != 0), bits + np.where(outward, 1, -1), bits)
    return odd.view(np.float64).astype(np.float32)


def moved(x: Values, ulps: int) -> Values:
    return (x.view(np.int32) + np.int32(ulps)).view(np.float32)


def short(x: Values, scale: Values, off: int) -> Values:
    """For BF16 values."""
    r = moved(np.float32(1) / scale, off - 4)
    e = fma(scale, r, np.full_like(r, -1))
    rest = fma(e, e, -e) * r
    assert bool((rest > 0).all())
    return fma(x, r, x * rest)


def corrected(x: Values, divisor: Values, r: Values) -> Values:
    q = x * r
    return fma(fma(q, divisor, -x), -r, q)


def reciprocal(scale: Values, off: int) -> Values:
    r = corrected(np.ones_like(scale), scale, moved(np.float32(1) / scale, off))
    bits = scale.view(np.int32)
    return np.where((bits & 0x7FFFFF) == 0x7FFFFF, (np.int32(0x7F000000) - bits).view(np.float32), r)


def same_codes(found: Values, expected: Values) -> bool:
    codes = [to_codes(torch.from_numpy(q.copy())).view(torch.uint8) for q in (found, expected)]
    return torch.equal(codes[0], codes[1])


def midpoints() -> Values:
    """Between two codes: an odd number of sixteenths of a power of two."""
    return np.arange(1, 32, 2, dtype=np.float32) / np.float32(1024)


def test_fma_rounds_once() -> None:
    a, b = np.float32([1 + 2**-12, 1 + 2**-23, 1]), np.float32([1 + 2**-12, 2**-24, 2**-24])
    c = np.float32([-(1 + 2**-11), 1, 1])
    assert fma(a, b, c).tolist() == [2**-24, 1 + 2**-23, 1.0]
    assert (a * b + c).tolist() != fma(a, b, c).tolist()


@pytest.mark.parametrize("off", ULPS)
def test_every_bf16_value_under_every_bf16_maximum(off: int) -> None:
    mantissa = np.float32(1) + np.arange(128, dtype=np.float32) / np.float32(128)
    x = np.concatenate([sign * mantissa * np.float32(2.0**-e) for e in range(22) for sign in (1, -1)])
    x = np.concatenate([x, np.float32([0.0, -0.0])])
    for amax in (*mantissa, np.float32(AMAX_FLOOR)):
        scale = np.full_like(x, amax / np.float32(E4M3_MAX))
        values = x * np.float32(2.0**-40) if amax < 1 else x
        values = np.where(np.abs(values) <= amax, values, np.float32(0))
        assert same_codes(short(values, scale, off), values / scale), float(amax)


@pytest.mark.parametrize("off", ULPS)
def test_fp32_values_next_to_a_midpoint(off: int) -> None:
    generator = np.random.default_rng(1)
    bits = np.concatenate(
        [generator.integers(1 << 23, 1 << 24, 4000), [1 << 23, (1 << 24) - 1, (1 << 24) - 2]]
    )
    scale, middle = (x.ravel() for x in np.meshgrid(bits.astype(np.float32), midpoints()))
    for ulps in range(-4, 5):
        x = moved((scale.astype(np.float64) * middle).astype(np.float32), ulps)
        assert same_codes(corrected(x, scale, reciprocal(scale, off)), x / scale), ulps


def test_without_the_correction_codes_differ() -> None:
    scale, middle = (
        x.ravel() for x in np.meshgrid(np.arange(1 << 23, (1 << 23) + 999, dtype=np.float32), midpoints())
    )
    x = (scale.astype(np.float64) * middle).astype(np.float32)
    assert not same_codes(x * (np.float32(1) / scale), x / scale)


def test_the_scale_of_every_mantissa() -> None:
    divisor = np.float32(E4M3_MAX)
    for amax in (np.arange(1 << 23, 1 << 24, dtype=np.float32), np.float32([AMAX_FLOOR, 3.3e38, E4M3_MAX])):
        found = corrected(amax, np.full_like(amax, divisor), np.full_like(amax, np.float32(1 / E4M3_MAX)))
        assert bool((found == amax / divisor).all())
