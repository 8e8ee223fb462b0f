"""What a window of steps leaves: kept ids as the sampler records them, and a refusal where there were too many."""

from __future__ import annotations

import pytest
import torch

from lockstep.errors import CapacityError
from lockstep.rollout.draws import Draws
from lockstep.rollout.types import TIES, SamplingParams


def test_kept_ids_of_a_draw() -> None:
    token, logp = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)
    plain = Draws(token, logp)
    assert len(plain.tensors) == 2
    ids = torch.arange(2 * 3 * 32, dtype=torch.int32).view(2, 3, 32)
    count = torch.tensor([[0, 3, 8], [TIES + 9, TIES + 8, 1]], dtype=torch.int32)
    draws = Draws(token, logp, count, ids, torch.full((2, 3), 0.5))
    assert [x is y for x, y in zip(draws.tensors, (token, logp, count, ids), strict=False)] == [True] * 4
    params = SamplingParams(4, top_k=8, max_kept=8)
    kept, mass = draws.kept(0, 1, params)
    assert kept.tolist() == [32, 33, 34] and kept.dtype == torch.int32 and mass == 0.5
    ids.zero_()
    assert kept.tolist() == [32, 33, 34], "the window's memory is used again"
    assert len(draws.kept(1, 1, params)[0]) == TIES + 8
    with pytest.raises(CapacityError, match=f"truncation keeps {TIES + 9} ids .*at most 8"):
        draws.kept(1, 0, params)
