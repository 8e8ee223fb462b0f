"""A reward function written for verl, as a reward here.

verl calls `compute_score(data_source, solution_str, ground_truth, extra_info)` for one sample and takes a number or a
dict with a `score`. The columns come from `data/verl.py`'s converter (layout `verl`): `data_source`, `answer`, which is
verl's ground truth, and `extra_info`. Next: `load.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.rewards.contract import Completion, Prompt, text_of


def adapt(compute_score: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """`compute_score` under TRL's signature; `options` reach it by keyword."""

    def verl_reward(
        prompts: list[Prompt],
        completions: list[Completion],
        completion_ids: list[list[int]],
        answer: list[Any],
        data_source: list[Any] | None = None,
        extra_info: list[Any] | None = None,
    ) -> list[Any]:
        count = len(completions)
        sources, infos = data_source or [None] * count, extra_info or [None] * count
        results = [
            compute_score(source, text_of(completion), truth, info, **options)
            for completion, source, truth, info in zip(completions, sources, answer, infos, strict=True)
        ]
        return [result.get("score") if isinstance(result, Mapping) else result for result in results]

    verl_reward.__name__ = name
    return verl_reward
