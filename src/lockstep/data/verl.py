"""verl's row layout, as the columns used here.

A row of verl has `prompt` (messages), `reward_model.ground_truth` (the answer), and usually `data_source`, `ability` and
`extra_info`. The ground truth becomes `answer`; everything else keeps its name, so `rewards/verl.py` can call a reward
function written for verl. Next: `example.py`.
"""

from __future__ import annotations

from typing import Any

from lockstep.errors import DataError


def from_verl(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The row with `answer` in place of `reward_model`. DataError when it isn't in verl's layout."""
    model = values.get("reward_model")
    if not isinstance(model, dict) or "ground_truth" not in model:
        what = (
            f"reward_model is {type(model).__name__}"
            if not isinstance(model, dict)
            else "reward_model has no ground_truth"
        )
        raise DataError(
            what, where=where, why="layout is verl", fix="drop data.args.layout if the file has plain columns"
        )
    if "answer" in values:
        raise DataError(
            "the row has both answer and reward_model.ground_truth", where=where, fix="drop data.args.layout"
        )
    rest = {name: value for name, value in values.items() if name != "reward_model"}
    return {**rest, "answer": model["ground_truth"]}
