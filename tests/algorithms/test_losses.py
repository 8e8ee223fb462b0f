"""Losses and gradients against the written formulas, detachment, additivity and metrics."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from lockstep.algorithms import (
    AlgorithmName,
    AlgorithmSpec,
    LossInput,
    Recipe,
    merge_metrics,
    policy_loss,
    resolve,
    token_coefficients,
)

NAMES = get_args(AlgorithmName)
LENGTHS = torch.tensor([4, 7, 1, 5])
SAMPLE = torch.repeat_interleave(torch.arange(4), LENGTHS)


def recipe_of(name: AlgorithmName, *, extras: bool = False) -> Recipe:
    """The algorithm's recipe; with a GSPO bound wide enough that some sequences are inside it."""
    spec = (
        AlgorithmSpec(name=name, clip_low=0.05, clip_high=0.04)
        if name == "gspo"
        else AlgorithmSpec(name=name)
    )
    spec = dataclasses.replace(spec, kl_coef=0.1, entropy_coef=0.02) if extras else spec
    return resolve(spec)


def make_inputs(recipe: Recipe, *, seed: int = 0, spread: float = 0.5) -> LossInput:
    """A float64 mini-batch of four samples, both signs of advantage, ratios on both sides of the bounds."""
    rng = torch.Generator().manual_seed(seed)
    tokens = len(SAMPLE)

    def normal() -> Tensor:
        return torch.randn(tokens, generator=rng, dtype=torch.float64)

    logp = -normal().abs() - 0.1
    advantage = torch.tensor([1.3, -0.7, 0.4, -1.0], dtype=torch.float64)
    coef = token_coefficients(LENGTHS, recipe.denominator, max_tokens=16)
    return LossInput(
        logp_N=logp.requires_grad_(),
        old_logp_N=logp.detach() + spread * normal(),
        advantage_N=advantage[SAMPLE],
        sample_N=SAMPLE,
        coef_N=coef[SAMPLE],
        weight_N=normal().abs(),
        entropy_N=normal().abs().requires_grad_(),
        ref_logp_N=logp.detach() + 0.3 * normal(),
    )


def cut(inputs: LossInput, tokens: slice) -> LossInput:
    """The micro-batch of `tokens`, its samples renumbered from 0."""
    part = {
        field.name: value[tokens] if (value := getattr(inputs, field.name)) is not None else None
        for field in dataclasses.fields(inputs)
        if field.name.endswith("_N")
    }
    part["sample_N"] = part["sample_N"] - part["sample_N"].min()
    return LossInput(**part)


def written_formula(inputs: LossInput, recipe: Recipe) -> Tensor:
    """The losses as docs/algorithms.md writes them, token by token, gradients left to autograd.

    For GSPO it is eq. 5 itself: the gradient runs through the sequence ratio.
    """
    assert inputs.weight_N is not None and inputs.ref_logp_N is not None and inputs.entropy_N is not None
    low, high = 1 - recipe.clip_low, 1 + recipe.clip_high
    total = torch.zeros((), dtype=torch.float64)
    for sample in inputs.sample_N.unique():
        rows = torch.nonzero(inputs.sample_N == sample)[:, 0]
        ratios = torch.exp(inputs.logp_N[rows] - inputs.old_logp_N[rows])
        sequence_ratio = torch.exp((inputs.logp_N[rows] - inputs.old_logp_N[rows]).mean())
        for row, ratio in zip(rows, ratios, strict=True):
            advantage, logp = inputs.advantage_N[row], inputs.logp_N[row]
            used = sequence_ratio if recipe.loss == "sequence_clip" else ratio
            if recipe.loss in ("clip", "sequence_clip"):
                term = -torch.min(used * advantage, torch.clamp(used, low, high) * advantage)
            elif recipe.loss == "cispo":
                term = -min(max(float(ratio.detach()), low), high) * advantage * logp
            else:
                term = -advantage * logp
            gap = inputs.ref_logp_N[row] - logp
            term = inputs.weight_N[row] * term + recipe.kl_coef * (torch.exp(gap) - gap - 1)
            total = total + inputs.coef_N[row] * (term - recipe.entropy_coef * inputs.entropy_N[row])
    return total


