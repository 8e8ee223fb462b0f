"""Truncation against a plain reference, greedy, and log-probabilities of exactly what was drawn."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.errors import CapacityError
from lockstep.kernels.truncation import threshold
from lockstep.models.decoder import Decoder
from lockstep.nn.head import CHUNK
from lockstep.nn.sampling_mask import SamplingMask
from lockstep.rollout.noise import row_state
from lockstep.rollout.sampler import draw, truncation_of
from lockstep.rollout.types import SamplingParams

MakeDecoder = Callable[..., Decoder]


def allowed(logits: list[float], params: SamplingParams) -> set[int]:
    """Plain reference: top-k, then min-p, then the smallest set of the most probable whose mass reaches top-p; always with all
    that are as likely as the last of them."""
    left = list(range(len(logits)))
    if params.top_k:
        floor = sorted(logits, reverse=True)[: params.top_k][-1]
        left = [i for i in left if logits[i] >= floor]
    if params.min_p:
        peak = max(logits[i] for i in left)
        left = [i for i in left if math.exp(logits[i] - peak) >= params.min_p]
    if params.top_p < 1:
        ordered = sorted(left, key=lambda i: -logits[i])
        total = math.fsum(math.exp(logits[i]) for i in ordered)
        left, mass = [], 0.0
        for i in ordered:
            if left and mass >= params.top_p:
                break
            left.append(i)
            mass += math.exp(logits[i]) / total
        left = [i for i in ordered if logits[i] >= logits[left[-1]]]
    return set(left)


LOGITS = st.lists(st.integers(-24, 24).map(lambda i: i / 4), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    LOGITS,
    st.integers(0, 14),
    st.sampled_from([1.0, 0.99, 0.61, 0.33, 1e-6]),
    st.sampled_from([0.0, 0.07, 0.51]),
)
def test_truncation_is_the_references(logits: list[float], top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(4, top_k=top_k, top_p=top_p, min_p=min_p)
    row = torch.tensor(logits)
    (least,) = threshold(row[None], truncation_of([params], torch.device("cpu")))
    kept = set((row >= least).nonzero().flatten().tolist())
    assert kept == allowed(logits, params)
    assert int(row.argmax()) in kept, "the largest always stays"
    assert torch.equal(row, torch.tensor(logits)), "the input isn't changed"


def test_a_threshold_is_the_row_s_own() -> None:
    """Whatever lies beside it, and however long the row."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(40, 30_001, generator=generator)
    some = [
        SamplingParams(1, top_k=k, top_p=p, min_p=m)
        for k, p, m in ((0, 0.9, 0.0), (50, 1.0, 0.0), (0, 1.0, 0.02), (400, 0.5, 1e-4), (0, 1.0, 0.0))
    ] * 8
    together = threshold(logits, truncation_of(some, torch.device("cpu")))
    for i, p in enumerate(some):
        alone = threshold(logits[i : i + 1], truncation_of([p], torch.device("cpu")))
        assert torch.equal(alone, together[i : i + 1])
    assert together[4::5].eq(-torch.inf).all()
    mass = logits[::5].double().softmax(1).masked_fill(logits[::5] < together[::5, None], 0.0)
    smallest = mass.masked_fill(mass == 0, 1.0).amin(1)
    assert bool((mass.sum(1) > 0.9 - 1e-5).all() and (mass.sum(1) - smallest < 0.9 + 1e-5).all())
    assert (logits[1::5] >= together[1::5, None]).sum(1).tolist() == [50] * 8


def rows_of(decoder: Decoder, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, decoder.spec.hidden_size, generator=generator).bfloat16()


