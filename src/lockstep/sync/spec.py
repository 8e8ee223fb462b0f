"""Options of the wire between a trainer and an engine in another process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SyncSpec:
    """Sizes and time limits of a publication. Both sides have one; they need not be equal."""

    __pydantic_config__ = {"extra": "forbid"}

    bucket_bytes: int = 256 * 2**20
    """Most bytes sent at a time (the trainer's counts). A larger tensor travels alone, with its scales."""

    handshake_timeout_s: float = 60.0
    """How long each side waits for the other to come up and to introduce itself."""

    publish_timeout_s: float = 600.0
    """How long a whole publication may take, from the manifest to the echo."""

    idle_timeout_s: float = 7200.0
    """How long the engine waits for the next publication."""

    memory_bytes: int = 0
    """Memory for weights, buckets and KV cache on the engine's side; 0 takes what is free on its device."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError("bucket_bytes must be at least 1")
        if min(self.handshake_timeout_s, self.publish_timeout_s, self.idle_timeout_s) <= 0:
            raise ValueError("time limits must be positive: every wait ends")
        if self.memory_bytes < 0:
            raise ValueError("memory_bytes can't be negative")
