"""Training on a GPU: the forward with gradient has the bits of the one without, gradients are the same in every run, and they
point where the reference's do. Random models of real layer shapes; needs a Hopper GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.attention_index import Run
from lockstep.kernels.reference import ReferenceKernels
from lockstep.kernels.table import select
from lockstep.models.decoder import Decoder
from lockstep.models.spec import PRESETS, ModelSpec
from lockstep.nn.kv_scales import AmaxCollector, KVScales
from lockstep.nn.norm import RMSNorm
from lockstep.nn.packed import packed_context
from lockstep.nn.rows import take_rows
from lockstep.numerics.flow import Flow, bf16_flow, fp8_flow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SPECS = {
    "smollm2": replace(PRESETS["smollm2-135m"], num_layers=2, vocab_size=2048, bos_id=1, eos_ids=(2,)),
    "qwen3-0.6b": replace(PRESETS["qwen3-0.6b"], num_layers=2, vocab_size=2048, bos_id=1, eos_ids=(2,)),
    "qwen2.5-7b": replace(PRESETS["qwen2.5-7b"], num_layers=1, vocab_size=2048, bos_id=1, eos_ids=(2,)),
}
FLOWS = {
    "bf16": bf16_flow(),
    "bf16+kv8": bf16_flow(kv_fp8=True),
    "fp8": fp8_flow(),
    "fp8+kv8": fp8_flow(kv_fp8=True),
    "pow2": fp8_flow(scale="pow2"),
    "bf16-wgrad": fp8_flow(wgrad_fp8=False),
}
LENGTHS = (150, 1, 70, 33)
RESPONSES = (40, 1, 63)
"""Rows that continue the first sequence, which they share."""


@pytest.fixture(scope="module")
def kernels() -> Any:
    return select("hopper")


def decoder_of(spec: ModelSpec, flow: Flow, kernels: Any, device: str) -> Decoder:
    """Random weights, the same on every device."""
    decoder = Decoder(spec, flow, kernels)
    generator = torch.Generator().manual_seed(0)
    for _, module in decoder.working():
        with torch.no_grad():
            module.weight.normal_(generator=generator).mul_(module.weight.shape[-1] ** -0.5)
            if isinstance(module, RMSNorm):
                module.weight.normal_(generator=generator).mul_(0.1).add_(1.0)
            if getattr(module, "bias", None) is not None:
                module.bias.normal_(generator=generator).mul_(0.1)  # type: ignore[union-attr]
    decoder.to(device)
    decoder.refresh(1)
    decoder.model.rope.reserve(1024, torch.device(device))
    return decoder


@dataclass
class Result:
    """Of one training step: hidden states, log-probabilities and gradients."""

    hidden: Tensor
    log_prob: Tensor
    grads: dict[str, Tensor]


def runs() -> tuple[list[Run], Tensor, int]:
    """(runs, positions, rows): whole sequences, then responses to the first."""
    found, positions, start = [], [], 0
    for count in LENGTHS:
        found.append(Run(start, count, 0, torch.arange(start, start + count)))
        positions.append(torch.arange(count))
        start += count
    for count in RESPONSES:
        slots = torch.cat([torch.arange(LENGTHS[0]), torch.arange(start, start + count)])
        found.append(Run(start, count, LENGTHS[0], slots))
        positions.append(torch.arange(LENGTHS[0], LENGTHS[0] + count))
        start += count
    return found, torch.cat(positions), start


def step(decoder: Decoder, *, gradient: bool = True, collector: AmaxCollector | None = None) -> Result:
    """One step over fixed rows; a prompt's last row predicts several tokens."""
    spec, device = decoder.spec, decoder.device
    sequences, positions, count = runs()
    index = decoder.kernels.index(sequences, spec.num_heads // spec.num_kv_heads, device)
    generator = torch.Generator().manual_seed(1)
    ids, targets = (
        torch.randint(spec.vocab_size, (count,), generator=generator).to(device) for _ in range(2)
    )
    temperature = (0.7 + torch.rand(count, generator=generator)).to(device)
    weights = torch.randn(count, generator=generator).to(device)
    rows = torch.randint(count, (count,), generator=generator).to(device)
    scales = None
    if decoder.flow.kv_fp8:
        shape = (spec.num_layers, spec.num_kv_heads)
        scales = KVScales(torch.full(shape, 0.005, device=device), torch.full(shape, 0.004, device=device), 1)
    context = packed_context(positions.to(device), index, decoder.kernels, scales=scales, collector=collector)
    decoder.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(gradient):
        hidden = decoder.hidden(ids, context)
        log_prob, entropy = decoder.head.log_probs(take_rows(hidden, rows), targets, temperature)
    if gradient:
        (log_prob @ weights + 0.1 * entropy.sum()).backward()
    grads = {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}
    return Result(hidden.detach(), log_prob.detach(), grads)


@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS.keys())
@pytest.mark.parametrize("name", SPECS)
def test_bits_of_a_step(name: str, flow: Flow, kernels: Any) -> None:
    decoder = decoder_of(SPECS[name], flow, kernels, "cuda")
    first = step(decoder)
    scored = step(decoder, gradient=False)
    assert torch.equal(first.hidden, scored.hidden) and torch.equal(first.log_prob, scored.log_prob)
    for checkpointing in (False, True):
        decoder.checkpointing = checkpointing
        again = step(decoder)
        assert torch.equal(again.log_prob, first.log_prob)
        assert again.grads.keys() == first.grads.keys()
        for parameter, grad in first.grads.items():
            assert bool(torch.isfinite(grad).all()), parameter
            assert torch.equal(again.grads[parameter], grad), (parameter, checkpointing)