def keys_of(count: int) -> list[tuple[int, int]]:
    return [(row_state(0, 0, 0, 0), i) for i in range(count)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1, top_k=3),
        SamplingParams(1, top_p=0.5),
        SamplingParams(1, 1.2, min_p=0.02, top_k=9, top_p=0.9),
    ],
)
def test_only_what_truncation_leaves_is_drawn(make_decoder: MakeDecoder, params: SamplingParams) -> None:
    head = make_decoder().head
    hidden = (rows_of(make_decoder(), 1) * 0.3).expand(400, -1)
    drawn = draw(hidden, head, [params] * 400, keys_of(400))
    logits = head.logits(hidden[:1], torch.tensor([params.score_temperature]))[0]
    inside = allowed(logits.tolist(), params)
    assert set(drawn.tokens) <= inside and len(set(drawn.tokens)) > 1
    full = logits.log_softmax(0)
    for token, logprob in zip(drawn.tokens, drawn.logprobs):
        assert math.isclose(logprob, float(full[token]), abs_tol=2e-6), (
            "log-probabilities are the full softmax's"
        )


def test_greedy_takes_the_largest_and_needs_no_noise(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder()
    hidden = rows_of(decoder, 20)
    greedy = SamplingParams(1, temperature=0.0)
    first = draw(hidden, decoder.head, [greedy] * 20, keys_of(20))
    assert first == draw(hidden, decoder.head, [greedy] * 20, keys_of(40)[20:])
    logits = decoder.head.logits(hidden, torch.ones(20))
    assert first.tokens == logits.argmax(-1).tolist()
    mixed = [greedy if i % 2 else SamplingParams(1) for i in range(20)]
    assert draw(hidden, decoder.head, mixed, keys_of(20)).tokens[1::2] == first.tokens[1::2]


def test_log_probabilities_are_the_trainers_whatever_the_batch(make_decoder: MakeDecoder) -> None:
    """Several temperatures, greedy and truncated rows side by side, more rows than a chunk of logits holds."""
    decoder = make_decoder()
    kinds = [
        SamplingParams(1), SamplingParams(1, 0.7), SamplingParams(1, 0.0), SamplingParams(1, 1.6, top_k=5),
        SamplingParams(1, 1.0, top_p=0.8),
    ]  # fmt: skip
    count = 2 * CHUNK + 17
    params = [kinds[i % len(kinds)] for i in range(count)]
    hidden, keys = rows_of(decoder, count), keys_of(count)
    together = draw(hidden, decoder.head, params, keys)
    temperature = torch.tensor([p.score_temperature for p in params])
    trainer, _ = decoder.head.log_probs(hidden, torch.tensor(together.tokens), temperature)
    assert torch.equal(trainer.detach(), torch.tensor(together.logprobs, dtype=torch.float32))
    for i in (0, 1, 2, 3, 4, CHUNK - 1, CHUNK, 2 * CHUNK, count - 1):
        alone = draw(hidden[i : i + 1], decoder.head, params[i : i + 1], keys[i : i + 1])
        assert (alone.tokens[0], alone.logprobs[0]) == (together.tokens[i], together.logprobs[i])


RECORDED = [
    SamplingParams(1, top_k=3, max_kept=3),
    SamplingParams(1, 0.7, top_p=0.5, max_kept=200),
    SamplingParams(1),
    SamplingParams(1, 1.2, min_p=0.02, top_k=9, top_p=0.9, max_kept=9),
    SamplingParams(1, 1.6, top_k=5),
    SamplingParams(1, 0.0, top_k=20, max_kept=20),
]


def test_recorded_ids_are_what_truncation_left_case_37(make_decoder: MakeDecoder) -> None:
    """Ids, their mass, and the log-probability under the distribution over them, in float64."""
    decoder = make_decoder()
    params = [RECORDED[i % len(RECORDED)] for i in range(60)]
    hidden = rows_of(decoder, 60) * 0.3
    drawn = draw(hidden, decoder.head, params, keys_of(60))
    temperature = torch.tensor([p.score_temperature for p in params])
    logits = decoder.head.logits(hidden, temperature)
    for row, p, token, logprob, kept in zip(
        logits, params, drawn.tokens, drawn.logprobs, drawn.kept, strict=True
    ):
        full = row.double().softmax(0)
        if not p.records:
            assert kept is None and math.isclose(logprob, float(full[token].log()), abs_tol=2e-6)
            continue
        assert kept is not None and kept[0].dtype == torch.int32
        ids = kept[0].tolist()
        assert ids == sorted(allowed(row.tolist(), p)) and token in ids
        assert math.isclose(kept[1], float(full[ids].sum()), rel_tol=1e-5) and 0 < kept[1] <= 1
        assert math.isclose(logprob, float((full[token] / full[ids].sum()).log()), abs_tol=2e-6)


def test_the_trainer_scores_recorded_draws_bit_for_bit_case_37(make_decoder: MakeDecoder) -> None:
    """Whatever the batch: all together, and a row alone or beside one that kept many more ids."""
    decoder = make_decoder()
    count = CHUNK + 40
    params = [RECORDED[i % len(RECORDED)] for i in range(count)]
    hidden, keys = rows_of(decoder, count) * 0.3, keys_of(count)
    together = draw(hidden, decoder.head, params, keys)
    temperature = torch.tensor([p.score_temperature for p in params])
    tokens, rollout = torch.tensor(together.tokens), torch.tensor(together.logprobs, dtype=torch.float32)
    mask = SamplingMask.of(together.kept)
    trainer, _ = decoder.head.log_probs(hidden, tokens, temperature, mask)
    assert torch.equal(trainer.detach(), rollout) and bool((rollout <= 0).all())
    full, _ = decoder.head.log_probs(hidden, tokens, temperature)
    recorded = mask.counts_N > 0
    assert bool((full[recorded & (mask.mass_N < 0.999)] < trainer[recorded & (mask.mass_N < 0.999)]).all())
    for batch in ([0], [1], [3], [5], [0, 1, 2], [CHUNK - 1, CHUNK, 3]):
        some = draw(hidden[batch], decoder.head, [params[i] for i in batch], [keys[i] for i in batch])
        assert some.logprobs == [together.logprobs[i] for i in batch]
        assert SamplingMask.of(some.kept) == SamplingMask.of([together.kept[i] for i in batch])


def test_more_ids_than_are_recorded_are_refused_case_37(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder()
    params = [SamplingParams(1), SamplingParams(1, top_k=30, max_kept=8)]
    with pytest.raises(
        CapacityError, match=r"rollout.max_kept: truncation keeps 30 ids of a token.*at most 8"
    ):
        draw(rows_of(decoder, 2), decoder.head, params, keys_of(2))
    assert draw(
        rows_of(decoder, 2), decoder.head, [params[0], SamplingParams(1, top_k=9)], keys_of(2)
    ).kept == [
        None,
        None,
    ]


def test_a_row_that_is_not_a_number_stays_one(make_decoder: MakeDecoder) -> None:
    """A broken model must reach the door as NaN, not fail in the sampler nor look fine."""
    decoder = make_decoder()
    hidden = rows_of(decoder, 2) * torch.tensor([[float("nan")], [1.0]])
    drawn = draw(hidden, decoder.head, [SamplingParams(1, top_p=0.9, max_kept=500)] * 2, keys_of(2))
    assert math.isnan(drawn.logprobs[0]) and drawn.logprobs[1] <= 0


def test_a_backend_that_fuses_draws_as_its_captured_steps_do(
    make_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets logits over their temperature, thresholds, and what its own noise is made from."""
    decoder = make_decoder()
    kernels = decoder.head.kernels
    given: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]] = []

    def sample(*args: Tensor) -> Tensor:
        given.append(args)  # type: ignore[arg-type]
        return args[0].argmax(-1)

    monkeypatch.setattr(type(kernels), "fused", True)
    monkeypatch.setattr(type(kernels), "sample", staticmethod(sample), raising=False)
    params = [SamplingParams(1, 0.7, top_k=4), SamplingParams(1, 0.0)]
    noise = [(row_state(1, 2, 3, 4), 5), (-(2**63), 7)]
    hidden = rows_of(decoder, 2)
    drawn = draw(hidden, decoder.head, params, noise)
    logits, hot, state, position, least = given[0]
    assert torch.equal(logits, decoder.head.logits(hidden, torch.tensor([0.7, 1.0])))
    assert hot.tolist() == [1.0, 0.0] and list(zip(state.tolist(), position.tolist())) == noise
    assert least is not None and (logits >= least[:, None]).sum(1).tolist() == [4, logits.shape[1]]
    assert drawn.tokens == logits.argmax(-1).tolist()
