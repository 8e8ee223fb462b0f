"""Computes an engine step: lays the scheduled tokens side by side, runs the decoder over the paged cache, returns the last
hidden state of every sequence that is complete. It computes; the scheduler decides.

Next: `../models/decoder.py`, with `PagedContext` as its attention context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.attention_index import Run, build_index
from lockstep.models.decoder import Decoder
from lockstep.nn.context import PagedContext
from lockstep.nn.kv_scales import KVScales
from lockstep.rollout.cache import PagedCache
from lockstep.rollout.scheduler import Work


class Runner:
    """Runs the decoder over scheduled work."""

    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        self.decoder, self.cache = decoder, cache

    @torch.no_grad()
    def forward(self, work: list[Work], scales: KVScales | None) -> list[Tensor]:
        """Hidden state [K] after the last computed token of each work item; advances `computed`."""
        runs: list[Run] = []
        ids: list[int] = []
        positions: list[Tensor] = []
        slots: list[Tensor] = []
        for item in work:
            sequence, start = item.sequence, item.sequence.computed
            end = start + item.count
            known = self.cache.slots(sequence.pages, end)
            runs.append(Run(len(ids), item.count, start, known))
            ids += sequence.tokens[start:end]
            positions.append(torch.arange(start, end))
            slots.append(known[start:])
            sequence.computed = end
        device = self.cache.k.device
        group = self.decoder.spec.num_heads // self.decoder.spec.num_kv_heads
        context = PagedContext(
            torch.cat(positions).to(device),
            torch.cat(slots).to(device),
            build_index(runs, group, device),
            self.decoder.kernels,
            self.cache.k,
            self.cache.v,
            scales,
        )
        hidden = self.decoder.hidden(torch.tensor(ids, device=device), context)
        return [hidden[run.row + run.count - 1] for run in runs]
