"""FP8 attention: its definition, spelled out again in float64; the same bits packed, alone, in chunks and paged."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.attention_index import Run, build_index
from lockstep.kernels.reference import ReferenceKernels
from lockstep.kernels.reference_attention import quantize_queries
from lockstep.nn.context import PackedContext, PagedContext
from lockstep.nn.kv_scales import KVScales
from lockstep.numerics.flow import FlowSpec, bf16_flow, build_flows
from lockstep.numerics.formats import E4M3

LENGTHS = (3, 64, 1, 130, 65, 17, 190, 63)
BACKENDS = pytest.mark.parametrize("exact", [False, True], ids=["reference", "exact"])
KINDS = pytest.mark.parametrize("kind", ["fp32", "pow2"])


def tensors(group: int = 3, kv_heads: int = 2, dim: int = 64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with scores far from uniform, query heads of very different sizes, and a query of zeros."""
    generator, rows = torch.Generator().manual_seed(seed), sum(LENGTHS)
    q = torch.randn(rows, group * kv_heads, dim, generator=generator)
    q = q * torch.logspace(-2, 0.4, group * kv_heads)[:, None]
    q[7] = 0
    k, v = (torch.randn(rows, kv_heads, dim, generator=generator) for _ in range(2))
    return q.bfloat16(), k.bfloat16(), (v * (1 + torch.arange(kv_heads))[:, None]).bfloat16()


def scales_for(k: Tensor, v: Tensor, share: float = 1.0) -> KVScales:
    k_scale, v_scale = (x.float().abs().amax((0, 2)) * share / 448 for x in (k, v))
    return KVScales(k_scale[None], v_scale[None], 1)


