"""The door that every sample has to pass (field failures 37, 44, 64): what breaks the contract is dropped and counted by reason,
or stops the run; it is never filled in."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.data.spec import DataSpec
from lockstep.errors import DataError
from lockstep.nn.sampling_mask import SamplingMask
from lockstep.rollout.external import completion_to_json
from lockstep.rollout.types import Completion, Request, SamplingParams, VersionSpan
from lockstep.trainer.sample import Expected, admit, defect
from lockstep.trainer.spec import RunSpec

NAN = math.nan
GOOD = Completion((1, 2), 0, 0, (3, 4), (-0.5, -0.0), "stop", (VersionSpan(7, 0, 2),), 2, SamplingParams(4))
TURNS = Completion(
    (1, 2), 0, 1, (3, 4, 5, 6), (-0.5, NAN, NAN, -1.0), "length", (VersionSpan(7, 0, 3), VersionSpan(7, 3, 4)), 2,
    SamplingParams(4), (True, False, False, True),
)  # fmt: skip
TOP = SamplingParams(4, top_k=3, max_kept=3)


def kept(*ids: Sequence[int], mass: float = 0.75) -> SamplingMask:
    return SamplingMask.of([(torch.tensor(part, dtype=torch.int32), mass) for part in ids])


TRUNCATED = replace(GOOD, params=TOP, sampling_mask=kept((0, 3, 8), (4, 9)))
WANTED = Expected(7, 2, 10)


def spans(*parts: tuple[int, int, int]) -> Completion:
    return replace(GOOD, spans=tuple(VersionSpan(*part) for part in parts))


def params(**changes: Any) -> Completion:
    return replace(GOOD, params=replace(GOOD.params, **changes))


BAD: dict[str, list[Completion]] = {
    "prompt": [replace(GOOD, prompt_ids=()), replace(GOOD, prompt_ids=(1, 10))],
    "no_tokens": [replace(GOOD, token_ids=(), logprobs=(), spans=())],
    "token_id": [
        replace(GOOD, token_ids=(3, 10)),
        replace(GOOD, token_ids=(-1, 4)),
        replace(GOOD, token_ids=(3, 4.0)),  # type: ignore[arg-type]
        replace(GOOD, token_ids=(3, True)),
        replace(GOOD, token_ids=(3, None)),  # type: ignore[arg-type]
    ],
    "finish_reason": [replace(GOOD, finish_reason="abort")],  # type: ignore[arg-type]
    "params": [
        replace(GOOD, params=None),  # type: ignore[arg-type]
        params(temperature=NAN),
        params(temperature=-1.0),
        params(top_p=0.0),
        params(top_p=1.5),
        params(top_k=-1),
        params(min_p=1.0),
        params(top_p=None),
    ],
    "greedy": [params(temperature=0.0)],
    "loss_mask": [
        replace(GOOD, loss_mask=(True,)),
        replace(GOOD, loss_mask=(True, True, False)),
        replace(GOOD, loss_mask=(1, 0)),  # type: ignore[arg-type]
    ],
    "nothing_trained": [replace(GOOD, loss_mask=(False, False))],
    "logprob_count": [replace(GOOD, logprobs=(-0.5,)), replace(GOOD, logprobs=(-0.5, -0.5, -0.5))],
    "logprob_missing": [replace(GOOD, logprobs=(-0.5, None))],  # type: ignore[arg-type]
    "logprob_type": [replace(GOOD, logprobs=(-0.5, "NaN")), replace(GOOD, logprobs=(-1, -0.5))],  # type: ignore[arg-type]
    "logprob_nonfinite": [
        replace(GOOD, logprobs=(-0.5, NAN)),
        replace(GOOD, logprobs=(-math.inf, -1.0)),
        replace(GOOD, logprobs=(-1e39, -1.0)),
        replace(TURNS, logprobs=(-0.5, -math.inf, NAN, -1.0)),
        replace(TURNS, logprobs=(NAN, NAN, NAN, -1.0)),
    ],
    "logprob_positive": [
        replace(GOOD, logprobs=(1e-9, -0.5)),
        replace(TURNS, logprobs=(-0.5, 0.25, NAN, -1.0)),
    ],
    "version_spans": [
        spans(),
        spans((7, 0, 1)),
        spans((7, 0, 3)),
        spans((7, 1, 2)),
        spans((7, 0, 1), (7, 0, 2)),
        spans((7, 0, 2), (7, 2, 2)),
        spans((7, 1, 2), (7, 0, 1)),
        spans((7, 0, 2), (6, 0, 2)),
    ],
    "mixed_versions": [spans((7, 0, 1), (6, 1, 2)), spans((6, 0, 1), (7, 1, 2))],
    "wrong_version": [spans((6, 0, 2)), spans((8, 0, 1), (8, 1, 2))],
    "wrong_scales": [replace(GOOD, scale_version=1)],
    "no_sampling_mask": [params(top_k=3), params(top_p=0.9), params(min_p=0.1)],
    "sampling_mask": [
        replace(TRUNCATED, params=GOOD.params),
        replace(TRUNCATED, sampling_mask=kept((0, 3, 8))),
        replace(TRUNCATED, sampling_mask=kept((0, 3, 8), (5, 9))),
        replace(TRUNCATED, sampling_mask=kept((0, 3, 8), ())),
        replace(TRUNCATED, sampling_mask=kept((3, 0, 8), (4, 9))),
        replace(TRUNCATED, sampling_mask=kept((3, 3), (4, 9))),
        replace(TRUNCATED, sampling_mask=kept((0, 3, 8), (4, 10))),
        replace(TRUNCATED, sampling_mask=kept((0, 3, 8), (4, 9), mass=0.0)),
        replace(TRUNCATED, sampling_mask=kept((0, 3, 8), (4, 9), mass=NAN)),
    ],
}  # fmt: skip


def test_good_samples_pass() -> None:
    glue_kept = SamplingMask.of(
        [(torch.tensor([3]).int(), 0.2), None, None, (torch.tensor([1, 6]).int(), 1.0)]
    )
    good = [
        GOOD,
        TURNS,
        TRUNCATED,
        replace(GOOD, loss_mask=(False, True)),
        replace(TURNS, logprobs=(-0.5, -2.0, NAN, -1.0)),
        replace(TURNS, params=TOP, sampling_mask=glue_kept),
        spans((7, 0, 1), (7, 1, 2)),
    ]
    assert admit(good, WANTED, "stop") == (good, {})


@pytest.mark.parametrize("reason", BAD)
def test_each_defect_has_its_name_case_44(reason: str) -> None:
    for sample in BAD[reason]:
        found = defect(sample, WANTED)
        assert found is not None and found.reason == reason, (found, sample)
        assert found.detail


def test_versions_are_enforced_at_the_door_case_64() -> None:
    """Spans with a gap, an overlap or an end too early; two versions in one sample; another version or other KV scales."""
    for reason in ("version_spans", "mixed_versions", "wrong_version", "wrong_scales"):
        kept_, counts = admit(BAD[reason], WANTED)
        assert not kept_ and counts == {f"data/dropped_{reason}": float(len(BAD[reason]))}
    found = defect(spans((7, 0, 1), (6, 1, 2)), WANTED)
    assert found is not None and "[6, 7]" in found.detail


def test_a_truncated_sample_without_its_mask_is_refused_case_37() -> None:
    for reason in ("no_sampling_mask", "sampling_mask"):
        assert {getattr(defect(s, WANTED), "reason", None) for s in BAD[reason]} == {reason}


def test_the_prompt_is_the_one_that_was_sent_case_59() -> None:
    """An engine that tokenizes prompts anew answers another question."""
    sent = replace(WANTED, prompts={0: (1, 2), 1: (1, 5)})
    assert defect(GOOD, sent) is None
    for other in (
        replace(GOOD, prompt_index=1),
        replace(GOOD, prompt_index=2),
        replace(GOOD, prompt_ids=(1, 2, 3)),
    ):
        found = defect(other, sent)
        assert found is not None and found.reason == "prompt"


def test_dropped_and_counted_case_44() -> None:
    everything = [GOOD, *(s for samples in BAD.values() for s in samples), TURNS, BAD["no_tokens"][0]]
    found, counts = admit(everything, WANTED)
    assert found == [GOOD, TURNS]
    assert counts == {f"data/dropped_{r}": float(len(s) + (r == "no_tokens")) for r, s in BAD.items()}


def test_stop_names_the_first_offender_and_the_reason_case_44() -> None:
    bad = replace(GOOD, prompt_index=17, sample_index=3, logprobs=(-0.5, NAN))
    with pytest.raises(DataError) as e:
        admit([GOOD, bad, BAD["no_tokens"][0]], WANTED, "stop")
    line = str(e.value)
    assert line.startswith(
        "sample 3 of prompt 17: breaks the sample contract: the log-probability of token 1 is nan"
    )
    assert "(logprob_nonfinite)" in line and "data.on_bad_sample" in line


def test_records_of_other_engines_pass_the_same_door_case_44() -> None:
    """As parsed JSON: good ones become completions, each bad one is counted under its own reason."""
    records = [json.loads(json.dumps(completion_to_json(c))) for c in (GOOD, TURNS, TRUNCATED)]
    null, text, absent, strange = ({**records[0]} for _ in range(4))
    null["logprobs"] = [-0.5, None]
    text["logprobs"] = [-0.5, "NaN"]
    del absent["params"]
    strange["logprob"] = []
    nan = json.loads(json.dumps({**records[0], "logprobs": [-0.5, NAN]}))
    late = {**records[0], "spans": [{"version": 6, "start": 0, "end": 2}]}
    found, counts = admit([*records, null, text, absent, strange, nan, late], WANTED)
    assert [(c.token_ids, c.sampling_mask) for c in found] == [
        (c.token_ids, c.sampling_mask) for c in (GOOD, TURNS, TRUNCATED)
    ]
    reasons = (
        "logprob_missing",
        "logprob_type",
        "field_missing",
        "field_unknown",
        "logprob_nonfinite",
        "wrong_version",
    )
    assert counts == {f"data/dropped_{r}": 1.0 for r in reasons}
    with pytest.raises(DataError, match=r"sample number 3: .*token 1 is null \(logprob_missing\)"):
        admit([*records, null], WANTED, "stop")


def spoil(engine: Any, change: Callable[[int, Completion], Completion]) -> None:
    """Makes an engine return other completions than it drew."""
    honest = engine.generate

    def generate(requests: Sequence[Request], **options: Any) -> list[Completion]:
        return [change(i, c) for i, c in enumerate(honest(requests, **options))]

    engine.generate = generate


def test_a_step_goes_on_without_the_broken_ones_case_44(
    make_spec: Callable[..., RunSpec], open_trainer: Callable[[RunSpec], Any]
) -> None:
    def change(i: int, c: Completion) -> Completion:
        if i == 1:
            return replace(c, logprobs=(float("nan"), *c.logprobs[1:]))
        return replace(c, logprobs=c.logprobs[:-1]) if i in (4, 5, 6) else c

    with open_trainer(make_spec()) as trainer:
        trainer.begin()
        spoil(trainer.parts.engine, change)
        metrics = trainer.step()
    assert metrics["data/dropped_logprob_nonfinite"] == 1 and metrics["data/dropped_logprob_count"] == 3
    assert metrics["data/kept_groups"] == 2, "a group left with one sample has no baseline"
    assert metrics["mismatch/max_abs_dlogp"] == 0.0 and math.isfinite(metrics["optim/grad_norm"])


def test_a_step_stops_at_a_broken_sample_when_asked_to_case_44(
    make_spec: Callable[..., RunSpec], open_trainer: Callable[[RunSpec], Any]
) -> None:
    data = DataSpec("arithmetic", args={"template": "{a}+{b}=", "size": 12}, on_bad_sample="stop")
    with open_trainer(make_spec(data=data)) as trainer:
        trainer.begin()
        spoil(
            trainer.parts.engine,
            lambda i, c: replace(c, token_ids=(10**6, *c.token_ids[1:])) if i == 5 else c,
        )
        with pytest.raises(DataError, match=r"sample 1 of prompt 1: .*token 0 is 1000000.*\(token_id\)"):
            trainer.step()


def test_a_step_of_another_version_is_refused_case_64(
    make_spec: Callable[..., RunSpec], open_trainer: Callable[[RunSpec], Any]
) -> None:
    def change(i: int, c: Completion) -> Completion:
        if i == 2:
            return replace(c, spans=(VersionSpan(0, 0, 1), VersionSpan(1, 1, len(c.token_ids))))
        return replace(c, spans=(VersionSpan(0, 0, len(c.token_ids)),)) if i == 3 else c

    with open_trainer(make_spec()) as trainer:
        trainer.begin()
        spoil(trainer.parts.engine, change)
        metrics = trainer.step()
    assert metrics["data/dropped_mixed_versions"] == metrics["data/dropped_wrong_version"] == 1


def test_a_step_without_any_good_sample_is_refused(
    make_spec: Callable[..., RunSpec], open_trainer: Callable[[RunSpec], Any]
) -> None:
    with open_trainer(make_spec()) as trainer:
        trainer.begin()
        spoil(trainer.parts.engine, lambda _, c: replace(c, logprobs=()))
        with pytest.raises(DataError, match="no completion of this step kept the sample contract"):
            trainer.step()
