"""Computes an engine step: lays the scheduled tokens side by side, runs the decoder over the paged cache, returns the last
hidden state of every sequence that is complete. It computes; the scheduler decides.

Next: `../models/decoder.py`, with `PagedContext` as its attention context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.errors import ContractError
from lockstep.kernels.attention_index import Run
from lockstep.kernels.upload import upload
from lockstep.models.decoder import Decoder
from lockstep.nn.context import PagedContext
from lockstep.nn.device_context import DevicePages
from lockstep.nn.kv_scales import AmaxCollector, KVScales
from lockstep.nn.routes import Routes
from lockstep.rollout.cache import PagedCache
from lockstep.rollout.scheduler import Work


class Runner:
    """Runs the decoder over scheduled work."""

    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        self.decoder, self.cache = decoder, cache
        spec, device = decoder.spec, cache.k.device
        self.watch = AmaxCollector(spec.num_layers, spec.num_kv_heads, device)

    @torch.no_grad()
    def forward(self, work: list[Work], scales: KVScales | None, flag: Tensor | None = None) -> list[Tensor]:
        """Hidden state [K] after the last computed token of each work item; advances `computed`.

        flag: int32 [1] on a device, set to 1 where a key or value was not finite on its way into the cache; whoever gave it reads
        it, and the host doesn't wait here. Without it raises ContractError then, as it does without fused kernels.
        """
        if self.decoder.kernels.fused:
            return self._forward_on_device(work, scales, flag)
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
        group = self.decoder.spec.query_group
        slots_T, routes = torch.cat(slots).to(device), Routes()
        context = PagedContext(
            torch.cat(positions).to(device),
            slots_T,
            self.decoder.kernels.index(runs, group, device),
            self.decoder.kernels,
            self.cache.k,
            self.cache.v,
            scales,
            self.watch,
            routes=routes,
        )
        hidden = self.decoder.hidden(torch.tensor(ids, device=device), context)
        if scales is not None:
            self.watch.read()
        if self.cache.routes is not None:
            self.cache.routes.write(slots_T, routes)
        return [hidden[run.row + run.count - 1] for run in runs]

    def _forward_on_device(
        self, work: list[Work], scales: KVScales | None, flag: Tensor | None
    ) -> list[Tensor]:
        """The same through the fused kernels: tiles of queries over block tables."""
        from lockstep.kernels.packed_index import PrefillIndex

        device = self.cache.k.device
        most = max(item.count for item in work)
        block = 128 if most > 64 else 64
        ids: list[int] = []
        tiles: list[tuple[int, int, int, int]] = []
        tables, positions, slots, last = [], [], [], []
        offset = longest = 0
        for item in work:
            sequence, start = item.sequence, item.sequence.computed
            end = start + item.count
            pages = sequence.pages[: self.cache.pages_for(end)]
            for at in range(0, item.count, block):
                tiles.append((len(ids) + at, min(block, item.count - at), start + at, offset))
            tables.append(torch.tensor(pages, dtype=torch.int32))
            positions.append(torch.arange(start, end))
            slots.append(self.cache.slots(pages, end)[start:])
            ids += sequence.tokens[start:end]
            last.append(len(ids) - 1)
            offset, longest = offset + len(pages), max(longest, end)
            sequence.computed = end
        tiles.sort(key=lambda t: -t[2])
        index = PrefillIndex(
            upload(torch.tensor(tiles, dtype=torch.int32), device),
            upload(torch.cat(tables), device),
            longest,
            block,
        )
        seen = torch.zeros(1, dtype=torch.int32, device=device) if flag is None else flag
        slots_T, routes = upload(torch.cat(slots), device), Routes()
        self.decoder.model.rope.reserve(longest, device)
        context = DevicePages(
            upload(torch.cat(positions), device),
            slots_T,
            index,
            self.cache.k,
            self.cache.v,
            scales,
            seen,
            routes,
        )
        hidden = self.decoder.hidden(upload(torch.tensor(ids), device), context)  # type: ignore[arg-type]
        if flag is None and bool(seen):
            raise ContractError("non-finite key or value on its way into the cache")
        if self.cache.routes is not None:
            self.cache.routes.write(slots_T, routes)
        return list(hidden[upload(torch.tensor(last), device)])
