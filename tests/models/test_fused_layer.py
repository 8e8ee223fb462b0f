"""The fused training forward and backward against the plain modules, on a CPU: the same operations in another arrangement, so
the same bits wherever groups of 128 fall alike."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import ConfigError, ContractError
from lockstep.models.decoder import Decoder
from lockstep.models.spec import ModelSpec
from lockstep.nn import head as head_module
from lockstep.nn.device_context import DevicePacked
from lockstep.nn.kv_scales import AmaxCollector, KVScales
from lockstep.nn.sampling_mask import SamplingMask
from lockstep.numerics.flow import Flow, bf16_flow, fp8_flow

LENGTHS = (70, 1, 33)
WHOLE = {
    "qwen2": ModelSpec("qwen2", 131, 256, 384, 2, 4, 2, 64, attention_bias=True),
    "qwen3": ModelSpec("qwen3", 131, 128, 256, 2, 2, 1, 128, qk_norm=True, tie_embeddings=True),
}
"""Widths in whole blocks: gradients of several linears side by side have the groups that each has alone."""
RAGGED = ("llama31", "llama_tied", "qwen2", "qwen3")
FLOWS = {
    "bf16": bf16_flow(),
    "fp8": fp8_flow(),
    "pow2": fp8_flow(scale="pow2"),
    "bf16-wgrad": fp8_flow(wgrad_fp8=False),
    "half": fp8_flow(keep_bf16=frozenset({1})),
}


def decoder_of(toy: SimpleNamespace, spec: ModelSpec, flow: Flow, kernels: Any = None) -> Decoder:
    """With plain modules on the reference, or on a backend that fuses; biases far from zero."""
    if kernels is None:
        return toy.make_decoder(spec, flow)  # type: ignore[no-any-return]
    decoder = Decoder(spec, flow, kernels)
    decoder.load_state_dict(toy.random_weights(spec), strict=True)
    decoder.refresh(1)
    return decoder


def hidden(
    toy: SimpleNamespace, decoder: Decoder, ids: Tensor, scales: KVScales | None = None, **options: Any
) -> Tensor:
    """Final hidden states by either path."""
    if not decoder.kernels.fused:
        return toy.packed_hidden(decoder, ids, LENGTHS, scales)  # type: ignore[no-any-return]
    group = decoder.spec.num_heads // decoder.spec.num_kv_heads
    decoder.model.rope.reserve(max(LENGTHS), torch.device("cpu"))
    context = DevicePacked(toy.positions(LENGTHS), toy.packed_index(LENGTHS, group), scales, **options)
    return decoder.hidden(ids, context)  # type: ignore[arg-type]


def upstream(decoder: Decoder, ids: Tensor) -> Tensor:
    """A gradient for every hidden state."""
    shape = (len(ids), decoder.spec.hidden_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)


def grads_of(
    toy: SimpleNamespace, decoder: Decoder, scales: KVScales | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """(hidden states, gradients of a fixed linear function of them)."""
    ids = toy.random_ids(decoder.spec, LENGTHS)
    out = hidden(toy, decoder, ids, scales)
    out.backward(upstream(decoder, ids))
    return out.detach(), {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor], *, cosine: float) -> None:
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        got = found[name]
        assert got.dtype == torch.float32 and got.shape == want.shape
        if float(want.norm()) < 1e-3:
            continue  # without rotation a key bias changes no softmax at all; its gradient is noise
        alike = float(F.cosine_similarity(got.double().flatten(), want.double().flatten(), 0))
        assert alike > cosine, f"{name}: {alike:.6f}"
        assert abs(float(got.norm() / want.norm()) - 1) < 30 * (1 - cosine), name


@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS.keys())
@pytest.mark.parametrize("spec", WHOLE.values(), ids=WHOLE.keys())
def test_whole_blocks_have_the_bits_of_the_plain_modules(
    toy: SimpleNamespace, fused: SimpleNamespace, spec: ModelSpec, flow: Flow
) -> None:
    plain, plain_grads = grads_of(toy, decoder_of(toy, spec, flow))
    out, grads = grads_of(toy, decoder_of(toy, spec, flow, fused.Kernels()))
    assert torch.equal(out, plain)
    assert grads.keys() == plain_grads.keys()
    for name, expected in plain_grads.items():
        # Sums over tokens run over another stride, in another order.
        close = {"rtol": 1e-4, "atol": 1e-4} if name.endswith("bias") else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(
            grads[name], expected, **close, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS.keys())
@pytest.mark.parametrize("family", RAGGED)
def test_ragged_blocks_have_the_same_forward_and_close_gradients(
    toy: SimpleNamespace, fused: SimpleNamespace, family: str, flow: Flow
) -> None:
    spec = toy.SPECS[family]
    plain, plain_grads = grads_of(toy, decoder_of(toy, spec, flow))
    out, grads = grads_of(toy, decoder_of(toy, spec, flow, fused.Kernels()))
    assert torch.equal(out, plain)
    assert_alike(grads, plain_grads, cosine=0.995 if flow.is_fp8 else 0.999999)


@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS.keys())
@pytest.mark.parametrize("family", RAGGED)
def test_forward_with_gradient_has_the_bits_of_the_one_without(
    toy: SimpleNamespace, fused: SimpleNamespace, family: str, flow: Flow
) -> None:
    decoder = decoder_of(toy, toy.SPECS[family], dataclasses.replace(flow, kv_fp8=True), fused.Kernels())
    ids = toy.random_ids(decoder.spec, LENGTHS)
    scales = tight_scales(toy, decoder.spec, flow, ids)
    with_gradient = hidden(toy, decoder, ids, scales)
    assert with_gradient.requires_grad
    with torch.no_grad():
        assert torch.equal(hidden(toy, decoder, ids, scales), with_gradient)


def tight_scales(toy: SimpleNamespace, spec: ModelSpec, flow: Flow, ids: Tensor) -> KVScales:
    """Under which the largest keys and values saturate."""
    found = toy.calibrate(toy.make_decoder(spec, flow), ids, LENGTHS)
    return KVScales(found.k * 0.5, found.v * 0.5, 1)


@pytest.mark.parametrize("save_fp8", [False, True])
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS.keys())
@pytest.mark.parametrize("family", ["whole", "llama31", "qwen3"])
def test_checkpointing_changes_no_bit(
    toy: SimpleNamespace, fused: SimpleNamespace, family: str, flow: Flow, save_fp8: bool
) -> None:
    spec = WHOLE["qwen2"] if family == "whole" else toy.SPECS[family]
    results, attended = [], []
    for checkpointing in (False, True):
        kernels = fused.Kernels()
        decoder = decoder_of(toy, spec, dataclasses.replace(flow, kv_fp8=True), kernels)
        decoder.checkpointing, decoder.save_fp8 = checkpointing, save_fp8
        scales = tight_scales(toy, spec, flow, toy.random_ids(spec, LENGTHS))
        results.append(grads_of(toy, decoder, scales))
        attended.append((kernels.calls["attend"], kernels.calls["watch_kv"]))
    assert torch.equal(results[0][0], results[1][0])
    for name, grad in results[0][1].items():
        assert torch.equal(grad, results[1][1][name]), name
    assert attended == [(2, 2), (4, 2)]  # keys and values are watched once


def test_gate_and_up_kept_in_fp8_change_gradients_a_little(
    toy: SimpleNamespace, fused: SimpleNamespace
) -> None:
    spec, found = WHOLE["qwen2"], []
    for save_fp8 in (False, True):
        decoder = decoder_of(toy, spec, fp8_flow(), fused.Kernels())
        decoder.save_fp8 = save_fp8
        found.append(grads_of(toy, decoder))
    assert torch.equal(found[0][0], found[1][0])
    name = "model.layers.0.mlp.gate_proj.weight"
    assert not torch.equal(found[0][1][name], found[1][1][name])
    assert_alike(found[1][1], found[0][1], cosine=0.997)


@pytest.mark.parametrize("flow", [bf16_flow(kv_fp8=True), fp8_flow(kv_fp8=True)], ids=["bf16", "fp8"])
def test_saturated_keys_and_values_get_no_gradient(
    toy: SimpleNamespace, fused: SimpleNamespace, flow: Flow
) -> None:
    spec = WHOLE["qwen2"]
    scales = tight_scales(toy, spec, flow, toy.random_ids(spec, LENGTHS))
    plain, plain_grads = grads_of(toy, decoder_of(toy, spec, flow), scales)
    out, grads = grads_of(toy, decoder_of(toy, spec, flow, fused.Kernels()), scales)
    assert torch.equal(out, plain)
    for name, expected in plain_grads.items():
        if not name.endswith("bias"):
            assert torch.equal(grads[name], expected), name
    roomy = KVScales(scales.k * 4, scales.v * 4, 1)
    other = grads_of(toy, decoder_of(toy, spec, flow, fused.Kernels()), roomy)[1]
    assert not torch.equal(
        other["model.layers.0.self_attn.v_proj.weight"], grads["model.layers.0.self_attn.v_proj.weight"]
    )


@pytest.mark.parametrize("quantize", [True, False])
def test_maxima_and_saturation_are_those_of_the_plain_context(
    toy: SimpleNamespace, fused: SimpleNamespace, quantize: bool
) -> None:
    spec, flow = WHOLE["qwen3"], fp8_flow(kv_fp8=quantize)
    ids = toy.random_ids(spec, LENGTHS)
    scales = tight_scales(toy, spec, flow, ids)
    seen = []
    for kernels in (None, fused.Kernels()):
        collector = AmaxCollector(spec.num_layers, spec.num_kv_heads)
        decoder = decoder_of(toy, spec, flow, kernels)
        if kernels is None:
            context = toy.packed_context(decoder, LENGTHS, scales, collector)
            context.quantize = quantize
            out = decoder.hidden(ids, context)
        else:
            out = hidden(toy, decoder, ids, scales, collector=collector, quantize=quantize)
        out.sum().backward()
        seen.append((out, collector.read()))
    (plain, expected), (out, found) = seen
    assert torch.equal(out, plain)
    assert torch.equal(found.k, expected.k) and torch.equal(found.v, expected.v)
    assert (found.saturated, found.elements) == (expected.saturated, expected.elements)
    assert found.saturated > 0


def test_case_17_a_non_finite_key_is_refused_with_its_layer(
    toy: SimpleNamespace, fused: SimpleNamespace
) -> None:
    spec = WHOLE["qwen3"]
    decoder = decoder_of(toy, spec, fp8_flow(kv_fp8=True), fused.Kernels())
    ids = toy.random_ids(spec, LENGTHS)
    scales = tight_scales(toy, spec, decoder.flow, ids)
    bias = torch.zeros(spec.num_kv_heads * spec.head_dim)
    bias[3] = torch.inf
    layer: Any = decoder.model.layers[1]
    layer.self_attn.v_proj.working_bias = bias.bfloat16()
    with pytest.raises(ContractError, match="layer 1: non-finite value in KV head 0"):
        hidden(toy, decoder, ids, scales)


def loss(toy: SimpleNamespace, decoder: Decoder, mask: SamplingMask | None = None, seed: int = 0) -> Tensor:
    """A log-probability and an entropy of every row, weighted."""
    ids, targets = toy.random_ids(decoder.spec, LENGTHS, seed), toy.random_ids(decoder.spec, LENGTHS, 1)
    generator = torch.Generator().manual_seed(3)
    temperature = 0.6 + torch.rand(len(ids), generator=generator)
    weights = torch.randn(len(ids), generator=generator)
    log_p, entropy = decoder.head.log_probs(hidden(toy, decoder, ids), targets, temperature, mask)
    return log_p @ weights + 0.3 * entropy.sum()


def some_kept(toy: SimpleNamespace, spec: ModelSpec) -> SamplingMask:
    """Every third token was drawn from a few ids, its own among them."""
    targets = toy.random_ids(spec, LENGTHS, 1)
    ids = [torch.tensor(sorted({int(t), 3, 50, 90}), dtype=torch.int32) for t in targets]
    return SamplingMask.of([None if i % 3 else (kept, 0.5) for i, kept in enumerate(ids)])


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "truncated"])
@pytest.mark.parametrize("flow", [bf16_flow(), fp8_flow()], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_whole_step_from_ids_to_gradients(
    toy: SimpleNamespace,
    fused: SimpleNamespace,
    family: str,
    flow: Flow,
    masked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Untied and tied heads; chunks smaller than the batch; log-probabilities of equal bits. The head's gradient is rounded to
    BF16 on its way."""
    spec = WHOLE[family]
    mask = some_kept(toy, spec) if masked else None
    plain = decoder_of(toy, spec, flow)
    expected = loss(toy, plain, mask)
    expected.backward()
    for chunk in (1024, 16):
        monkeypatch.setattr(head_module, "chunk_rows", lambda kernels, vocabulary, chunk=chunk: chunk)
        decoder = decoder_of(toy, spec, flow, fused.Kernels())
        found = loss(toy, decoder, mask)
        assert torch.equal(found, expected)
        found.backward()
        grads, wanted = ({n: p.grad for n, p in d.named_parameters()} for d in (decoder, plain))
        assert_alike(grads, wanted, cosine=0.995 if flow.is_fp8 else 0.9998)


