"""DataSpec: what it refuses, and that pydantic can validate into it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from lockstep.data.spec import DataSpec


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"source": "jsonl"}, "jsonl needs a path"),
        ({"source": "arithmetic", "path": "x"}, "path has no effect"),
        ({"source": "arithmetic", "limit": 0}, "limit is 0"),
        ({"source": "arithmetic", "max_prompt_tokens": -1}, "max_prompt_tokens is -1"),
        ({"source": "arithmetic", "args": {"digit": 2}}, "did you mean digits"),
        ({"source": "jsonl", "path": "x", "args": {"digits": 2}}, "source jsonl has no such option"),
        ({"source": "arithmetic", "prompt_column": ""}, "prompt_column is empty"),
    ],
)
def test_refuses(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DataSpec(**values)


def test_pydantic_validates_into_it_and_forbids_unknown_keys() -> None:
    adapter = TypeAdapter(DataSpec)
    spec = adapter.validate_python(
        {"source": "jsonl", "path": "x", "columns": ["a", "b"], "args": {"chat": True}}
    )
    assert spec == DataSpec("jsonl", path="x", columns=("a", "b"), args={"chat": True})
    for wrong in ({"source": "csv", "path": "x"}, {"source": "arithmetic", "shufle": True}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)
