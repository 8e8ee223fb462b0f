"""Samples as JSON: read back equal, or refused under a reason (field failure 44). Nothing is defaulted."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
import torch

from lockstep.nn.sampling_mask import SamplingMask
from lockstep.rollout.external import BadSample, completion_from_json, completion_to_json
from lockstep.rollout.types import Completion, SamplingParams, VersionSpan

PARAMS = SamplingParams(8, 0.7, 0.9, 4, 0.01, ("###",), frozenset({2, 5}), 16)
KEPT = SamplingMask.of([(torch.tensor([1, 3, 7]).int(), 0.5), None, (torch.tensor([4]).int(), 0.25)])
SAMPLE = Completion(
    (1, 2), 5, 3, (3, 9, 4), (-0.5, -2.0, -0.25), "stop", (VersionSpan(7, 0, 1), VersionSpan(8, 1, 3)), 2, PARAMS,
    (True, False, True), KEPT,
)  # fmt: skip
PLAIN = Completion((1,), 0, 0, (3,), (-0.5,), "length", (VersionSpan(1, 0, 1),), 0, SamplingParams(4))


def record(sample: Completion = SAMPLE) -> dict[str, Any]:
    """A sample after a trip through a file."""
    found: dict[str, Any] = json.loads(json.dumps(completion_to_json(sample)))
    return found


def test_a_round_trip_loses_nothing() -> None:
    assert completion_from_json(record()) == SAMPLE
    assert completion_from_json(record(PLAIN)) == PLAIN and "loss_mask" not in record(PLAIN)


def test_log_probabilities_become_fp32_and_unsampled_ones_nan() -> None:
    found = record()
    found["logprobs"] = [-0.1, None, -1]
    values = completion_from_json(found).logprobs
    assert values[0] == struct.unpack("f", struct.pack("f", -0.1))[0] != -0.1
    assert math.isnan(values[1]) and values[2] == -1.0 and type(values[2]) is float
    assert completion_to_json(completion_from_json(found))["logprobs"][1] is None


def change(*path: str | int, to: Any) -> dict[str, Any]:
    """A record with one value replaced."""
    found = record()
    place: Any = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return found


def without(*path: str) -> dict[str, Any]:
    found = record()
    place: Any = found
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return found


BAD: dict[str, list[Any]] = {
    "field_missing": [
        *(without(name) for name in record() if name not in ("loss_mask", "sampling_mask")),
        *(without("params", name) for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens")),
        without("sampling_mask", "mass"),
        change("spans", 0, to={"version": 7, "start": 0}),
    ],
    "field_unknown": [change("loss_masks", to=[]), change("params", "topp", to=1.0)],
    "field_type": [
        [],
        change("token_ids", to=None),
        change("token_ids", to="3 9 4"),
        change("logprobs", to={"0": -1.0}),
        change("prompt_index", to="5"),
        change("sample_index", to=True),
        change("params", to=None),
        change("params", "temperature", to="1.0"),
        change("params", "top_k", to=4.5),
        change("spans", to=[[7, 0, 3]]),
        change("sampling_mask", "ids", to=[[1]]),
        change("sampling_mask", "ids", to=[[1, 3, 7], None, [4]]),
        change("sampling_mask", "ids", to=[[1, 3, "7"], [], [4]]),
        change("sampling_mask", "mass", to=[0.5, None, 1.0]),
    ],
    "logprob_missing": [change("logprobs", 0, to=None), change("loss_mask", 1, to=True) | {"logprobs": [-1, None, -1]}],
    "logprob_type": [change("logprobs", i, to=v) for i, v in ((0, "NaN"), (2, "-Infinity"), (1, "-0.5"), (0, [-1]), (0, True))],
}  # fmt: skip


@pytest.mark.parametrize("reason", BAD)
def test_what_is_no_sample_is_refused_under_its_reason_case_44(reason: str) -> None:
    for bad in BAD[reason]:
        with pytest.raises(BadSample) as e:
            completion_from_json(bad)
        assert e.value.reason == reason, (e.value, bad)
        assert f"({reason})" in str(e.value)


def test_without_a_loss_mask_every_null_is_missing_case_44() -> None:
    found = without("loss_mask") | {"logprobs": [-0.5, None, -0.5]}
    with pytest.raises(BadSample, match="token 1 is null"):
        completion_from_json(found)
