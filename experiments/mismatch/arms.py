"""The arms of the experiment: what differs between two runs beside their seeds.

All train under one configuration, from the same weights, on the same prompts. `-mini` arms cut a step's samples into several
mini-batches: then the policy moves between the rollout and the last optimizer step, as it does in most published runs. Next:
`run.py`, one run; `drive.py`, all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

MINI_BATCHES = 4
ROLLOUT = ("flow.name=fp8-rollout", "flow.kv=fp8")
GEOMETRIC = (
    "correction.preset=geometric_mis",
    "correction.rollout_rs_threshold=1.02",
    "correction.rollout_rs_threshold_lower=0.98",
)
"""The preset's bounds, 0.999 to 1.001, are for completions of thousands of tokens and would leave hardly a sample of these."""


@dataclass(frozen=True)
class Arm:
    """One way to train. color: its line in the plots, 1 to 8."""

    name: str
    what: str
    overrides: tuple[str, ...]
    color: int

    @property
    def mini(self) -> bool:
        """Whether it takes several optimizer steps for one rollout."""
        return self.name.endswith("-mini")

    def cut(self) -> Arm:
        """The same arm with several mini-batches a step."""
        overrides = (*self.overrides, f"update.mini_batches={MINI_BATCHES}")
        return Arm(
            f"{self.name}-mini", f"{self.what}, {MINI_BATCHES} mini-batches a step", overrides, self.color
        )


MAIN = (
    Arm("bf16", "rollout and trainer in BF16", ("flow.name=bf16",), 8),
    Arm(
        "fp8-rollout",
        "FP8 rollout, BF16 trainer, uncorrected",
        (*ROLLOUT, "correction.preset=none"),
        2,
    ),
    Arm(
        "token-tis",
        "FP8 rollout, BF16 trainer, token TIS",
        (*ROLLOUT, "correction.preset=token_tis"),
        4,
    ),
    Arm("geometric-mis", "FP8 rollout, BF16 trainer, geometric MIS in 0.98..1.02", (*ROLLOUT, *GEOMETRIC), 6),
    Arm("exact", "unified FP8: linears and KV cache, both sides", ("flow.name=fp8", "flow.kv=fp8"), 1),
)
ARMS = {arm.name: arm for arm in (*MAIN, *(arm.cut() for arm in MAIN if arm.name != "geometric-mis"))}
"""By name; those of one optimizer step a rollout come first."""
GROUPS = {
    "main": tuple(name for name, arm in ARMS.items() if not arm.mini),
    "mini": tuple(name for name, arm in ARMS.items() if arm.mini),
    "all": tuple(ARMS),
}
"""Names for several arms at once."""


def chosen(names: list[str]) -> list[Arm]:
    """The arms of these names and groups, each once. KeyError for an unknown one."""
    flat = [name for given in names for name in GROUPS.get(given, (given,))]
    return [ARMS[name] for name in dict.fromkeys(flat)]
