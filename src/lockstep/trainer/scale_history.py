"""The trainer's memory of KV scales: which version a sample was drawn with, and when new scales are due.

Scales by version. A sample's keys and values are replayed with the very scales it was drawn with, so the last few versions are
kept, and they are part of a checkpoint. A version that isn't there is refused: other scales give other bits.

New scales. After step t the training forward has seen maxima m_t, one for each layer, head and of keys and values:

    a_t = max(m_t, decay a_{t-1})            what scales should cover, remembered for a while
    due : some a_t / b is above min(1 + h, headroom) or below 1 / (1 + h)
    b   = a_t when due                       what the scales in use were made from: scale = headroom b / 448

e4m3 is a floating-point format: a scale that is off by a quarter costs no precision, only range, and the headroom has that. So
small moves are not worth a version (h is `kv_hysteresis`), and all scales change together or none does. The comparison is of
maxima, so that rounding a scale up to a power of two can't make it flicker. With a headroom below 1 + h, the upper bound is
where values would saturate.

Next: `../nn/kv_scales.py` for what a scale is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.errors import ContractError
from lockstep.nn.kv_scales import KVMaxima, KVScales
from lockstep.numerics.flow import FlowSpec
from lockstep.numerics.formats import AMAX_FLOOR

KEPT = 4
"""Newest versions kept. A step trains on samples of the version before its own publication; the rest is for slower rollouts."""


class ScaleHistory:
    """KV scales by version. `drift` is the largest relative difference between what the maxima ask for and what the scales in
    use were made from, as of the last `advance`."""

    def __init__(self, flow: FlowSpec, device: torch.device) -> None:
        self.flow, self.device = flow, device
        self.versions: dict[int, KVScales] = {}
        self.running: Tensor | None = None
        self.basis: Tensor | None = None
        self.drift = 0.0

    @property
    def current(self) -> KVScales | None:
        """The scales in use; None before the first calibration."""
        return self.versions[self.version] if self.versions else None

    @property
    def version(self) -> int:
        """Version of the scales in use; 0 before the first calibration."""
        return max(self.versions, default=0)

    def of(self, version: int) -> KVScales:
        """The scales a sample was drawn with. Raises ContractError when they are not known (any more)."""
        if version not in self.versions:
            known = ", ".join(f"v{v}" for v in sorted(self.versions)) or "none"
            raise ContractError(f"a sample was drawn with KV scales v{version}, the trainer knows {known}")
        return self.versions[version]

    def advance(self, seen: KVMaxima | None, *, force: bool = False) -> KVScales | None:
        """Takes the maxima of a step into account (None: it had no forward); the scales to publish next, or None when those in
        use stay. `force`: new ones are due whatever the maxima say, unless they would be the same.

        Raises ContractError when the first maxima are of no keys and values at all.
        """
        if self.running is None or self.basis is None:
            self.running = None if seen is None else torch.stack([seen.k, seen.v])
            return None if self.running is None else self._renew(self.running)
        if seen is not None:
            maxima = torch.stack([seen.k, seen.v])
            self.running = torch.maximum(maxima, self.running * self.flow.kv_decay)
        ratio = self.running.clamp(min=AMAX_FLOOR) / self.basis.clamp(min=AMAX_FLOOR)
        self.drift = float((ratio - 1).abs().max())
        upper = min(1 + self.flow.kv_hysteresis, self.flow.kv_headroom)
        due = bool((ratio > upper).any()) or bool((ratio < 1 / (1 + self.flow.kv_hysteresis)).any())
        return self._renew(self.running) if force or (due and self.flow.kv_recalibrate == "step") else None

    def _renew(self, basis: Tensor) -> KVScales | None:
        self.basis = basis
        maxima = KVMaxima(basis[0], basis[1])
        flow, held = self.flow, self.current
        new = maxima.scales(headroom=flow.kv_headroom, kind=flow.scale, version=self.version + 1)
        new = new.to(self.device)
        if held is not None and new.same_values(held):
            return None  # powers of two, say, that didn't change
        self.versions[new.version] = new
        for old in sorted(self.versions)[:-KEPT]:
            del self.versions[old]
        return new

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs; `k` and `v` are the scales in use. Empty before the first calibration."""
        if self.running is None or self.basis is None or self.current is None:
            return {}
        tensors = {"k": self.current.k, "v": self.current.v, "running": self.running, "basis": self.basis}
        for version, scales in self.versions.items():
            tensors |= {f"k.{version}": scales.k, f"v.{version}": scales.v}
        return {name: t.cpu().clone() for name, t in tensors.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Restores what `state_tensors` gave, with the scales of `version` in use. Raises ValueError when it is incomplete."""
        if not tensors:
            return
        numbers = sorted(int(name[2:]) for name in tensors if name.startswith("k."))
        if not numbers or numbers[-1] != version or not {"running", "basis"} <= tensors.keys():
            raise ValueError(f"KV scales v{version} or the maxima they were made from are missing")
        if any(f"v.{n}" not in tensors for n in numbers):
            raise ValueError("KV scales of keys came without those of values")
        self.running, self.basis = tensors["running"], tensors["basis"]
        self.versions = {
            n: KVScales(tensors[f"k.{n}"], tensors[f"v.{n}"], n).to(self.device) for n in numbers
        }
