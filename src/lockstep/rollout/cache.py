"""The paged KV cache: pages of a fixed number of tokens, counted by reference so that a group shares its prompt's pages.

A block table is a list of page numbers; token j of a sequence lives in slot `pages[j // size] * size + j % size`. The block
manager only counts; the storage is one tensor for keys and one for values. With a `PrefixCache`, free pages whose content is
remembered are given out last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.models.spec import ModelSpec
from lockstep.numerics.flow import Flow
from lockstep.numerics.formats import E4M3
from lockstep.rollout.prefix_cache import PrefixCache, PrefixKey
from lockstep.rollout.route_store import RouteStore


class PagedCache:
    """Storage and page counts. k, v: [layers, slots, KV heads, D]. routes: the experts of every slot, where they are recorded."""

    def __init__(
        self,
        spec: ModelSpec,
        flow: Flow,
        *,
        tokens: int,
        page_size: int,
        device: torch.device,
        prefix: PrefixCache | None = None,
        record_routes: bool = False,
    ) -> None:
        self.page_size, self.prefix = page_size, prefix
        self.num_pages = -(-tokens // page_size)
        self.k, self.v = self.storage(spec, flow, device)
        self.routes = RouteStore(spec, self.num_pages * page_size, device) if record_routes else None
        self._references: list[int] = []
        self._free: list[int] = []
        self.clear()

    def storage(self, spec: ModelSpec, flow: Flow, device: torch.device) -> tuple[Tensor, Tensor]:
        """Empty storage of keys and values."""
        shape = (spec.num_layers, self.num_pages * self.page_size, spec.num_kv_heads, spec.head_dim)
        dtype = E4M3 if flow.kv_fp8 else flow.activation
        return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page's keys and values."""
        slots = [slice(p * self.page_size, (p + 1) * self.page_size) for p in (source, target)]
        for store in (self.k, self.v):
            raw = store.view(torch.uint8) if store.dtype == E4M3 else store
            raw[:, slots[1]] = raw[:, slots[0]]

    @property
    def free_pages(self) -> int:
        """Pages nobody holds."""
        return len(self._free) + (self.prefix.parked if self.prefix else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return 2 * self.k.numel() * self.k.element_size()

    def pages_for(self, tokens: int) -> int:
        """Pages that many tokens need."""
        return -(-tokens // self.page_size)

    def grow(self, pages: list[int], tokens: int) -> bool:
        """Extends a block table to hold `tokens`; False, and nothing changed, when there are too few free pages."""
        missing = self.pages_for(tokens) - len(pages)
        if missing > self.free_pages:
            return False
        for _ in range(missing):
            page = self._free.pop() if self._free or self.prefix is None else self.prefix.evict()
            self._references[page] = 1
            pages.append(page)
        return True

    def share(self, pages: list[int]) -> list[int]:
        """Another holder of the same pages."""
        for page in pages:
            if self._references[page] == 0 and self.prefix is not None:
                self.prefix.unpark(page)
            self._references[page] += 1
        return list(pages)

    def fork(self, pages: list[int], tokens: int) -> list[int] | None:
        """A block table with the first `tokens` of another: whole pages are shared, the last partial page is copied.

        None, and nothing changed, when a copy is needed and no page is free.
        """
        whole = tokens // self.page_size
        if tokens % self.page_size and not self.free_pages:
            return None
        forked = self.share(pages[:whole])
        if tokens % self.page_size:
            self.grow(forked, tokens)
            self.copy_page(pages[whole], forked[whole])
            if self.routes is not None:
                source, target = (p * self.page_size for p in (pages[whole], forked[whole]))
                self.routes.copy(source, target, self.page_size)
        return forked

    def release(self, pages: list[int]) -> None:
        """Gives up a block table; pages without a holder are free again, the last of the table to be taken first."""
        for page in reversed(pages):
            self._references[page] -= 1
            assert self._references[page] >= 0, "a page was released twice"
            if self._references[page] == 0 and not (self.prefix is not None and self.prefix.park(page)):
                self._free.append(page)
        pages.clear()

    def renew(self, key: PrefixKey) -> None:
        """Forgets what was remembered under other weights or scales."""
        if self.prefix is not None:
            self._free += self.prefix.renew(key)

    def clear(self) -> None:
        """Frees every page, whoever holds it, and forgets what was remembered: after work that was broken off."""
        if self.prefix is not None:
            self.prefix.clear()
        self._references = [0] * self.num_pages
        self._free = list(range(self.num_pages))[::-1]

    def recall(self, tokens: list[int]) -> list[int]:
        """A block table of the whole pages that already hold a beginning of `tokens`, all but its last token at most."""
        return [] if self.prefix is None else self.share(self.prefix.match(tokens))

    def remember(self, tokens: list[int], pages: list[int]) -> None:
        """Notes that the whole pages of this block table hold `tokens`."""
        if self.prefix is not None:
            self.prefix.remember(tokens, pages)

    def routes_of(self, pages: list[int], tokens: int) -> Tensor | None:
        """[tokens, sparse layers, k] int16: the experts of the first tokens, where routes are recorded."""
        return None if self.routes is None else self.routes.read(self.slots(pages, tokens))

    def slots(self, pages: list[int], tokens: int) -> Tensor:
        """[tokens] int64: the slot of each of the first tokens."""
        starts = torch.tensor(pages[: self.pages_for(tokens)], dtype=torch.long) * self.page_size
        return (starts[:, None] + torch.arange(self.page_size)).flatten()[:tokens]
