"""What decode steps leave of their draws: on the device that made them, then in pinned memory of the host."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from lockstep.nn.sampling_mask import Kept
from lockstep.rollout.sampler import refuse_wide
from lockstep.rollout.types import SamplingParams


@dataclass(frozen=True)
class Draws:
    """Tokens and log-probabilities of some draws, [...]. Where a generation records what truncation keeps: how many ids [...],
    the ids [..., W] int32, ascending, as many of them as there is room for, and their mass under the full distribution [...]."""

    token: Tensor
    logp: Tensor
    count: Tensor | None = None
    ids: Tensor | None = None
    mass: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are there, in the order of the fields."""
        return [x for f in fields(self) if (x := getattr(self, f.name)) is not None]

    def kept(self, step: int, row: int, params: SamplingParams) -> Kept:
        """What truncation kept of a draw; of draws [steps, rows] on the host. Raises CapacityError when it is more than may be
        recorded."""
        assert self.count is not None and self.ids is not None and self.mass is not None
        number = int(self.count[step, row])
        refuse_wide(number, params)
        return self.ids[step, row, :number].clone(), float(self.mass[step, row])
