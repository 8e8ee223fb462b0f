"""From a projected row to q and the paged cache: rotation as defined, and one kernel writes what two write."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lockstep.bench.checks_rows import empty_pages, rope_inputs
from lockstep.bench.shapes import AttentionShape, attentions
from lockstep.numerics.formats import E4M3

pytestmark = pytest.mark.gpu
EPS = 1e-6
SHAPES = attentions(extra=True)
TOKENS = 150
PAGES = 7


def norms_of(shape: AttentionShape) -> tuple[Tensor, Tensor] | None:
    if not shape.norm:
        return None
    generator = torch.Generator().manual_seed(1)
    q, k = (1 + 0.3 * torch.randn(shape.head_dim, generator=generator) for _ in range(2))
    return q.bfloat16().cuda(), k.bfloat16().cuda()


def rotated(x_THD: Tensor, weight: Tensor | None, table: Tensor, positions: Tensor) -> Tensor:
    """The definition in float64, with the norm's result rounded to BF16 as the model has it."""
    x = x_THD.double()
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        x = x.bfloat16().double()
    a, b = x.chunk(2, -1)
    cos, sin = (table[positions, i].double()[:, None] for i in (0, 1))
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_rows_are_rotated(shape: AttentionShape, hopper: SimpleNamespace) -> None:
    qkv, positions, table = (x.cuda() for x in rope_inputs(shape, TOKENS))
    norms = norms_of(shape)
    found = hopper.rope.rope_rows(
        qkv, table, positions, heads=shape.heads, kv_heads=shape.kv_heads, norms=norms, eps=EPS
    )
    parts = qkv.view(TOKENS, -1, shape.head_dim).split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    for i in (0, 1):
        exact = rotated(parts[i], norms[i] if norms is not None else None, table, positions)
        error = (found[i].double() - exact).square().sum().sqrt() / exact.square().sum().sqrt()
        assert float(error) < 0.003
        assert float((found[i] == exact.bfloat16()).double().mean()) > 0.99
    assert torch.equal(found[2], parts[2])


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_one_kernel_writes_what_two_write(shape: AttentionShape, fp8: bool, hopper: SimpleNamespace) -> None:
    rope, heads, kv = hopper.rope, shape.heads, shape.kv_heads
    qkv, positions, table = (x.cuda() for x in rope_inputs(shape, TOKENS))
    norms, scales = norms_of(shape), None
    if fp8:
        scales = (
            torch.linspace(0.004, 0.02, kv, device="cuda"),
            torch.linspace(0.02, 0.004, kv, device="cuda"),
        )
    slots = torch.randperm(PAGES * 64, generator=torch.Generator().manual_seed(2))[:TOKENS].cuda()
    q, k, v = rope.rope_rows(qkv, table, positions, heads=heads, kv_heads=kv, norms=norms, eps=EPS)
    one, two, single = (empty_pages(PAGES, shape, fp8=fp8) for _ in range(3))
    q_one = rope.rope_and_write(
        qkv, table, positions, slots, *one, heads=heads, norms=norms, eps=EPS, scales=scales
    )
    rope.write_pages(k, v, torch.arange(TOKENS, device="cuda"), slots, *two, scales)
    assert torch.equal(q, q_one)
    for i in range(TOKENS):  # token by token, as decode does it
        at = slice(i, i + 1)
        q_single = rope.rope_and_write(
            qkv[at],
            table,
            positions[at],
            slots[at],
            *single,
            heads=heads,
            norms=norms,
            eps=EPS,
            scales=scales,
            early=i % 2 == 1,  # the kernel before writes pages only
        )
        assert torch.equal(q_single, q[at])
    for a, b, c in zip(one, two, single):
        assert torch.equal(raw(a), raw(b)) and torch.equal(raw(a), raw(c))
    written = torch.zeros(PAGES * 64, dtype=torch.bool)
    written[slots.cpu()] = True
    if not fp8:
        rows = one[0].transpose(1, 2).flatten(0, 1).cpu(), one[1].permute(0, 3, 1, 2).flatten(0, 1).cpu()
        for stored, x in zip(rows, (k, v)):
            assert torch.equal(stored[slots.cpu()], x.cpu())
            assert not bool(stored[~written].any())


def raw(pages: Tensor) -> Tensor:
    return pages.view(torch.uint8) if pages.dtype == E4M3 else pages


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("part", ["k", "v"])
def test_what_is_not_finite_raises_the_flag(
    part: str, bad: float, fp8: bool, hopper: SimpleNamespace
) -> None:
    shape = AttentionShape("llama", 9, 3, 64)
    qkv, positions, table = (x.cuda() for x in rope_inputs(shape, 20))
    scales = (torch.full((3,), 0.01, device="cuda"),) * 2 if fp8 else None
    slots, pages = torch.arange(20, device="cuda"), empty_pages(1, shape, fp8=fp8)

    def flag(rows: Tensor) -> int:
        found = torch.zeros(1, dtype=torch.int32, device="cuda")
        hopper.rope.rope_and_write(
            rows, table, positions, slots, *pages, heads=9, norms=None, eps=EPS, scales=scales, flag=found
        )
        return int(found)

    assert flag(qkv) == 0
    qkv[13, (9 if part == "k" else 12) * 64 + 70] = bad
    assert flag(qkv) == 1
