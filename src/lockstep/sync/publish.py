"""Publication: after the optimizer moved the masters, both sides get working copies of the new version.

In a unified flow trainer and embedded engine share one decoder: its codes are remade once and there is nothing to copy. In
a split flow the engine's decoder shares the *masters* and makes its own codes from the same source tensor. An engine that
doesn't share memory (`remote.py`) gets those same codes over a channel. KV scales travel with the weights, under one version.
Whichever way, the engine says what it holds, and the receipt is made from that.

Next: `receipt.py`, then `../nn/working.py` and `../numerics/quantize.py`, where the codes are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lockstep.errors import ContractError
from lockstep.models.decoder import Decoder
from lockstep.nn.kv_scales import KVScales
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.sync.manifest import scales_digest
from lockstep.sync.receipt import Echo, Receipt, make_receipt


class Target(Protocol):
    """Where a publication goes."""

    @property
    def decoder(self) -> Decoder:
        """Whose working copies the engine is to hold."""

    def deliver(self, version: int, scales: KVScales | None) -> Echo:
        """Hands over the decoder's working copies, and KV scales where there are new ones; what the engine says it holds.

        Raises ContractError when it doesn't take them.
        """


class SharedEngine:
    """The embedded engine as a target: it has the decoder itself, so only KV scales are handed over."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine

    @property
    def decoder(self) -> Decoder:
        """Its own, which it may exchange."""
        return self.engine.decoder

    def deliver(self, version: int, scales: KVScales | None) -> Echo:
        """See `Target`."""
        engine = self.engine
        if scales is not None and engine.set_kv_scales(scales) != scales.version:
            raise ContractError(
                f"publication v{version}: the engine does not use KV scales v{scales.version}"
            )
        _check_version(engine.version, version)
        return Echo(engine.version, engine.scale_version, engine.digest(), scales_digest(engine.scales))


class Publisher:
    """Publishes a trainer's decoder to an engine: the embedded one, or another target."""

    def __init__(self, trainer: Decoder, engine: EmbeddedEngine | Target) -> None:
        self.trainer, self.engine = trainer, engine
        self.target: Target = SharedEngine(engine) if isinstance(engine, EmbeddedEngine) else engine
        self.expected = frozenset(name for name, _ in trainer.working())
        self.scales: KVScales | None = None

    @property
    def unified(self) -> bool:
        """Both sides use the same codes."""
        return self.target.decoder is self.trainer

    def publish(
        self,
        version: int,
        *,
        scales: KVScales | Callable[[], KVScales | None] | None = None,
        must_change: bool = False,
    ) -> Receipt:
        """Makes `version` current on both sides and returns the receipt of what the engine now holds. `scales` are the KV
        scales to take into use, or what calibrates them under the new weights.

        Raises ContractError when a weight is not finite, when the engine's tensors aren't the trainer's, when nothing
        changed that should have, or when the engine echoes other weights or KV scales than it was given.
        """
        try:
            refreshed = self.trainer.refresh(version)
            if not self.unified:
                refreshed = self.target.decoder.refresh(version)
        except ValueError as error:
            raise ContractError(f"publication v{version}: {error}") from error
        scales = scales() if callable(scales) else scales
        echo = self.target.deliver(version, scales)
        _check_version(echo.version, version)
        if scales is not None:
            self.scales = scales
        if self.scales is not None and echo.scales_digest != scales_digest(self.scales):
            raise ContractError(
                f"publication v{version}: the engine uses other KV scales than v{self.scales.version}"
            )
        return make_receipt(
            version,
            refreshed,
            self.expected,
            echo.digest,
            scale_version=echo.scale_version,
            scales_digest=echo.scales_digest,
            must_change=must_change,
        )


def _check_version(reported: int, version: int) -> None:
    if reported != version:
        raise ContractError(f"publication v{version}: the engine reports version {reported}")
