"""The paged KV cache: pages of a fixed number of tokens, counted by reference so that a group shares its prompt's pages.

A block table is a list of page numbers; token j of a sequence lives in slot `pages[j // size] * size + j % size`. The block
manager only counts; the storage is one tensor for keys and one for values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.models.spec import ModelSpec
from lockstep.numerics.flow import Flow
from lockstep.numerics.formats import E4M3


class PagedCache:
    """Storage and page counts. k, v: [layers, slots, KV heads, D]."""

    def __init__(
        self, spec: ModelSpec, flow: Flow, *, tokens: int, page_size: int, device: torch.device
    ) -> None:
        self.page_size = page_size
        self.num_pages = -(-tokens // page_size)
        shape = (spec.num_layers, self.num_pages * page_size, spec.num_kv_heads, spec.head_dim)
        dtype = E4M3 if flow.kv_fp8 else flow.activation
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self._references = [0] * self.num_pages
        self._free = list(range(self.num_pages))[::-1]

    @property
    def free_pages(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

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
        if missing > len(self._free):
            return False
        for _ in range(missing):
            page = self._free.pop()
            self._references[page] = 1
            pages.append(page)
        return True

    def share(self, pages: list[int]) -> list[int]:
        """Another holder of the same pages."""
        for page in pages:
            self._references[page] += 1
        return list(pages)

    def fork(self, pages: list[int], tokens: int) -> list[int] | None:
        """A block table with the first `tokens` of another: whole pages are shared, the last partial page is copied.

        None, and nothing changed, when a copy is needed and no page is free.
        """
        whole = tokens // self.page_size
        if tokens % self.page_size and not self._free:
            return None
        forked = self.share(pages[:whole])
        if tokens % self.page_size:
            self.grow(forked, tokens)
            source, target = (p * self.page_size for p in (pages[whole], forked[whole]))
            for store in (self.k, self.v):
                raw = store.view(torch.uint8) if store.dtype == E4M3 else store
                raw[:, target : target + self.page_size] = raw[:, source : source + self.page_size]
        return forked

    def release(self, pages: list[int]) -> None:
        """Gives up a block table; pages without a holder are free again."""
        for page in pages:
            self._references[page] -= 1
            assert self._references[page] >= 0, "a page was released twice"
            if self._references[page] == 0:
                self._free.append(page)
        pages.clear()

    def slots(self, pages: list[int], tokens: int) -> Tensor:
        """[tokens] int64: the slot of each of the first tokens."""
        starts = torch.tensor(pages[: self.pages_for(tokens)], dtype=torch.long) * self.page_size
        return (starts[:, None] + torch.arange(self.page_size)).flatten()[:tokens]
