"""When the mismatch counts as out of its band, and what may be done about it. `controller.py` obeys this record."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

Action = Literal["tighten", "recalibrate", "keep_layers", "republish", "stop"]
WatchedMetric = Literal[
    "mismatch/mean_abs_dlogp",
    "mismatch/p99_abs_dlogp",
    "mismatch/max_abs_dlogp",
    "mismatch/kl_k3",
    "mismatch/chi2_token",
    "mismatch/extreme_tokens",
    "token_mult_prob_error",
]
"""Measures that grow with the disagreement."""

COOLDOWN: dict[str, int] = {"tighten": 4, "recalibrate": 1, "keep_layers": 1, "republish": 1, "stop": 0}
"""Steps each action is given. A publication shows at the next step; a tighter correction acts through the training itself."""


@dataclass(frozen=True)
class ControllerSpec:
    """What the mismatch may be, and what is done when it leaves its band."""

    __pydantic_config__ = {"extra": "forbid"}

    enabled: Literal["auto", "on", "off"] = "auto"
    """`auto`: on where rollout and trainer have different flows. In a unified flow it is off: there any difference at all
    already stops the run (`mismatch.on_violation`)."""

    metrics: tuple[WatchedMetric, ...] = ("mismatch/mean_abs_dlogp",)
    """What is watched; the step is out of band when one of these is. Means over few tokens are steadier than percentiles."""

    baseline_steps: int = 5
    """The median of the first so many steps is the level that counts as normal for this run."""

    band: float = 2.0
    """Out of band is what lies further above the floor (what one side disagrees with itself, measured at the first step) than
    this multiple of the normal level."""

    ceiling: float = 0.0
    """mismatch/mean_abs_dlogp above this is out of band from the first step on, whatever was normal; 0: no such limit."""

    patience: int = 2
    """Steps in a row out of band before something is done, and in band before an episode is over. A value that isn't finite
    is not waited for."""

    actions: tuple[Action, ...] = get_args(Action)
    """What may be done, in this order, one at a time. `tighten` the correction, `recalibrate` the KV scales, `keep_layers` in
    BF16, `republish` the weights, `stop` the run. What a run has no use for is passed over. Evidence against the KV scales
    moves `recalibrate` to the front."""

    cooldown: dict[str, int] = field(default_factory=dict)
    """Steps to wait after an action before its effect is judged, by its name. Not named: tighten 4, the others 1."""

    kv_saturation_pct: float = 0.1
    """Evidence against the KV scales: more than this percentage of keys and values saturated (`kv/saturation_pct`)."""

    kv_scale_drift: float = 0.5
    """Evidence against the KV scales: a maximum moved by more than this share since they were made (`kv/scale_drift`)."""

    keep_layers: tuple[int, ...] = ()
    """Decoder layers whose linears `keep_layers` puts in BF16, from 0. Empty: the first and the last."""

    def __post_init__(self) -> None:
        if self.baseline_steps < 1 or self.patience < 1:
            raise ValueError("baseline_steps and patience start at 1")
        if not (math.isfinite(self.band) and self.band >= 1):
            raise ValueError(f"band is a multiple of the normal level, at least 1, not {self.band}")
        for name in ("ceiling", "kv_saturation_pct", "kv_scale_drift"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative, not {value}")
        if not self.metrics or len(set(self.metrics)) < len(self.metrics):
            raise ValueError("metrics names at least one measure, each once")
        if len(set(self.actions)) < len(self.actions):
            raise ValueError("actions names each action once")
        if "stop" in self.actions[:-1]:
            raise ValueError("actions: nothing comes after stop -> name it last, or leave it out")
        if unknown := sorted(self.cooldown.keys() - COOLDOWN.keys()):
            raise ValueError(f"cooldown: no action {unknown[0]!r} -> one of {', '.join(COOLDOWN)}")
        if any(steps < 0 for steps in self.cooldown.values()):
            raise ValueError("cooldown counts steps and can't be negative")
        layers = self.keep_layers
        if list(layers) != sorted(set(layers)) or any(layer < 0 for layer in layers):
            raise ValueError(f"keep_layers lists layers from 0, ascending and each once, not {list(layers)}")

    def active(self, *, unified: bool) -> bool:
        """Whether a run with these flows has a controller."""
        return self.enabled == "on" or (self.enabled == "auto" and not unified)

    def wait(self, action: Action) -> int:
        """Steps after this action that are not judged."""
        return self.cooldown.get(action, COOLDOWN[action])
