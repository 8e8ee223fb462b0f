"""The output head on the GPU: log-normalizer, log-probability of a token, and the draw, each row on its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lockstep.bench.checks_products import draw_state
from lockstep.rollout import noise

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
VOCABULARIES = [151_936, 128_256, 49_152, 4097, 4096, 97, 2]


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator, device=CUDA) * 3


def temperatures(rows: int) -> Tensor:
    return torch.tensor([1.0, 0.7, 1.3], device=CUDA).repeat(rows)[:rows].contiguous()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_log_normalizer(vocabulary: int, hopper: SimpleNamespace) -> None:
    x, t = random_logits(70, vocabulary), temperatures(70)
    x[3] = -1e4
    x[4, vocabulary // 2] = 1e4
    found = hopper.head.log_normalizer(x, t)
    exact = torch.logsumexp(x.double() / t.double()[:, None], -1)
    assert float(((found.double() - exact) / exact.abs().clamp(min=1)).abs().max()) < 4e-6
    for rows in (1, 2, 7, 64):
        for first in (0, 70 - rows):
            at = slice(first, first + rows)
            part = hopper.head.log_normalizer(x[at].clone(), t[at].clone())
            assert torch.equal(part, found[at]), (rows, first)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_target_log_prob(vocabulary: int, hopper: SimpleNamespace) -> None:
    x, t = random_logits(300, vocabulary), temperatures(300)
    target = torch.randint(vocabulary, (300,), device=CUDA, generator=torch.Generator("cuda").manual_seed(1))
    normalizer = hopper.head.log_normalizer(x, t)
    found = hopper.head.target_log_prob(x, t, normalizer, target)
    exact = (x.double() / t.double()[:, None]).log_softmax(-1).gather(1, target[:, None])[:, 0]
    assert float((found.double() - exact).abs().max()) < 2e-5
    expected = (x / t[:, None]).gather(1, target[:, None])[:, 0] - normalizer
    assert torch.equal(found, expected)
    one = hopper.head.target_log_prob(
        x[7:8].clone(), t[7:8].clone(), normalizer[7:8].clone(), target[7:8].clone()
    )
    assert torch.equal(one, found[7:8])


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_draw_is_the_definition(vocabulary: int, hopper: SimpleNamespace) -> None:
    rows = 400
    x, t = random_logits(rows, vocabulary), temperatures(rows)
    names = [(1, 2, row // 8, row % 8, 5 + row % 11) for row in range(rows)]
    states = torch.tensor([draw_state(*name[:4]) for name in names], device=CUDA)
    positions = torch.tensor([name[4] for name in names], device=CUDA)
    tokens = hopper.head.sample(x, t, states, positions)
    keys = [noise.row_keys(*name) for name in names]
    scores = x / t[:, None] + noise.gumbel(keys, vocabulary, CUDA)
    gap = scores.amax(1) - scores.gather(1, tokens[:, None])[:, 0]
    assert float(gap.max()) < 1e-3
    assert float((gap > 0).double().mean()) < 0.01
    for row in (0, 13, rows - 1):
        at = slice(row, row + 1)
        one = hopper.head.sample(x[at].clone(), t[at].clone(), states[at].clone(), positions[at].clone())
        assert torch.equal(one, tokens[at])


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_greedy_takes_the_lowest_of_equal_tokens(vocabulary: int, hopper: SimpleNamespace) -> None:
    x = torch.zeros(4, vocabulary, device=CUDA)
    x[1, vocabulary - 1] = 1
    x[2, vocabulary // 2 :] = 2
    x[3] = -torch.inf
    x[3, vocabulary - 1] = -5
    numbers = torch.arange(4, device=CUDA)
    tokens = hopper.head.sample(x, torch.zeros(4, device=CUDA), numbers, numbers)
    assert tokens.tolist() == [0, vocabulary - 1, vocabulary // 2, vocabulary - 1]


def test_draws_follow_the_softmax(hopper: SimpleNamespace) -> None:
    rows, logits = 200_000, torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0], device=CUDA)
    states = torch.arange(rows, device=CUDA) * 7919
    numbers = torch.zeros(rows, dtype=torch.int64, device=CUDA)
    tokens = hopper.head.sample(
        logits.expand(rows, 5).contiguous(), torch.ones(rows, device=CUDA), states, numbers
    )
    share = torch.bincount(tokens, minlength=5).double() / rows
    p = logits.double().softmax(-1)
    assert bool(((share - p).abs() < 5 * (p * (1 - p) / rows).sqrt()).all()), (share, p)
