"""Advantages, denominators and policy losses as plain functions on plain tensors.

The order in which a training step calls them:

1. `AlgorithmSpec` (what the user wrote) becomes a `Recipe` (every choice made) through `resolve`, once;
2. rejection: masks from the correction weights, `drop_small_groups`, `dynamic_sampling_mask`;
3. `overlong_penalty` on the rewards, then `advantages` over what was kept;
4. `token_coefficients`, once for each mini-batch;
5. `policy_loss`, once for each micro-batch.

Nothing here holds state, knows a model or moves data between ranks. Start reading with `spec.py`.
"""

from __future__ import annotations

from lockstep.algorithms.advantages import (
    AdvantageKind,
    advantages,
    drop_small_groups,
    dynamic_sampling_mask,
    overlong_penalty,
)
from lockstep.algorithms.calibration import ClipBounds, calibrated_bounds
from lockstep.algorithms.denominator import DenominatorKind, token_coefficients
from lockstep.algorithms.losses import LossInput, LossOutput, policy_loss
from lockstep.algorithms.reduced import Reduced, merge_metrics
from lockstep.algorithms.spec import AlgorithmName, AlgorithmSpec, LossKind, Recipe, resolve

__all__ = [
    "AdvantageKind",
    "AlgorithmName",
    "AlgorithmSpec",
    "ClipBounds",
    "DenominatorKind",
    "LossInput",
    "LossKind",
    "LossOutput",
    "Recipe",
    "Reduced",
    "advantages",
    "calibrated_bounds",
    "drop_small_groups",
    "dynamic_sampling_mask",
    "merge_metrics",
    "overlong_penalty",
    "policy_loss",
    "resolve",
    "token_coefficients",
]
