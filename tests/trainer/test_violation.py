"""What is said of samples whose log-probabilities are not the rollout's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lockstep.rollout.types import Completion, SamplingParams
from lockstep.trainer.violation import Violation, examine

TRUTH = {0: (-1.0, -2.0, -3.0), 1: (-1.5, -2.5), 2: (-0.5,)}


def samples(**wrong: tuple[float, ...]) -> list[Any]:
    told = TRUTH | {int(k[1:]): v for k, v in wrong.items()}
    return [
        SimpleNamespace(
            completion=Completion((5, 6), 7, i, tuple(range(len(p))), p, "length", (), 0, SamplingParams(9))
        )
        for i, p in told.items()
    ]


class Trainer:
    """Scores samples as TRUTH says; `drift` is added in every pack after the first, `crowd` in packs of several samples."""

    def __init__(self, drift: float = 0.0, crowd: float = 0.0) -> None:
        self.drift, self.crowd, self.calls = drift, crowd, 0

    def packs(self, chosen: list[Any]) -> Iterator[tuple[list[Any], Any]]:
        yield chosen, [s.completion.sample_index for s in chosen]

    def score(self, micro: Any) -> Tensor:
        self.calls += 1
        added = self.drift * (self.calls > 1) + self.crowd * (len(micro) > 1)
        return torch.tensor([p for i in micro for p in TRUTH[i]]) + added


def found(trainer: Trainer, **wrong: tuple[float, ...]) -> Violation:
    return examine(samples(**wrong), trainer.packs, trainer.score)


def test_the_sample_and_its_first_token_are_named(tmp_path: Path) -> None:
    seen = found(Trainer(), s1=(-1.5, -2.25))
    (one,) = seen.differing
    assert seen.repeats and (one.prompt, one.sample, one.trained, one.differ, one.first) == (7, 1, 2, 1, 1)
    assert one.largest == 0.25 and one.deltas == (0.0, -0.25) and one.alone == "the trainer"
    assert "1 of 3 samples differ, of prompts 7; the earliest at token 1 of sample 1" in seen.line()
    assert json.loads(seen.write(tmp_path / "run").read_text())["differing"][0]["tokens"] == [0, 1]


def test_a_pack_that_changes_its_rows_is_told_from_a_wrong_rollout() -> None:
    seen = found(Trainer(crowd=0.5))
    assert len(seen.differing) == 3 and {d.alone for d in seen.differing} == {"the rollout"}


def test_a_forward_that_does_not_repeat_itself() -> None:
    seen = found(Trainer(drift=0.125), s2=(-0.75,))
    assert not seen.repeats and [d.alone for d in seen.differing] == ["neither"]
    assert "does not repeat itself" in seen.line()
    assert "doesn't repeat itself" in found(Trainer()).line(), "nothing differs the second time"
