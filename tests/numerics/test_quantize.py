"""The quantizer against a slow one written twice over: explicit tables, numpy, one group at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.numerics.formats import (
    AMAX_FLOOR,
    BF16,
    E4M3,
    Operand,
    column_groups,
    row_groups,
    square_blocks,
)
from lockstep.numerics.quantize import Quantized, quantize, scale_from_amax, to_codes, widen

GRANULARITIES = {"1x128": row_groups, "128x1": column_groups, "128x128": square_blocks}
OPERANDS = [make(kind) for make in GRANULARITIES.values() for kind in ("fp32", "pow2")]
EXAMPLES = settings(max_examples=80, deadline=None)

# e4m3fn: subnormals m / 512, then (8 + m) * 2^(e - 10); code 127 would be NaN. Codes ascend with the values.
TABLE = np.array([c / 512 if c < 8 else (8 + c % 8) * 2.0 ** (c // 8 - 10) for c in range(127)])
MIDPOINTS = (TABLE[1:] + TABLE[:-1]) / 2


def slow_codes(scaled: np.ndarray) -> np.ndarray:
    """Nearest table entry, ties to the even code; sign in bit 7."""
    size = np.minimum(np.abs(scaled.astype(np.float64)), 448.0)
    code = np.searchsorted(MIDPOINTS, size, side="left")
    tie = (code < len(MIDPOINTS)) & (MIDPOINTS[np.minimum(code, len(MIDPOINTS) - 1)] == size)
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    return (code | (np.signbit(scaled) << 7)).astype(np.uint8)


def slow_scale(amax: np.float32, kind: str) -> np.float32:
    scale = np.maximum(amax, np.float32(AMAX_FLOOR)) / np.float32(448)
    if kind == "pow2":
        mantissa, exponent = math.frexp(float(scale))
        scale = np.float32(math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent))
    return np.float32(scale)


def slow_quantize(x: Tensor, operand: Operand) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales), one group at a time."""
    assert operand.group is not None
    values, (gr, gc) = x.float().numpy(), operand.group
    codes = np.zeros(values.shape, np.uint8)
    scales = np.zeros((-(-values.shape[0] // gr), -(-values.shape[1] // gc)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * gr, (i + 1) * gr), slice(j * gc, (j + 1) * gc))
            scales[i, j] = slow_scale(np.abs(values[block]).max(), operand.scale)
            codes[block] = slow_codes(values[block] / scales[i, j])
    return codes, scales


def powers_of_two(low: int, high: int) -> Tensor:
    """2^low .. 2^(high - 1), exact whatever torch's own power does."""
    return torch.tensor([2.0**e for e in range(low, high)])


def raw(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8)


def assert_equal(a: Quantized, b: Quantized) -> None:
    assert a.group == b.group
    assert torch.equal(raw(a.codes), raw(b.codes)) and torch.equal(a.scale, b.scale)


def assert_as_slow(x: Tensor, operand: Operand) -> Quantized:
    q = quantize(x, operand)
    codes, scales = slow_quantize(x, operand)
    assert q.codes.dtype == E4M3 and q.codes.shape == x.shape and q.scale.dtype == torch.float32
    np.testing.assert_array_equal(q.scale.numpy(), scales)
    np.testing.assert_array_equal(raw(q.codes).numpy(), codes)
    return q


KINDS = ("normal", "heavy", "tiny", "subnormal", "huge", "outlier", "zero_blocks", "powers", "ties")


def matrix(rows: int, columns: int, kind: str, seed: int) -> Tensor:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns))
    if kind == "heavy":
        x = x * np.exp2(rng.integers(-40, 40, x.shape))
    elif kind == "tiny":
        x = x * 1e-13
    elif kind == "subnormal":
        x = x * 1e-40
    elif kind == "huge":
        x = x / np.abs(x).max() * 3e38
    elif kind == "outlier":
        x[rng.integers(rows), rng.integers(columns)] = 3e5
    elif kind == "zero_blocks":
        x[:128] = 0.0
        x[:, 128:] = -0.0
    elif kind == "powers":
        x = np.exp2(rng.integers(-12, 3, x.shape)) * rng.choice([-1, 1], x.shape)
    elif kind == "ties":  # scale 1, values on codes and halfway between
        x = rng.choice(np.concatenate([TABLE, MIDPOINTS]), x.shape) * rng.choice([-1, 1], x.shape)
        x[::128] = 448.0
        x[:, ::128] = 448.0
    return torch.from_numpy(x.astype(np.float32))


@EXAMPLES
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    kind=st.sampled_from(KINDS),
    operand=st.sampled_from(OPERANDS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_codes_and_scales_are_those_of_the_slow_quantizer(
    rows: int, columns: int, kind: str, operand: Operand, dtype: torch.dtype, seed: int
) -> None:
    x = matrix(rows, columns, kind, seed).to(dtype)
    q = assert_as_slow(x, operand)
    assert bool(torch.isfinite(q.dequantize()).all())
    # The stored scale is the multiplier, and half a step of e4m3 the error: 1/16 of the value, or 2^-10 of the scale.
    error = (q.dequantize().double() - x.double()).abs()
    bound = torch.maximum(x.double().abs() / 16, q.expanded_scale().double() * 2.0**-10)
    assert bool((error <= bound * (1 + 1e-6)).all())
    assert torch.equal(q.dequantize(), q.codes.float() * q.expanded_scale())


@EXAMPLES
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=140),
    operand=st.sampled_from(OPERANDS),
)
def test_any_finite_floats_are_those_of_the_slow_quantizer(values: list[float], operand: Operand) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    assert_as_slow(x[None], operand)
    assert_as_slow(x[:, None], operand)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operand", OPERANDS, ids=str)
