"""What the training benchmarks and the memory plan say of a backend that fuses, on the one made of the reference's operations."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

from lockstep.bench import gradients, training, training_layer
from lockstep.bench.baseline import Baseline, saved_bytes_a_token
from lockstep.bench.baseline_ops import FusedOperations, LibraryAttention
from lockstep.bench.corpus import to_imitate
from lockstep.bench.sides import Ours, Sides, Theirs, cosine, random_batch, random_masters
from lockstep.models.build import sharing_decoder
from lockstep.models.fused_backward import Saved
from lockstep.models.fused_layer import Step
from lockstep.models.spec import ModelSpec
from lockstep.nn.packed import packed_context
from lockstep.numerics.flow import Flow, bf16_flow, fp8_flow
from lockstep.numerics.quantize import Quantized
from lockstep.trainer.footprint import Keeping, layer_bytes_a_token

SPEC = ModelSpec("qwen3", 131, 128, 256, 1, 2, 1, 128, qk_norm=True, tie_embeddings=True)
RAGGED = ModelSpec("llama", 131, 96, 200, 1, 3, 1, 32)
LENGTHS = [70, 33]


def sides_of(kernels: object, spec: ModelSpec, flow: Flow, *, lean: bool = False) -> Sides:
    decoder = random_masters(spec, flow, kernels, std=0.05)  # type: ignore[arg-type]
    twin = sharing_decoder(decoder, bf16_flow())
    for each in (decoder, twin):
        each.model.rope.reserve(max(LENGTHS), torch.device("cpu"))
    twin.refresh(1)
    operations = FusedOperations(
        kernels,  # type: ignore[arg-type]
        LibraryAttention("math", SDPBackend.MATH, batched=False),
        sum_in_fp32=False,
    )
    return Sides(Ours(decoder, None), Theirs(Baseline(twin, operations, lean=lean)), "")


@pytest.mark.parametrize("lean", [False, True])
def test_the_baseline_on_fused_kernels_is_the_decoders_bf16_flow(fused: SimpleNamespace, lean: bool) -> None:
    sides = sides_of(fused.Kernels(), SPEC, bf16_flow(), lean=lean)
    found = training.compare(sides, random_batch(sides.ours.decoder, LENGTHS))
    assert found.difference < 0.01 and found.worst > 0.999 and found.whole > 0.999


def test_one_layer_of_both_sides(fused: SimpleNamespace) -> None:
    sides = sides_of(fused.Kernels(), SPEC, fp8_flow())
    layers, parameters = training_layer.layers_of(sides, random_batch(sides.ours.decoder, LENGTHS))
    generator = torch.Generator().manual_seed(0)
    h, delta, *grads = (torch.randn(103, 128, generator=generator).bfloat16() for _ in range(4))
    pair = (grads[0], grads[1])
    found = {
        name: training_layer.gradients(layer, (h, delta), pair, parameters) for name, layer in layers.items()
    }
    assert 0.99 < cosine(found["fp8"], found["bf16"]) < 1.0
    assert len(found["fp8"]) == 2 + len(parameters)
    times = training_layer._timed(layers["fp8"], (h, delta), pair, parameters)
    assert set(times) == {"forward", "backward"} and all(p.grad is None for p in parameters)


def test_the_linears_of_a_layer_are_timed_with_what_fp8_adds(fused: SimpleNamespace) -> None:
    """A clock that shows 1 ms for every call: twelve products a side, and more kernels than BF16 runs, four of them along
    tokens (two of norms, of attention's output and of SwiGLU's); in separate passes four quantizations each of x, of dy and of
    x along tokens."""
    kernels = fused.Kernels()
    sides = sides_of(kernels, SPEC, fp8_flow())
    h, delta, a, b = (torch.randn(103, 128).bfloat16() for _ in range(4))

    def timer(call: object) -> float:
        call()  # type: ignore[operator]
        return 1.0

    with pytest.MonkeyPatch.context() as patch:
        real = torch.mm
        patch.setattr(torch, "mm", lambda x, y, out_dtype=None: real(x, y))  # the CPU's has no out_dtype
        found = training_layer.time_linears(sides, (h, delta), (a, b), timer)
    assert (found.fp8_products, found.bf16_products, found.separate) == (12.0, 12.0, 12.0)
    assert found.added == (2 + 1 + 1 + 3 + 1 + 2 + 1 + 1) - (2 + 1 + 1)


def test_layers_alone_turn_a_gradient_less_than_the_flow_does(fused: SimpleNamespace) -> None:
    sides = sides_of(fused.Kernels(), replace(SPEC, num_layers=3), fp8_flow())
    ours, theirs = sides.ours.decoder, sides.theirs.baseline.decoder
    texts = to_imitate([tuple(range(i, i + 40)) for i in (3, 50)])
    alone = gradients.layers_alone(ours, theirs, texts)
    found = [gradients.gradient(decoder, texts)[1] for decoder in (ours, theirs)]
    flow = training.layer_cosines(found[0], found[1])
    assert set(alone) == {0, 1, 2} and 0.99 < min(alone.values()) < 1.0
    assert min(flow.values()) < min(alone.values())
    same = gradients.layers_alone(theirs, theirs, texts)
    assert list(same.values()) == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("save_fp8", [False, True])
@pytest.mark.parametrize("flow", [bf16_flow(), fp8_flow()], ids=["bf16", "fp8"])
@pytest.mark.parametrize("spec", [SPEC, RAGGED], ids=["whole", "ragged"])
def test_the_plan_counts_what_a_layer_keeps(
    fused: SimpleNamespace, spec: ModelSpec, flow: Flow, save_fp8: bool
) -> None:
    sides = sides_of(fused.Kernels(), spec, flow)
    decoder = sides.ours.decoder
    batch = random_batch(decoder, LENGTHS)
    context = packed_context(batch.micro.positions_T, batch.micro.index, decoder.kernels)
    decoder.save_fp8 = save_fp8
    step = Step.of(decoder, 0, context)  # type: ignore[arg-type]
    with torch.no_grad():
        embedded = decoder.model.embed_tokens(batch.micro.ids_T)
        saved = step.again(embedded)
    expected = layer_bytes_a_token(spec, flow, 0, Keeping(save_fp8=save_fp8))
    assert kept_bytes(saved) == expected * batch.rows


def kept_bytes(saved: Saved) -> int:
    tensors = []
    for value in vars(saved).values():
        tensors += [value.codes, value.scale] if isinstance(value, Quantized) else [value]
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@pytest.mark.parametrize("lean", [False, True])
def test_the_baseline_keeps_what_is_predicted(fused: SimpleNamespace, lean: bool) -> None:
    sides = sides_of(fused.Kernels(), SPEC, fp8_flow(), lean=lean)
    batch = random_batch(sides.ours.decoder, LENGTHS)
    layer = sides.theirs.baseline.layers[0]
    h, delta = (torch.randn(batch.rows, 128).bfloat16() for _ in range(2))
    _, _, kept, state = layer.forward(h, delta, batch.micro.positions_T, batch.packing, keep=True)
    assert kept is not None
    q, k, _ = state[1]  # attention's own: q, k; v lies in qkv, the output is `out`, and a log-sum-exp a head
    tensors = [t for t in (*kept.tensors, q, k) if t is not None]
    lse = 4 * SPEC.num_heads * batch.rows
    total = sum(t.numel() * t.element_size() for t in tensors) + lse
    assert total == saved_bytes_a_token(SPEC, lean=lean) * batch.rows
