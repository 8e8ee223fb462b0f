"""The verdict on FP8 for a model shape: from times to words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from lockstep.bench.layer import DECODE_BATCH, TRAINING_ROWS, LayerCalls, LayerTimes, Verdict, judge
from lockstep.bench.timing import Ceilings
from lockstep.kernels.in_turns import copies_for

Times = tuple[float, float, float, float]
"""FP8 products and inputs, BF16 products and inputs, in milliseconds."""


def judged(decode: Times, training: Times) -> tuple[Verdict, list[str]]:
    """The verdict when a fake clock shows these times, and what was timed."""
    timed: list[str] = []
    parts = ("fp8 products", "fp8 inputs", "bf16 products", "bf16 inputs")
    shown = {DECODE_BATCH: dict(zip(parts, decode)), TRAINING_ROWS: dict(zip(parts, training))}

    def calls(model: str, rows: int) -> LayerCalls:
        assert model == "qwen3-0.6b"

        def work(part: str) -> Sequence[Callable[[], str]]:
            return [lambda: f"{rows} {part}"] * 2

        return LayerCalls(*(work(part) for part in parts))

    def timer(work: Sequence[Callable[[], object]]) -> float:
        names = {str(call()) for call in work}
        assert len(names) == 1
        timed.append(names.pop())
        rows, _, part = timed[-1].partition(" ")
        return shown[int(rows)][part]

    return judge("qwen3-0.6b", calls, timer, timer), timed


def test_everything_is_timed_once() -> None:
    _, timed = judged((1, 1, 1, 1), (1, 1, 1, 1))
    assert len(timed) == len(set(timed)) == 8


def test_the_verdict_names_the_gain() -> None:
    verdict, _ = judged((0.9, 0.1, 1.35, 0.07), (7.0, 1.0, 10.0, 0.4))
    assert verdict.line() == "FP8 is worth it here: 1.42x in decode (64 rows), 1.30x in training (16384 rows)"
    assert verdict.decode.products_ratio == pytest.approx(1.5)
    assert verdict.decode.codes_ms == pytest.approx(0.03)


def test_a_small_model_whose_codes_eat_the_gain_is_told_so_case_72() -> None:
    """Products are 1.4x as fast, but making the codes takes more than that saves: FP8 must not be called worth it."""
    verdict, _ = judged((0.010, 0.012, 0.014, 0.006), (1.0, 0.6, 1.4, 0.2))
    assert verdict.decode.products_ratio == pytest.approx(1.4)
    line = verdict.line()
    assert line.startswith(
        "FP8 is not worth it here: 0.91x in decode (64 rows), 1.00x in training (16384 rows)"
    )
    assert "flow bf16" in line
    assert "codes take 0.0060 of 0.0220 ms" in verdict.decode.line()


@pytest.mark.parametrize(
    ("decode", "training", "words"),
    [(1.3, 1.0, "for decode only"), (1.0, 1.3, "for training only"), (1.04, 1.06, "for training only")],
)
def test_one_side_only(decode: float, training: float, words: str) -> None:
    verdict, _ = judged((1.0, 0.0, decode, 0.0), (1.0, 0.0, training, 0.0))
    assert f"FP8 is worth it here {words}: " in verdict.line()


def test_times_add_up() -> None:
    times = LayerTimes(64, 0.1, 0.02, 0.16, 0.01)
    assert times.ratio == pytest.approx(0.17 / 0.12)
    assert times.line() == "    64 rows: 1.42x (1.60x for the products alone; codes take 0.0100 of 0.1200 ms)"


def test_the_floor_is_the_larger_of_two_times() -> None:
    ceilings = Ceilings(copy_gbps=3000.0, bf16_tflops=750.0)
    assert ceilings.floor_ms(0, 3e9, fp8=True) == pytest.approx(1.0)
    assert ceilings.floor_ms(1.5e12, 0, fp8=True) == pytest.approx(1.0)
    assert ceilings.floor_ms(1.5e12, 3e9, fp8=False) == pytest.approx(2.0)


def test_copies_outgrow_the_cache() -> None:
    assert copies_for(10**9) == 1 and copies_for(4096 * 4096) * 4096 * 4096 > 4 * 50e6
