"""RewardSpec: what it refuses, and that pydantic can validate into it."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from lockstep.rewards.spec import RewardSpec


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"use": " "}, "use is empty"),
        ({"weight": float("nan")}, "weight"),
        ({"weight": float("inf")}, "weight"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"timeout_score": float("nan")}, "timeout_score"),
    ],
)
def test_refuses(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RewardSpec(**{"use": "last_number", **change})  # type: ignore[arg-type]


def test_pydantic_validates_into_it_and_forbids_unknown_keys() -> None:
    adapter = TypeAdapter(tuple[RewardSpec, ...])
    (spec,) = adapter.validate_python([{"use": "length", "args": {"soft": 10, "hard": 20}}])
    assert spec == RewardSpec("length", args={"soft": 10, "hard": 20})
    with pytest.raises(ValidationError):
        adapter.validate_python([{"use": "length", "wieght": 2.0}])
