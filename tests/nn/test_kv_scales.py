"""KV scales: gathered by layer and head from every forward, with headroom, judged by what a quantization did, checked by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lockstep.errors import ContractError
from lockstep.nn.kv_scales import AmaxCollector, KVMaxima, KVScales
from lockstep.numerics.flow import fp8_flow

LENGTHS = (40, 90, 7)


def seen_by(toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Tensor, Tensor]]:
    """Every (layer, keys, values) that any collector sees from now on."""
    seen: list[tuple[int, Tensor, Tensor]] = []
    honest = AmaxCollector.see

    def see(self: AmaxCollector, layer: int, k: Tensor, v: Tensor) -> None:
        seen.append((layer, k.detach().double(), v.detach().double()))
        honest(self, layer, k, v)

    monkeypatch.setattr(AmaxCollector, "see", see)
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_case_35_maxima_are_those_of_every_head_over_all_micro_batches(dtype: torch.dtype) -> None:
    """Not a percentile over micro-batch maxima: of any cut, the very largest values."""
    generator = torch.Generator().manual_seed(0)
    k, v = (
        torch.randn(200, 3, 8, generator=generator).mul(torch.tensor([[1.0], [30.0], [0.01]]))
        for _ in range(2)
    )
    k[77, 1, 3], v[199, 2, 0] = 5000.0, -9000.0
    k, v = k.to(dtype), v.to(dtype)
    for cut in (1, 7, 64, 200):
        collector = AmaxCollector(2, 3)
        for rows_k, rows_v in zip(k.split(cut), v.split(cut)):
            collector.see(1, rows_k, rows_v)
        found = collector.read()
        assert torch.equal(found.k[1], k.double().abs().amax((0, 2)).float())
        assert torch.equal(found.v[1], v.double().abs().amax((0, 2)).float())
        assert not bool(found.k[0].any()) and not bool(found.v[0].any()), "layers are apart"
        assert found.k[1, 1] == torch.tensor(5000.0, dtype=dtype) and found.v[1, 2] == torch.tensor(
            9000.0, dtype=dtype
        )


@pytest.mark.parametrize("headroom", [1.0, 1.3, 2.0, 16.0])
@pytest.mark.parametrize("kind", ["fp32", "pow2"])
def test_case_29_scales_cover_headroom_times_the_largest_value(headroom: float, kind: str) -> None:
    maxima = KVMaxima(torch.rand(4, 3) * 10, torch.rand(4, 3) * 1e-3)
    scales = maxima.scales(headroom=headroom, kind=kind, version=2)  # type: ignore[arg-type]
    for scale, amax in ((scales.k, maxima.k), (scales.v, maxima.v)):
        needed = amax.double() * headroom / 448
        assert bool((scale.double() >= needed * (1 - 2**-22)).all()), (
            "an FP32 product and an FP32 quotient, rounded"
        )
        assert bool((scale.double() <= needed * (2 if kind == "pow2" else 1) * (1 + 2**-22)).all())


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 3.0])
def test_case_35_saturation_counts_elements_not_maxima(
    toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """One scale too small for one head saturates exactly the elements beyond it."""
    spec = toy.SPECS["llama31"]
    decoder = toy.make_decoder(spec, fp8_flow(kv_fp8=True))
    ids = toy.random_ids(spec, LENGTHS)
    right = toy.calibrate(decoder, ids, LENGTHS, 1.5)
    scales = replace(right, v=right.v * torch.tensor([[1.0, 1.0], [1.0, share]]))
    seen = seen_by(toy, monkeypatch)
    collector = AmaxCollector(spec.num_layers, spec.num_kv_heads)
    with torch.no_grad():
        decoder.hidden(ids, toy.packed_context(decoder, LENGTHS, scales, collector))
    beyond = total = 0
    for layer, k, v in seen:
        for x, scale in ((k, scales.k[layer]), (v, scales.v[layer])):
            beyond += int((x.abs() > 448.0 * scale.double()[:, None] * (1 + 2**-22)).sum())
            total += x.numel()
    found = collector.read()
    assert (found.saturated, found.elements) == (beyond, total)
    assert total == 2 * 2 * sum(LENGTHS) * 2 * spec.head_dim
    assert (found.saturated > 0) is (share < 0.6)


def test_a_collector_does_not_change_a_bit_and_works_without_scales(toy: SimpleNamespace) -> None:
    spec = toy.SPECS["qwen2"]
    decoder = toy.make_decoder(spec, fp8_flow(kv_fp8=True))
    ids = toy.random_ids(spec, LENGTHS)
    scales = toy.calibrate(decoder, ids, LENGTHS, 0.5)
    collectors = [AmaxCollector(spec.num_layers, spec.num_kv_heads) for _ in range(2)]
    with torch.no_grad():
        for s, collector in zip((scales, None), collectors):
            plain = decoder.hidden(ids, toy.packed_context(decoder, LENGTHS, s))
            assert torch.equal(plain, decoder.hidden(ids, toy.packed_context(decoder, LENGTHS, s, collector)))
    assert collectors[0].read().saturated > 0
    assert (collectors[1].read().saturated, collectors[1].read().elements) == (0, 0)


def test_the_collector_reads_once_and_never_in_between(
    toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would make a device wait: a tensor's value asked for by the host, while a layer runs."""
    asked: list[str] = []
    for name in ("__bool__", "__int__", "__float__", "item", "tolist", "cpu", "nonzero"):
        honest = getattr(Tensor, name)

        def counted(
            self: Tensor, *args: object, name: str = name, honest: Callable[..., object] = honest
        ) -> object:
            asked.append(name)
            return honest(self, *args)

        monkeypatch.setattr(Tensor, name, counted)
    k, v = torch.randn(9, 2, 4), torch.randn(9, 2, 4)
    collector = AmaxCollector(1, 2)
    collector.see(0, k, v)
    collector.count(k > 1, v > 1)
    assert asked == []
    collector.read()
    assert asked.count("cpu") == 1


