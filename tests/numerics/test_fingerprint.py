"""The fingerprint: its definition in whole numbers, what it sees, and that no accident of storage is part of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.numerics.fingerprint import Fingerprint, fingerprint

MASK = 2**64 - 1
RECORDED = (5063653736779914469, 14928731777678485800)


def mixed(x: int, steps: tuple[tuple[int, int], ...], bits: int) -> int:
    for shift, factor in steps:
        x = ((x ^ (x >> shift)) * factor) % 2**bits
    return x


def signed(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x


def key(number: int, second: bool) -> int:
    x = mixed(number + 1, ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)), 32)
    return signed(mixed(x, ((17, 0xED5AD4BB),), 32) if second else x)


def factor(x: int) -> int:
    return mixed(x & MASK, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)), 64) | 1


def definition(x: Tensor, scale: Tensor | None = None) -> Fingerprint:
    """Word by word, in Python's integers."""
    data = x.contiguous().flatten().view(torch.uint8)
    width = 128
    if scale is not None:
        data, width = x.contiguous().view(torch.uint8), x.shape[1]
    rows = -(-data.numel() // width)
    down, across = -(-rows // 128), -(-width // 128)
    stream = torch.zeros(rows * width, dtype=torch.uint8)
    stream[: data.numel()] = data.flatten()
    whole = torch.zeros(down * 128, across * 128, dtype=torch.uint8)
    whole[:rows, :width] = stream.view(rows, width)
    words = whole.view(torch.int32).tolist()
    bits = [0] * (down * across) if scale is None else scale.contiguous().view(torch.int32).flatten().tolist()
    found = []
    for second, seed in ((False, 0x9E3779B97F4A7C15), (True, 0xD1B54A32D192ED03)):
        total = 0
        for tile in range(down * across):
            block, column = divmod(tile, across)
            numbers = ((r, w) for r in range(128) for w in range(32))
            s = sum(key(32 * r + w, second) * words[block * 128 + r][column * 32 + w] for r, w in numbers)
            total += factor(tile + seed) * (s + key(4096, second) * bits[tile])
        found.append(total & MASK)
    return found[0], found[1]


def codes(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    return x, torch.rand(-(-rows // 128), -(-columns // 128), generator=generator)


@pytest.mark.parametrize("shape", [(128, 128), (1, 3), (130, 127), (129, 260), (300, 4)])
def test_it_is_the_definition(shape: tuple[int, int]) -> None:
    x, scale = codes(*shape)
    assert fingerprint(x, scale) == definition(x, scale)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert fingerprint(values) == definition(values) == fingerprint(values.flatten())


def test_it_is_what_it_was() -> None:
    """Receipts of old runs are compared with new ones."""
    x = torch.arange(200 * 300, dtype=torch.int32).view(200, 300) * 7919 % 251
    scale = torch.arange(1, 7, dtype=torch.float32).view(2, 3) / 64
    assert fingerprint(x.to(torch.uint8), scale) == RECORDED
    assert fingerprint(torch.zeros(0)) == (0, 0)


@given(st.integers(0, 199), st.integers(0, 299), st.integers(0, 7))
@settings(max_examples=40, deadline=None)
def test_one_bit_shows_in_both_halves(row: int, column: int, bit: int) -> None:
    x, scale = codes(200, 300)
    before = fingerprint(x, scale)
    x[row, column] ^= 1 << bit
    assert all(a != b for a, b in zip(before, fingerprint(x, scale), strict=True))


def test_accidents_show() -> None:
    x, scale = codes(384, 512)
    changed = {"as it is": (x, scale)}
    for name, rows in {"two rows": (0, 1), "two rows of two tiles": (5, 133)}.items():
        changed[f"{name} exchanged"] = (swapped(x, *rows), scale)
    changed["two columns exchanged"] = (swapped(x.t(), 0, 1).t(), scale)
    changed["two words exchanged"] = (swapped(x.t(), slice(0, 4), slice(4, 8)).t(), scale)
    changed["two tiles exchanged"] = (swapped(x, slice(0, 128), slice(128, 256)), scale)
    changed["two scales exchanged"] = (x, swapped(scale, 0, 1))
    changed["tiles and scales exchanged"] = (swapped(x, slice(0, 128), slice(128, 256)), swapped(scale, 0, 1))
    changed["shifted by a row"] = (x.roll(1, 0), scale)
    changed["shifted by a tile"] = (x.roll(128, 0), scale)
    changed["a scale's last bit"] = (
        x,
        (scale.view(torch.int32) ^ torch.eye(3, 4, dtype=torch.int32)).view(torch.float32),
    )
    changed["a row missing"] = (torch.cat([x[:-1], torch.zeros(1, 512, dtype=torch.uint8)]), scale)
    changed["without scales"] = (x, None)  # type: ignore[assignment]
    found = [fingerprint(*pair) for pair in changed.values()]
    for half in range(2):
        assert len({f[half] for f in found}) == len(changed)


def swapped(x: Tensor, a: int | slice, b: int | slice) -> Tensor:
    y = x.clone()
    y[a], y[b] = x[b], x[a]
    return y


def test_storage_is_no_part_of_it() -> None:
    x, scale = codes(300, 260)
    wide = torch.zeros(300, 400, dtype=torch.uint8)
    wide[:, 7:267] = x
    assert fingerprint(wide[:, 7:267], scale.t().contiguous().t()) == fingerprint(x, scale)


def test_scales_of_another_shape_are_refused() -> None:
    x, scale = codes(300, 260)
    with pytest.raises(ValueError, match=r"\(3, 2\).*\(3, 3\)"):
        fingerprint(x, scale[:, :2])
