"""Gradients of the whole decoder against autograd over a plain rewriting of it.

The rewriting (`Plain`) is ordinary torch in FP32, with one hook: what happens to both operands of a decoder linear. As it
stands it is the BF16 flow without rounding; with a straight-through quantizer it is the FP8 forward with exact gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.models.decoder import Decoder
from lockstep.models.frequencies import inverse_frequencies
from lockstep.models.spec import ModelSpec
from lockstep.numerics.flow import Flow, bf16_flow, fp8_flow
from lockstep.numerics.formats import row_groups, square_blocks
from lockstep.numerics.quantize import quantize

LENGTHS = (70, 1, 33)
WIDE = ModelSpec("qwen2", 131, 256, 384, 2, 4, 2, 64, attention_bias=True)
Hook = Callable[[Tensor, Tensor], Tensor]


def straight_through(x: Tensor, value: Tensor) -> Tensor:
    """`value` forward, the identity backward."""
    return x + (value - x).detach()


def fp8_product(x: Tensor, w: Tensor) -> Tensor:
    """x w^T over quantized values, without rounding."""
    x_values = quantize(x.detach(), row_groups("fp32")).dequantize()
    w_values = quantize(w.detach(), square_blocks("fp32")).dequantize()
    return F.linear(straight_through(x, x_values), straight_through(w, w_values))


@dataclasses.dataclass
class Plain:
    """The decoder in ordinary torch, FP32."""

    spec: ModelSpec
    weights: dict[str, Tensor]
    product: Hook = F.linear

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = self.product(x, self.weights[name + ".weight"])
        bias = self.weights.get(name + ".bias")
        return y if bias is None else y + bias

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[name + ".weight"]
        return F.rms_norm(x, (x.shape[-1],), weight, self.spec.rms_norm_eps)

    def rotate(self, x: Tensor) -> Tensor:
        angle = torch.arange(len(x)).double()[:, None] * inverse_frequencies(
            self.spec.rope, self.spec.head_dim
        )
        cos, sin = (f.float().repeat(1, 2)[:, None] for f in (angle.cos(), angle.sin()))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def attention(self, x: Tensor, name: str) -> Tensor:
        shape = (len(x), -1, self.spec.head_dim)
        q, k, v = (self.linear(x, f"{name}.{p}_proj").view(shape) for p in "qkv")
        if self.spec.qk_norm:
            q, k = self.norm(q, name + ".q_norm"), self.norm(k, name + ".k_norm")
        q, k = self.rotate(q), self.rotate(k)
        group = self.spec.num_heads // self.spec.num_kv_heads
        q, k, v = q.transpose(0, 1), *(y.repeat_interleave(group, 1).transpose(0, 1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.linear(out.transpose(0, 1).flatten(1), name + ".o_proj")

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = (self.linear(x, f"{name}.{p}_proj") for p in ("gate", "up"))
        return self.linear(F.silu(gate) * up, name + ".down_proj")

    def moe(self, x: Tensor, name: str) -> Tensor:
        """Every expert computes every row; all but the best get a weight of zero."""
        moe = self.spec.moe
        assert moe is not None and moe.norm_topk_prob
        scores = F.linear(x, self.weights[name + ".gate.weight"]).softmax(-1)
        best = scores.topk(moe.experts_per_token)
        weight = torch.zeros_like(scores).scatter(
            1, best.indices, best.values / best.values.sum(1, keepdim=True)
        )
        outputs = [self.mlp(x, f"{name}.experts.{i}") for i in range(moe.num_experts)]
        return sum(weight[:, i, None] * y for i, y in enumerate(outputs))

    def hidden(self, ids: Tensor) -> Tensor:
        """Of one sequence."""
        h = self.weights["model.embed_tokens.weight"][ids]
        for i in range(self.spec.num_layers):
            name = f"model.layers.{i}"
            h = h + self.attention(self.norm(h, name + ".input_layernorm"), name + ".self_attn")
            x = self.norm(h, name + ".post_attention_layernorm")
            h = h + (self.moe if self.spec.is_sparse(i) else self.mlp)(x, name + ".mlp")
        return self.norm(h, "model.norm")

    def log_probs(
        self, ids: Tensor, lengths: Sequence[int], targets: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(log-probability, entropy) of a target after every row."""
        hidden = torch.cat([self.hidden(part) for part in ids.split(list(lengths))])
        name = "model.embed_tokens.weight" if self.spec.tie_embeddings else "lm_head.weight"
        log_p = (hidden @ self.weights[name].t() / temperature[:, None]).log_softmax(-1)
        return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def float32(flow: Flow) -> Flow:
    return dataclasses.replace(flow, activation=torch.float32)


