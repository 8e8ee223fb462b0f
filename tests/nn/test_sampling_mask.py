"""Sums over the ids that truncation kept: the values and gradients of a float64 softmax over them, and the row law."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from lockstep.kernels.reference import ReferenceKernels
from lockstep.nn.head import CHUNK, Table
from lockstep.nn.sampling_mask import Kept, KeptRows, SamplingMask
from lockstep.numerics.flow import Flow, bf16_flow

ROWS, HIDDEN, VOCABULARY = CHUNK + 75, 48, 131
FLOAT32 = dataclasses.replace(bf16_flow(), activation=torch.float32)


def make_table(flow: Flow, exact: bool = False) -> Table:
    table = Table(VOCABULARY, HIDDEN, flow=flow, kernels=ReferenceKernels(exact=exact))
    with torch.no_grad():
        table.weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.4)
    table.refresh("head")
    return table


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, list[Kept | None]]:
    """Hidden states, targets, temperatures, and kept ids: 1 to 90 of them, the target among them; every fifth row none."""
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype)
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    kept: list[Kept | None] = []
    for i, target in enumerate(targets.tolist()):
        count = int(torch.randint(1, 91, (), generator=generator))
        chosen = {target, *torch.randperm(VOCABULARY, generator=generator)[: count - 1].tolist()}
        kept.append(None if i % 5 == 0 else (torch.tensor(sorted(chosen), dtype=torch.int32), 0.5))
    return h, targets, 0.5 + torch.rand(ROWS, generator=generator), kept


def truth(
    h: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, kept: list[Kept | None]
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of the softmax over the kept ids, row by row in float64."""
    logits = h.double() @ weight.double().t() / temperature.double()[:, None]
    log_p, entropy = [], []
    for row, target, part in zip(logits, targets.tolist(), kept):
        ids = list(range(VOCABULARY)) if part is None else part[0].tolist()
        log_q = row[ids].log_softmax(0)
        log_p.append(log_q[ids.index(target)])
        entropy.append(-(log_q.exp() * log_q).sum())
    return torch.stack(log_p), torch.stack(entropy)


