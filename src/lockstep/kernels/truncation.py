"""What top-k, min-p and top-p leave of a distribution, as one number a row: every logit from a threshold on stays.

    top-k    the k-th largest logit
    min-p    the largest logit plus log(min_p)
    top-p    of what these two leave, the largest logit l such that all from l on have the wanted share of the mass

So ids that are as likely as the last one that is kept stay too. Masses are integers, floor(2^40 exp(x - peak)), and integers add
up to the same sum in any order: a row's threshold depends on neither its neighbours nor on who adds.

Shapes: R rows, V vocabulary. Next: `triton/truncation.py`, the same on a GPU; `../rollout/sampler.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lockstep.kernels.upload import upload

MASS = 2.0**40
"""Of the most likely id."""
SHARE_BITS = 20
"""Shares of mass are in units of 2^-20."""


@dataclass(frozen=True)
class Truncation:
    """Of each row. top_k_R: int32, 0 for none. least_R: FP32 log(min_p), -inf for none. share_R: int32 top-p in units of 2^-20,
    2^20 for none."""

    top_k_R: Tensor
    least_R: Tensor
    share_R: Tensor

    @classmethod
    def of(
        cls, top_k: Sequence[int], min_p: Sequence[float], top_p: Sequence[float], device: torch.device
    ) -> Truncation:
        """Of rows that ask for this: 0, 0 and 1 for none."""
        least = [math.log(p) if p > 0 else -math.inf for p in min_p]
        share = [max(round(p * (1 << SHARE_BITS)), 1) for p in top_p]
        return cls(
            upload(torch.tensor(top_k, dtype=torch.int32), device),
            upload(torch.tensor(least, dtype=torch.float32), device),
            upload(torch.tensor(share, dtype=torch.int32), device),
        )

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All of it."""
        return tuple(getattr(self, f.name) for f in fields(self))


def threshold(logits_RV: Tensor, truncation: Truncation) -> Tensor:
    """The least logit [R] FP32 that stays, of FP32 logits over their temperature; -inf where there is no truncation."""
    k_R, share_R = truncation.top_k_R.long(), truncation.share_R.long()
    ordered = logits_RV.sort(descending=True).values
    vocabulary = ordered.shape[1]
    kth = ordered.gather(1, (k_R.clamp(1, vocabulary) - 1)[:, None])[:, 0]
    least = torch.where((k_R > 0) & (k_R < vocabulary), kth, -torch.inf)
    peak = ordered[:, 0]
    least = torch.maximum(least, peak + truncation.least_R)
    mass = ((ordered - peak[:, None]).exp() * MASS).long()
    mass = mass.masked_fill_(ordered < least[:, None], 0).cumsum(1)
    wanted = share_of(mass[:, -1], share_R)
    last = (mass < wanted[:, None]).sum(1)
    found = ordered.gather(1, last[:, None])[:, 0]
    return torch.where(share_R < 1 << SHARE_BITS, torch.maximum(least, found), least)


def share_of(mass: Tensor, share: Tensor) -> Tensor:
    """A share of int64 masses below 2^60, in units of 2^-20, without leaving 64 bits."""
    low = mass & ((1 << SHARE_BITS) - 1)
    return (mass >> SHARE_BITS) * share + ((low * share) >> SHARE_BITS)