def test_every_kind_at_one_ragged_shape(kind: str, operand: Operand) -> None:
    assert_as_slow(matrix(257, 131, kind, 7), operand)


@pytest.mark.parametrize("operand", OPERANDS, ids=str)
def test_case_17_all_zero_blocks_get_the_floor_and_zero_codes(operand: Operand) -> None:
    q = quantize(torch.zeros(200, 300), operand)
    assert not bool(raw(q.codes).any()) and not bool(q.dequantize().any())
    expected = slow_scale(np.float32(0), operand.scale)
    assert bool((q.scale == float(expected)).all()) and float(expected) > 0
    x = torch.zeros(256, 256)
    x[0, 0] = 5.0  # one block lives, the others are zero
    q = quantize(x, operand)
    assert (
        float(q.dequantize()[0, 0]) == pytest.approx(5.0, rel=0.07) and int((q.dequantize() != 0).sum()) == 1
    )
    assert bool(torch.isfinite(q.scale).all())


@pytest.mark.parametrize("operand", OPERANDS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [(0, 0), (129, 70), (199, 299)])
def test_case_17_non_finite_values_are_refused(operand: Operand, bad: float, at: tuple[int, int]) -> None:
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    x[at] = bad
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match="non-finite"):
            quantize(x.to(dtype), operand)


def test_what_has_no_codes_is_refused() -> None:
    with pytest.raises(ValueError, match="no codes"):
        quantize(torch.ones(2, 2), BF16)
    with pytest.raises(ValueError, match="matrix"):
        quantize(torch.ones(2, 2, 2), OPERANDS[0])


@EXAMPLES
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    kind=st.sampled_from(KINDS),
    operand=st.sampled_from(OPERANDS),
    seed=st.integers(0, 2**31),
)
def test_quantizing_again_changes_nothing(
    rows: int, columns: int, kind: str, operand: Operand, seed: int
) -> None:
    once = quantize(matrix(rows, columns, kind, seed), operand).dequantize()
    again = quantize(once, operand)
    assert torch.equal(again.dequantize(), once)
    if operand.scale == "fp32":  # under pow2 a rounded-down maximum may halve the scale and double the codes
        assert torch.equal(again.scale, quantize(matrix(rows, columns, kind, seed), operand).scale)


@EXAMPLES
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
)
def test_transposing_commutes_with_quantizing(rows: int, columns: int, kind: str, seed: int) -> None:
    x = matrix(rows, columns, kind, seed)
    for scale in ("fp32", "pow2"):
        assert_equal(quantize(x.t(), square_blocks(scale)), quantize(x, square_blocks(scale)).transpose())
        assert_equal(quantize(x.t(), row_groups(scale)), quantize(x, column_groups(scale)).transpose())
        q = quantize(x, square_blocks(scale))
        assert torch.equal(q.transpose().dequantize(), q.dequantize().t())
        assert q.transpose().shape == (columns, rows)


@EXAMPLES
@given(
    columns=st.integers(1, 300),
    start=st.integers(0, 200),
    count=st.integers(1, 100),
    kind=st.sampled_from(KINDS),
    scale=st.sampled_from(["fp32", "pow2"]),
    seed=st.integers(0, 99),
)
def test_a_row_never_depends_on_its_batch(
    columns: int, start: int, count: int, kind: str, scale: str, seed: int
) -> None:
    x = matrix(300, columns, kind, seed)
    whole = quantize(x, row_groups(scale))  # type: ignore[arg-type]
    order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
    for rows in (torch.arange(start, start + count), order[:count], order):
        part = quantize(x[rows], row_groups(scale))  # type: ignore[arg-type]
        assert_equal(part, Quantized(raw(whole.codes)[rows].view(E4M3), whole.scale[rows], whole.group))


def test_memory_layout_changes_nothing() -> None:
    x = matrix(300, 290, "heavy", 3)
    views = [x.t().contiguous().t(), torch.cat([x, x], 1)[:, :290], torch.cat([x, x])[:300]]
    for operand in OPERANDS:
        for view in views:
            assert_equal(quantize(view, operand), quantize(x, operand))


