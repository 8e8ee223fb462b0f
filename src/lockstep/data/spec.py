"""What a user writes to say where prompts come from.

The fields are what every source has; `args` is what one source has. Next: `example.py`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

Source = Literal["arithmetic", "jsonl", "parquet", "dataset", "reasoning_gym"]

COMMON_ARGS = ("chat", "system", "template")
SOURCE_ARGS: dict[str, tuple[str, ...]] = {
    "arithmetic": ("digits", "operators", "size", "holdout"),
    "jsonl": ("layout",),
    "parquet": ("layout",),
    "dataset": ("layout", "name", "split", "revision"),
    "reasoning_gym": ("task", "size", "config"),
}
FILE_SOURCES = ("jsonl", "parquet", "dataset")


@dataclass(frozen=True)
class DataSpec:
    """One source of prompts."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    source: Source
    """`arithmetic` (generated sums), `jsonl` or `parquet` (a file), `dataset` (a Hugging Face dataset, on the hub or saved in
    a folder), `reasoning_gym` (a generated task)."""

    path: str = ""
    """File, folder or dataset name. For the sources that read something."""

    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""

    answer_column: str = "answer"
    """Column with the reference answer. Rewards get it as `answer`, whatever its name here. Empty: there is none."""

    columns: tuple[str, ...] = ()
    """Columns that rewards get beside the answer. Empty: all but the prompt."""

    shuffle: bool = True
    """A new order in every epoch; otherwise the order of the source, again and again."""

    seed: int | None = None
    """Seed of the order and of what is generated. None takes the run's."""

    limit: int | None = None
    """Use the first so many rows only."""

    max_prompt_tokens: int | None = None
    """Leave out (and count) prompts with more tokens. They are never cut."""

    on_bad_sample: Literal["drop", "stop"] = "drop"
    """What becomes of a sample that breaks the sample contract (docs/samples.md): `drop` leaves it out and counts it by reason,
    `stop` ends the run and names it. For training data; it is never repaired."""

    chat_template_args: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as `enable_thinking: false`."""

    args: dict[str, Any] = field(default_factory=dict)
    """Options of the source. All: `chat` (text prompts become a user message), `system` (a system message goes first),
    `template` (a format string over the columns, in place of the prompt column). arithmetic: `digits`, `operators`, `size`,
    `holdout`. jsonl, parquet, dataset: `layout` (`plain` or `verl`). dataset: `name`, `split`, `revision`. reasoning_gym: `task`,
    `size`, `config`."""

    def __post_init__(self) -> None:
        if self.source in FILE_SOURCES and not self.path:
            raise ValueError(f"source {self.source} needs a path")
        if self.source not in FILE_SOURCES and self.path:
            raise ValueError(
                f"path has no effect with source {self.source}; remove it, or set source to jsonl or parquet"
            )
        if not self.prompt_column:
            raise ValueError("prompt_column is empty")
        for name in ("limit", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it starts at 1, and null means no limit")
        allowed = (*COMMON_ARGS, *SOURCE_ARGS.get(self.source, ()))
        for name in self.args:
            if name not in allowed:
                near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(allowed)}"
                raise ValueError(f"args.{name}: source {self.source} has no such option; {hint}")