def test_micro_batches_accumulate(toy: SimpleNamespace, fused: SimpleNamespace) -> None:
    spec = WHOLE["qwen2"]
    decoder = decoder_of(toy, spec, fp8_flow(), fused.Kernels())
    apart = []
    for seed in range(3):
        decoder.zero_grad(set_to_none=True)
        loss(toy, decoder, seed=seed).backward()
        apart.append({n: p.grad for n, p in decoder.named_parameters()})
    decoder.zero_grad(set_to_none=True)
    for seed in range(3):
        loss(toy, decoder, seed=seed).backward()
    for name, parameter in decoder.named_parameters():
        expected = apart[0][name] + apart[1][name] + apart[2][name]
        assert torch.equal(parameter.grad, expected), name


def test_frozen_weights_get_no_gradient_and_change_no_other(
    toy: SimpleNamespace, fused: SimpleNamespace
) -> None:
    spec = WHOLE["qwen2"]
    whole = grads_of(toy, decoder_of(toy, spec, fp8_flow(), fused.Kernels()))[1]
    decoder = decoder_of(toy, spec, fp8_flow(), fused.Kernels())
    frozen = {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "model.norm.weight",
    }
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(name not in frozen)
    rest = grads_of(toy, decoder)[1]
    assert rest.keys() == whole.keys() - frozen
    for name, grad in rest.items():
        assert torch.equal(grad, whole[name]), name


