"""The head's probabilities, stored by a forward pass with gradient on a backend that fuses: which rows, how long, and that the
gradient stays what it is without them."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.kernels.reference import ReferenceKernels
from lockstep.nn import head as head_module
from lockstep.nn.head import PROBABILITY_BYTES, Table, stored_rows
from lockstep.nn.sampling_mask import SamplingMask
from lockstep.numerics.flow import bf16_flow

ROWS, HIDDEN, VOCABULARY = 600, 48, 131
ALL = ROWS
SOME = 384
"""Three 128s; chunks end elsewhere."""


def make_table(kernels: Any) -> Table:
    table = Table(VOCABULARY, HIDDEN, flow=bf16_flow(), kernels=kernels)
    with torch.no_grad():
        table.weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.4)
    table.refresh("head")
    return table


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, targets, and temperatures from 0.5 to 1.5. Every fourth target is its row's likeliest token, or nearly."""
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(ROWS, HIDDEN, generator=generator).mul_(1.5).bfloat16()
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    weight = make_table(ReferenceKernels()).weight.detach()
    targets[::4] = (h.float() @ weight.t()).argmax(1)[::4]
    return h, targets, 0.5 + torch.rand(ROWS, generator=generator)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many rows may store their probabilities, and how many logits are held at a time."""

    def limit(stored: int, chunk: int = 160) -> None:
        monkeypatch.setattr(head_module, "PROBABILITY_BYTES", 2 * VOCABULARY * stored)
        monkeypatch.setattr(head_module, "chunk_rows", lambda kernels, vocabulary: chunk)

    return limit


class Probabilities:
    """Every piece of storage that `score` was given, without holding it."""

    def __init__(self, kernels: Any) -> None:
        self.rows = 0
        self.seen: list[weakref.ref[Tensor]] = []
        honest = kernels.score

        def score(h_CK: Tensor, *rest: Any) -> Any:
            p_SV = rest[-1]
            if p_SV is not None:
                assert p_SV.dtype == torch.bfloat16 and p_SV.shape[1] == VOCABULARY
                self.rows += len(p_SV)
                whole = p_SV._base
                assert whole is not None
                self.seen.append(weakref.ref(whole))
            return honest(h_CK, *rest)

        kernels.score = score

    @property
    def alive(self) -> bool:
        return any(ref() is not None for ref in self.seen)


def gradients(table: Table, up: tuple[float, float] = (1.0, 0.3)) -> tuple[list[Tensor], list[Tensor]]:
    """([log-probabilities, entropies], gradients of h and of the weight)."""
    h, targets, temperature = batch()
    h.requires_grad_()
    out = table.log_probs(h, targets, temperature)
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(ROWS, generator=generator) * part for part in up]
    torch.autograd.backward([o for o, part in zip(out, up) if part], [w for w, p in zip(weights, up) if p])
    assert h.grad is not None and table.weight.grad is not None
    return [o.detach() for o in out], [h.grad, table.weight.grad]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def test_which_rows_store_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that fit, or whole 128s; rows and vocabulary decide."""
    most = PROBABILITY_BYTES // (2 * 151_936)
    assert most == 10_600
    for rows, stored in ((0, 0), (1, 1), (100, 100), (most, most), (most + 1, 10_496), (16_384, 10_496)):
        assert stored_rows(rows, 151_936) == stored
        assert 2 * stored * 151_936 <= PROBABILITY_BYTES
    assert stored_rows(50_000, 32_000) == 50_000
    monkeypatch.setattr(head_module, "PROBABILITY_BYTES", 2 * 1000 * 127)
    assert stored_rows(127, 1000) == 127 and stored_rows(128, 1000) == 0


@pytest.mark.parametrize("up", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)], ids=["log_probs", "entropy", "both"])
def test_gradients_are_those_of_logits_made_again(
    fused: SimpleNamespace, limits: Any, up: tuple[float, float]
) -> None:
    """Both within roundings to BF16 of the reference's in FP32; log-probabilities and entropies with the same bits."""
    exact_out, exact = gradients(make_table(ReferenceKernels()), up)
    errors = {}
    for stored, calls in ((0, (0, 4)), (SOME, (1, 2)), (ALL, (1, 0))):
        limits(stored)
        kernels = fused.Kernels()
        out, found = gradients(make_table(kernels), up)
        assert all(torch.equal(a, b) for a, b in zip(out, exact_out))
        counted = tuple(kernels.calls.get(name, 0) for name in ("stored_logits_grad", "logits_grad"))
        assert counted == calls and kernels.calls["score"] == 4
        errors[stored] = [relative(a, b) for a, b in zip(found, exact)]
        print(f"{stored} of {ROWS} rows stored: errors of dh and dw", *(f"{e:.2e}" for e in errors[stored]))
    for again, over in zip(errors[0], errors[ALL]):
        assert over < 3 * again and over < 6e-3


