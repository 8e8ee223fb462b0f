"""Times that kernels add to a run: they sum to its length, however kernels overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.bench.profile import GAP, times_added


def test_a_kernel_that_waits_for_the_one_before_adds_what_comes_after() -> None:
    assert times_added([("a", 0.0, 10.0), ("b", 4.0, 13.0), ("a", 15.0, 16.0), ("c", 15.5, 15.9)]) == {
        "a": (11.0, 2),
        "b": (3.0, 1),
        GAP: (2.0, 1),
        "c": (0.0, 1),
    }
    assert times_added([]) == {}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1000), st.integers(0, 50)), min_size=1))
def test_they_add_up(kernels: list[tuple[str, int, int]]) -> None:
    spans = [(name, float(start), float(start + length)) for name, start, length in kernels]
    added = times_added(spans)
    whole = max(end for _, _, end in spans) - min(start for _, start, _ in spans)
    assert sum(ms for ms, _ in added.values()) == pytest.approx(whole)
    assert sum(count for name, (_, count) in added.items() if name != GAP) == len(kernels)
