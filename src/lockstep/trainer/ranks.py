"""The processes of one run, a GPU each: who does what, and how what they found becomes everybody's.

Every rank holds the whole model and knows all samples of a step; what is divided is the work. A prompt is sampled and its
completions are scored by one rank, a micro-batch is computed by one rank, and what comes of it is gathered in the order in which
one process would have found it. So everything that is decided from samples (rejections, baselines, advantages, denominators,
orders of the controller) is decided on all ranks alike, by the code that a single process runs. By the row law a sample has
the same bits whichever rank drew it. Gradients are summed over ranks; a parameter's moments are held by one rank, which steps it
and sends it to the others (ZeRO stage 1, arXiv 1910.02054). The weights that come of it are compared in every step.

Next: `../launch/torchrun.py`, which makes one; `packs.py`, which divides micro-batches.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch import Tensor

from lockstep.errors import ContractError

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Ranks:
    """This process among `size` of them. Alone, nothing is sent and nothing is waited for."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def divide(self, items: Sequence[Item], costs: Sequence[float] | None = None) -> Division[Item]:
        """Every item to one rank: in blocks of equal numbers, or where costs are known each to the rank with the least so far,
        the dearest first."""
        if costs is None:
            owners = [i * self.size // len(items) for i in range(len(items))]
            return Division(self, list(items), owners)
        owners, load = [0] * len(items), [0.0] * self.size
        for i in sorted(range(len(items)), key=lambda i: (-costs[i], i)):
            owners[i] = load.index(min(load))
            load[owners[i]] += costs[i]
        return Division(self, list(items), owners)

    def gather(self, found: Found) -> list[Found]:
        """What every rank found, by rank; all ranks have to ask. Tensors that were sent are on the CPU."""
        if self.size == 1:
            return [found]
        sent: list[bytes] = [b""] * self.size
        dist.all_gather_object(sent, _on_host(found))
        return [pickle.loads(one) for one in sent]  # of this very job's processes

    def told(self, found: Found) -> Found:
        """What the first rank found."""
        return self.gather(found)[0]

    def wait(self) -> None:
        """Until all ranks are here."""
        self.gather(None)

    def alike(self, value: str, what: str) -> None:
        """Raises ContractError unless all ranks have the same."""
        found = self.gather(value)
        if len(set(found)) > 1:
            odd = [rank for rank, other in enumerate(found) if other != found[0]]
            raise ContractError(
                f"{what} differ between rank 0 and rank {', '.join(map(str, odd))} of {self.size}: "
                "they compute with different software or hardware, or one of them is broken"
            )

    def to_first(self, found: Found | None, owner: int) -> Found | None:
        """On the first rank what `owner` found, and None on the others. Tensors that were sent are on the CPU."""
        if owner == 0:
            return found if self.first else None
        if self.rank == owner:
            dist.send_object_list([_on_host(found)], dst=0)
        if not self.first:
            return None
        sent: list[bytes] = [b""]
        dist.recv_object_list(sent, src=owner)
        return pickle.loads(sent[0])  # type: ignore[no-any-return]

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Sums over all ranks, in place. Every rank has the same bits then."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def share_out(self, tensors: Iterable[Tensor], owners: Iterable[int]) -> None:
        """Every rank gets each tensor's values from its owner, in place."""
        if self.size > 1:
            for tensor, owner in zip(tensors, owners, strict=True):
                dist.broadcast(tensor, src=owner)


@dataclass(frozen=True)
class Division(Generic[Item]):
    """Work, and whose it is: `owners` has a rank for each item."""

    ranks: Ranks
    items: list[Item]
    owners: list[int]

    @property
    def own(self) -> list[Item]:
        """What this rank does, in the order of all items."""
        return [item for item, owner in zip(self.items, self.owners, strict=True) if owner == self.ranks.rank]

    def gather(self, found: Sequence[Found]) -> list[Found]:
        """What was found for each of all items, in their order, from what every rank found for its own."""
        if len(found) != len(self.own):
            raise ValueError(f"{len(found)} results of {len(self.own)} items")
        by_rank = [iter(some) for some in self.ranks.gather(list(found))]
        return [next(by_rank[owner]) for owner in self.owners]


class _HostPickler(pickle.Pickler):
    """Sends tensors of a GPU by their values: the receiver's GPU is another one."""

    def reducer_override(self, value: Any) -> Any:
        """See `pickle.Pickler`."""
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _on_host(value: Any) -> bytes:
    buffer = io.BytesIO()
    _HostPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
