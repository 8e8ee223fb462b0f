"""Schedule values, clipping, decay, skipped steps, and state that goes out and in again."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lockstep.trainer.optimizer import Optimizer
from lockstep.trainer.spec import OptimSpec


def make(spec: OptimSpec, steps: int = 10) -> tuple[Optimizer, nn.Parameter, nn.Parameter]:
    matrix, vector = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))
    return Optimizer([("v", vector), ("m", matrix)], spec, steps), matrix, vector


def rates(spec: OptimSpec, total: int, count: int) -> list[float]:
    optimizer, matrix, vector = make(spec, total)
    found = []
    for _ in range(count):
        matrix.grad, vector.grad = torch.ones(2, 3), torch.ones(3)
        expected = optimizer.learning_rate()
        found.append(optimizer.step().lr)
        assert found[-1] == expected
    return found


def test_warm_up_then_constant() -> None:
    assert rates(OptimSpec(lr=8.0, warmup_steps=4), 6, 7) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0]


def test_linear_to_a_share_of_the_peak() -> None:
    spec = OptimSpec(lr=1.0, schedule="linear", min_lr_ratio=0.5, warmup_steps=2)
    assert rates(spec, 6, 8) == pytest.approx([0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5])


def test_cosine() -> None:
    expected = [0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(5)]
    assert rates(OptimSpec(lr=1.0, schedule="cosine"), 4, 6) == pytest.approx([*expected, 0.0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_skips_the_step(bad: float) -> None:
    optimizer, matrix, vector = make(OptimSpec(lr=0.1))
    matrix.grad, vector.grad = torch.ones(2, 3), torch.ones(3)
    assert optimizer.step().applied
    before = {k: t.clone() for k, t in optimizer.state_tensors().items()}
    weights = matrix.detach().clone()
    matrix.grad, vector.grad = torch.ones(2, 3), torch.tensor([1.0, bad, 1.0])
    result = optimizer.step()
    assert not result.applied and not math.isfinite(result.grad_norm)
    assert (optimizer.steps, optimizer.skipped) == (1, 1)
    assert torch.equal(matrix, weights) and matrix.grad is None
    assert all(torch.equal(t, before[k]) for k, t in optimizer.state_tensors().items()), (
        "moments are untouched"
    )


def test_clipping_is_global_and_can_be_off() -> None:
    for limit, expected in ((0.5, 0.5), (0.0, 3.0), (10.0, 3.0)):
        optimizer, matrix, vector = make(OptimSpec(lr=0.1, betas=(0.0, 0.0), max_grad_norm=limit))
        matrix.grad, vector.grad = torch.ones(2, 3), torch.ones(3)
        assert optimizer.step().grad_norm == pytest.approx(3.0), "the norm before clipping"
        moments = [t for k, t in optimizer.state_tensors().items() if k.endswith("|exp_avg")]
        assert float(torch.cat([m.flatten() for m in moments]).norm()) == pytest.approx(expected, rel=1e-5)


def test_decay_is_for_matrices_only() -> None:
    optimizer, matrix, vector = make(OptimSpec(lr=0.5, weight_decay=0.1))
    matrix.grad, vector.grad = torch.zeros(2, 3), torch.zeros(3)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 3), 0.95)) and torch.equal(vector, torch.ones(3))


def test_restored_state_goes_on_bit_for_bit() -> None:
    def run(optimizer: Optimizer, parameters: tuple[nn.Parameter, ...], first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()

    spec = OptimSpec(lr=0.1, schedule="cosine", weight_decay=0.01)
    whole, *parameters = make(spec)
    run(whole, tuple(parameters), 0, 8)
    half, *others = make(spec)
    run(half, tuple(others), 0, 5)
    state = {k: t.clone() for k, t in half.state_tensors().items()}
    resumed, *again = make(spec)
    with torch.no_grad():
        for p, q in zip(again, others):
            p.copy_(q)
    resumed.load_state_tensors(state, steps=half.steps, skipped=2)
    run(resumed, tuple(again), 5, 8)
    assert all(torch.equal(p, q) for p, q in zip(parameters, again))
    assert (resumed.steps, resumed.skipped) == (8, 2)
