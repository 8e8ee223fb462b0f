"""The denominators against their formulas, and that rejected samples are in none of them."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from lockstep.algorithms import DenominatorKind, token_coefficients

KINDS = get_args(DenominatorKind)
LENGTHS = torch.tensor([3, 1, 8])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token", [1 / 12, 1 / 12, 1 / 12]),
        ("sequence", [1 / 9, 1 / 3, 1 / 24]),
        ("constant", [1 / 48, 1 / 48, 1 / 48]),
    ],
)
def test_against_the_formulas(kind: DenominatorKind, expected: list[float]) -> None:
    result = token_coefficients(LENGTHS, kind, max_tokens=16)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-7, atol=0)


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_a_loss_of_one_for_every_token_is_a_loss_of_one(kind: DenominatorKind) -> None:
    assert float((token_coefficients(LENGTHS, kind, max_tokens=16) * LENGTHS).sum()) == pytest.approx(
        1, rel=1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
def test_case_42_a_rejected_sample_is_not_counted(kind: DenominatorKind) -> None:
    """Passing the kept lengths and passing a mask are the same, whatever the rejected sample's length."""
    keep = torch.tensor([True, False, True, True, False])
    for rejected in (0, 1, 10_000):
        lengths = torch.tensor([3, rejected, 1, 8, rejected])
        masked = token_coefficients(lengths, kind, max_tokens=16, keep_S=keep)
        assert torch.equal(masked[keep], token_coefficients(LENGTHS, kind, max_tokens=16))
        assert torch.equal(masked[~keep], torch.zeros(2))


@pytest.mark.parametrize("kind", KINDS)
def test_case_42_a_kept_sample_is_counted(kind: DenominatorKind) -> None:
    """The other way: a sample that is kept, though its loss may be zero, dilutes the others."""
    more = token_coefficients(torch.tensor([3, 1, 8, 4]), kind, max_tokens=16)[:3]
    assert bool((more < token_coefficients(LENGTHS, kind, max_tokens=16)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_denominator_is_refused(kind: DenominatorKind) -> None:
    with pytest.raises(ValueError, match="skip it"):
        token_coefficients(LENGTHS, kind, max_tokens=16, keep_S=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="no token"):
        token_coefficients(torch.tensor([3, 0]), kind, max_tokens=16)
    with pytest.raises(ValueError, match="integer"):
        token_coefficients(LENGTHS.float(), kind, max_tokens=16)
    with pytest.raises(ValueError, match="keep mask"):
        token_coefficients(LENGTHS, kind, max_tokens=16, keep_S=torch.ones(2, dtype=torch.bool))


def test_wrong_kind_and_wrong_constant_are_refused() -> None:
    with pytest.raises(ValueError, match="longer than max_tokens = 7"):
        token_coefficients(LENGTHS, "constant", max_tokens=7)
    with pytest.raises(ValueError, match="unknown denominator"):
        token_coefficients(LENGTHS, "mean", max_tokens=7)  # type: ignore[arg-type]
