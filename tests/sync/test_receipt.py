"""A receipt sums up a publication, or refuses it."""

from __future__ import annotations

import pytest

from lockstep.errors import ContractError
from lockstep.nn.working import Refreshed
from lockstep.sync.receipt import Receipt, make_receipt

NAMES = ("a", "b", "c")


def tensor(name: str, changed: int = 5, numel: int = 100, max_rel: float = 0.01) -> Refreshed:
    return Refreshed(name, "e4m3", (10, numel // 10), numel + 4, numel, changed, max_rel)


def receipt(*refreshed: Refreshed, must_change: bool = True) -> Receipt:
    return make_receipt(7, refreshed, frozenset(NAMES), "d" * 64, scale_version=2, must_change=must_change)


def test_sums() -> None:
    made = receipt(tensor("a", 5, 100, 0.02), tensor("b", 0, 300, 0.03), tensor("c", 10, 100, 0.0))
    assert (made.version, made.tensors, made.bytes, made.scale_version) == (7, 3, 512, 2)
    assert made.changed_pct == pytest.approx(100 * 15 / 500)
    assert (made.max_rel_err, made.max_rel_tensor) == (0.03, "b")
    assert "v7" in made.line() and "3.000 %" in made.line() and made.to_dict()["digest"] == "d" * 64


def test_case_08_a_missing_or_extra_tensor_is_named() -> None:
    with pytest.raises(ContractError, match=r"v7: missing \['b'\], extra \[\]"):
        receipt(tensor("a"), tensor("c"))
    with pytest.raises(ContractError, match=r"missing \[\], extra \['b_scale'\]"):
        receipt(*map(tensor, NAMES), tensor("b_scale"))


def test_case_66_nothing_changed_although_it_should_have() -> None:
    still = [tensor(n, changed=0) for n in NAMES]
    with pytest.raises(ContractError, match="not one of 3 tensors changed"):
        receipt(*still)
    assert receipt(*still, must_change=False).changed_pct == 0.0
    assert receipt(tensor("a", 1), *still[1:]).changed_pct > 0
