"""The receipt of a publication: what was shipped, that it arrived, and how much of it is new.

A receipt is made on every publication and kept (`receipts.jsonl`). It answers "are the weights really updated?"
(OpenRLHF 660): a tensor that is missing, extra or non-finite stops the run, and so does a publication in which nothing
changed although the optimizer moved (verl 7495).

Next: `../nn/working.py`, whose `Refreshed` records it sums up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.errors import ContractError
from lockstep.nn.working import Refreshed


@dataclass(frozen=True)
class Echo:
    """What an engine says it holds after a publication: version of the weights, version and digest of the KV scales in use
    (0 and empty without), and `Decoder.digest` of its working copies."""

    version: int
    scale_version: int
    digest: str
    scales_digest: str


@dataclass(frozen=True)
class Receipt:
    """One publication. `digest` is `Decoder.digest` of the weights the engine holds, `scales_digest` of the KV scales it uses
    (empty with a BF16 KV cache); `changed_pct` the share of codes (BF16 values where a tensor has no codes) that differ from
    the version before; `max_rel_err` the largest quantization error relative to its tensor's largest value, with the
    tensor's name."""

    version: int
    tensors: int
    bytes: int
    digest: str
    changed_pct: float
    max_rel_err: float
    max_rel_tensor: str
    scale_version: int
    scales_digest: str = ""

    def line(self) -> str:
        """For people."""
        return (
            f"published v{self.version}: {self.tensors} tensors, {self.bytes / 1e6:.1f} MB, {self.digest[:12]}, "
            f"{self.changed_pct:.3f} % of codes changed, largest relative error {self.max_rel_err:.4f}"
        )

    def to_dict(self) -> dict[str, Any]:
        """For receipts.jsonl."""
        return asdict(self)


def make_receipt(
    version: int,
    refreshed: Sequence[Refreshed],
    expected: frozenset[str],
    digest: str,
    *,
    scale_version: int,
    must_change: bool,
    scales_digest: str = "",
) -> Receipt:
    """Sums up a publication.

    expected: names of every weight that must be there. must_change: the optimizer moved since the last version.
    Raises ContractError for a missing or extra tensor, and when nothing changed that should have.
    """
    names = {r.name for r in refreshed}
    if names != expected:
        missing, extra = sorted(expected - names), sorted(names - expected)
        raise ContractError(f"publication v{version}: missing {missing[:4]}, extra {extra[:4]}")
    changed = sum(r.changed for r in refreshed)
    if must_change and changed == 0:
        raise ContractError(
            f"publication v{version}: the optimizer stepped but not one of {len(refreshed)} tensors changed; "
            "the learning rate may be too small to move a BF16 weight, or the wrong tensors are being published"
        )
    total = sum(r.numel for r in refreshed)
    worst = max(refreshed, key=lambda r: r.max_rel)
    return Receipt(
        version,
        len(refreshed),
        sum(r.nbytes for r in refreshed),
        digest,
        100.0 * changed / total,
        worst.max_rel,
        worst.name,
        scale_version,
        scales_digest,
    )