def test_a_target_near_one_keeps_its_gradient(fused: SimpleNamespace, limits: Any) -> None:
    """Probabilities from 0.98 to 0.9999, of which BF16 would leave 1 - p with an error as large as itself."""
    limits(ALL)
    table = make_table(fused.Kernels())
    h, _, temperature = batch()
    logits = table.logits(h, torch.ones(ROWS))
    targets = logits.argmax(1)
    low, high = torch.full((ROWS,), 0.1), torch.full((ROWS,), 50.0)
    wanted = 1 - 10 ** -torch.linspace(1.7, 4.0, ROWS).double()
    for _ in range(60):  # the temperature at which the target is as likely as that
        temperature = (low + high) / 2
        p = (logits.double() / temperature[:, None]).softmax(1).amax(1)
        low, high = torch.where(p > wanted, temperature, low), torch.where(p > wanted, high, temperature)
    p_TV = (logits.double() / temperature[:, None]).softmax(1)
    p = p_TV.gather(1, targets[:, None])[:, 0]
    there = (p - wanted).abs() < 2e-5  # two tokens may be as likely at any temperature
    assert int(there.sum()) > 300
    given: list[Tensor] = []
    honest = table.kernels.linear_dgrad  # type: ignore[attr-defined]
    table.kernels.linear_dgrad = lambda d, w: given.append(d.clone()) or honest(d, w)  # type: ignore[attr-defined]
    h.requires_grad_()
    table.log_probs(h, targets, temperature)[0].sum().backward()
    (d,) = given
    own, expected = d.double().gather(1, targets[:, None])[:, 0], (1 - p) / temperature
    # one rounding to BF16, and FP32's of logits over temperature
    floor = 2.0**-22 * logits.abs().amax(1) / temperature**2
    assert bool(((own - expected).abs() <= 2.0**-7.9 * expected + floor).all())
    naive = (1 - p.bfloat16().double()) / temperature
    error, worst = relative(own[there], expected[there]), relative(naive[there], expected[there])
    print(f"1 - p of targets: error {error:.2e}, from p in BF16 {worst:.2e}")
    assert error < 3e-3 and worst > 0.1
    others = d.double().scatter(1, targets[:, None], 0.0)
    exact = -(p_TV / temperature[:, None]).scatter(1, targets[:, None], 0.0)
    assert relative(others, exact) < 4e-3


def test_nothing_is_stored_without_need(fused: SimpleNamespace, limits: Any) -> None:
    """Not without gradient, not under a mask, not by the reference."""
    limits(ALL)
    h, targets, temperature = batch()
    kernels = fused.Kernels()
    probabilities, table = Probabilities(kernels), make_table(kernels)
    with torch.no_grad():
        table.log_probs(h, targets, temperature)
    mask = SamplingMask.of([None] * ROWS)
    table.log_probs(h, targets, temperature, mask)[0].sum().backward()
    some = SamplingMask.of(
        [None if i % 3 else (torch.tensor([int(t)]).int(), 0.5) for i, t in enumerate(targets)]
    )
    table.log_probs(h, targets, temperature, some)[0].sum().backward()
    table.weight.requires_grad_(False)
    table.log_probs(h, targets, temperature)
    assert probabilities.rows == 0 and kernels.calls["score"] > 4
    table.log_probs(h.requires_grad_(), targets, temperature)
    assert probabilities.rows == ROWS, "for a frozen head's input"
    plain = make_table(ReferenceKernels()).log_probs(h, targets, temperature)[0]
    assert plain.grad_fn is not None and plain.grad_fn.p_SV is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("stored", [SOME, ALL])
def test_they_are_gone_after_the_backward_pass(fused: SimpleNamespace, limits: Any, stored: int) -> None:
    """Also before the rows beyond them are multiplied, and with a graph that is dropped or retained."""
    limits(stored)
    kernels = fused.Kernels()
    probabilities, table = Probabilities(kernels), make_table(kernels)
    h, targets, temperature = batch()
    alive: list[bool] = []
    honest = kernels.logits_grad
    kernels.logits_grad = lambda *args: alive.append(probabilities.alive) or honest(*args)
    gc.collect()
    gc.disable()
    try:
        logp, entropy = table.log_probs(h, targets, temperature)
        assert probabilities.rows == stored and probabilities.alive
        logp.sum().backward(retain_graph=True)
        assert not probabilities.alive and logp.grad_fn is not None
        assert alive == [False] * (2 if stored == SOME else 0)
        logp, entropy = table.log_probs(h, targets, temperature)
        assert probabilities.alive
        del logp, entropy
        assert not probabilities.alive
    finally:
        gc.enable()


def test_a_second_backward_pass_makes_all_logits_again(fused: SimpleNamespace, limits: Any) -> None:
    """What the first one overwrote isn't read twice."""
    limits(0)
    again = gradients(make_table(fused.Kernels()), (1.0, 0.0))[1]
    limits(ALL)
    kernels = fused.Kernels()
    table = make_table(kernels)
    h, targets, temperature = batch()
    weights = torch.randn(ROWS, generator=torch.Generator().manual_seed(2))
    logp = table.log_probs(h.requires_grad_(), targets, temperature)[0]
    first = torch.autograd.grad(logp, (h, table.weight), weights, retain_graph=True)
    assert "logits_grad" not in kernels.calls
    second = torch.autograd.grad(logp, (h, table.weight), weights)
    assert kernels.calls["logits_grad"] == 4 and kernels.calls["stored_logits_grad"] == 1
    for a, b, c in zip(first, second, again):
        assert torch.equal(b, c) and not torch.equal(a, b) and relative(a, b) < 6e-3
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(logp, h, weights)


def test_the_gradient_so_far_is_added_to(fused: SimpleNamespace, limits: Any) -> None:
    """In place, in one addition for all rows that stored their probabilities."""
    limits(SOME, chunk=128)
    kernels = fused.Kernels()
    table = make_table(kernels)
    expected = gradients(table)[1][1].clone()
    added: list[int] = []
    honest = kernels.add_wgrad
    kernels.add_wgrad = lambda total, d, h: added.append(len(d)) or honest(total, d, h)
    table.weight.grad = torch.ones_like(table.weight)
    table.in_place = True
    gradients(table)
    assert added == [SOME, ROWS - SOME]
    torch.testing.assert_close(table.weight.grad, expected + 1, rtol=1e-5, atol=1e-4)
