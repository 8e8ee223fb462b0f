"""FP8 keys and values in training: calibration, saturation, gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import ContractError
from lockstep.kernels.reference import ReferenceKernels
from lockstep.nn.context import PackedContext
from lockstep.nn.kv_scales import AmaxCollector, KVScales
from lockstep.numerics.flow import fp8_flow

LENGTHS = (40, 90)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = sum(LENGTHS)
    q = torch.randn(rows, 6, 32, generator=generator)
    k, v = (torch.randn(rows, 2, 32, generator=generator) for _ in range(2))
    return q.requires_grad_(), k.requires_grad_(), (v * torch.tensor([[1.0], [7.0]])).requires_grad_()


@pytest.mark.parametrize("exact", [False, True], ids=["reference", "exact"])
def test_saturated_elements_get_no_gradient_and_the_others_the_true_one(
    toy: SimpleNamespace, exact: bool
) -> None:
    kernels = ReferenceKernels(exact=exact)
    q, k, v = qkv()
    v.retain_grad()
    limit_k, limit_v = (x.detach().abs().amax((0, 2)) * 0.5 for x in (k, v))
    scales = KVScales(limit_k[None] / 448, limit_v[None] / 448, 1)
    context = PackedContext(toy.positions(LENGTHS), toy.packed_index(LENGTHS, 3), kernels, scales=scales)
    out = context.attend(0, q, k, v)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(grad)

    # Straight through: clamp (whose gradient is zero outside), then codes, in float64.
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    parts = [wide[0]]
    for x, scale in ((wide[1], scales.k[0]), (wide[2], scales.v[0])):
        s = scale.double()[None, :, None]
        codes = kernels.quantize_kv(x.detach().float(), scale).double()
        clamped = x.clamp(-448 * s, 448 * s)
        parts.append(clamped + (codes * s - clamped).detach())
    outputs = []
    for qs, ks, vs in zip(*(x.split(list(LENGTHS)) for x in parts)):
        ks, vs = (x.repeat_interleave(3, 1).transpose(0, 1) for x in (ks, vs))
        outputs.append(
            F.scaled_dot_product_attention(qs.transpose(0, 1), ks, vs, is_causal=True).transpose(0, 1)
        )
    torch.cat(outputs).backward(grad.double())

    for x, y, limit in zip((q, k, v), wide, (None, limit_k, limit_v)):
        assert x.grad is not None and y.grad is not None
        assert float(F.cosine_similarity(x.grad.double().flatten(), y.grad.flatten(), 0)) > 0.9999
        if limit is not None:
            clipped = x.detach().abs() > limit[:, None] * (1 + 1e-5)
            inside = x.detach().abs() < limit[:, None] * (1 - 1e-5)
            assert 50 < int(clipped.sum()) < x.numel() // 5
            assert not bool(x.grad[clipped].any())
            rows = torch.arange(len(x)) % 40 != 0  # the key of a lone query gets no gradient
            assert float((x.grad[rows] != 0)[inside[rows]].float().mean()) > 0.99


@pytest.mark.parametrize("kind", ["fp32", "pow2"])
def test_calibration_covers_headroom_times_the_largest_value(kind: str) -> None:
    _, k, v = qkv()
    collector = AmaxCollector(3, 2)
    for layer in range(3):
        collector.see(layer, k[:50] * (layer + 1), v[:50])
        collector.see(layer, k[50:] * (layer + 1), v[50:])
    scales = collector.scales(headroom=2.0, kind=kind, version=4)  # type: ignore[arg-type]
    assert scales.version == 4 and scales.k.shape == scales.v.shape == (3, 2)
    for layer in range(3):
        for x, scale in ((k * (layer + 1), scales.k[layer]), (v, scales.v[layer])):
            needed = x.detach().abs().amax((0, 2)) * 2 / 448
            if kind == "fp32":
                torch.testing.assert_close(scale, needed)
            else:
                assert bool((scale >= needed).all()) and bool((scale < 2 * needed).all())
                assert bool((scale.frexp().mantissa == 0.5).all())


def test_calibration_without_finite_values_is_refused() -> None:
    collector = AmaxCollector(1, 2)
    with pytest.raises(ContractError, match="saw no keys and values"):
        collector.scales(headroom=2.0, kind="fp32", version=1)
    for bad in (torch.inf, torch.nan):
        collector = AmaxCollector(3, 2)
        values = torch.ones(3, 2, 4)
        values[1, 1, 2] = bad
        collector.see(1, torch.ones(3, 2, 4), values)
        collector.see(1, torch.ones(3, 2, 4), torch.ones(3, 2, 4))
        with pytest.raises(ContractError, match="layer 1: non-finite value in KV head 1"):
            collector.scales(headroom=2.0, kind="fp32", version=1)


def test_a_decoder_with_fp8_kv_trains(toy: SimpleNamespace) -> None:
    """Gradients stay close to those with BF16 keys and values."""
    spec = toy.SPECS["llama31"]
    ids, targets = toy.random_ids(spec, LENGTHS), toy.random_ids(spec, LENGTHS, 1)
    grads = []
    for kv_fp8 in (False, True):
        decoder = toy.make_decoder(spec, fp8_flow(kv_fp8=kv_fp8))
        scales = toy.calibrate(decoder, ids, LENGTHS) if kv_fp8 else None
        hidden = toy.packed_hidden(decoder, ids, LENGTHS, scales)
        decoder.head.log_probs(hidden, targets, torch.ones(len(ids)))[0].sum().backward()
        grads.append({n: p.grad for n, p in decoder.named_parameters()})
    for name, grad in grads[0].items():
        assert bool(torch.isfinite(grads[1][name]).all())
        assert not torch.equal(grad, grads[1][name])
        assert float(F.cosine_similarity(grad.flatten(), grads[1][name].flatten(), 0)) > 0.9, name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["packed", "paged"])
def test_case_17_non_finite_keys_are_refused_with_their_layer(
    toy: SimpleNamespace, side: str, value: float
) -> None:
    """Their codes would be plausible numbers: one look at the end of every forward, on either side."""
    spec, lengths = toy.SPECS["llama31"], (5, 9)
    decoder = toy.make_decoder(spec, fp8_flow(kv_fp8=True))
    ids = toy.random_ids(spec, lengths)
    scales = toy.calibrate(decoder, ids, lengths)
    steps = toy.decode_schedule(lengths)
    honest = decoder.kernels.rope
    calls: list[int] = []

    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = honest(x, cos, sin)
        calls.append(1)
        if len(calls) % 4 == 0:  # queries and keys of two layers: these are the keys of the second
            out[0, 0, 3] = value
        return out

    decoder.kernels.rope = rope
    with pytest.raises(ContractError, match="layer 1: non-finite key in KV head 0"):
        if side == "packed":
            toy.packed_hidden(decoder, ids, lengths, scales)
        else:
            toy.paged_hidden(decoder, ids, lengths, steps, scales)