def test_nothing_is_kept_after_backward_and_without_it(toy: SimpleNamespace, fused: SimpleNamespace) -> None:
    """No cycle keeps a layer's tensors alive, whether its backward pass ran or not."""
    import gc
    import weakref

    decoder = decoder_of(toy, WHOLE["qwen3"], fp8_flow(), fused.Kernels())
    kept: list[weakref.ref[Tensor]] = []
    honest = decoder.kernels.attend  # type: ignore[attr-defined]

    def attend(*args: Any, **options: Any) -> Any:
        out = honest(*args, **options)
        kept.append(weakref.ref(out[0]))
        return out

    decoder.kernels.attend = attend  # type: ignore[attr-defined]
    gc.collect()
    gc.disable()
    try:
        ids = toy.random_ids(decoder.spec, LENGTHS)
        out = hidden(toy, decoder, ids)
        assert all(ref() is not None for ref in kept) and len(kept) == 2
        out.backward(upstream(decoder, ids))
        assert all(ref() is None for ref in kept)
        out = hidden(toy, decoder, ids)
        del out
        assert all(ref() is None for ref in kept) and len(kept) == 4
    finally:
        gc.enable()


def test_a_second_backward_is_refused(toy: SimpleNamespace, fused: SimpleNamespace) -> None:
    decoder = decoder_of(toy, WHOLE["qwen3"], bf16_flow(), fused.Kernels())
    out = hidden(toy, decoder, toy.random_ids(decoder.spec, LENGTHS)).float().sum()
    out.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="there is no second one"):
        out.backward()


def test_what_has_no_gradient_is_refused(toy: SimpleNamespace, fused: SimpleNamespace) -> None:
    moe = decoder_of(toy, toy.SPECS["qwen3_moe"], bf16_flow(), fused.Kernels())
    attention = decoder_of(toy, WHOLE["qwen3"], fp8_flow(kv_fp8=True, attention_fp8=True), fused.Kernels())
    for decoder, message in ((moe, "experts have no gradient"), (attention, "FP8 queries have no gradient")):
        with pytest.raises(ConfigError, match=message):
            hidden(toy, decoder, toy.random_ids(decoder.spec, LENGTHS))
