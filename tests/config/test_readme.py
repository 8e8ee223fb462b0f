"""The README's configuration loads, and its reward function is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.config.load import load_run
from lockstep.rewards.contract import check_scores

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", README, re.M | re.S)
    assert found
    return found[1]


def test_the_configuration_loads(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(block("yaml"), encoding="utf-8")
    run = load_run(file, ["optim.lr=3e-5", "rewards.1.weight=0"])
    assert run.optim.lr == 3e-5 and run.flow.kv == "fp8" and run.eval.data is not None


def test_the_reward_function_is_one() -> None:
    names: dict[str, object] = {}
    exec(block("python"), names)
    brevity = names["brevity"]
    assert callable(brevity)
    scores = brevity(
        prompts=["a", "b"],
        completions=["1", "2"],
        completion_ids=[[1] * 16, [1]],
        answer=["1", "2"],
        level=[1, 2],
    )
    assert check_scores("brevity", scores, 2) == pytest.approx([0.5, 1.0])


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/index.md",
        "docs/architecture.md",
        "docs/dependencies.md",
        "docs/coming-from.md",
        "docs/on-a-gpu.md",
    ],
)
def test_links_lead_somewhere(page: str) -> None:
    file = Path(__file__).parents[2] / page
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text(encoding="utf-8")):
        assert (file.parent / target).exists(), target
