"""Attention: the same bits packed, alone, in chunks and token by token from scattered pages; and the right values.

Sequences of 1 to 310 tokens side by side, so that steps of 64 keys, tiles of both sizes and ragged ends all occur.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.attention_index import Run, build_index
from lockstep.kernels.reference import ReferenceKernels, saturated
from lockstep.nn.context import PackedContext, PagedContext
from lockstep.nn.kv_scales import KVScales
from lockstep.numerics.formats import E4M3

LENGTHS = (3, 64, 1, 130, 65, 17, 310, 63)
SHORT = (66, 1, 64, 5)
BACKENDS = [False, True]
HEADS = [(g, 64) for g in range(1, 9)] + [
    (3, 80),
    (2, 96),
    (1, 128),
    (5, 16),
]  # queries of a KV head, head size


def tensors(
    lengths: Sequence[int],
    group: int,
    kv_heads: int,
    dim: int,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with scores far from uniform and heads of different sizes."""
    generator, rows = torch.Generator().manual_seed(seed), sum(lengths)
    q = torch.randn(rows, group * kv_heads, dim, generator=generator) * 1.5
    k, v = (torch.randn(rows, kv_heads, dim, generator=generator) for _ in range(2))
    return q.to(dtype), k.to(dtype), (v * (1 + torch.arange(kv_heads))[:, None]).to(dtype)


def scales_for(k: Tensor, v: Tensor, share: float = 1.0) -> KVScales:
    """One layer; a share below 1 makes the largest elements saturate."""
    k_scale, v_scale = (x.float().abs().amax((0, 2)) * share / 448 for x in (k, v))
    return KVScales(k_scale[None], v_scale[None], 1)