BROKEN: dict[str, tuple[Callable[[KVScales], KVScales], str]] = {
    "another model's layers": (
        lambda s: replace(s, k=s.k[:1], v=s.v[:1]),
        r"shape \(1, 2\), the model needs .*\(3, 2\)",
    ),
    "one head for all": (lambda s: replace(s, v=s.v[:, :1]), r"value scales are .*\(3, 1\)"),
    "half precision": (lambda s: replace(s, k=s.k.bfloat16()), "key scales are torch.bfloat16"),
    "zero": (lambda s: replace(s, k=changed(s.k, 0.0)), "the key scale of layer 2, head 1 is 0.0"),
    "negative": (lambda s: replace(s, v=changed(s.v, -1.0)), "the value scale of layer 2, head 1 is -1.0"),
    "nan": (lambda s: replace(s, k=changed(s.k, torch.nan)), "the key scale of layer 2, head 1 is nan"),
    "infinite": (
        lambda s: replace(s, v=changed(s.v, torch.inf)),
        "the value scale of layer 2, head 1 is inf",
    ),
    "no version": (lambda s: replace(s, version=0), "version 0"),
}


def changed(scale: Tensor, value: float) -> Tensor:
    scale = scale.clone()
    scale[2, 1] = value
    return scale


@pytest.mark.parametrize("kind", BROKEN)
def test_case_28_scales_that_can_not_be_right_are_refused_by_name(kind: str) -> None:
    good = KVScales(torch.rand(3, 2) + 0.1, torch.rand(3, 2) + 0.1, 3)
    good.refuse_unless_usable(3, 2)
    spoil, message = BROKEN[kind]
    with pytest.raises(ContractError, match=message):
        spoil(good).refuse_unless_usable(3, 2)
    with pytest.raises(ContractError, match="drawn with KV scales v2, these are v3"):
        good.of(2)
    assert good.of(3) is good