def test_widening_is_exact_for_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    finite = (codes & 0x7F) != 0x7F
    wide, cast = widen(codes.view(E4M3)), codes.view(E4M3).float()
    assert wide.dtype == torch.float32
    assert torch.equal(wide[finite].view(torch.int32), cast[finite].view(torch.int32))  # bits: -0 too
    np.testing.assert_array_equal(wide[:127].numpy(), TABLE.astype(np.float32))
    # The two NaN codes are never made (non-finite input is refused); widening reads them as +-480.
    assert wide[~finite].abs().tolist() == [480.0, 480.0] or bool(wide[~finite].isnan().all())
    for shape in ((16, 16), (2, 8, 16)):
        x = codes.view(shape)
        assert torch.equal(widen(x.view(E4M3))[finite.view(shape)], cast[finite])
    turned = widen(codes.view(16, 16).view(E4M3).t())
    assert torch.equal(turned.t().reshape(-1)[finite], cast[finite])


def test_rounding_is_to_nearest_even_at_every_boundary() -> None:
    mid = MIDPOINTS.astype(np.float32)  # exact: at most 5 significant bits
    points = np.concatenate(
        [TABLE, mid, np.nextafter(mid, np.float32(-1)), np.nextafter(mid, np.float32(500))]
    )
    points = np.concatenate([points, -points]).astype(np.float32)
    codes = raw(to_codes(torch.from_numpy(points.copy()))).numpy()
    np.testing.assert_array_equal(codes, slow_codes(points))


def test_the_clamp_comes_before_the_cast() -> None:
    beyond = [448 * (1 + 2.0**-23), 448 * (1 + 1e-6), 449.0, 463.9, 464.0, 464.1, 480.0, 1e9, 3e38]
    codes = raw(to_codes(torch.tensor(beyond + [-x for x in beyond])))
    assert codes.tolist() == [0x7E] * len(beyond) + [0xFE] * len(beyond)
    # amax / (amax / 448) rounds above 448 for some maxima; these still get the largest code.
    amax = torch.arange(2**23, 2**23 + 40_000).float()
    scale = scale_from_amax(amax, "fp32")
    above = amax / scale > 448
    assert int(above.sum()) > 100
    q = quantize(amax[above][:, None], row_groups("fp32"))
    assert bool((raw(q.codes) == 0x7E).all())


def test_power_of_two_scales_are_exact_powers_and_never_smaller() -> None:
    generator = torch.Generator().manual_seed(5)
    amax = torch.cat(
        [
            torch.rand(180, 100, generator=generator).mul(powers_of_two(-60, 120)[:, None]).flatten(),
            448 * powers_of_two(-40, 100),
            torch.tensor([0.0, 1e-45, 1e-38, 1e-12, 3e38, torch.finfo(torch.float32).max]),
        ]
    )
    exact, power = scale_from_amax(amax, "fp32"), scale_from_amax(amax, "pow2")
    assert bool((power.frexp().mantissa == 0.5).all())
    assert bool((power >= exact).all()) and bool((power < 2 * exact).all())
    assert torch.equal(scale_from_amax(448 * powers_of_two(-30, 30), "pow2"), powers_of_two(-30, 30))
    assert bool((exact > 0).all())


def integer_matrix() -> Tensor:
    """Made of integers and powers of two only, so that every machine has these very values."""
    i, j = torch.arange(131)[:, None], torch.arange(259)[None]
    power = powers_of_two(-5, 6)[(7 * i + 3 * j) % 11]
    return ((i * 37 + j * 101) % 255 - 127).float() * power


DIGESTS = {
    "e4m3[1x128,fp32]": "1ffb1c49d4afcc68d6cd23e54588807e9e449cef2828aa6ef9d5305e7c4401ac",
    "e4m3[1x128,pow2]": "82543904e59ca1a8994b8dad54b3230015f28e27b9e1a34c453ae98c6edd1deb",
    "e4m3[128x1,fp32]": "8d0e53d0d492b8b41bd40ab95c5ca214dbfe9cc51cedc60a0122a7d9709f33fd",
    "e4m3[128x1,pow2]": "f62ec525800e1d9b7c73d5204f27c0fd5c9d97aad65ea4f52190fd49cc9d34a7",
    "e4m3[128x128,fp32]": "afbfc8b6103ecd8ef96593b7be262a4cf9049372c0d459ad89791830f09a389b",
    "e4m3[128x128,pow2]": "7491e8fa4a7ad22ba505ce5278a1a7a4c4db3fa04f154ed4e2aa5ceafc558eae",
}


@pytest.mark.parametrize("operand", OPERANDS, ids=str)
def test_digests_are_what_they_were(operand: Operand) -> None:
    q = assert_as_slow(integer_matrix(), operand)
    assert q.digest() == DIGESTS[str(operand)]
    strided = Quantized(q.codes.t().contiguous().t(), q.scale.t().contiguous().t(), q.group)
    assert strided.digest() == q.digest()


def test_digests_see_every_part() -> None:
    q = quantize(integer_matrix(), square_blocks("fp32"))
    codes, scale = raw(q.codes).clone(), q.scale.clone()
    codes[130, 258] ^= 1
    scale[1, 2] = torch.nextafter(scale[1, 2], torch.tensor(1.0))
    others = [
        Quantized(codes.view(E4M3), q.scale, q.group),
        Quantized(q.codes, scale, q.group),
        Quantized(q.codes, q.scale, (128, 64)),
        Quantized(q.codes.reshape(259, 131), q.scale, q.group),
    ]
    assert len({q.digest(), *(o.digest() for o in others)}) == 5