def packed(
    toy: SimpleNamespace,
    kernels: ReferenceKernels,
    lengths: Sequence[int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Any,
) -> Tensor:
    index = toy.packed_index(lengths, q.shape[1] // k.shape[1])
    return PackedContext(toy.positions(lengths), index, kernels, scales=s).attend(0, q, k, v)


def paged(
    toy: SimpleNamespace,
    kernels: ReferenceKernels,
    lengths: Sequence[int],
    steps: Sequence[Sequence[Any]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: KVScales | None,
    page: int = 16,
) -> Tensor:
    """The same rows, step by step from a store of scattered pages that starts full of rubbish."""
    slots, size = toy.random_slots(lengths, page, 9)
    rubbish = torch.randn(1, size, *k.shape[1:], generator=torch.Generator().manual_seed(1)) * 300
    dtype = k.dtype if scales is None else E4M3
    k_store, v_store = rubbish.to(dtype), rubbish.neg().to(dtype)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
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
        context = PagedContext(at, write, index, kernels, k_store, v_store, scales)
        out[rows] = context.attend(0, q[rows], k[rows], v[rows])
    return out


def truth(lengths: Sequence[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own attention in float64, one sequence at a time."""
    outputs = []
    for qs, ks, vs in zip(*(x.double().split(list(lengths)) for x in (q, k, v))):
        group = qs.shape[1] // ks.shape[1]
        ks, vs = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (ks, vs))
        outputs.append(
            F.scaled_dot_product_attention(qs.transpose(0, 1), ks, vs, is_causal=True).transpose(0, 1)
        )
    return torch.cat(outputs)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("exact", BACKENDS, ids=["reference", "exact"])
def test_packed_alone_chunked_and_paged_give_the_same_bits(
    toy: SimpleNamespace, exact: bool, kv: str
) -> None:
    kernels = ReferenceKernels(exact=exact)
    q, k, v = tensors(LENGTHS, 3, 2, 64)
    scales = scales_for(k, v, 0.8) if kv == "fp8" else None
    whole = packed(toy, kernels, LENGTHS, q, k, v, scales)
    assert bool(torch.isfinite(whole).all()) and bool((whole != 0).any(-1).all())

    start = 0
    for n in LENGTHS:  # alone
        rows = slice(start, start + n)
        assert torch.equal(packed(toy, kernels, (n,), q[rows], k[rows], v[rows], scales), whole[rows]), n
        start += n
    reverse = torch.cat(
        [torch.arange(sum(LENGTHS)).split(list(LENGTHS))[i] for i in range(len(LENGTHS))[::-1]]
    )
    turned = packed(toy, kernels, LENGTHS[::-1], q[reverse], k[reverse], v[reverse], scales)
    assert torch.equal(turned, whole[reverse])

    by_token = paged(toy, kernels, LENGTHS, toy.decode_schedule(LENGTHS), q, k, v, scales)
    assert torch.equal(by_token, whole)
    for seed, largest, page in ((0, 40, 1), (1, 100, 7), (3, 310, 64)):
        steps = toy.schedule(LENGTHS, seed, largest)
        assert torch.equal(paged(toy, kernels, LENGTHS, steps, q, k, v, scales, page), whole), (seed, largest)


@pytest.mark.parametrize("exact", BACKENDS, ids=["reference", "exact"])
@pytest.mark.parametrize(("group", "dim"), HEADS)
def test_every_head_layout_obeys_the_row_law_and_has_the_right_value(
    toy: SimpleNamespace, group: int, dim: int, exact: bool
) -> None:
    kernels = ReferenceKernels(exact=exact)
    q, k, v = tensors(SHORT, group, 2, dim, seed=group)
    whole = packed(toy, kernels, SHORT, q, k, v, None)
    error = whole.double() - truth(SHORT, q, k, v)
    # p and o are rounded to BF16: 2^-9 each; p's errors are independent and average out.
    assert float(error.square().mean().sqrt() / whole.double().square().mean().sqrt()) < 2.5e-3
    assert float(error.abs().max()) < 0.06
    assert torch.equal(paged(toy, kernels, SHORT, toy.decode_schedule(SHORT), q, k, v, None), whole)
    scales = scales_for(k, v)
    with_codes = packed(toy, kernels, SHORT, q, k, v, scales)
    assert torch.equal(paged(toy, kernels, SHORT, toy.schedule(SHORT, group, 9), q, k, v, scales), with_codes)


@pytest.mark.parametrize("exact", BACKENDS, ids=["reference", "exact"])
def test_long_sequences_have_the_right_value(toy: SimpleNamespace, exact: bool) -> None:
    kernels, lengths = ReferenceKernels(exact=exact), (700, 333)
    q, k, v = tensors(lengths, 2, 1, 64)
    error = packed(toy, kernels, lengths, q, k, v, None).double() - truth(lengths, q, k, v)
    assert float(error.abs().max()) < 0.03


@pytest.mark.parametrize("exact", BACKENDS, ids=["reference", "exact"])
def test_fp8_keys_and_values_are_their_code_times_scale(toy: SimpleNamespace, exact: bool) -> None:
    kernels = ReferenceKernels(exact=exact)
    q, k, v = tensors(SHORT, 4, 2, 64)
    scales = scales_for(k, v, 0.7)
    stored = [kernels.quantize_kv(x, s[0]) for x, s in ((k, scales.k), (v, scales.v))]
    for x, codes, s in zip((k, v), stored, (scales.k[0], scales.v[0])):
        assert codes.dtype == E4M3
        clipped = saturated(x, s)
        assert 0 < int(clipped.sum()) < x.numel() // 10
        assert bool((codes.float()[clipped].abs() == 448).all())
        error = (codes.float() * s[:, None] - x.float()).abs()[~clipped]
        assert bool((error <= torch.maximum(x.float().abs()[~clipped] / 16, s.max() / 512)).all())
    kd, vd = (c.double() * s[0].double()[:, None] for c, s in zip(stored, (scales.k, scales.v)))
    out = packed(toy, kernels, SHORT, q, k, v, scales)
    error = out.double() - truth(SHORT, q, kd, vd)
    assert float(error.square().mean().sqrt() / out.double().square().mean().sqrt()) < 2.5e-3


def test_both_backends_are_close(toy: SimpleNamespace) -> None:
    q, k, v = tensors(LENGTHS, 3, 2, 64)
    a, b = (packed(toy, ReferenceKernels(exact=e), LENGTHS, q, k, v, None) for e in BACKENDS)
    assert float((a != b).float().mean()) < 0.01
    assert float((a.float() - b.float()).abs().max()) < 0.02


def test_huge_scores_do_not_overflow(toy: SimpleNamespace) -> None:
    q, k, v = tensors(SHORT, 2, 2, 64)
    for factor in (1e3, 1e12, -1e12):
        out = packed(toy, ReferenceKernels(), SHORT, q * factor, k, v, None)
        assert bool(torch.isfinite(out).all())
        assert float((out.double() - truth(SHORT, q * factor, k, v)).abs().max()) < 0.05


def test_a_shared_prompt_is_as_good_as_its_own_copy(toy: SimpleNamespace) -> None:
    """Three samples after one prompt, the prompt's rows there once or three times."""
    kernels, prompt, samples = ReferenceKernels(), 70, (5, 64, 90)
    lengths = [prompt + n for n in samples]
    q, k, v = tensors(lengths, 3, 2, 64)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for x in (q, k, v):
        for s in starts[1:-1]:
            x[s : s + prompt] = x[:prompt]
    whole = packed(toy, kernels, lengths, q, k, v, None)
    rows = [torch.arange(prompt)] + [torch.arange(s + prompt, s + n) for s, n in zip(starts, lengths)]
    own, runs, row = torch.cat(rows), [Run(0, prompt, 0, torch.arange(prompt))], prompt
    for n in samples:
        runs.append(Run(row, n, prompt, torch.cat([torch.arange(prompt), torch.arange(row, row + n)])))
        row += n
    at = torch.cat([torch.arange(prompt), *(torch.arange(prompt, prompt + n) for n in samples)])
    shared = PackedContext(at, build_index(runs, 3), kernels).attend(0, q[own], k[own], v[own])
    assert torch.equal(shared, whole[own])


def test_neighbours_of_any_size_do_not_leak(toy: SimpleNamespace) -> None:
    """Other sequences and later tokens change by factors of a million; earlier rows keep their bits."""
    kernels = ReferenceKernels()
    q, k, v = tensors(LENGTHS, 3, 2, 64)
    whole = packed(toy, kernels, LENGTHS, q, k, v, None)
    start, n = sum(LENGTHS[:3]), LENGTHS[3]
    keep = torch.zeros(len(q), dtype=torch.bool)
    keep[start : start + n - 40] = True
    for factor in (1e6, 0.0):
        changed = [torch.where(keep[:, None, None], x, x * factor) for x in (q, k, v)]
        assert torch.equal(packed(toy, kernels, LENGTHS, *changed, None)[keep], whole[keep])


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_change_a_row(toy: SimpleNamespace, threads: int) -> None:
    before, kernels = torch.get_num_threads(), [ReferenceKernels(exact=e) for e in BACKENDS]
    q, k, v = tensors(LENGTHS, 3, 2, 64)
    expected = [packed(toy, kernel, LENGTHS, q, k, v, None) for kernel in kernels]
    try:
        torch.set_num_threads(threads)
        got = [packed(toy, kernel, LENGTHS, q, k, v, None) for kernel in kernels]
    finally:
        torch.set_num_threads(before)
    for a, b in zip(got, expected):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("exact", BACKENDS, ids=["reference", "exact"])
def test_gradients_are_those_of_float64_attention(toy: SimpleNamespace, exact: bool, kv: str) -> None:
    kernels = ReferenceKernels(exact=exact)
    q, k, v = (x.requires_grad_() for x in tensors(SHORT, 3, 2, 64, dtype=torch.float32))
    scales = scales_for(k.detach(), v.detach()) if kv == "fp8" else None
    out = packed(toy, kernels, SHORT, q, k, v, scales)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    out.backward(grad)
    wide = [x.detach().double() for x in (q, k, v)]
    if scales is not None:  # straight through the codes
        for i, s in ((1, scales.k[0]), (2, scales.v[0])):
            wide[i] = kernels.quantize_kv(wide[i].float(), s).double() * s.double()[:, None]
    wide = [x.requires_grad_() for x in wide]
    truth(SHORT, *wide).backward(grad.double())
    for x, y in zip((q, k, v), wide):
        assert x.grad is not None and y.grad is not None
        assert float(F.cosine_similarity(x.grad.double().flatten(), y.grad.flatten(), 0)) > 0.99999
        torch.testing.assert_close(x.grad.double().norm(), y.grad.norm(), rtol=1e-3, atol=0)


def test_too_many_heads_in_a_group_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 16"):
        build_index([Run(0, 1, 0, torch.zeros(1, dtype=torch.long))], 17)
