"""Which pages of the KV cache still hold the beginning of a prompt, so that it needn't be computed again.

When a prompt is in the cache, each of its whole pages is remembered under the tokens that led to it: a tree whose edges are
pages of tokens, so equality is of tokens and never of hashes. A remembered page that nobody holds is *parked*: as free as any
other, but taken last, the least recently used first, and looked up when a sequence is admitted. Of a match, the last token is
always left to compute, since the sequence needs its hidden state.

What a page holds is a function of its tokens, the weights and the KV scales, so the tree belongs to one weight version and one
scale version; with another it is dropped, whole (field failure 63). Between the mini-batches of an update, working copies change
under one version number; the decoder's count of refreshes is therefore part of the key. Bits are the same with and without:
keys come from the same rows, and a row attends to them in the same order.

Next: `cache.py`, which gives pages out; `scheduler.py`, which asks for a match on admission.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass

_ROOT = 0


@dataclass(frozen=True)
class PrefixKey:
    """What remembered pages were computed under: the weights (their version, and how often they were remade) and the scales
    of keys and values."""

    weights: int
    refreshes: int
    scales: int


_Edge = tuple[int, tuple[int, ...]]
"""Parent node and the tokens of one page after it."""


class PrefixCache:
    """The tree and the parked pages. It remembers; `PagedCache` counts."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.key: PrefixKey | None = None
        self._nodes: dict[_Edge, tuple[int, int]] = {}
        """Edge to (node, page). Numbers of nodes are never used twice: what lies below a forgotten node can't be reached."""
        self._edge_of: dict[int, _Edge] = {}
        self._parked: dict[int, None] = {}
        self._last_node = _ROOT

    @property
    def parked(self) -> int:
        """Remembered pages that nobody holds."""
        return len(self._parked)

    def renew(self, key: PrefixKey) -> list[int]:
        """Forgets everything unless it was computed under `key`; the pages that are thereby parked no longer."""
        if key == self.key:
            return []
        pages = list(self._parked)
        self.clear()
        self.key = key
        return pages

    def clear(self) -> None:
        """Forgets everything, whatever it was computed under."""
        self.key = None
        for table in (self._nodes, self._edge_of, self._parked):
            table.clear()

    def match(self, tokens: Sequences[int]) -> list[int]:
        """Pages of the longest remembered beginning of `tokens` that leaves at least one token to compute."""
        pages: list[int] = []
        node, size = _ROOT, self.page_size
        for start in range(0, len(tokens) - size, size):
            found = self._nodes.get((node, tuple(tokens[start : start + size])))
            if found is None:
                break
            node, page = found
            pages.append(page)
        return pages

    def remember(self, tokens: Sequences[int], pages: Sequences[int]) -> None:
        """Takes the whole pages of a computed prompt in; where another page holds the same, that one stays."""
        node, size = _ROOT, self.page_size
        for number, start in enumerate(range(0, len(tokens) - size + 1, size)):
            edge = (node, tuple(tokens[start : start + size]))
            if edge not in self._nodes:
                page = pages[number]
                assert page not in self._edge_of, "a page stands for one beginning"
                self._last_node += 1
                self._nodes[edge] = (self._last_node, page)
                self._edge_of[page] = edge
            node = self._nodes[edge][0]

    def park(self, page: int) -> bool:
        """Notes that nobody holds the page any more; False when it isn't remembered."""
        if page not in self._edge_of:
            return False
        self._parked[page] = None
        return True

    def unpark(self, page: int) -> None:
        """Somebody holds the page again."""
        del self._parked[page]

    def evict(self) -> int:
        """Forgets the least recently used parked page, to be filled anew."""
        page = next(iter(self._parked))
        del self._parked[page]
        del self._nodes[self._edge_of.pop(page)]
        return page