@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS.keys())
@pytest.mark.parametrize("name", ["smollm2", "qwen3-0.6b"])
def test_gradients_are_the_reference_s(name: str, flow: Flow, kernels: Any) -> None:
    """A BF16 flow: close to the reference. An FP8 flow: two orders of rounding differ by about what FP8 itself costs, since
    a last bit changes codes; so it has to be as near to BF16 as the reference is."""
    found = step(decoder_of(SPECS[name], flow, kernels, "cuda"))
    expected = step(decoder_of(SPECS[name], flow, ReferenceKernels(), "cpu"))
    noisy = flow.is_fp8 or flow.kv_fp8
    exact = step(decoder_of(SPECS[name], bf16_flow(), ReferenceKernels(), "cpu")) if noisy else expected
    noise = float((expected.log_prob - exact.log_prob).square().mean().sqrt())
    off = float((found.log_prob.cpu() - exact.log_prob).square().mean().sqrt())
    assert off < 1.25 * noise if noisy else off < 0.02, (off, noise)
    assert found.grads.keys() == expected.grads.keys()
    for parameter, want in expected.grads.items():
        got, ideal = found.grads[parameter].cpu(), exact.grads[parameter]
        assert got.dtype == torch.float32 and got.shape == want.shape
        least = 1 - 1.5 * (1 - alike(want, ideal)) if noisy else 0.997
        assert alike(got, ideal) > least, f"{parameter}: {alike(got, ideal):.5f}, wanted {least:.5f}"
        assert abs(float(got.norm() / want.norm()) - 1) < 0.05, parameter


def alike(a: torch.Tensor, b: torch.Tensor) -> float:
    """Cosine of two gradients."""
    return float(F.cosine_similarity(a.double().flatten(), b.double().flatten(), 0))


def test_transposed_codes_follow_the_weights(kernels: Any) -> None:
    decoder = decoder_of(SPECS["qwen3-0.6b"], fp8_flow(), kernels, "cuda")
    before = step(decoder)
    fresh = decoder_of(SPECS["qwen3-0.6b"], fp8_flow(), kernels, "cuda")
    for model in (decoder, fresh):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        model.refresh(2)
    after, expected = step(decoder), step(fresh)
    for parameter, grad in expected.grads.items():
        assert torch.equal(after.grads[parameter], grad), parameter
        assert not torch.equal(before.grads[parameter], grad), parameter


