"""The BF16 baseline computes what the decoder does: its hand-written backward pass against the decoder's autograd, in FP32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep.bench.baseline import Baseline
from lockstep.bench.baseline_ops import Packing, PlainOperations
from lockstep.errors import ConfigError
from lockstep.kernels.table import select
from lockstep.models.decoder import Decoder
from lockstep.models.spec import ModelSpec
from lockstep.models.tiny import tiny_spec
from lockstep.numerics.flow import bf16_flow, fp8_flow
from lockstep.rollout.types import Completion, SamplingParams
from lockstep.trainer.microbatch import MicroBatch, make_microbatch

LENGTHS = ((5, 9), (7, 4), (3, 20))
"""Prompt and completion tokens."""
FP32 = replace(bf16_flow(), activation=torch.float32)


def decoder_of(spec: ModelSpec) -> Decoder:
    decoder = Decoder(spec, FP32, select("reference"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + ("norm" in name))
    decoder.refresh(1)
    return decoder


def micro_of(vocabulary: int) -> tuple[MicroBatch, Packing]:
    generator = torch.Generator().manual_seed(2)
    completions = []
    for i, (prompt, count) in enumerate(LENGTHS):
        ids = torch.randint(vocabulary, (prompt + count,), generator=generator).tolist()
        completions.append(
            Completion(
                tuple(ids[:prompt]), i, 0, tuple(ids[prompt:]), (0.0,) * count, "length", (), 0,
                SamplingParams(count),
            )
        )  # fmt: skip
    micro = make_microbatch(completions, 2, share_prompts=False)
    return micro, Packing.of([p + n - 1 for p, n in LENGTHS], torch.device("cpu"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("lean", [False, True])
def test_log_probabilities_and_every_gradient_are_the_decoders(family: str, lean: bool) -> None:
    spec = tiny_spec(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, family=family)
    decoder = decoder_of(spec)
    micro, packing = micro_of(spec.vocab_size)
    assert (micro.index.group, sum(packing.lengths)) == (spec.query_group, len(micro.ids_T))
    weight = torch.linspace(-1, 1, len(micro.targets_N))

    expected, _ = micro.log_probs(decoder, None)
    (expected * weight).sum().backward()
    grads = {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}
    decoder.zero_grad(set_to_none=True)

    baseline = Baseline(decoder, PlainOperations(), lean=lean)
    found = baseline.log_probs(micro, packing)
    close(found, expected)
    (found * weight).sum().backward()
    named = dict(decoder.named_parameters())
    assert {n for n, p in named.items() if p.grad is not None} == set(grads) == set(named)
    for name, expected_grad in grads.items():
        grad = named[name].grad
        assert grad is not None and grad.dtype == torch.float32
        close(grad, expected_grad, name)
    with torch.no_grad():
        assert torch.equal(baseline.log_probs(micro, packing), found.detach())


def close(found: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    """The decoder's attention rounds probabilities to BF16 and the baseline's doesn't: within a percent of the norm."""
    error = float((found.detach() - expected.detach()).norm() / expected.detach().norm())
    assert error < 0.01, (name, error)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_the_backward_pass_by_hand_is_autograds(lean: bool, first: bool) -> None:
    spec = tiny_spec(hidden=32, layers=1, heads=4, kv_heads=2, intermediate=48, family="qwen3")
    baseline = Baseline(decoder_of(spec), PlainOperations(), lean=lean)
    baseline.decoder.model.rope.reserve(64, torch.device("cpu"))
    layer, packing = baseline.layers[0], Packing.of([9, 14], torch.device("cpu"))
    positions = torch.cat([torch.arange(n) for n in packing.lengths])
    generator = torch.Generator().manual_seed(3)
    h, delta, *grads = (torch.randn(23, 32, generator=generator) for _ in range(4))
    leaves = [copy.detach().clone().requires_grad_() for copy, _ in layer.copies]
    h_leaf, delta_leaf = h.clone().requires_grad_(), None if first else delta.clone().requires_grad_()

    def use(values: list[torch.Tensor]) -> None:
        """Puts other working copies into the layer's modules, in the order of `copies`."""
        rest = iter(values)
        for norm in (*layer.norms, *layer.head_norms):
            norm.packed = replace(norm.working, plain=next(rest))
        for product in layer.products:
            product.weight_NK = torch.cat([next(rest) for _ in product.masters])

    use(leaves)
    out = layer.forward(h_leaf, delta_leaf, positions, packing, keep=False)[:2]
    inputs = [h_leaf, *leaves] if delta_leaf is None else [h_leaf, *leaves, delta_leaf]
    expected = torch.autograd.grad(out, inputs, grads)

    use([leaf.detach() for leaf in leaves])
    h_leaf, delta_leaf = h.clone().requires_grad_(), None if first else delta.clone().requires_grad_()
    by_hand = layer(h_leaf, delta_leaf, positions, packing)
    for a, b in zip(by_hand, out, strict=True):
        assert torch.equal(a, b)
    torch.autograd.backward(by_hand, grads)
    found = [h_leaf.grad, *(p.grad for p in layer.parameters)]
    found += [] if delta_leaf is None else [delta_leaf.grad]
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a is not None
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def test_working_copies_follow_the_masters() -> None:
    decoder = decoder_of(tiny_spec(hidden=32, layers=1, heads=4, kv_heads=2, family="qwen2"))
    micro, packing = micro_of(decoder.spec.vocab_size)
    baseline = Baseline(decoder, PlainOperations())
    with torch.no_grad():
        before = baseline.log_probs(micro, packing)
        for p in decoder.parameters():
            p.mul_(1.25)
        baseline.refresh()
        moved = baseline.log_probs(micro, packing)
        decoder.refresh(2)
        expected = micro.log_probs(decoder, None)[0]
    assert not torch.allclose(before, moved, atol=1e-2)
    close(moved, expected)


def test_an_fp8_decoder_is_no_baseline() -> None:
    decoder = Decoder(tiny_spec(hidden=32, layers=1), fp8_flow(), select("reference"))
    with pytest.raises(ConfigError, match="BF16 flow"):
        Baseline(decoder, PlainOperations())
