"""RMSNorm and SwiGLU on the GPU: right values, fused codes those of the unfused result, each row on its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lockstep.bench.shapes import mlp_widths, norm_widths
from lockstep.numerics.formats import ScaleKind, row_groups
from lockstep.numerics.quantize import quantize

pytestmark = pytest.mark.gpu
EPS = 1e-6
ULP = 2.0**-8
"""Of a BF16 value, relative, at most."""


def random(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, device="cuda").bfloat16()


def assert_codes_of(fused: tuple[Tensor, Tensor], plain: Tensor, kind: ScaleKind) -> None:
    expected = quantize(plain.cpu(), row_groups(kind))
    assert torch.equal(fused[0].view(torch.uint8).cpu(), expected.codes.view(torch.uint8))
    assert torch.equal(fused[1].cpu(), expected.scale)


def assert_rounds_to(found: Tensor, exact: Tensor) -> None:
    """BF16 values next to the float64 ones: nearly all the nearest, the rest its neighbour."""
    nearest = exact.to(torch.bfloat16)
    assert bool(torch.isfinite(found).all())
    assert float((found == nearest).double().mean()) > 0.999
    assert bool(((found.double() - exact).abs() <= exact.abs() * ULP + 1e-30).all())


@pytest.mark.parametrize("kind", ["fp32", "pow2"])
@pytest.mark.parametrize("columns", norm_widths(ragged=True))
def test_norm(columns: int, kind: ScaleKind, hopper: SimpleNamespace) -> None:
    x, delta, weight = random(67, columns, 1), random(67, columns, 2), random(1, columns, 3)[0] + 1
    x[5] = delta[5] = 0
    x[6] *= 1e4
    total, y = hopper.norm.rms_norm(x, weight, EPS, delta_TK=delta, fp8=False)
    assert torch.equal(total, x + delta)
    exact = total.double() / (total.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert_rounds_to(y, exact)
    fused_total, fused = hopper.norm.rms_norm(x, weight, EPS, delta_TK=delta, fp8=True, pow2=kind == "pow2")
    assert torch.equal(fused_total, total)
    assert_codes_of(fused, y, kind)
    same, alone = hopper.norm.rms_norm(total, weight, EPS, fp8=False)
    assert torch.equal(same, total) and torch.equal(alone, y)
    for row in (0, 5, 66):
        _, one = hopper.norm.rms_norm(total[row : row + 1].clone(), weight, EPS, fp8=False)
        assert torch.equal(one, y[row : row + 1])


@pytest.mark.parametrize("kind", ["fp32", "pow2"])
@pytest.mark.parametrize("columns", mlp_widths(ragged=True))
def test_swiglu(columns: int, kind: ScaleKind, hopper: SimpleNamespace) -> None:
    gate_up = random(67, 2 * columns, 4) * 3
    gate_up[5] = 0
    gate_up[6, :columns] = -80
    gate_up[7, :columns] = 80
    y = hopper.swiglu.swiglu(gate_up, fp8=False)
    gate, up = gate_up.double().split(columns, 1)
    assert_rounds_to(y, gate / (1 + (-gate).exp()) * up)
    assert_codes_of(hopper.swiglu.swiglu(gate_up, fp8=True, pow2=kind == "pow2"), y, kind)
    if columns % 128 == 0:
        codes, kept = hopper.swiglu.swiglu_kept(gate_up, pow2=kind == "pow2")
        assert_codes_of(codes, y, kind)
        assert_codes_of(kept, gate_up, kind)
    for row in (0, 5, 66):
        assert torch.equal(hopper.swiglu.swiglu(gate_up[row : row + 1], fp8=False), y[row : row + 1])