@pytest.mark.parametrize("heads, dim", [(8, 128), (3, 64), (2, 80)])
def test_keys_and_values_are_watched_in_one_launch(heads: int, dim: int, kernels: Any) -> None:
    from lockstep.kernels.reference import saturated

    generator = torch.Generator("cuda").manual_seed(0)
    k, v = (torch.randn(1000, heads, dim, generator=generator, device="cuda").bfloat16() for _ in range(2))
    scales = (torch.full((heads,), 0.005, device="cuda"), torch.full((heads,), 0.006, device="cuda"))
    plain, fused = (AmaxCollector(2, heads, torch.device("cuda")) for _ in range(2))
    plain.see(1, k, v)
    plain.count(saturated(k, scales[0]), saturated(v, scales[1]))
    fused.watch(1, k, v, scales, kernels)
    expected, found = plain.read(), fused.read()
    assert torch.equal(found.k, expected.k) and torch.equal(found.v, expected.v)
    assert (found.saturated, found.elements) == (expected.saturated, expected.elements)
    assert found.saturated > 0
    codes, wanted = kernels.quantize_kv(k, scales[0]), ReferenceKernels().quantize_kv(k, scales[0])
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))


def test_the_head_s_gradient_and_entropy(kernels: Any) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    h = torch.randn(300, 512, generator=generator, device="cuda").bfloat16()
    weight = (torch.randn(5001, 512, generator=generator, device="cuda") * 0.05).bfloat16()
    packed = kernels.pack(weight)
    targets = torch.randint(5001, (300,), generator=generator, device="cuda")
    temperature = 0.5 + torch.rand(300, generator=generator, device="cuda")
    log_prob, normalizer, entropy = kernels.score(h, packed, targets, temperature)
    logits = (h.double() @ weight.double().t()).requires_grad_()
    log_p = (logits / temperature[:, None].double()).log_softmax(-1)
    true_log_prob, true_entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(log_prob.double(), true_log_prob.detach(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.double(), true_entropy.detach(), rtol=1e-5, atol=1e-4)
    grad, grad_entropy = (torch.randn(300, generator=generator, device="cuda") for _ in range(2))
    (true_log_prob @ grad.double() + true_entropy @ grad_entropy.double()).backward()
    assert logits.grad is not None
    for some_entropy in (grad_entropy, None):
        out = torch.empty(300, 5001, device="cuda", dtype=torch.bfloat16)
        kernels.logits_grad(h, packed, targets, temperature, normalizer, entropy, grad, some_entropy, out)
        error = float((out.double() - logits.grad).norm() / logits.grad.norm())
        assert (error < 3e-3) == (some_entropy is not None)


@pytest.mark.parametrize("vocabulary", [5001, 151_936])
def test_the_head_s_gradient_over_stored_probabilities(vocabulary: int, kernels: Any) -> None:
    """Of a forward pass with the same bits, next to float64. Targets of p near one are among them."""
    generator = torch.Generator("cuda").manual_seed(0)
    h = torch.randn(300, 512, generator=generator, device="cuda").bfloat16()
    weight = (torch.randn(vocabulary, 512, generator=generator, device="cuda") * 0.05).bfloat16()
    packed = kernels.pack(weight)
    targets = torch.randint(vocabulary, (300,), generator=generator, device="cuda")
    temperature = 0.5 + torch.rand(300, generator=generator, device="cuda")
    temperature[:50] = 1.0
    for row in range(0, 40, 2):  # a hidden state that knows its target: 1 - p from 0.1 down to 1e-4 or so
        own = weight[targets[row]].double()
        rest = (h[row].double() @ weight.double().t()).logsumexp(0)
        h[row] = h[row] + (own * ((rest + 2.3 + 0.35 * row / 2) / own.square().sum())).bfloat16()
    plain = kernels.score(h, packed, targets, temperature)
    for stored in (300, 128, 1):
        p = torch.full((stored, vocabulary), torch.nan, device="cuda", dtype=torch.bfloat16)
        found = kernels.score(h, packed, targets, temperature, p)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
        assert bool(torch.isfinite(p).all())
    p = torch.empty(300, vocabulary, device="cuda", dtype=torch.bfloat16)
    log_prob, normalizer, entropy = kernels.score(h, packed, targets, temperature, p)
    logits = (h.double() @ weight.double().t()).requires_grad_()
    log_p = (logits / temperature[:, None].double()).log_softmax(-1)
    true = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    likely = true[0].detach().exp()
    assert float(likely.max()) > 0.999 and int((likely > 0.9).sum()) > 10
    torch.testing.assert_close(p.double(), log_p.detach().exp(), rtol=2.0**-8 + 1e-4, atol=1e-30)
    grad, grad_entropy = (torch.randn(300, generator=generator, device="cuda") for _ in range(2))
    for some_entropy in (grad_entropy, None):
        total = true[0] @ grad.double()
        total = total if some_entropy is None else total + true[1] @ some_entropy.double()
        (exact,) = torch.autograd.grad(total, logits, retain_graph=True)
        given = (targets, temperature)
        made, over = torch.empty_like(p), p.clone()
        kernels.logits_grad(h, packed, *given, normalizer, entropy, grad, some_entropy, made)
        kernels.stored_logits_grad(over, *given, log_prob, entropy, grad, some_entropy)
        errors = [float((d.double() - exact).norm() / exact.norm()) for d in (made, over)]
        print(f"V {vocabulary}: from logits {errors[0]:.2e}, over probabilities {errors[1]:.2e}")
        assert errors[0] < 3e-3 and errors[1] < 4e-3
        own = [d.double().gather(1, targets[:, None])[:, 0] for d in (over, exact)]
        floor = 1e-4 * (grad.abs() + grad_entropy.abs()).double() / temperature  # what FP32 logits know
        assert bool(((own[0] - own[1]).abs() <= 2.0**-7.9 * own[1].abs() + floor).all())
        again = p.clone()
        kernels.stored_logits_grad(again, *given, log_prob, entropy, grad, some_entropy)
        assert torch.equal(again, over)


def test_a_head_that_stores_some_rows_and_one_that_stores_none(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same log-probabilities and entropies, and gradients apart by roundings to BF16; nothing is left on the device."""
    from lockstep.nn import head as head_module

    rows, hidden, vocabulary = 1000, 512, 32_000
    generator = torch.Generator("cuda").manual_seed(0)
    table = head_module.Table(vocabulary, hidden, flow=bf16_flow(), kernels=kernels).to("cuda")
    with torch.no_grad():
        table.weight.normal_(generator=generator).mul_(0.05)
    table.refresh("head")
    h = torch.randn(rows, hidden, generator=generator, device="cuda").bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (rows,), generator=generator, device="cuda")
    temperature = 0.5 + torch.rand(rows, generator=generator, device="cuda")
    up = [torch.randn(rows, generator=generator, device="cuda") for _ in range(2)]
    monkeypatch.setattr(head_module, "LOGITS_BYTES", 4 * vocabulary * 256)
    torch.autograd.grad(
        table.log_probs(h, targets, temperature), (h, table.weight), up
    )  # libraries make their room
    found = []
    for stored in (0, 640, rows):
        monkeypatch.setattr(head_module, "PROBABILITY_BYTES", 2 * vocabulary * stored)
        with torch.no_grad():
            scored = table.log_probs(h, targets, temperature)
        before = torch.cuda.memory_allocated()
        out = table.log_probs(h, targets, temperature)
        kept = torch.cuda.memory_allocated() - before
        assert 0 <= kept - 2 * vocabulary * stored < 8 << 20
        assert all(torch.equal(a, b) for a, b in zip(out, scored, strict=True))
        grads = torch.autograd.grad(out, (h, table.weight), up, retain_graph=True)
        taken = sum(g.numel() * g.element_size() for g in grads)
        assert torch.cuda.memory_allocated() - before - taken < 8 << 20
        del scored
        found.append((*(o.detach() for o in out), *grads))
        del out, grads
    for other in found[1:]:
        assert torch.equal(other[0], found[0][0]) and torch.equal(other[1], found[0][1])
        for a, b in zip(other[2:], found[0][2:], strict=True):
            assert float((a.double() - b.double()).norm() / b.double().norm()) < 6e-3
