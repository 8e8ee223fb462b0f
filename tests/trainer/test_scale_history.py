"""When new KV scales are due, and what is remembered of the old ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lockstep.errors import ContractError
from lockstep.nn.kv_scales import KVMaxima
from lockstep.numerics.flow import FlowSpec
from lockstep.trainer.scale_history import KEPT, ScaleHistory

CPU = torch.device("cpu")


def history(**options: Any) -> ScaleHistory:
    return ScaleHistory(FlowSpec("fp8", "fp8", **options), CPU)


def maxima(*values: float) -> KVMaxima:
    """Two layers of two heads; keys as given, values eight times as large."""
    k = torch.tensor(values).view(2, 2)
    return KVMaxima(k, k * 8)


STEADY = (1.0, 2.0, 3.0, 4.0)


def test_small_moves_keep_the_scales_and_their_version_case_35() -> None:
    """Hysteresis: a quarter up or down is no reason, as long as the headroom covers it."""
    held = history()
    first = held.advance(maxima(*STEADY))
    assert first is not None and first.version == 1 == held.version
    generator = random.Random(0)
    for _ in range(50):
        moved = maxima(*(x * generator.uniform(0.85, 1.24) for x in STEADY))
        assert held.advance(moved) is None
        assert held.current is first and held.drift <= 0.25
        scales = held.current
        assert bool((scales.k * 448 >= moved.k).all()), "covered all the time"


@pytest.mark.parametrize("head", range(4))
def test_one_maximum_that_leaves_renews_all_scales(head: int) -> None:
    held = history(kv_headroom=3.0)
    held.advance(maxima(*STEADY))
    grown = list(STEADY)
    grown[head] *= 1.26
    new = held.advance(maxima(*grown))
    assert new is not None and new.version == 2 == held.version and held.current is new
    assert held.drift == pytest.approx(0.26, abs=1e-6)
    torch.testing.assert_close(new.k.flatten(), torch.tensor(grown) * 3 / 448)
    torch.testing.assert_close(new.v.flatten(), torch.tensor(grown) * 24 / 448)


def test_maxima_are_forgotten_slowly() -> None:
    """After a step with one huge value scales stay wide, then come down as decay says: a_t = max(m_t, 0.9 a_{t-1})."""
    held = history()
    held.advance(maxima(*(8 * x for x in STEADY)))
    covered, expected, versions = 8.0, 8.0, [1]
    for _ in range(40):
        held.advance(maxima(*STEADY))
        covered = max(1.0, 0.9 * covered)
        if covered / expected < 1 / 1.25:
            expected = covered
        assert held.current is not None
        torch.testing.assert_close(
            held.current.k.flatten(), torch.tensor(STEADY) * expected * 2 / 448, rtol=1e-5, atol=0
        )
        versions.append(held.version)
    assert versions == sorted(versions) and 5 < versions[-1] < 12
    never = history(kv_decay=1.0)
    never.advance(maxima(*(8 * x for x in STEADY)))
    assert all(never.advance(maxima(*STEADY)) is None for _ in range(20)), "decay 1 never forgets"


def test_saturation_is_a_reason_within_the_hysteresis() -> None:
    """With a headroom below 1 + hysteresis, the range of the scales is the bound."""
    for headroom, renewed in ((1.0, True), (1.1, True), (1.3, False)):
        held = history(kv_headroom=headroom)
        held.advance(maxima(*STEADY))
        assert (held.advance(maxima(*(1.15 * x for x in STEADY))) is not None) is renewed
        assert held.current is not None and bool(
            (held.current.k.flatten() * 448 >= torch.tensor(STEADY) * 1.149).all()
        )


def test_powers_of_two_do_not_flicker() -> None:
    """A maximum that goes to and fro over a power of two: maxima are compared, not rounded scales."""
    held = history(scale="pow2", kv_headroom=1.0)
    edge = 448 * 2.0**-9
    first = held.advance(maxima(*(1.01 * edge for _ in range(4))))
    assert first is not None and bool((first.k == 2.0**-8).all())
    for i in range(30):
        assert held.advance(maxima(*((0.99 if i % 2 else 1.01) * edge for _ in range(4)))) is None
    assert held.advance(maxima(*(1.9 * edge for _ in range(4)))) is None, (
        "the same power of two is no new version"
    )
    assert held.version == 1 and held.drift == pytest.approx(1.9 / 1.01 - 1, abs=1e-6)
    second = held.advance(maxima(*(2.1 * edge for _ in range(4))))
    assert second is not None and bool((second.k == 2.0**-7).all())


def test_once_means_once_and_force_means_now() -> None:
    held = history(kv_recalibrate="once")
    first = held.advance(maxima(*STEADY))
    for _ in range(5):
        assert held.advance(maxima(*(9 * x for x in STEADY))) is None and held.current is first
    assert held.drift == pytest.approx(8.0), "but how far off they are is known"
    forced = held.advance(None, force=True)
    assert forced is not None and forced.version == 2
    torch.testing.assert_close(forced.k.flatten(), torch.tensor(STEADY) * 9 * 2 / 448)
    assert held.advance(None, force=True) is None, "the same scales are no new version"
    assert history().advance(None) is None and history().version == 0


def test_the_last_versions_are_known_and_others_refused_by_name_case_32() -> None:
    held = history()
    made = [held.advance(maxima(*(2.0**i * x for x in STEADY))) for i in range(7)]
    for scales in made[-KEPT:]:
        assert scales is not None and held.of(scales.version) is scales
    for version in (0, 7 - KEPT, 8):
        with pytest.raises(
            ContractError, match=f"drawn with KV scales v{version}, the trainer knows v4, v5, v6, v7"
        ):
            held.of(version)
    with pytest.raises(ContractError, match="knows none"):
        history().of(1)


def test_a_checkpoint_holds_all_of_it_case_65() -> None:
    """Restored after any step, it makes the same decisions and the same bits."""
    generator = random.Random(3)
    steps = [maxima(*(x * generator.uniform(0.7, 1.3) for x in STEADY)) for _ in range(30)]
    steps[9] = maxima(*(3 * x for x in STEADY))  # remembered for a while
    for cut in range(1, 29):
        whole, half = history(), history()
        for seen in steps[:cut]:
            whole.advance(seen)
            half.advance(seen)
        restored = history()
        restored.load_state_tensors(half.state_tensors(), half.version)
        assert restored.versions.keys() == whole.versions.keys()
        for seen in steps[cut:]:
            a, b = whole.advance(seen), restored.advance(seen)
            assert (a is None) == (b is None), cut
            assert (whole.version, whole.drift) == (restored.version, restored.drift)
            assert a is None or b is None or (torch.equal(a.k, b.k) and torch.equal(a.v, b.v))
        assert whole.version > 3, "there was something to decide"


@pytest.mark.parametrize("missing", ["running", "basis", "v.2", "k.3"])
def test_an_incomplete_state_is_refused(missing: str) -> None:
    held = history()
    for i in range(3):
        held.advance(maxima(*(2.0**i * x for x in STEADY)))
    tensors = held.state_tensors()
    del tensors[missing]
    with pytest.raises(ValueError, match="missing|without"):
        history().load_state_tensors(tensors, 3)


def test_options_out_of_range_are_refused() -> None:
    for bad in ({"kv_decay": 1.1}, {"kv_decay": -0.1}, {"kv_hysteresis": -1.0}, {"kv_hysteresis": 2.0}):
        with pytest.raises(ValueError, match="0..1"):
            FlowSpec("fp8", "fp8", **bad)  # type: ignore[arg-type]