def packed(
    toy: SimpleNamespace,
    kernels: ReferenceKernels,
    lengths: Sequence[int],
    x: Sequence[Tensor],
    s: Any,
    kind: Any,
) -> Tensor:
    q, k, v = x
    index = toy.packed_index(lengths, q.shape[1] // k.shape[1])
    return PackedContext(toy.positions(lengths), index, kernels, scales=s).attend(0, q, k, v, kind)


def paged(
    toy: SimpleNamespace, kernels: ReferenceKernels, steps: Any, x: Sequence[Tensor], s: KVScales, kind: Any
) -> Tensor:
    """Step by step from scattered pages that start full of rubbish."""
    q, k, v = x
    slots, size = toy.random_slots(LENGTHS, 16, 9)
    rubbish = torch.randn(1, size, *k.shape[1:], generator=torch.Generator().manual_seed(1)) * 300
    k_store, v_store = rubbish.to(E4M3), rubbish.neg().to(E4M3)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    out = torch.full_like(q, torch.nan)
    for step in steps:
        runs, count = [], 0
        for c in step:
            runs.append(Run(count, c.end - c.start, c.start, slots[c.sequence][: c.end]))
            count += c.end - c.start
        rows = torch.cat(
            [torch.arange(starts[c.sequence] + c.start, starts[c.sequence] + c.end) for c in step]
        )
        at = torch.cat([torch.arange(c.start, c.end) for c in step])
        write = torch.cat([slots[c.sequence][c.start : c.end] for c in step])
        index = build_index(runs, q.shape[1] // k.shape[1])
        context = PagedContext(at, write, index, kernels, k_store, v_store, s)
        out[rows] = context.attend(0, q[rows], k[rows], v[rows], kind)
    return out


def e4m3(x: Tensor) -> Tensor:
    """To the nearest e4m3 number, ties to even, by looking through all of them: no cast involved. float64."""
    exponent, mantissa = torch.meshgrid(torch.arange(16), torch.arange(8), indexing="ij")
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    grid = torch.where(exponent == 0, mantissa / 8 * 2.0**-6, normal).double().flatten()[:127]
    size = x.double().abs().clamp(max=448)
    upper = torch.searchsorted(grid, size).clamp(1, 126)
    below, above = grid[upper - 1], grid[upper]
    tie = (size - below) == (above - size)
    nearer_above = torch.where(tie, upper % 2 == 0, (size - below) > (above - size))
    return torch.where(nearer_above, above, below).copysign(x.double())


def definition(x: Sequence[Tensor], s: KVScales, *, round_sum: bool = True) -> Tensor:
    """The table of docs/architecture.md in float64, a sequence and a head at a time."""
    q, k, v = x
    group, dim = q.shape[1] // k.shape[1], q.shape[2]
    scale = q.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.tensor(448.0)
    q8 = e4m3(q.float() / scale)  # codes are defined by an FP32 scale and an FP32 division
    k8, v8 = (e4m3(t.float() / c[0][:, None]) for t, c in ((k, s.k), (v, s.v)))
    scale = scale.double()
    out = torch.zeros(q.shape, dtype=torch.float64)
    start = 0
    for n in LENGTHS:
        hidden = torch.ones(n, n).triu(1).bool()
        for h in range(q.shape[1]):
            g, rows = h // group, slice(start, start + n)
            factor = (
                scale[rows, h]
                * s.k[0, g].double()
                * dim**-0.5
                / torch.log(torch.tensor(2.0, dtype=torch.float64))
            )
            scores = (q8[rows, h] @ k8[rows, g].T * factor).masked_fill(hidden, -torch.inf)
            m = torch.full((n,), -1e30, dtype=torch.float64)
            total, acc = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dim, dtype=torch.float64)
            for at in range(0, n, 64):
                part = scores[:, at : at + 64]
                m_new = torch.maximum(m, part.amax(1))
                p = 2 ** (part - m_new[:, None]) * 448
                a = 2 ** (m - m_new)
                p8 = e4m3(p)
                total = total * a + (p8 if round_sum else p).sum(1)
                acc = acc * a[:, None] + p8 @ v8[rows, g][at : at + 64]
                m = m_new
            out[rows, h] = acc / total[:, None] * s.v[0, g].double()
        start += n
    return out


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@BACKENDS
@KINDS
def test_packed_alone_chunked_and_paged_give_the_same_bits(
    toy: SimpleNamespace, exact: bool, kind: Any
) -> None:
    kernels, x = ReferenceKernels(exact=exact), tensors()
    scales = scales_for(x[1], x[2], 0.8)
    whole = packed(toy, kernels, LENGTHS, x, scales, kind)
    assert bool(torch.isfinite(whole).all())
    start = 0
    for n in LENGTHS:
        rows = slice(start, start + n)
        assert torch.equal(packed(toy, kernels, (n,), [t[rows] for t in x], scales, kind), whole[rows]), n
        start += n
    assert torch.equal(paged(toy, kernels, toy.decode_schedule(LENGTHS), x, scales, kind), whole)
    for seed, largest in ((0, 40), (1, 190)):
        assert torch.equal(paged(toy, kernels, toy.schedule(LENGTHS, seed, largest), x, scales, kind), whole)


@BACKENDS
def test_the_value_is_that_of_its_definition(toy: SimpleNamespace, exact: bool) -> None:
    x = [t.float() for t in tensors()]  # so that the output isn't rounded to BF16
    scales = scales_for(x[1], x[2])
    out = packed(toy, ReferenceKernels(exact=exact), LENGTHS, x, scales, "fp32").double()
    want = definition(x, scales)
    assert float(((out - want).abs() > 1e-5).double().mean()) < 1e-3, (
        "all but a score on a rounding threshold"
    )
    assert rms(out - want) / rms(want) < 1e-4
    assert rms(out - definition(x, scales, round_sum=False)) / rms(want) > 2e-3, (
        "p is rounded in the sum, too"
    )
    plain = packed(toy, ReferenceKernels(exact=exact), LENGTHS, x, scales, None).double()
    assert 5e-3 < rms(plain - want) / rms(want) < 0.05, "and it is another operation than BF16 attention"


@BACKENDS
def test_the_rounded_probabilities_are_the_summed_ones(toy: SimpleNamespace, exact: bool) -> None:
    """Values that are all 1 come out as exactly 1, whatever the probabilities were rounded to."""
    q, k, v = tensors()
    scales = KVScales(scales_for(k, v).k, torch.full((1, 2), 2.0**-8), 1)
    out = packed(toy, ReferenceKernels(exact=exact), LENGTHS, (q, k, torch.ones_like(v)), scales, "fp32")
    assert torch.equal(out, torch.ones_like(out))


@KINDS
def test_every_row_and_head_has_a_query_scale_of_its_own(kind: Any) -> None:
    q, _, _ = tensors()
    codes, scale = quantize_queries(q, kind)
    assert scale.shape == (*q.shape[:2], 1) and scale.dtype == torch.float32
    needed = q.double().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    if kind == "fp32":
        assert torch.equal(
            scale, (q.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.tensor(448.0))
        )
        assert bool((codes.abs().amax(-1)[q.abs().amax(-1) > 0] == 448).all()), (
            "the largest is the largest code"
        )
    else:
        assert bool((scale >= needed).all()) and bool((scale < 2 * needed * (1 + 1e-6)).all())
        assert bool((scale.frexp().mantissa == 0.5).all())
    assert torch.equal(codes.double(), e4m3(q.float() / scale))
    assert not bool(codes[7].any()), "a query of zeros has zero codes"
    changed = q.clone()
    changed[5] *= 1000
    same = torch.arange(len(q)) != 5
    assert torch.equal(quantize_queries(changed, kind)[0][same], codes[same])


@BACKENDS
def test_gradients_go_straight_through_every_rounding(toy: SimpleNamespace, exact: bool) -> None:
    kernels = ReferenceKernels(exact=exact)
    x = [t.float().requires_grad_() for t in tensors()]
    scales = scales_for(x[1].detach(), x[2].detach())
    out = packed(toy, kernels, LENGTHS, x, scales, "fp32")
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    out.backward(grad)
    codes, scale = quantize_queries(x[0].detach(), "fp32")
    wide = [codes.double() * scale]
    wide += [
        kernels.quantize_kv(t.detach(), s[0]).double() * s[0].double()[:, None]
        for t, s in ((x[1], scales.k), (x[2], scales.v))
    ]
    wide = [w.requires_grad_() for w in wide]
    outputs = []
    for q, k, v in zip(*(w.split(list(LENGTHS)) for w in wide)):
        k, v = (t.repeat_interleave(3, 1).transpose(0, 1) for t in (k, v))
        outputs.append(
            F.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True).transpose(0, 1)
        )
    torch.cat(outputs).backward(grad.double())
    for a, b in zip(x, wide):
        assert a.grad is not None and b.grad is not None
        assert float(F.cosine_similarity(a.grad.double().flatten(), b.grad.flatten(), 0)) > 0.999
        torch.testing.assert_close(a.grad.double().norm(), b.grad.norm(), rtol=0.02, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_query_that_is_not_finite_does_not_become_a_number(toy: SimpleNamespace, value: float) -> None:
    q, k, v = tensors()
    scales = scales_for(k, v)
    whole = packed(toy, ReferenceKernels(), LENGTHS, (q, k, v), scales, "fp32")
    q[100, 2, 5] = value
    out = packed(toy, ReferenceKernels(), LENGTHS, (q, k, v), scales, "fp32")
    assert bool(out[100, 2].isnan().all())
    out[100, 2] = whole[100, 2]
    assert torch.equal(out, whole), "and touches no other row"


def test_it_needs_an_fp8_cache() -> None:
    with pytest.raises(ValueError, match="kv: fp8"):
        FlowSpec("fp8", attention="fp8")
    with pytest.raises(ValueError, match="FP8 KV cache"):
        bf16_flow(attention_fp8=True)
    for name in ("fp8", "bf16", "fp8-rollout"):
        flows = build_flows(FlowSpec(name, "fp8", attention="fp8"), 2)  # type: ignore[arg-type]
        assert flows.rollout.attention_fp8 and flows.rollout.query_scale == "fp32"
        assert flows.trainer.attention_fp8 is flows.unified is (name != "fp8-rollout")
        assert "e4m3" in flows.rollout.describe()["attention"]
    assert build_flows(FlowSpec("fp8", "fp8"), 2).rollout.describe()["attention"] == "bf16"
