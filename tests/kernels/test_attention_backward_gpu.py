"""The gradient of attention on the GPU: every path against autograd in float64, and the same bits run after run.

The truth is softmax attention over the very values that codes stand for, differentiated by autograd; paths get the output and
the log-sum-exp of the exact forward kernel.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.bench.attention_backward import inputs, packed_runs
from lockstep.bench.shapes import AttentionShape
from lockstep.errors import ConfigError
from lockstep.kernels.attention_form import AttentionForm
from lockstep.kernels.attention_formula import values_of
from lockstep.kernels.attention_index import Run

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPES = (
    AttentionShape("groups of 4, heads of 128", 8, 2, 128),
    AttentionShape("groups of 1", 4, 4, 64),
    AttentionShape("groups of 7, heads of 80", 14, 2, 80),
    AttentionShape("groups of 3, heads of 96", 6, 2, 96),
)


def whole_runs(*lengths: int) -> list[Run]:
    return packed_runs((n, ()) for n in lengths)


PACKS = {
    "one row": whole_runs(1),
    "equal": whole_runs(512, 512, 512),
    "nearly equal": whole_runs(500, 512, 430),
    "unequal": whole_runs(1, 63, 64, 65, 127, 128, 129, 700, 1300),
    "shared prompt": packed_runs([(300, (1, 64, 200, 333))]),
    "shared prompt, out of order": packed_runs([(129, (130, 40))])[::-1],
}


def truth(tensors: Any, runs: list[Run], form: AttentionForm) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in float64."""
    grad, q, k, v = (x for x in tensors[:4])
    q64 = q.double().requires_grad_()
    k64 = values_of(k, None, form.k_scale_G, torch.float64).requires_grad_()
    v64 = values_of(v, None, form.v_scale_G, torch.float64).requires_grad_()
    dim, group = q.shape[2], q.shape[1] // k.shape[1]
    total = torch.zeros((), dtype=torch.float64, device=q.device)
    for run in runs:
        seen = run.position + run.count
        slots, rows = run.slots[:seen].to(q.device), slice(run.row, run.row + run.count)
        its_q = q64[rows].view(run.count, -1, group, dim)
        s = torch.einsum("tgqd,sgd->gqts", its_q, k64[slots]) * dim**-0.5
        position = torch.arange(run.position, seen, device=q.device)
        s = s.masked_fill(torch.arange(seen, device=q.device) > position[:, None], -torch.inf)
        out = torch.einsum("gqts,sgd->tgqd", s.softmax(-1), v64[slots]).reshape(run.count, -1, dim)
        total = total + (out * grad[rows].double()).sum()
    return torch.autograd.grad(total, (q64, k64, v64))  # type: ignore[return-value]


def errors(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """(1 - cosine, largest error over the largest value)."""
    x, y = found.double().flatten(), exact.flatten()
    cosine = float(x @ y / (x.norm() * y.norm()).clamp(min=1e-300))
    if not bool(y.any()):  # a single row: p = 1, so dq and dk vanish
        return float((x.abs() > 1e-2).any()), float(x.abs().max())
    return 1 - cosine, float((x - y).abs().max() / y.abs().max())


def paths_for(name: str) -> list[str]:
    """Paths that take the pack."""
    dense = name in ("equal", "nearly equal")
    return ["two-pass", "flash", "formula", *(["cudnn"] if dense else [])]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape", SHAPES, ids=[str(s.head_dim) for s in SHAPES])
@pytest.mark.parametrize("name", PACKS)
def test_gradient(name: str, shape: AttentionShape, fp8: bool, hopper: SimpleNamespace) -> None:
    from lockstep.kernels.attention_library import attention_grad

    runs = PACKS[name]
    tensors, index, form = inputs(shape, runs, fp8, CUDA)
    exact = truth(tensors, runs, form)
    for path in paths_for(name):
        found = attention_grad(*tensors, index, form, path=path)  # type: ignore[arg-type]
        # The library reads keys rounded to BF16, which moves p away from the forward's.
        angle = 5e-4 if fp8 and path in ("flash", "cudnn") else 1e-4
        for which, x, y in zip(("dq", "dk", "dv"), found, exact, strict=True):
            assert x.dtype == torch.bfloat16 and bool(torch.isfinite(x).all()), (path, which)
            apart, largest = errors(x, y)
            if (
                name == "one row" and which != "dv"
            ):  # constant softmax: rounding of p v . dO, which has no direction
                assert largest < 0.1, (path, which, largest)
            else:
                assert apart < angle and largest < 0.04, (path, which, apart, largest)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", ["unequal", "shared prompt"])
def test_the_same_bits_every_time(name: str, fp8: bool, hopper: SimpleNamespace) -> None:
    from lockstep.kernels.attention_library import attention_grad

    tensors, index, form = inputs(AttentionShape("wide", 32, 8, 128), PACKS[name], fp8, CUDA)
    for path in ("two-pass", "flash"):
        first = attention_grad(*tensors, index, form, path=path)  # type: ignore[arg-type]
        for _ in range(5):
            again = attention_grad(*tensors, index, form, path=path)  # type: ignore[arg-type]
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), path


def test_who_computes(hopper: SimpleNamespace) -> None:
    from lockstep.kernels.attention_library import attention_grad, choose

    found = {}
    for name in ("equal", "unequal", "shared prompt"):
        for fp8 in (False, True):
            tensors, index, form = inputs(SHAPES[0], PACKS[name], fp8, CUDA)
            assert choose(index.gradient, 128, form, deterministic=True) == "two-pass"
            found[name, fp8] = choose(index.gradient, 128, form, deterministic=False)
    assert found.pop(("equal", False)) == "cudnn"
    assert set(found.values()) == {"two-pass"}
    assert choose(index.gradient, 100, form, deterministic=True) == "formula"
    with pytest.raises(ConfigError, match="shared prompts"):
        attention_grad(*tensors, index, form, path="cudnn")


def test_rows_outside_every_run_get_zero(hopper: SimpleNamespace) -> None:
    from lockstep.kernels.attention_library import attention_grad
    from lockstep.kernels.hopper import HopperKernels

    shape = SHAPES[0]
    (grad, q, k, v, out, lse), _, form = inputs(shape, whole_runs(400), False, CUDA)
    runs = [Run(50, 100, 0, torch.arange(50, 150)), Run(200, 130, 0, torch.arange(200, 330))]
    index = HopperKernels().index(runs, shape.group, CUDA)
    for run in runs:
        rows = slice(run.row, run.row + run.count)
        alone = HopperKernels().index(whole_runs(run.count), shape.group, CUDA)
        out[rows], lse[rows] = HopperKernels().attention(q[rows], k[rows], v[rows], alone, form)
    for path in ("two-pass", "flash"):
        found = attention_grad(grad, q, k, v, out, lse, index, form, path=path)  # type: ignore[arg-type]
        for x, y in zip(found, truth((grad, q, k, v), runs, form), strict=True):
            assert not bool(x[:50].any()) and not bool(x[150:200].any()) and not bool(x[330:].any())
            assert errors(x, y)[0] < 1e-4, path
