"""Publication: after the optimizer moved the masters, both sides get working copies of the new version.

In a unified flow trainer and embedded engine share one decoder: its codes are remade once and there is nothing to copy. In
a split flow the engine's decoder shares the *masters* and makes its own codes from the same source tensor. KV scales travel
with the weights, under one version. Either way a receipt is made from what the engine holds.

Next: `receipt.py`, then `../nn/linear.py` and `../numerics/quantize.py`, where the codes are made.
"""

from __future__ import annotations

from collections.abc import Callable

from lockstep.errors import ContractError
from lockstep.models.decoder import Decoder
from lockstep.nn.kv_scales import KVScales
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.sync.receipt import Receipt, make_receipt


class Publisher:
    """Publishes a trainer's decoder to the embedded engine."""

    def __init__(self, trainer: Decoder, engine: EmbeddedEngine) -> None:
        self.trainer, self.engine = trainer, engine
        self.expected = frozenset(name for name, _ in trainer.working())

    @property
    def unified(self) -> bool:
        """Both sides use the same codes."""
        return self.engine.decoder is self.trainer

    def publish(
        self,
        version: int,
        *,
        scales: KVScales | Callable[[], KVScales] | None = None,
        must_change: bool = False,
    ) -> Receipt:
        """Makes `version` current on both sides and returns the receipt of what the engine now holds. `scales` are the KV
        scales to take into use, or what calibrates them under the new weights.

        Raises ContractError when a weight is not finite, when the engine's tensors aren't the trainer's, when nothing
        changed that should have, or when the engine echoes other KV scales than it was given.
        """
        try:
            refreshed = self.trainer.refresh(version)
            if not self.unified:
                refreshed = self.engine.decoder.refresh(version)
        except ValueError as error:
            raise ContractError(f"publication v{version}: {error}") from error
        scales = scales() if callable(scales) else scales
        if scales is not None and self.engine.set_kv_scales(scales) != scales.version:
            raise ContractError(
                f"publication v{version}: the engine does not use KV scales v{scales.version}"
            )
        if self.engine.version != version:
            raise ContractError(f"publication v{version}: the engine reports version {self.engine.version}")
        return make_receipt(
            version,
            refreshed,
            self.expected,
            self.engine.digest(),
            scale_version=self.engine.scale_version,
            must_change=must_change,
        )
