"""Routes: which experts the rows of a forward went to, recorded from it or imposed on it.

Within one model routes are equal on both sides by construction: a router sees the same bits and breaks ties the same way
(field failure 52). Between two engines a single different bit may send a token to another expert, so the routes of the
engine that sampled are recorded and the training forward repeats them (rollout routing replay, R3, arXiv 2510.11370). Only
the *set* of experts is imposed: their scores are the trainer's own, gathered from the softmax over all experts, so that the
router keeps its gradient (field failure 56).

A record belongs to one forward pass and travels in its attention context. Next: `moe.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.kernels.table import Kernels


class Routes:
    """Expert numbers [T, k] int64 by decoder layer, for the rows of one forward pass.

    Made empty it is filled by the forward; made from `ids` it imposes them, layer by layer, in any order within a row.
    `overruled` counts the imposed choices of a row in a layer that differ from the model's own, as sets.
    """

    def __init__(self, ids: Mapping[int, Tensor] | None = None) -> None:
        self.imposed = dict(ids) if ids is not None else None
        self.ids: dict[int, Tensor] = {}
        self.overruled = 0

    def choose(self, layer: int, scores_TE: Tensor, count: int, kernels: Kernels) -> Tensor:
        """The experts [T, k] of every row by falling score: those imposed, or the best; notes them.

        Raises ValueError when the imposed ones are missing for this layer, misshapen, no expert's numbers, or not distinct.
        """
        if self.imposed is not None:
            chosen_TE = self._imposed(layer, tuple(scores_TE.shape), count, scores_TE.device)
            own_Tk = kernels.top_experts(scores_TE, count)
            self.overruled += int((~chosen_TE.gather(1, own_Tk).all(1)).sum())
            scores_TE = scores_TE.masked_fill(~chosen_TE, -torch.inf)
        self.ids[layer] = kernels.top_experts(scores_TE, count)
        return self.ids[layer]

    def _imposed(self, layer: int, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        """[T, E] bool: the set of each row."""
        assert self.imposed is not None
        if layer not in self.imposed:
            raise ValueError(f"replayed routes lack layer {layer}")
        ids = self.imposed[layer].to(device=device, dtype=torch.int64)
        rows, experts = shape
        if ids.shape != (rows, count):
            raise ValueError(
                f"replayed routes of layer {layer} have shape {list(ids.shape)}, the forward needs {[rows, count]}"
            )
        if bool(((ids < 0) | (ids >= experts)).any()):
            raise ValueError(f"replayed routes of layer {layer} name an expert outside 0..{experts - 1}")
        chosen_TE = torch.zeros(shape, dtype=torch.bool, device=device).scatter_(1, ids, True)
        if bool((chosen_TE.sum(1) != count).any()):
            raise ValueError(f"replayed routes of layer {layer} name an expert twice for one row")
        return chosen_TE


class ExpertLoad:
    """Rows that every one of `experts` got in every layer, summed over forward passes."""

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self.rows: dict[int, Tensor] = {}
        self.choices = self.overruled = 0
        self.replays = False

    def add(self, other: ExpertLoad) -> None:
        """Takes in what another one saw."""
        for layer, count in other.rows.items():
            self.rows[layer] = self.rows[layer] + count if layer in self.rows else count
        self.choices += other.choices
        self.overruled += other.overruled
        self.replays |= other.replays

    def see(self, routes: Routes) -> None:
        """Adds a finished forward."""
        for layer, ids in routes.ids.items():
            count = torch.bincount(ids.flatten(), minlength=self.experts).cpu()
            self.rows[layer] = self.rows[layer] + count if layer in self.rows else count
            self.choices += len(ids)
        self.overruled += routes.overruled
        self.replays |= routes.imposed is not None

    def metrics(self) -> dict[str, float]:
        """How uneven the load is, over layers; of replayed routes also how many were not the model's own choice."""
        if not self.rows:
            return {}
        rows = torch.stack(list(self.rows.values())).double()
        metrics = {
            "moe/load_max_over_mean": float((rows.amax(1) / rows.mean(1)).mean()),
            "moe/idle_experts": float((rows == 0).double().mean()),
        }
        return metrics | ({"moe/overruled_routes": self.overruled / self.choices} if self.replays else {})
