"""The tables of the backward pass name every pair of query and key once; the formula over runs is the reference's gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lockstep.bench.attention_backward import packed_runs
from lockstep.kernels.attention_form import PLAIN, AttentionForm
from lockstep.kernels.attention_formula import formula_grad
from lockstep.kernels.attention_index import Run, build_index
from lockstep.kernels.gradient_index import GAP, GradientIndex, gradient_index
from lockstep.kernels.reference_attention import attention_backward, attention_forward
from lockstep.numerics.quantize import to_codes

HEADS, GROUPS, DIM, STEP = 4, 2, 16, 64


PACKS = {
    "one": packed_runs([(5, [])]),
    "whole": packed_runs([(130, []), (1, []), (256, []), (63, [])]),
    "equal": packed_runs([(192, []), (192, [])]),
    "shared": packed_runs([(70, [1, 200, 64]), (129, [130]), (3, [2, 2, 300])]),
    "out of order": list(reversed(packed_runs([(70, [20, 200]), (64, [])]))),
}


def inputs(runs: list[Run], fp8: bool) -> tuple[list[Tensor], AttentionForm]:
    """[grad, q, k, v, out, lse] and the form, float32 where they are not codes."""
    generator = torch.Generator().manual_seed(0)
    rows = sum(r.count for r in runs)
    q, grad = (torch.randn(rows, HEADS, DIM, generator=generator) for _ in range(2))
    k, v = (torch.randn(rows, GROUPS, DIM, generator=generator) for _ in range(2))
    form = PLAIN
    if fp8:
        form = AttentionForm(torch.tensor([0.01, 0.03]), torch.tensor([0.02, 0.013]))
        k, v = (to_codes(x / 0.01) for x in (k, v))
    index = build_index(runs, HEADS // GROUPS)
    out, lse = attention_forward(q, k, v, index, form, torch.float64)
    return [grad, q, k, v, out, lse], form


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", PACKS)
def test_the_formula_is_the_reference(name: str, fp8: bool) -> None:
    runs = PACKS[name]
    tensors, form = inputs(runs, fp8)
    expected = attention_backward(*tensors, build_index(runs, HEADS // GROUPS), form, torch.float64)
    found = formula_grad(*tensors, runs, form, torch.float64)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.float(), y, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", PACKS)
def test_walks_over_the_tiles_give_the_gradient(name: str) -> None:
    """The two passes of the GPU in float64 torch, reading exactly what the kernels read, also past the end of a run."""
    runs = PACKS[name]
    (grad, q, k, v, out, lse), _ = inputs(runs, False)
    index = gradient_index(runs)
    expected = formula_grad(grad, q, k, v, out, lse, runs, PLAIN, torch.float64)
    dq, dk, dv = two_passes(grad, q, k, v, out, lse, index)
    for x, y in zip((dq, dk, dv), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def two_passes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, index: GradientIndex
) -> tuple[Tensor, Tensor, Tensor]:
    """What `triton/attention_backward.py` does. Rows past the last are zeros, as TMA has them."""
    group = HEADS // GROUPS
    grad, q, k, v, out, lse = (x.double() for x in (grad, q, k, v, out, lse))
    entries = torch.arange(index.entries) if index.rows_W is None else index.rows_W
    k_W, v_W = k[entries], v[entries]
    spaced_lse = torch.full((index.spaced_rows, HEADS), torch.inf, dtype=torch.float64)
    spaced_delta = torch.zeros(index.spaced_rows, HEADS, dtype=torch.float64)
    delta = (grad * out).sum(-1)
    for row, count, _, _, spaced in index.query_tiles_N5.tolist():
        spaced_lse[spaced : spaced + count] = lse[row : row + count]
        spaced_delta[spaced : spaced + count] = delta[row : row + count]

    def rows(x: Tensor, start: int, count: int) -> Tensor:
        assert start >= 0
        part = x[start : start + count]
        return torch.cat([part, part.new_zeros(count - len(part), *part.shape[1:])])

    factor = DIM**-0.5
    dq = torch.zeros_like(q)
    dk_W, dv_W = torch.zeros_like(k_W), torch.zeros_like(v_W)
    for entry, keys, row, count, ahead, spaced in index.key_tiles_N6.tolist():
        k_tile, v_tile = rows(k_W, entry, 128), rows(v_W, entry, 128)
        for h in range(HEADS):
            g = h // group
            steps = -(-count // STEP)
            diagonal = min(-(-max(127 - ahead, 0) // STEP), steps)
            for step in range(steps):
                at = step * STEP
                q_step, do = rows(q, row + at, STEP)[:, h], rows(grad, row + at, STEP)[:, h]
                s = k_tile[:, g] @ q_step.T * factor
                assert spaced + at + STEP <= index.spaced_rows
                p = (s - spaced_lse[spaced + at : spaced + at + STEP, h] * math.log(2)).exp()
                if step < diagonal:
                    seen = torch.arange(128)[:, None] <= (ahead + at + torch.arange(STEP))[None]
                    p = torch.where(seen, p, 0.0)
                ds = p * (v_tile[:, g] @ do.T - spaced_delta[spaced + at : spaced + at + STEP, h])
                dv_W[entry : entry + keys, g] += (p @ do)[:keys]
                dk_W[entry : entry + keys, g] += (ds @ q_step)[:keys] * factor
    for row, count, position, entry, spaced in index.query_tiles_N5.tolist():
        for h in range(HEADS):
            g = h // group
            q_tile, do = rows(q, row, 128)[:, h], rows(grad, row, 128)[:, h]
            lse_tile = rows(spaced_lse, spaced, 128)[:, h].masked_fill(torch.arange(128) >= count, torch.inf)
            delta_tile = rows(spaced_delta, spaced, 128)[:, h]
            whole, steps = (position + 1) // STEP, -(-(position + count) // STEP)
            for step in range(steps):
                at = step * STEP
                k_step, v_step = rows(k_W, entry + at, STEP)[:, g], rows(v_W, entry + at, STEP)[:, g]
                p = (q_tile @ k_step.T * factor - lse_tile[:, None] * math.log(2)).exp()
                if step >= whole:
                    seen = (at + torch.arange(STEP))[None] <= (position + torch.arange(128))[:, None]
                    p = torch.where(seen, p, 0.0)
                ds = p * (do @ v_step.T - delta_tile[:, None])
                dq[row : row + count, h] += (ds @ k_step)[:count] * factor
    return dq, by_row(dk_W, index, k), by_row(dv_W, index, v)


def by_row(x_W: Tensor, index: GradientIndex, like: Tensor) -> Tensor:
    """Sums of each row's entries, ascending."""
    found = torch.zeros_like(like)
    for row in range(index.key_rows):
        own = index.order_W[index.begin_S1[row] : index.begin_S1[row + 1]]
        assert own.tolist() == sorted(own.tolist())
        found[row] = x_W[own].sum(0)
    return found


def test_what_a_pack_is() -> None:
    shared, whole, equal = (gradient_index(PACKS[name]) for name in ("shared", "whole", "equal"))
    assert shared.shared and shared.rows_W is not None and shared.dense is None
    assert not whole.shared and whole.rows_W is None and whole.dense is not None and whole.dense.waste > 1
    assert equal.dense is not None and equal.dense.waste == 1.0 and equal.dense.place_T is None
    assert whole.query_rows is None and gradient_index(PACKS["out of order"]).query_rows is not None
    assert whole.covered == 450 and whole.spaced_rows >= 450 + 4 * GAP
