"""Dotted overrides edit the tree of the file."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config.overrides import apply_overrides, split_override
from lockstep.errors import ConfigError


def tree() -> dict[str, Any]:
    return {"optim": {"lr": 1.0}, "rewards": [{"use": "a"}, {"use": "b"}], "seed": 1, "eval": None}


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("optim.lr=1e-5", ("optim", "lr"), 1e-5),
        ("rewards.0.weight=2", ("rewards", 0, "weight"), 2),
        ("rollout.stop=['\\n', x]", ("rollout", "stop"), ["\\n", "x"]),
        ("run_dir=a=b", ("run_dir",), "a=b"),
        ("observe.live=off", ("observe", "live"), "off"),
        ("eval.data=null", ("eval", "data"), None),
    ],
)
def test_split(text: str, path: tuple[str | int, ...], value: object) -> None:
    assert split_override(text) == (path, value)


def test_written_over_the_file_and_the_last_one_wins() -> None:
    made = tree()
    written = apply_overrides(made, ["optim.lr=2", "optim.lr=3", "rewards.1.use=c", "new.section.key=x"])
    assert made["optim"] == {"lr": 3}
    assert [r["use"] for r in made["rewards"]] == ["a", "c"]
    assert made["new"] == {"section": {"key": "x"}}
    assert ("rewards", 1, "use") in written


def test_an_empty_section_is_filled() -> None:
    made = tree()
    apply_overrides(made, ["eval.every=5"])
    assert made["eval"] == {"every": 5}


def test_the_next_index_appends() -> None:
    made = tree()
    apply_overrides(made, ["rewards.2.use=c", "fresh.0.use=d"])
    assert made["rewards"][2] == {"use": "c"} and made["fresh"] == [{"use": "d"}]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optim.lr", "is not an override"),
        ("=1", "is not an override"),
        ("optim..lr=1", "is not an override"),
        ("rewards.5.use=x", "no position in a list of 2"),
        ("rewards.first.use=x", "no position in a list of 2"),
        ("seed.x=1", "nothing can be set under 'x'"),
        ("optim.lr=[1", "not valid YAML"),
    ],
)
def test_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as e:
        apply_overrides(tree(), [text])
    assert says in str(e.value) and str(e.value).startswith("command line")
