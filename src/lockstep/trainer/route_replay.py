"""Replayed routes: whether a run repeats its engine's experts, whether a sample's routes can be its own, and the rows of a
micro-batch that they belong to.

A sample's routes are [P + N - 1, sparse layers, k] integers: those of its prompt and of its response but the last token, which
are the rows a micro-batch computes (`microbatch.py`). Next: `../nn/routes.py`, where a forward repeats them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import ConfigError, ContractError
from lockstep.models.spec import ModelSpec
from lockstep.nn.routes import ExpertLoad, Routes
from lockstep.numerics.flow import FlowPair
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Completion


@dataclass(frozen=True)
class RouteShape:
    """What the routes of every row must be: `count` of `experts`, in `layers` sparse layers."""

    layers: int
    count: int
    experts: int

    def wrong(self, completion: Completion) -> str:
        """Why the routes of a completion can't be replayed, or nothing."""
        routes = completion.routes
        shape = [len(completion.prompt_ids) + len(completion.token_ids) - 1, self.layers, self.count]
        if routes is None:
            return "it doesn't say which experts computed it"
        if list(routes.shape) != shape or routes.dtype.is_floating_point:
            return (
                f"its routes are {list(routes.shape)} of {routes.dtype}, {shape} whole numbers were expected"
            )
        if bool(((routes < 0) | (routes >= self.experts)).any()):
            return f"its routes name an expert outside 0..{self.experts - 1}"
        if bool((routes.sort(-1).values.diff(dim=-1) == 0).any()):
            return "its routes name an expert twice for one token"
        return ""


def replayed_shape(rollout: RolloutSpec, model: ModelSpec, flows: FlowPair) -> RouteShape | None:
    """The shape of the routes that this run replays, or None when it doesn't. Raises ConfigError where that has no effect."""
    if rollout.routes != "replay":
        return None
    where, fix = "rollout.routes", "leave it at own"
    if model.moe is None:
        raise ConfigError("the model has no experts whose routes could be replayed", where=where, fix=fix)
    if flows.unified:
        why = "in a unified flow the trainer's router chooses the engine's experts by itself, bit for bit"
        raise ConfigError("replayed routes have no effect", where=where, why=why, fix=fix)
    return RouteShape(len(model.sparse_layers), model.moe.experts_per_token, model.moe.num_experts)


def same_prompt(a: Completion, b: Completion) -> bool:
    """Whether the rows of one sample's prompt are the other's: equal tokens, and equal routes where these are replayed."""
    if a.prompt_ids != b.prompt_ids or a.routes is None or b.routes is None:
        return a.prompt_ids == b.prompt_ids and a.routes is b.routes
    length = len(a.prompt_ids)
    return torch.equal(a.routes[:length], b.routes[:length])


def joined_routes(parts: Sequence[Tensor], rows: int) -> Tensor | None:
    """[T, sparse layers, k] of a micro-batch from its pieces in order; None without any. Raises ContractError when there are
    pieces for some rows only."""
    if not parts:
        return None
    joined = torch.cat(list(parts))
    if len(joined) != rows:
        raise ContractError(f"there are routes for {len(joined)} rows of a micro-batch of {rows}")
    return joined


def expert_load(model: ModelSpec) -> ExpertLoad | None:
    """What counts the rows of every expert, for a model that has some."""
    return None if model.moe is None else ExpertLoad(model.moe.num_experts)


def routes_of_rows(routes_TLk: Tensor | None, model: ModelSpec) -> Routes | None:
    """The record for one forward pass over T rows: an imposing one when there are routes to replay. None without experts."""
    if model.moe is None:
        return None
    if routes_TLk is None:
        return Routes()
    return Routes(dict(zip(model.sparse_layers, routes_TLk.unbind(1), strict=True)))