@dataclasses.dataclass
class Result:
    log_p: Tensor
    grads: dict[str, Tensor]


def inputs(toy: SimpleNamespace, spec: ModelSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, targets, temperatures other than one, and the gradient that arrives at each log-probability."""
    ids, targets = toy.random_ids(spec, LENGTHS), toy.random_ids(spec, LENGTHS, 1)
    generator = torch.Generator().manual_seed(3)
    temperature = 0.6 + torch.rand(len(ids), generator=generator)
    return ids, targets, temperature, torch.randn(len(ids), generator=generator)


def lockstep(toy: SimpleNamespace, decoder: Decoder, entropy: float = 0.3) -> Result:
    ids, targets, temperature, grad = inputs(toy, decoder.spec)
    hidden = toy.packed_hidden(decoder, ids, LENGTHS)
    log_p, h = decoder.head.log_probs(hidden, targets, temperature)
    (log_p @ grad + entropy * h.sum()).backward()
    return Result(log_p.detach(), {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None})


def plain(
    toy: SimpleNamespace,
    spec: ModelSpec,
    weights: dict[str, Tensor],
    product: Hook = F.linear,
    entropy: float = 0.3,
) -> Result:
    ids, targets, temperature, grad = inputs(toy, spec)
    leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
    log_p, h = Plain(spec, leaves, product).log_probs(ids, LENGTHS, targets, temperature)
    (log_p @ grad + entropy * h.sum()).backward()
    return Result(log_p.detach(), {n: w.grad for n, w in leaves.items() if w.grad is not None})


def assert_close(ours: Result, truth: Result, *, cosine: float, norm: float) -> None:
    assert ours.grads.keys() == truth.grads.keys()
    for name, expected in truth.grads.items():
        got = ours.grads[name]
        assert got.dtype == torch.float32 and got.shape == expected.shape
        if name.endswith("k_proj.bias") and float(expected.norm()) < 1e-3:
            continue  # without rotation a key bias changes no softmax at all; its gradient is noise
        alike = float(F.cosine_similarity(got.double().flatten(), expected.double().flatten(), 0))
        assert alike > cosine, f"{name}: cosine {alike:.6f}"
        ratio = float(got.norm() / expected.norm())
        assert abs(ratio - 1) < norm, f"{name}: norm ratio {ratio:.4f}"


@pytest.mark.parametrize("exact", [False, True], ids=["reference", "exact"])
@pytest.mark.parametrize("family", ["llama31", "llama_tied", "qwen2", "qwen3", "qwen3_moe"])
def test_float32_flow_has_the_gradients_of_autograd(toy: SimpleNamespace, family: str, exact: bool) -> None:
    spec, weights = toy.SPECS[family], toy.random_weights(toy.SPECS[family])
    ours = lockstep(toy, toy.make_decoder(spec, float32(bf16_flow()), exact=exact, weights=weights))
    truth = plain(toy, spec, weights)
    torch.testing.assert_close(ours.log_p, truth.log_p, rtol=5e-3, atol=2e-2)
    assert_close(ours, truth, cosine=0.99999, norm=2e-3)


@pytest.mark.parametrize("family", ["llama31", "qwen2", "qwen3"])
def test_bf16_flow_has_the_gradients_of_autograd(toy: SimpleNamespace, family: str) -> None:
    spec, weights = toy.SPECS[family], toy.random_weights(toy.SPECS[family])
    ours = lockstep(toy, toy.make_decoder(spec, bf16_flow(), weights=weights))
    assert_close(ours, plain(toy, spec, weights), cosine=0.999, norm=0.015)


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
@pytest.mark.parametrize("exact", [False, True], ids=["reference", "exact"])
def test_fp8_flow_is_close_to_exact_gradients_of_its_own_forward(
    toy: SimpleNamespace, exact: bool, wgrad: str
) -> None:
    weights = toy.random_weights(WIDE)
    flow = float32(fp8_flow(wgrad_fp8=wgrad == "fp8"))
    ours = lockstep(toy, toy.make_decoder(WIDE, flow, exact=exact, weights=weights))
    truth = plain(toy, WIDE, weights, fp8_product)
    torch.testing.assert_close(ours.log_p, truth.log_p, rtol=0.05, atol=0.15)
    assert_close(ours, truth, cosine=0.993, norm=0.025)
    # The quantized forward is another function: against unquantized weights the same gradients are further off.
    other = plain(toy, WIDE, weights)
    name = "model.layers.0.mlp.down_proj.weight"
    close, far = (
        F.cosine_similarity(ours.grads[name].flatten(), r.grads[name].flatten(), 0) for r in (truth, other)
    )
    assert close > far


def test_fp8_flow_with_bf16_activations(toy: SimpleNamespace) -> None:
    weights = toy.random_weights(WIDE)
    ours = lockstep(toy, toy.make_decoder(WIDE, fp8_flow(), weights=weights))
    assert_close(ours, plain(toy, WIDE, weights, fp8_product), cosine=0.985, norm=0.03)


def test_layers_kept_in_bf16_have_no_codes_and_exact_gradients(toy: SimpleNamespace) -> None:
    weights = toy.random_weights(WIDE)
    decoder = toy.make_decoder(WIDE, float32(fp8_flow(keep_bf16=frozenset({0, 1}))), weights=weights)
    assert all(module.working.codes is None for _, module in decoder.working())
    assert_close(lockstep(toy, decoder), plain(toy, WIDE, weights), cosine=0.99999, norm=2e-3)
    half = toy.make_decoder(WIDE, fp8_flow(keep_bf16=frozenset({1})), weights=weights)
    coded = {name for name, module in half.working() if module.working.codes is not None}
    assert coded == {n for n in weights if n.startswith("model.layers.0.") and n.endswith("_proj.weight")}


def test_bf16_weight_gradient_is_the_better_one(toy: SimpleNamespace) -> None:
    """The last linear's output gradient is the same in both flows; only its own weight gradient is quantized or not."""
    weights, name = toy.random_weights(WIDE), "model.layers.1.mlp.down_proj.weight"
    errors = {}
    truth = plain(toy, WIDE, weights, fp8_product).grads[name]
    for wgrad_fp8 in (True, False):
        decoder = toy.make_decoder(WIDE, float32(fp8_flow(wgrad_fp8=wgrad_fp8)), weights=weights)
        got = lockstep(toy, decoder).grads[name]
        errors[wgrad_fp8] = float((got - truth).norm() / truth.norm())
    assert errors[False] < errors[True] < 0.1


def test_case_68_a_tied_head_gets_both_gradients(toy: SimpleNamespace) -> None:
    spec, name = toy.SPECS["llama_tied"], "model.embed_tokens.weight"
    weights = toy.random_weights(spec)
    decoder = toy.make_decoder(spec, float32(bf16_flow()), weights=weights)
    assert decoder.head is decoder.model.embed_tokens
    assert [n for n, _ in decoder.named_parameters()] == list(weights)
    tied = lockstep(toy, decoder).grads[name]
    torch.testing.assert_close(tied, plain(toy, spec, weights).grads[name], rtol=0.02, atol=0.02)
    # The same numbers in an untied model: the two gradients that have to add up.
    untied = dataclasses.replace(spec, tie_embeddings=False)
    both = {**weights, "lm_head.weight": weights[name].clone()}
    apart = lockstep(toy, toy.make_decoder(untied, float32(bf16_flow()), weights=both)).grads
    assert float(apart[name].norm()) > 0 and float(apart["lm_head.weight"].norm()) > 0
    torch.testing.assert_close(tied, apart[name] + apart["lm_head.weight"])
    ids, *_ = inputs(toy, spec)
    unread = torch.ones(spec.vocab_size, dtype=torch.bool)
    unread[ids] = False
    assert bool(unread.any()) and not bool(apart[name][unread].any())


def test_frozen_weights_get_no_gradient_and_change_no_other(toy: SimpleNamespace) -> None:
    weights = toy.random_weights(WIDE)
    whole = lockstep(toy, toy.make_decoder(WIDE, fp8_flow(), weights=weights)).grads
    decoder = toy.make_decoder(WIDE, fp8_flow(), weights=weights)
    frozen = "model.layers.1.mlp.down_proj.weight"
    dict(decoder.named_parameters())[frozen].requires_grad_(False)
    rest: dict[str, Any] = lockstep(toy, decoder).grads
    assert frozen not in rest and rest.keys() == whole.keys() - {frozen}
    for name, grad in rest.items():
        assert torch.equal(grad, whole[name]), name
