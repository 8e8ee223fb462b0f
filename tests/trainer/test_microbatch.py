"""Packing completions into rows: every response token has its row, its target and its own parameters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lockstep.rollout.types import Completion, SamplingParams, VersionSpan
from lockstep.trainer.microbatch import make_microbatch


def completion(prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float = 1.0) -> Completion:
    params = SamplingParams(9, temperature)
    logprobs = tuple(-0.5 - t / 8 for t in tokens)
    return Completion(prompt, 0, 0, tokens, logprobs, "length", (VersionSpan(1, 0, len(tokens)),), 0, params)


BATCH = [
    completion((5, 6, 7), (10, 11, 12)),
    completion((5, 6, 7), (13,), 0.7),
    completion((8, 9), (14, 15), 0.0),
    completion((5, 6, 7), (16, 17)),
]


def test_shared_prompts_appear_once_in_a_row() -> None:
    micro = make_microbatch(BATCH, 1, share_prompts=True)
    assert micro.ids_T.tolist() == [5, 6, 7, 10, 11, 8, 9, 14, 5, 6, 7, 16]
    assert micro.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]
    assert micro.rows_N.tolist() == [2, 3, 4, 2, 6, 7, 10, 11]


def test_repeated_prompts() -> None:
    micro = make_microbatch(BATCH, 1, share_prompts=False)
    assert micro.ids_T.tolist() == [5, 6, 7, 10, 11, 5, 6, 7, 8, 9, 14, 5, 6, 7, 16]
    assert micro.rows_N.tolist() == [2, 3, 4, 7, 9, 10, 13, 14]


@pytest.mark.parametrize("share", [True, False])
def test_every_token_has_its_target_sample_and_temperature(share: bool) -> None:
    micro = make_microbatch(BATCH, 2, share_prompts=share)
    assert micro.targets_N.tolist() == [10, 11, 12, 13, 14, 15, 16, 17]
    assert micro.sample_N.tolist() == [0, 0, 0, 1, 2, 2, 3, 3]
    assert micro.temperature_N.tolist() == pytest.approx([1, 1, 1, 0.7, 1, 1, 1, 1]), "greedy is scored at 1"
    assert micro.rollout_N.dtype == torch.float32
    assert micro.rollout_N.tolist() == [p for c in BATCH for p in c.logprobs]
    inputs = micro.ids_T[micro.rows_N].tolist()
    assert inputs == [7, 10, 11, 7, 9, 14, 7, 16], "a token is predicted at the row of the one before it"
    for row, target_position in zip(micro.rows_N.tolist(), [3, 4, 5, 3, 2, 3, 3, 4]):
        assert int(micro.positions_T[row]) == target_position - 1


def test_slots_of_a_response_are_prompt_then_response() -> None:
    """Keys of the last query of every sample, by token, are its whole prefix."""
    for share in (True, False):
        micro = make_microbatch(BATCH, 1, share_prompts=share)
        prefixes = {}
        for tile in micro.index.tiles:
            for query, position, slots in zip(tile.query_BQ, tile.position_BQ, tile.slots_BL):
                for row, at in zip(query.tolist(), position.tolist()):
                    if at >= 0:
                        prefixes[row] = micro.ids_T[slots[: at + 1]].tolist()
        rows = iter(micro.rows_N.tolist())
        for c in BATCH:
            for i in range(len(c.token_ids)):
                assert prefixes[next(rows)] == [*c.prompt_ids, *c.token_ids[:i]]


def test_a_prompt_and_its_first_completion_are_one_run() -> None:
    """So a pack without shared prompts is whole sequences, which more kernels take."""

    def runs(share: bool) -> list[tuple[int, int, int]]:
        met: list[tuple[int, int, int]] = []
        index = SimpleNamespace(index=lambda runs, *_: met.extend((r.row, r.count, r.position) for r in runs))
        make_microbatch(BATCH, 1, share_prompts=share, kernels=index)  # type: ignore[arg-type]
        return met

    assert runs(False) == [(0, 5, 0), (5, 3, 0), (8, 3, 0), (11, 4, 0)]
    assert runs(True) == [(0, 5, 0), (5, 3, 0), (8, 4, 0)]
