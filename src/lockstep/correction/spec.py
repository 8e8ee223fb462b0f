"""What a user writes about the correction: a preset and perhaps some deviations, under verl's option names.

A field left at None is what the preset prescribes; `resolve` puts the two together. What would have no effect, contradict
itself or count the correction twice is refused.

Next: `presets.py` for the values, `docs/mismatch.md` for the whole picture.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from lockstep.correction.presets import PRESETS, Correction, PresetName, Weighting

IS_THRESHOLD = 2.0
"""Truncation of weights when neither preset nor user gives one (verl's default)."""
RS_THRESHOLD: dict[Weighting, float] = {"token": 2.0, "sequence": 2.0, "geometric": 1.001}
"""Upper bound of kept ratios when neither preset nor user gives one for this level (verl's values)."""


@dataclass(frozen=True)
class CorrectionSpec:
    """Correction of the mismatch between rollout and trainer. r is the ratio of the trainer's old policy over the rollout
    policy: of a token, of a sequence (product of its token ratios) or of a sequence's average token (geometric mean)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    preset: PresetName = "none"
    """A published correction, see docs/mismatch.md. The fields below deviate from it; null is what it says."""

    rollout_is: Weighting | None = None
    """Importance weights: the policy term of every token is multiplied by r at this level."""

    rollout_is_threshold: float | None = None
    """Weights are truncated at this upper bound (TIS). Infinity: no truncation."""

    rollout_is_threshold_lower: float | None = None
    """Weights are at least this. 0: no lower bound."""

    rollout_is_batch_normalize: bool | None = None
    """Weights are divided by their mean over the step."""

    ess_target: float | None = None
    """Adaptive importance sampling: weights are drawn towards 1 just as far as this effective sample size (a share of the
    batch, below 1) asks for. 0: off."""

    rollout_rs: Weighting | None = None
    """Rejection: `token` masks single tokens (IcePop), `sequence` and `geometric` throw out whole samples."""

    rollout_rs_threshold: float | None = None
    """Largest r that is kept."""

    rollout_rs_threshold_lower: float | None = None
    """Smallest r that is kept; null with an upper bound of your own is its reciprocal. 0: no lower bound."""

    rollout_token_veto_threshold: float | None = None
    """A sample with any token of r below this is thrown out; 1e-4 to 1e-6 are usual. 0: off."""

    count_masked_tokens: bool | None = None
    """Tokens masked by rollout_rs `token` stay in the denominator, as IcePop was published. false: they leave it, as
    rejected samples always do."""

    bypass_mode: bool | None = None
    """The importance ratio of the loss is against the rollout policy instead of the trainer's old one, and so contains the
    correction; no pass for the old policy is needed, and no weights may come on top."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"unknown preset {self.preset!r}; known: {', '.join(PRESETS)}")
        made = resolve(self)
        for field, needs in _NEEDS.items():
            if getattr(self, field) and getattr(made, needs) == "none":
                raise ValueError(f"{field} has no effect without {needs}: set {needs}, or remove {field}")
        if self.count_masked_tokens and made.rollout_rs != "token":
            raise ValueError(
                "count_masked_tokens has an effect only with rollout_rs token; rejected samples always leave"
            )


_NEEDS = {
    "rollout_is_threshold": "rollout_is",
    "rollout_is_threshold_lower": "rollout_is",
    "rollout_is_batch_normalize": "rollout_is",
    "ess_target": "rollout_is",
    "rollout_rs_threshold": "rollout_rs",
    "rollout_rs_threshold_lower": "rollout_rs",
}


def resolve(spec: CorrectionSpec) -> Correction:
    """The preset's correction with the deviations of `spec` applied. ValueError as for `Correction`."""
    base = PRESETS[spec.preset]
    given = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name != "preset"}
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("rollout_is", base.rollout_is) != base.rollout_is:
        given = _defaults("rollout_is", IS_THRESHOLD, 0.0, given)
        if given["rollout_is"] == "none":
            given = {"rollout_is_batch_normalize": False, "ess_target": 0.0} | given
    if given.get("rollout_rs", base.rollout_rs) != base.rollout_rs:
        given = _defaults("rollout_rs", RS_THRESHOLD.get(given["rollout_rs"], 0.0), None, given)
        if given["rollout_rs"] != "token":
            given = {"count_masked_tokens": False} | given
    elif "rollout_rs_threshold" in given:
        given = _reciprocal(given)
    return dataclasses.replace(base, **given)


def _defaults(kind: str, upper: float, lower: float | None, given: dict[str, Any]) -> dict[str, Any]:
    """Thresholds of a level that isn't the preset's: the preset's own don't fit it."""
    if given[kind] == "none":
        off = Correction()
        names = (f"{kind}_threshold", f"{kind}_threshold_lower")
        return {name: getattr(off, name) for name in names} | given
    given = {f"{kind}_threshold": upper} | given
    return _reciprocal(given) if lower is None else {f"{kind}_threshold_lower": lower} | given


def _reciprocal(given: dict[str, Any]) -> dict[str, Any]:
    """The lower bound that belongs to an upper one, unless there is one (verl)."""
    upper = given["rollout_rs_threshold"]
    return {"rollout_rs_threshold_lower": 1.0 / upper if upper else 0.0} | given
