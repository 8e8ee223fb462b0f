"""docs/samples.md: its record is a sample, and its table has every reason."""

from __future__ import annotations

import json
import re
from pathlib import Path

from lockstep.rollout import external
from lockstep.trainer import sample
from lockstep.trainer.sample import Expected, admit

PAGE = (Path(__file__).parents[2] / "docs" / "samples.md").read_text(encoding="utf-8")


def test_the_record_of_the_page_is_a_sample() -> None:
    record = json.loads(PAGE.split("```json\n")[1].split("```")[0])
    [found], counts = admit([record], Expected(3, 0, 10, {0: (1, 5)}), "stop")
    assert found.trained_logprobs == (-0.25, -0.5) and not counts


def test_every_reason_is_explained_case_44() -> None:
    source = "".join(Path(str(module.__file__)).read_text() for module in (sample, external))
    raised = set(re.findall(r'(?:Defect|BadSample)\(\s*"(\w+)"', source)) | {
        "logprob_nonfinite",
        "logprob_positive",
    }
    raised |= {"logprob_missing", "logprob_type"}
    table = PAGE.split("| reason |")[1].split("\n\n")[0]
    explained = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert raised == explained and len(raised) > 20
