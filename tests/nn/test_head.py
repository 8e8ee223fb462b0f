"""The output head: values and gradients against autograd, and one way to compute them for trainer and sampler."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.reference import ReferenceKernels
from lockstep.nn.head import Table, target_log_prob
from lockstep.numerics.flow import Flow, FlowSpec, bf16_flow, build_flows, fp8_flow

ROWS, HIDDEN, VOCABULARY = 600, 48, 131  # more rows than are held at a time
FLOAT32 = dataclasses.replace(bf16_flow(), activation=torch.float32)


def make_table(flow: Flow, exact: bool = False) -> Table:
    table = Table(VOCABULARY, HIDDEN, flow=flow, kernels=ReferenceKernels(exact=exact))
    with torch.no_grad():
        table.weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.4)
    table.refresh("head")
    return table


def rows(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, targets, and temperatures from 0.5 to 1.5."""
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype)
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    return h, targets, 0.5 + torch.rand(ROWS, generator=generator)


def truth(h: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (h.double() @ weight.double().t() / temperature.double()[:, None]).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("parts", [(1.0, 0.0), (0.0, 1.0), (0.7, 0.3)], ids=["log_probs", "entropy", "both"])
@pytest.mark.parametrize("exact", [False, True], ids=["reference", "exact"])
def test_case_36_gradients_at_any_temperature(exact: bool, parts: tuple[float, float]) -> None:
    table = make_table(FLOAT32, exact)
    h, targets, temperature = rows(torch.float32)
    generator = torch.Generator().manual_seed(2)
    up = [torch.randn(ROWS, generator=generator) * part for part in parts]
    h.requires_grad_()
    got = table.log_probs(h, targets, temperature)
    sum((o * g).sum() for o, g in zip(got, up)).backward()  # type: ignore[union-attr]
    wide = [h.detach().double().requires_grad_(), table.weight.detach().double().requires_grad_()]
    expected = truth(*wide, targets, temperature)
    sum((o * g).sum() for o, g in zip(expected, up)).backward()  # type: ignore[union-attr]
    for a, b in zip(got, expected):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    assert h.grad is not None and table.weight.grad is not None
    torch.testing.assert_close(h.grad.double(), wide[0].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(table.weight.grad.double(), wide[1].grad, rtol=1e-4, atol=1e-4)


def test_gradients_in_bf16() -> None:
    table = make_table(bf16_flow())
    h, targets, temperature = rows(torch.bfloat16)
    h.requires_grad_()
    table.log_probs(h, targets, temperature)[0].sum().backward()
    wide = [h.detach().double().requires_grad_(), table.weight.detach().bfloat16().double().requires_grad_()]
    truth(*wide, targets, temperature)[0].sum().backward()
    assert h.grad is not None and h.grad.dtype == torch.bfloat16
    assert table.weight.grad is not None and table.weight.grad.dtype == torch.float32
    for a, b in ((h.grad, wide[0].grad), (table.weight.grad, wide[1].grad)):
        assert b is not None and float(F.cosine_similarity(a.double().flatten(), b.flatten(), 0)) > 0.99999


def test_case_36_temperature_is_part_of_the_distribution() -> None:
    table = make_table(bf16_flow())
    h, targets, temperature = rows(torch.bfloat16)
    by_row = table.log_probs(h, targets, temperature)[0]
    one = table.log_probs(h, targets, torch.ones(ROWS))[0]
    assert not torch.equal(by_row, one)
    for value in (0.5, 1.0, 1.3):
        got = table.log_probs(h, targets, torch.full((ROWS,), value))[0]
        weight = table.weight.detach().bfloat16()
        expected = truth(h, weight, targets, torch.full((ROWS,), value))[0]
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    # Rows of different temperatures side by side: each as if alone.
    for i in (0, 17, 255, 256, 599):
        alone = table.log_probs(h[i : i + 1], targets[i : i + 1], temperature[i : i + 1])[0]
        assert torch.equal(alone[0], by_row[i])


FLOWS = {
    "bf16": bf16_flow(),
    "fp8": fp8_flow(),
    "pow2": fp8_flow(scale="pow2", kv_fp8=True),
    "float32": FLOAT32,
}


@pytest.mark.parametrize("exact", [False, True], ids=["reference", "exact"])
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS.keys())
def test_case_46_trainer_and_sampler_run_the_same_operations(flow: Flow, exact: bool) -> None:
    table = make_table(flow, exact)
    h, targets, temperature = rows(flow.activation)
    trainer = table.log_probs(h, targets, temperature)[0].detach()
    sampler = torch.empty(ROWS)
    for batch in torch.randperm(ROWS, generator=torch.Generator().manual_seed(4)).split(37):
        logits = table.logits(h[batch], temperature[batch])
        assert logits.dtype == torch.float32
        normalizer = table.kernels.log_normalizer(logits)
        sampler[batch] = target_log_prob(logits, normalizer, targets[batch])
    assert torch.equal(trainer, sampler)


def test_case_47_head_precision_is_one_for_both_sides() -> None:
    """Whatever the flow quantizes, every head multiplies the BF16 rounding of the master into FP32 logits."""
    expected = make_table(bf16_flow())
    h, targets, temperature = rows(torch.bfloat16)
    values = expected.log_probs(h, targets, temperature)[0]
    for name in ("bf16", "fp8", "fp8-rollout"):
        pair = build_flows(FlowSpec(name=name, kv="fp8"), 2)  # type: ignore[arg-type]
        for flow in (pair.trainer, pair.rollout):
            table = make_table(flow)
            assert table.working.codes is None and table.working.plain is not None
            assert table.working.plain.dtype == torch.bfloat16
            assert torch.equal(table.working.plain, table.weight.detach().bfloat16())
            assert torch.equal(table.log_probs(h, targets, temperature)[0], values)


def test_case_47_no_stale_copy_survives_a_refresh(toy: SimpleNamespace) -> None:
    for family in ("llama31", "llama_tied"):
        decoder = toy.make_decoder(toy.SPECS[family], fp8_flow())
        ids = toy.random_ids(decoder.spec, (20,))
        before = toy.logits(decoder, ids, (20,))
        with torch.no_grad():
            decoder.head.weight.mul_(2)
        assert torch.equal(toy.logits(decoder, ids, (20,)), before)  # masters move, the version doesn't
        decoder.refresh(2)
        after, fresh = toy.logits(decoder, ids, (20,)), toy.make_decoder(decoder.spec, fp8_flow())
        fresh.load_state_dict(decoder.state_dict())
        fresh.refresh(2)
        assert not torch.equal(after, before)
        assert torch.equal(after, toy.logits(fresh, ids, (20,))) and decoder.digest() == fresh.digest()
        if family == "llama31":
            assert torch.equal(after, before * 2)
