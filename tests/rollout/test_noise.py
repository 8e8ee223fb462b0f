"""The noise is uniform, independent, a function of its five counters only, and its winners are finite."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.rollout.noise import gumbel, row_keys

CPU = torch.device("cpu")
EULER = 0.5772156649


def keys_over(part: int, count: int) -> list[tuple[int, int]]:
    """Keys that differ in one of (seed, step, prompt, sample, position) only."""
    base = [11, 3, 5, 2, 40]
    return [row_keys(*base[:part], i, *base[part + 1 :]) for i in range(count)]


def assert_chi_square(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Pearson's statistic lies within six deviations of its mean."""
    freedom = len(counts) - 1
    statistic = float(((counts.double() - expected.double()).square() / expected.double()).sum())
    assert statistic < freedom + 6 * math.sqrt(2 * freedom), (statistic, freedom)


@pytest.mark.parametrize("part", range(5))
def test_samples_follow_the_softmax(part: int) -> None:
    """Counts of argmax(logits + noise) over many keys, whichever counter runs."""
    logits = torch.tensor([0.0, 1.0, -2.0, 0.5, 2.0, -1.0, 0.2, -3.0, 1.5, 0.0, -0.7])
    keys = keys_over(part, 12_000)
    drawn = (gumbel(keys, 11, CPU) + logits).argmax(-1)
    assert_chi_square(torch.bincount(drawn, minlength=11), logits.softmax(0) * len(keys))


def test_the_distribution_is_gumbels() -> None:
    noise = gumbel(keys_over(4, 256), 4096, CPU).double()
    assert noise.dtype == torch.float64 and bool(torch.isfinite(noise).all())
    assert abs(float(noise.mean()) - EULER) < 6e-3
    assert abs(float(noise.var()) - math.pi**2 / 6) < 2e-2
    uniform = torch.exp(-torch.exp(-noise)).flatten()
    assert_chi_square(torch.histc(uniform, 64, 0.0, 1.0), torch.full((64,), uniform.numel() / 64))
    tail = uniform[uniform > 1 - 1 / 64]
    assert_chi_square(torch.histc(tail, 32, 1 - 1 / 64, 1.0), torch.full((32,), tail.numel() / 32))


@pytest.mark.parametrize("part", range(5))
def test_neighbouring_keys_are_uncorrelated(part: int) -> None:
    noise = gumbel(keys_over(part, 64), 4096, CPU).double()
    noise = (noise - noise.mean()) / noise.std()
    a, b = noise[:-1], noise[1:]
    for shift in range(-3, 4):
        correlation = float((a * b.roll(shift, 1)).mean())
        assert abs(correlation) < 6 / math.sqrt(a.numel()), shift


def test_elements_of_a_row_are_uncorrelated() -> None:
    noise = gumbel(keys_over(2, 64), 4096, CPU).double()
    noise = (noise - noise.mean()) / noise.std()
    for lag in (1, 2, 3, 7, 64, 128, 1024):
        correlation = float((noise[:, :-lag] * noise[:, lag:]).mean())
        assert abs(correlation) < 6 / math.sqrt(noise[:, lag:].numel()), lag


def test_every_counter_matters_and_so_does_its_place() -> None:
    base = (1, 2, 3, 4, 5)
    changed = [row_keys(*(n + (i == j) for j, n in enumerate(base))) for i in range(5)]
    swapped = [row_keys(*base[:i], base[i + 1], base[i], *base[i + 2 :]) for i in range(4)]
    everything = [row_keys(*base), *changed, *swapped, row_keys(0, 0, 0, 0, 0), row_keys(0, 0, 0, 0, 1)]
    assert len(set(everything)) == len(everything)
    assert len({key for pair in everything for key in pair}) == 2 * len(everything)


def test_keys_are_32_bit_and_never_meet() -> None:
    keys = [row_keys(s, t, p, i, j) for s in (0, 2**40, -1) for t in range(4) for p in range(8)
            for i in range(4) for j in range(32)]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert all(-(2**31) <= k < 2**31 for pair in keys for k in pair)


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 8, 15, 16, 33, 87, 1000, 4097])
def test_a_row_does_not_depend_on_its_batch(vocabulary: int) -> None:
    keys = keys_over(4, 37)
    together = gumbel(keys, vocabulary, CPU)
    for i in (0, 1, 5, 18, 36):
        assert torch.equal(together[i], gumbel([keys[i]], vocabulary, CPU)[0])
    assert torch.equal(together[9:20], gumbel(keys[9:20], vocabulary, CPU))
    assert torch.equal(together.flip(0), gumbel(keys[::-1], vocabulary, CPU))


def test_no_noise_is_infinite_and_winners_are_spread_out() -> None:
    """Five million draws: the largest come near the largest possible, log 2^32, and none stands twice on top."""
    largest = []
    for part in range(5):
        noise = gumbel(keys_over(part, 99)[49:], 20_000, CPU)
        assert bool(torch.isfinite(noise).all())
        largest.append(noise.max(-1))
    values = torch.cat([m.values for m in largest])
    assert 13 < float(values.max()) < 22.2
    assert len(values.unique()) == len(values), "winners are resolved finely"
    assert len(torch.cat([m.indices for m in largest]).unique()) > 240
