"""The row law: what an operation gives for a row depends on that row only. Bits, over thousands of rows.

Rows are recomputed alone, in slices of every size from 1 to 70 at random offsets, permuted, and from other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.kernels.reference import ReferenceKernels
from lockstep.kernels.rowwise import row_matmul, tree_sum
from lockstep.numerics.formats import row_groups, square_blocks
from lockstep.numerics.quantize import quantize

Rows = Callable[[Tensor], Tensor | tuple[Tensor, ...]]
BACKENDS = [False, True]
SHAPES = [(64, 128), (96, 97), (160, 96), (576, 192), (77, 33)]  # inputs, outputs


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def selections(count: int, seed: int = 0) -> Iterator[Tensor]:
    """Slices of 1..70 rows at random offsets, a few larger ones, permutations, strided and repeated rows."""
    generator = torch.Generator().manual_seed(seed)

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    for size in [*range(1, 71), 127, 128, 129, 255, 257, 511, 513, 1000]:
        if size <= count:
            start = below(count - size + 1)
            yield torch.arange(start, start + size)
    yield torch.randperm(count, generator=generator)
    yield torch.arange(count - 1, -1, -3)
    yield torch.full((200,), below(count))


def assert_row_law(op: Rows, x: Tensor) -> None:
    """Every selection of rows gives the bits that all rows together give."""

    def run(rows: Tensor) -> tuple[Tensor, ...]:
        out = op(rows)
        return out if isinstance(out, tuple) else (out,)

    whole = run(x)
    assert all(len(part) == len(x) and not bool(part.isnan().any()) for part in whole)
    for rows in selections(len(x)):
        for got, expected in zip(run(x[rows]), whole):
            assert torch.equal(got, expected[rows]), f"{len(rows)} rows from {int(rows[0])}"
    offset = torch.cat([x[:1], x])[1:]  # the same rows, elsewhere relative to a vector's width
    for got, expected in zip(run(offset), whole):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_row_matmul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, w = random(2500, shape[0], dtype=dtype), random(shape[1], shape[0], seed=1, dtype=dtype)
    assert_row_law(lambda rows: row_matmul(rows, w), x)
    torch.testing.assert_close(row_matmul(x, w), x @ w.t(), rtol=1e-4, atol=1e-4)
    assert row_matmul(x[:0], w).shape == (0, shape[1])


def test_row_matmul_with_a_wide_head() -> None:
    """More elements than any layer of the other tests: another ladder of piece sizes."""
    x, w = random(600, 256), random(33_000, 256, seed=1)
    whole = row_matmul(x, w)
    for start, size in ((0, 1), (5, 16), (99, 17), (300, 64), (77, 65), (3, 255), (11, 257), (599, 1)):
        assert torch.equal(row_matmul(x[start : start + size], w), whole[start : start + size])


@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("exact", BACKENDS, ids=["reference", "exact"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_linear(shape: tuple[int, int], exact: bool, scale: str) -> None:
    kernels = ReferenceKernels(exact=exact)
    weight = kernels.pack(quantize(random(shape[1], shape[0], seed=1), square_blocks(scale)))  # type: ignore[arg-type]
    operand = row_groups(scale)  # type: ignore[arg-type]

    def op(rows: Tensor) -> Tensor:
        return kernels.linear(kernels.dense_input(kernels.quantize_rows(rows, operand)), weight)

    assert_row_law(op, random(1500, shape[0], dtype=torch.bfloat16))


@pytest.mark.parametrize("exact", BACKENDS, ids=["reference", "exact"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bf16_linear_and_head(shape: tuple[int, int], exact: bool) -> None:
    kernels = ReferenceKernels(exact=exact)
    weight = kernels.pack(random(shape[1], shape[0], seed=1, dtype=torch.bfloat16))
    x = random(2000, shape[0], dtype=torch.bfloat16)
    assert_row_law(lambda rows: kernels.linear(kernels.dense_input(rows), weight), x)
    temperature = 0.5 + random(2000, 1, seed=2).abs()
    joined = torch.cat([x.float(), temperature], 1)
    assert_row_law(lambda r: kernels.logits(r[:, :-1].bfloat16(), weight, r[:, -1].clone()), joined)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 7, 64, 96, 577])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    kernels, weight = ReferenceKernels(), random(width, seed=1, dtype=dtype)
    x = random(3000, width, dtype=dtype)
    assert_row_law(lambda rows: kernels.rms_norm(rows, weight, 1e-6), x)
    heads = x.view(1000, 3, width)
    assert torch.equal(
        kernels.rms_norm(heads, weight, 1e-6).view(3000, width), kernels.rms_norm(x, weight, 1e-6)
    )
    truth = torch.nn.functional.rms_norm(x.double(), (width,), weight.double(), 1e-6)
    step = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    assert bool(
        ((kernels.rms_norm(x, weight, 1e-6).double() - truth).abs() <= truth.abs() * step + 1e-9).all()
    )


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_rope(dim: int) -> None:
    kernels, x = ReferenceKernels(), random(3000, 3 * dim, dtype=torch.bfloat16)
    angle = random(3000, dim // 2, seed=1).double() * 100
    joined = torch.cat([x.float(), angle.cos().float(), angle.sin().float()], 1)

    def op(rows: Tensor) -> Tensor:
        heads = rows[:, : 3 * dim].bfloat16().view(-1, 3, dim)
        cos, sin = rows[:, 3 * dim :].split(dim // 2, 1)
        return kernels.rope(heads, cos, sin)

    assert_row_law(op, joined)
    a, b = x.double().view(3000, 3, dim).chunk(2, -1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    truth = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    torch.testing.assert_close(op(joined).double(), truth, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 7, 64, 250])
def test_swiglu(width: int, dtype: torch.dtype) -> None:
    kernels = ReferenceKernels()
    x = (random(3000, 2 * width) * 8).to(dtype)
    x[0], x[1] = 200.0, -200.0  # the exponential overflows; the result must not be NaN
    assert_row_law(lambda rows: kernels.swiglu(rows[:, :width], rows[:, width:]), x)
    gate, up = x.double().split(width, 1)
    truth = torch.nn.functional.silu(gate) * up
    step = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        kernels.swiglu(x[:, :width], x[:, width:]).double(), truth, rtol=step, atol=1e-6
    )


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 97, 1000, 4099])
def test_log_normalizer(vocabulary: int) -> None:
    kernels, x = ReferenceKernels(), random(1500, vocabulary) * 6

    def op(rows: Tensor) -> tuple[Tensor, Tensor]:
        normalizer = kernels.log_normalizer(rows)
        return normalizer, kernels.entropy(rows.clone(), normalizer)

    before = x.clone()
    assert_row_law(op, x)
    assert torch.equal(x, before)
    normalizer, entropy = op(x)
    truth = x.double().logsumexp(-1)
    torch.testing.assert_close(normalizer.double(), truth, rtol=1e-6, atol=1e-5)
    log_p = x.double() - truth[:, None]
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-4, atol=2e-5)


def by_halves(x: np.ndarray) -> np.ndarray:
    """The two halves are added, an odd last column to the first one, until one column is left."""
    while (count := x.shape[-1]) > 1:
        half = count // 2
        folded = x[:, :half] + x[:, half : 2 * half]
        if count % 2:
            folded[:, 0] += x[:, -1]
        x = folded
    return x[:, 0]


@pytest.mark.parametrize("columns", [*range(1, 18), 63, 64, 65, 1000, 4097])
def test_tree_sum_is_a_fixed_tree(columns: int) -> None:
    x = random(300, columns)
    before = x.clone()
    total = tree_sum(x)
    assert torch.equal(x, before)
    np.testing.assert_array_equal(total.numpy(), by_halves(x.numpy().copy()))
    torch.testing.assert_close(total.double(), x.double().sum(-1), rtol=1e-5, atol=1e-4)
    assert_row_law(tree_sum, x)
    assert torch.equal(tree_sum(x.view(30, 10, columns)).flatten(), total)
    integers = torch.randint(-50, 50, (300, columns), generator=torch.Generator().manual_seed(1)).float()
    assert torch.equal(tree_sum(integers), integers.sum(-1))


def test_threads_do_not_change_a_row() -> None:
    """One thread or two: the same bits, for every operation."""
    kernels = [ReferenceKernels(exact=exact) for exact in BACKENDS]
    x, gate = random(700, 576, dtype=torch.bfloat16), random(700, 1152, seed=3, dtype=torch.bfloat16)
    codes = quantize(random(192, 576, seed=1), square_blocks("fp32"))
    plain, head = (
        random(192, 576, seed=1, dtype=torch.bfloat16),
        random(1000, 576, seed=2, dtype=torch.bfloat16),
    )
    ones = torch.ones(700)

    def everything() -> list[Tensor]:
        out = []
        for k in kernels:
            out.append(k.linear(k.dense_input(k.quantize_rows(x, row_groups("fp32"))), k.pack(codes)))
            out.append(k.linear(k.dense_input(x), k.pack(plain)))
            logits = k.logits(x, k.pack(head), ones)
            out += [logits, k.log_normalizer(logits)]
            out.append(k.rms_norm(x, x[0], 1e-6))
            out.append(k.swiglu(gate[:, :576], gate[:, 576:]))
        return out

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = everything()
        torch.set_num_threads(2)
        two = everything()
    finally:
        torch.set_num_threads(before)
    for a, b in zip(one, two):
        assert torch.equal(a, b)