def gradient(loss: Tensor, inputs: LossInput) -> Tensor:
    return torch.autograd.grad(loss, inputs.logp_N, retain_graph=True)[0]


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_are_those_of_the_written_formula(name: AlgorithmName, extras: bool) -> None:
    recipe = recipe_of(name, extras=extras)
    for seed in range(3):
        inputs = make_inputs(recipe, seed=seed)
        if recipe.loss == "sequence_clip":  # one weight a sample, or token-wise flow is not eq. 5
            inputs = dataclasses.replace(
                inputs, weight_N=(torch.tensor([0.5, 1.0, 2.0, 1.5]).double())[SAMPLE]
            )
        output, expected = policy_loss(inputs, recipe).loss, written_formula(inputs, recipe)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(
            gradient(output, inputs), gradient(expected, inputs), rtol=1e-12, atol=1e-14
        )


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("cispo", "gspo")])
def test_gradient_is_that_of_finite_differences(name: AlgorithmName) -> None:
    """For losses whose value has the gradient that is used (no stop-gradient)."""
    recipe = recipe_of(name, extras=True)
    inputs = make_inputs(recipe)

    def loss_of(logp: Tensor, entropy: Tensor) -> Tensor:
        return policy_loss(dataclasses.replace(inputs, logp_N=logp, entropy_N=entropy), recipe).loss

    assert inputs.entropy_N is not None
    assert torch.autograd.gradcheck(loss_of, (inputs.logp_N, inputs.entropy_N), atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_add_up_to_the_mini_batch(name: AlgorithmName) -> None:
    recipe = recipe_of(name, extras=True)
    inputs = make_inputs(recipe)
    whole = policy_loss(inputs, recipe)
    bounds = [0, 4, 12, 17] if recipe.needs_whole_samples else [0, 1, 6, 11, 17]
    parts = [policy_loss(cut(inputs, slice(a, b)), recipe) for a, b in itertools.pairwise(bounds)]
    total = torch.stack([part.loss for part in parts]).sum()
    torch.testing.assert_close(total, whole.loss, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(gradient(total, inputs), gradient(whole.loss, inputs), rtol=1e-14, atol=1e-16)
    merged = merge_metrics(part.metrics for part in parts)
    assert set(merged) == set(whole.metrics)
    for key, metric in whole.metrics.items():
        assert merged[key].result() == pytest.approx(metric.result(), rel=1e-12)
        assert float(merged[key].weight) == float(metric.weight) and (
            metric.weight == 17 or metric.how == "share"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_equal_log_probabilities_give_a_ratio_of_exactly_one(name: AlgorithmName, dtype: torch.dtype) -> None:
    recipe = recipe_of(name)
    base = make_inputs(recipe)
    logp = base.logp_N.detach().to(dtype).requires_grad_()
    inputs = dataclasses.replace(
        base, logp_N=logp, old_logp_N=logp, advantage_N=base.advantage_N.to(dtype), weight_N=None
    )
    output = policy_loss(inputs, recipe)
    assert output.metrics["policy/ratio_mean"].result() == 1
    assert output.metrics["policy/ratio_max"].result() == 1
    assert output.metrics["policy/approx_kl"].result() == 0
    assert all(metric.result() == 0 for key, metric in output.metrics.items() if "clip_fraction" in key)
    # On policy every algorithm has the gradient of REINFORCE.
    expected = -inputs.coef_N * inputs.advantage_N
    torch.testing.assert_close(gradient(output.loss, inputs), expected.to(dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_case_39_only_the_trained_policy_and_its_entropy_have_gradients(name: AlgorithmName) -> None:
    recipe = recipe_of(name, extras=True)
    plain = make_inputs(recipe)
    assert plain.weight_N is not None and plain.ref_logp_N is not None
    watched = dataclasses.replace(
        plain,
        old_logp_N=plain.old_logp_N.clone().requires_grad_(),
        advantage_N=plain.advantage_N.clone().requires_grad_(),
        coef_N=plain.coef_N.clone().requires_grad_(),
        weight_N=plain.weight_N.clone().requires_grad_(),
        ref_logp_N=plain.ref_logp_N.clone().requires_grad_(),
    )
    policy_loss(watched, recipe).loss.backward()
    assert (
        watched.logp_N.grad is not None
        and watched.entropy_N is not None
        and watched.entropy_N.grad is not None
    )
    for name_of in ("old_logp_N", "advantage_N", "coef_N", "weight_N", "ref_logp_N"):
        assert getattr(watched, name_of).grad is None, name_of


@pytest.mark.parametrize("name", NAMES)
def test_case_39_a_weight_made_from_the_current_policy_is_a_constant(name: AlgorithmName) -> None:
    recipe = recipe_of(name)
    inputs = make_inputs(recipe)
    weight = torch.exp(inputs.logp_N - inputs.old_logp_N)
    attached = dataclasses.replace(inputs, weight_N=weight)
    constant = dataclasses.replace(inputs, weight_N=weight.detach())
    assert torch.equal(
        gradient(policy_loss(attached, recipe).loss, inputs),
        gradient(policy_loss(constant, recipe).loss, inputs),
    )


def test_weights_scale_the_policy_term_only() -> None:
    recipe = recipe_of("grpo", extras=True)
    inputs = make_inputs(recipe)
    ones = dataclasses.replace(inputs, weight_N=torch.ones_like(inputs.old_logp_N))
    none = dataclasses.replace(inputs, weight_N=None)
    zeros = dataclasses.replace(inputs, weight_N=torch.zeros_like(inputs.old_logp_N))
    assert torch.equal(policy_loss(ones, recipe).loss, policy_loss(none, recipe).loss)
    extras_only = dataclasses.replace(none, advantage_N=torch.zeros_like(inputs.old_logp_N))
    torch.testing.assert_close(policy_loss(zeros, recipe).loss, policy_loss(extras_only, recipe).loss)


@pytest.mark.parametrize("tokens", [1, 3, 1000])
def test_the_sequence_ratio_does_not_depend_on_length(tokens: int) -> None:
    """The same deviation on every token gives the same ratio, loss and sum of gradients at any length."""
    recipe = resolve(AlgorithmSpec(name="gspo"))
    logp = torch.full((tokens,), -1.0, dtype=torch.float64, requires_grad=True)
    coef = token_coefficients(torch.tensor([tokens]), "sequence", max_tokens=1000)
    inputs = LossInput(
        logp_N=logp,
        old_logp_N=logp.detach() - 2e-4,
        advantage_N=torch.ones(tokens),
        sample_N=torch.zeros(tokens, dtype=torch.int64),
        coef_N=coef.expand(tokens),
    )
    output = policy_loss(inputs, recipe)
    assert output.metrics["policy/ratio_max"].result() == pytest.approx(math.exp(2e-4), rel=1e-12)
    assert float(output.loss.detach()) == pytest.approx(-math.exp(2e-4), rel=1e-7)
    assert float(gradient(output.loss, inputs).sum()) == pytest.approx(-math.exp(2e-4), rel=1e-7)


def test_the_sequence_ratio_ignores_the_order_of_tokens() -> None:
    recipe = recipe_of("gspo")
    inputs = make_inputs(recipe)
    order = torch.randperm(17, generator=torch.Generator().manual_seed(1))
    mixed = {
        field.name: None if (value := getattr(inputs, field.name)) is None else value[order]
        for field in dataclasses.fields(inputs)
    }
    shuffled = policy_loss(LossInput(**mixed), recipe).loss
    torch.testing.assert_close(shuffled, policy_loss(inputs, recipe).loss, rtol=1e-13, atol=0)


def test_a_cut_sample_is_refused_where_the_ratio_needs_it_whole() -> None:
    recipe = recipe_of("gspo")
    inputs = make_inputs(recipe)
    policy_loss(dataclasses.replace(inputs, length_S=LENGTHS), recipe)
    with pytest.raises(ValueError, match="every sample whole"):
        policy_loss(dataclasses.replace(cut(inputs, slice(0, 9)), length_S=LENGTHS[:2]), recipe)


@pytest.mark.parametrize("name", NAMES)
def test_case_42_rejected_tokens_are_in_no_sum_and_no_metric(name: AlgorithmName) -> None:
    """Sample 1 stays in the micro-batch with coefficient 0 and unusable numbers: as if it were not there."""
    recipe = recipe_of(name, extras=True)
    inputs = make_inputs(recipe)
    assert inputs.weight_N is not None and inputs.ref_logp_N is not None
    keep = torch.tensor([True, False, True, True])
    coef = token_coefficients(LENGTHS, recipe.denominator, max_tokens=16, keep_S=keep)
    out = ~keep[SAMPLE]
    nan = float("nan")
    rejected = dataclasses.replace(
        inputs,
        coef_N=coef[SAMPLE],
        old_logp_N=inputs.old_logp_N.masked_fill(out, nan),
        advantage_N=inputs.advantage_N.masked_fill(out, nan),
        weight_N=inputs.weight_N.masked_fill(out, nan),
        ref_logp_N=inputs.ref_logp_N.masked_fill(out, nan),
    )
    absent = {
        field.name: None if (value := getattr(inputs, field.name)) is None else value[~out]
        for field in dataclasses.fields(inputs)
    }
    kept = token_coefficients(LENGTHS[keep], recipe.denominator, max_tokens=16)
    absent["sample_N"] = torch.repeat_interleave(torch.arange(3), LENGTHS[keep])
    absent["coef_N"] = kept[absent["sample_N"]]
    with_it, without = policy_loss(rejected, recipe), policy_loss(LossInput(**absent), recipe)
    torch.testing.assert_close(with_it.loss, without.loss, rtol=1e-13, atol=0)
    slope = gradient(with_it.loss, inputs)
    torch.testing.assert_close(slope, gradient(without.loss, inputs), rtol=1e-13, atol=0)
    assert torch.equal(slope[out], torch.zeros(7, dtype=torch.float64))
    for key, metric in without.metrics.items():
        assert with_it.metrics[key].result() == pytest.approx(metric.result(), rel=1e-12)
        assert float(with_it.metrics[key].weight) == (10 if metric.how != "share" else float(metric.weight))


def test_metrics_against_hand_written_values() -> None:
    ratios = torch.tensor([1.5, 0.5, 1.0, 1.1], dtype=torch.float64)
    logp = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    inputs = LossInput(
        logp_N=logp,
        old_logp_N=logp.detach() - ratios.log(),
        advantage_N=torch.tensor([1.0, -1.0, 1.0, 1.0]),
        sample_N=torch.tensor([0, 1, 2, 2]),
        coef_N=torch.ones(4),
        entropy_N=torch.tensor([0.0, 1.0, 2.0, 3.0]),
        ref_logp_N=logp.detach() + torch.tensor([0.0, 0.5, -0.5, 0.0], dtype=torch.float64),
    )
    results = {
        key: metric.result() for key, metric in policy_loss(inputs, resolve(AlgorithmSpec())).metrics.items()
    }
    k3 = [math.exp(x) - 1 - x for x in (0.5, -0.5)]
    assert results == pytest.approx(
        {
            "policy/ratio_mean": 4.1 / 4,
            "policy/ratio_max": 1.5,
            "policy/approx_kl": sum(r - 1 - math.log(r) for r in (1.5, 0.5, 1.0, 1.1)) / 4,
            "policy/clip_fraction_high": 0.25,
            "policy/clip_fraction_low": 0.25,
            "policy/clip_fraction_positive_advantage": 1 / 3,
            "policy/clip_fraction_negative_advantage": 1.0,
            "clip_ratio/high_mean": 0.25,
            "clip_ratio/low_mean": 0.25,
            "clip_ratio/region_mean": 0.5,
            "policy/kl_to_reference": sum(k3) / 4,
            "policy/entropy": 1.5,
        }
    )


def test_metrics_never_touch_the_gradient() -> None:
    """A reference and an entropy that are only measured leave loss and gradient as they are."""
    recipe = recipe_of("grpo")
    inputs = make_inputs(recipe)
    bare = dataclasses.replace(inputs, ref_logp_N=None, entropy_N=None)
    measured, plain = policy_loss(inputs, recipe), policy_loss(bare, recipe)
    assert torch.equal(measured.loss, plain.loss)
    assert torch.equal(gradient(measured.loss, inputs), gradient(plain.loss, inputs))
    assert all(not metric.value.requires_grad for metric in measured.metrics.values())
    assert set(measured.metrics) - set(plain.metrics) == {"policy/kl_to_reference", "policy/entropy"}


def test_an_all_rejected_micro_batch_contributes_nothing() -> None:
    recipe = recipe_of("grpo")
    inputs = make_inputs(recipe)
    output = policy_loss(dataclasses.replace(inputs, coef_N=torch.zeros_like(inputs.coef_N)), recipe)
    assert float(output.loss.detach()) == 0 and not gradient(output.loss, inputs).any()
    assert output.metrics["policy/ratio_max"].result() == -math.inf
    assert all(math.isnan(metric.result()) for metric in output.metrics.values() if metric.how == "mean")
    whole = policy_loss(inputs, recipe).metrics
    merged = merge_metrics([output.metrics, whole])
    assert all(merged[key].result() == whole[key].result() for key in whole)


def test_unusable_inputs_are_refused() -> None:
    recipe, extras = recipe_of("grpo"), recipe_of("grpo", extras=True)
    inputs = make_inputs(recipe)
    with pytest.raises(ValueError, match="FP32"):
        policy_loss(dataclasses.replace(inputs, old_logp_N=inputs.old_logp_N.bfloat16()), recipe)
    with pytest.raises(ValueError, match=r"coef_N has shape \(4,\)"):
        policy_loss(dataclasses.replace(inputs, coef_N=torch.ones(4)), recipe)
    with pytest.raises(ValueError, match="at least one token"):
        policy_loss(_empty(inputs), recipe)
    with pytest.raises(ValueError, match="reference policy"):
        policy_loss(dataclasses.replace(inputs, ref_logp_N=None), extras)
    with pytest.raises(ValueError, match="no entropy"):
        policy_loss(dataclasses.replace(inputs, entropy_N=None), extras)


def _empty(inputs: LossInput) -> LossInput:
    return LossInput(
        *(getattr(inputs, name)[:0] for name in ("logp_N", "old_logp_N", "advantage_N", "sample_N", "coef_N"))
    )


def test_metrics_that_reduce_differently_are_not_merged() -> None:
    metrics = policy_loss(make_inputs(recipe_of("grpo")), recipe_of("grpo")).metrics
    with pytest.raises(ValueError, match="can't be merged"):
        metrics["policy/ratio_mean"].merge(metrics["policy/ratio_max"])