@pytest.mark.parametrize("parts", [(1.0, 0.0), (0.0, 1.0), (0.7, 0.3)], ids=["log_probs", "entropy", "both"])
@pytest.mark.parametrize("exact", [False, True], ids=["reference", "exact"])
def test_gradients_over_the_kept_ids_are_autograds_case_37(exact: bool, parts: tuple[float, float]) -> None:
    table = make_table(FLOAT32, exact)
    h, targets, temperature, kept = drawn()
    generator = torch.Generator().manual_seed(2)
    up = [torch.randn(ROWS, generator=generator) * part for part in parts]
    h.requires_grad_()
    got = table.log_probs(h, targets, temperature, SamplingMask.of(kept))
    sum((o * g).sum() for o, g in zip(got, up)).backward()  # type: ignore[union-attr]
    wide = [h.detach().double().requires_grad_(), table.weight.detach().double().requires_grad_()]
    expected = truth(wide[0], wide[1], targets, temperature, kept)
    sum((o * g).sum() for o, g in zip(expected, up)).backward()  # type: ignore[union-attr]
    for a, b in zip(got, expected):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    assert h.grad is not None and table.weight.grad is not None
    torch.testing.assert_close(h.grad.double(), wide[0].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(table.weight.grad.double(), wide[1].grad, rtol=1e-4, atol=1e-4)


def test_a_token_alone_has_probability_1_and_no_gradient() -> None:
    table = make_table(FLOAT32)
    h, targets, temperature, _ = drawn()
    h.requires_grad_()
    alone = SamplingMask.of([(t[None].int(), 0.3) for t in targets])
    log_p, entropy = table.log_probs(h, targets, temperature, alone)
    assert torch.equal(log_p, torch.zeros(ROWS)) and torch.equal(entropy, torch.zeros(ROWS))
    (log_p.sum() + entropy.sum()).backward()
    assert h.grad is not None and float(h.grad.abs().max()) < 1e-6


def test_kept_logits_below_all_others_stay_finite() -> None:
    """Where the trainer's logits differ from the sampler's (a split flow), ids that were not kept may be the largest."""
    table = make_table(FLOAT32)
    with torch.no_grad():
        table.weight.mul_(300)
    table.refresh("head")
    h, _, temperature, _ = drawn()
    worst = table.logits(h, temperature).argsort(1)[:, :2].sort(1).values.int()
    mask = SamplingMask.of([(row, 1e-9) for row in worst])
    h.requires_grad_()
    log_p, entropy = table.log_probs(h, worst[:, 0].long(), temperature, mask)
    (log_p.sum() - entropy.sum()).backward()
    assert bool(log_p.isfinite().all()) and bool((log_p <= 0).all()) and bool(entropy.isfinite().all())
    assert h.grad is not None and bool(h.grad.isfinite().all())
    assert table.weight.grad is not None and bool(table.weight.grad.isfinite().all())


@pytest.mark.parametrize("exact", [False, True], ids=["reference", "exact"])
def test_a_row_is_the_same_beside_any_other_case_37(exact: bool) -> None:
    """Alone, in other batches, and beside neighbours that kept many more ids: the padding never shows."""
    table = make_table(bf16_flow(), exact)
    h, targets, temperature, kept = drawn(torch.bfloat16)
    together = table.log_probs(h, targets, temperature, SamplingMask.of(kept))
    for batch in torch.randperm(ROWS, generator=torch.Generator().manual_seed(3)).split(7):
        mask = SamplingMask.of([kept[i] for i in batch.tolist()])
        some = table.log_probs(h[batch], targets[batch], temperature[batch], mask)
        for a, b in zip(some, together):
            assert torch.equal(a, b[batch])
    plain = table.log_probs(h, targets, temperature)
    for a, b in zip(plain, together):
        assert torch.equal(a[::5], b[::5]) and not torch.equal(a, b), (
            "rows that recorded nothing are as before"
        )


def test_joined_and_selected_masks_hold_the_same_ids() -> None:
    kept = drawn()[3]
    whole = SamplingMask.of(kept)
    parts = [SamplingMask.of(kept[:100]), SamplingMask.of(kept[100:101]), SamplingMask.of(kept[101:])]
    assert SamplingMask.join(parts, [100, 1, ROWS - 101]) == whole != SamplingMask.of(kept[::-1])
    assert SamplingMask.join([None, None], [3, 4]) is None
    gap = SamplingMask.join([parts[0], None], [100, 2])
    assert gap is not None and gap == SamplingMask.of([*kept[:100], None, None])
    chosen = torch.arange(ROWS) % 3 == 1
    assert whole.select(chosen) == SamplingMask.of([k for i, k in enumerate(kept) if i % 3 == 1])
    assert whole.rows(0, 1) is None and whole.rows(0, 2) is not None
    assert whole.counts_N.tolist() == [0 if k is None else len(k[0]) for k in kept]


def test_ids_with_a_fixed_room_have_the_same_normalizers() -> None:
    """As captured decode steps list them, from raw logits, with anything behind a row's ids."""
    generator = torch.Generator().manual_seed(3)
    raw = 5 * torch.randn(6, 700, generator=generator)
    temperature = torch.tensor([1.0, 0.7, 1.3, 1.0, 0.9, 1.0])
    counts = [1, 17, 64, 0, 300, 5]
    kept = [torch.randperm(700, generator=generator)[:n].sort().values.int() for n in counts]
    logits = raw / temperature[:, None]
    full = logits.logsumexp(1)
    rows = SamplingMask.of([(ids, 0.5) if len(ids) else None for ids in kept]).rows(0, 6)
    assert rows is not None
    expected = rows.log_normalizer(logits, full)
    for width in (512, 1024):
        listed = torch.full((6, width), 2**31 - 1, dtype=torch.int32)
        for row, ids in enumerate(kept):
            listed[row, : len(ids)] = ids
        fixed = KeptRows.first(listed, torch.tensor(counts, dtype=torch.int32))
        assert torch.equal(fixed.normalizer_of(fixed.gathered(raw, temperature), full), expected)
