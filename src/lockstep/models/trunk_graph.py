"""The training pass through all layers as two CUDA graphs, one forward and one backward: the host launches both at once.

Launching a layer's kernels one by one takes a host some milliseconds, whatever the number of rows; short micro-batches would
wait for it. A captured pass runs over fixed storage, so a pack is padded to one of few numbers of rows, and its index is put into
a static one (`kernels/packed_index.py`). Rows of padding are one more sequence of zeros without gradient: no other row sees them.
Forward rows keep their bits. Sums over tokens run over more rows than without, so weight gradients may round elsewhere; they
have the same bits whenever the same pack meets the same weights, unless the decoder is not `deterministic`.

Weight gradients are added up in totals that stay, and become `.grad` of the parameters: hooks don't see them, and whoever keeps
one beyond its step copies it, or takes other gradients under `Decoder.uncaptured`. (Embedding and head are no part of this;
`Decoder.capture` makes them add in place too.) Between the two passes of a micro-batch no other may begin: what is kept for the
backward pass lies in storage that all captured passes share.

Next: `fused_layer.py` for the layers, which are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lockstep.kernels.attention_index import Run
from lockstep.kernels.packed_index import Room
from lockstep.models.fused import fused_kernels, normed, weight_of
from lockstep.models.fused_backward import Saved, Totals, layer_backward, weights_key
from lockstep.models.fused_layer import Step, parameters_of
from lockstep.nn.device_context import DevicePacked
from lockstep.nn.kv_scales import AmaxCollector, KVScales
from lockstep.nn.mlp import MLP

if TYPE_CHECKING:
    from lockstep.models.decoder import Decoder
    from lockstep.nn.linear import Projection

MOST_ROWS = 16384
"""Packs of more rows are launched one by one: the host keeps up, and they would hold much memory."""
LEAST_STEP, STEPS = 128, 16
"""A pack is padded to a multiple of 128 rows, from 4,096 rows on to one of a sixteenth of the power of two below."""
MOST_ROOMS = 48
"""Passes that are kept. Packs of samples of any lengths need as many as there are numbers of rows, once or twice."""
CAPTURED_AT = 2
"""Which use of a room captures its pass. Before, the same work is launched kernel by kernel over the same storage, with the
same bits."""


def padded_rows(rows: int) -> int:
    """Rows of the captured pass for so many."""
    step = max(LEAST_STEP, (1 << (rows.bit_length() - 1)) // STEPS)
    return -(-rows // step) * step


class TrunkGraphs:
    """Captured passes of a decoder, by the room that a pack needs and by what is done with it. turn: counts passes. launched:
    counts those whose kernels were launched one by one."""

    def __init__(self) -> None:
        self.passes: dict[Hashable, CapturedPass] = {}
        self.totals = Totals({}, {})
        self.turn = self.launched = 0
        self._rows: PassRows | None = None
        self._captured_rows = 0
        self._pool: Any = None
        self._seen: tuple[int, ...] = ()
        self._places: tuple[int, ...] = ()

    def takes(self, context: DevicePacked) -> bool:
        """Whether a pack can go this way."""
        return context.routes is None and len(context.positions_T) <= MOST_ROWS

    def hidden(self, decoder: Decoder, h_TK: Tensor, context: DevicePacked) -> Tensor:
        """Final normed hidden states [T, K] of embedded rows, differentiable, as `fused_layer.hidden` gives them."""
        runs = padded_runs(cast("Any", context.index).runs, len(h_TK))
        captured = self._pass_for(decoder, runs, context, h_TK)
        anchor = captured.parameters[0] if captured.parameters else None
        return _Replayed.apply(h_TK, anchor, captured, context, runs)  # type: ignore[no-any-return]

    def _pass_for(
        self, decoder: Decoder, runs: tuple[Run, ...], context: DevicePacked, h_TK: Tensor
    ) -> CapturedPass:
        self._check_storage(decoder)
        needed = Room.of(runs, dense=not decoder.deterministic)
        key = (
            needed.kind, context.scales is not None, context.quantize,
            context.collector is not None, decoder.checkpointing, decoder.save_fp8, decoder.deterministic,
            tuple(p.requires_grad for p in decoder.parameters()),
        )  # fmt: skip
        found = self.passes.pop(key, None)
        if found is None or not found.room.holds(needed):
            room = needed.spacious(found.room if found else None)
            if self._rows is None or room.rows > len(self._rows.h_TK):
                self._drop()
                self._rows = PassRows.like(h_TK, 1 << (room.rows - 1).bit_length())
            while len(self.passes) >= MOST_ROOMS:
                del self.passes[next(iter(self.passes))]
            found = CapturedPass(self, decoder, room, context, self._rows.first(room.rows))
        self.passes[key] = found  # now the youngest
        found.uses += 1
        self.launched += not found.captured
        if found.uses == CAPTURED_AT:
            self._capture(found)
        return found

    def _capture(self, one: CapturedPass) -> None:
        """The largest is captured first, so that the others fit into its memory: they have to wait for their next use. A pool
        that lost its last graph is not used again: torch takes it for gone, whatever still lies in it."""
        rows, others = len(one.rows.h_TK), [p for p in self.passes.values() if p is not one]
        if rows > self._captured_rows:
            for other in others:
                other.release()
        if not any(other.captured for other in others):
            self._captured_rows, self._pool = rows, _new_pool()
        one.capture(self._pool)

    def _check_storage(self, decoder: Decoder) -> None:
        """Forgets captured passes when something that they read has moved."""
        rope, parameters = decoder.model.rope.table_PD, tuple(id(p) for p in decoder.parameters())
        seen = (decoder.refreshes, len(rope), rope.data_ptr(), *parameters)
        if seen == self._seen:
            return
        places = (*decoder.places(), *parameters)
        if places != self._places:
            self._drop()
            self.totals = Totals({}, {})
        self._seen, self._places = seen, places

    def _drop(self) -> None:
        self.passes.clear()
        self._rows, self._captured_rows, self._pool = None, 0, None


@dataclass(frozen=True)
class PassRows:
    """What goes into and comes out of a pass, [T, K]: rows, final states and their gradients. position_T, counting_T, seen_T:
    see `CapturedPass.load`. All passes share the storage."""

    h_TK: Tensor
    out_TK: Tensor
    grad_TK: Tensor
    dh_TK: Tensor
    position_T: Tensor
    counting_T: Tensor
    seen_T: Tensor

    @classmethod
    def like(cls, h_TK: Tensor, rows: int) -> PassRows:
        """For so many rows like these."""
        device = h_TK.device
        matrices = [torch.zeros(rows, h_TK.shape[1], dtype=h_TK.dtype, device=device) for _ in range(4)]
        counting = torch.arange(rows, device=device)
        seen = torch.ones(rows, dtype=torch.bool, device=device)
        h, out, grad, dh = matrices
        return cls(h, out, grad, dh, counting.clone(), counting, seen)

    def first(self, rows: int) -> PassRows:
        """The first rows."""
        return PassRows(**{f.name: getattr(self, f.name)[:rows] for f in fields(self)})


def padded_runs(runs: tuple[Run, ...], rows: int) -> tuple[Run, ...]:
    """These runs, and one of all rows that are added."""
    more = padded_rows(rows) - rows
    return (*runs, Run(rows, more, 0, torch.arange(rows, rows + more))) if more else runs


class CapturedPass:
    """Forward and backward over one room. rows: their storage, padding included. uses: how often a pack was put in; see
    `CAPTURED_AT`."""

    def __init__(
        self,
        graphs: TrunkGraphs,
        decoder: Decoder,
        room: Room,
        context: DevicePacked,
        rows: PassRows,
    ) -> None:
        device, spec = rows.h_TK.device, decoder.spec
        self.graphs, self.decoder, self.quantize = graphs, decoder, context.quantize
        self.room, self.rows = room, rows
        self.kernels = fused_kernels(decoder.kernels)
        self.parameters = tuple(p for p in _parameters(decoder) if p.requires_grad)
        self.index = self.kernels.static_index(room, spec.query_group, device)
        self.scales: KVScales | None = None
        if context.scales is not None:
            self.scales = KVScales(torch.ones_like(context.scales.k), torch.ones_like(context.scales.v), 1)
        self.collector: AmaxCollector | None = None
        if context.collector is not None:
            self.collector = AmaxCollector(spec.num_layers, spec.num_kv_heads, device)
        self._make_totals()
        self.saved: list[tuple[Step, Tensor | Saved]] = []
        self.last_TK: Tensor | None = None
        self.uses = 0
        self.forward: Callable[[], None] = self._forward
        self.backward: Callable[[], None] = self._backward

    def _make_totals(self) -> None:
        """Where they aren't yet: those of weights that share an input as rows of one tensor."""
        totals = self.graphs.totals
        for projection in self._projections():
            key, weights = weights_key(projection), [linear.weight for linear in projection.linears]
            if key not in totals.stacks and all(
                w.requires_grad and id(w) not in totals.parts for w in weights
            ):
                stack = torch.zeros(sum(projection.sizes), weights[0].shape[1], device=weights[0].device)
                totals.stacks[key] = stack
                totals.parts.update(zip(key, stack.split(projection.sizes), strict=True))
        for parameter in self.parameters:
            if id(parameter) not in totals.parts:
                totals.parts[id(parameter)] = torch.zeros_like(parameter, requires_grad=False)

    def _projections(self) -> Iterator[Projection]:
        """Of all layers."""
        for layer in self.decoder.model.layers:
            attention, mlp = cast("Any", layer).self_attn, cast("Any", layer).mlp
            yield from (attention.qkv, attention.o_proj.alone, mlp.gate_up, mlp.down_proj.alone)

    def capture(self, pool: Any) -> None:
        """From now on, replays. The work was done before, so that kernels are compiled and products proven. Each graph is
        captured in the thread that did its work, autograd's for the backward pass: cuDNN plans by thread, and can't meanwhile."""

        def backward() -> None:
            self.backward = _graph(self._backward, pool)
            self.backward()

        self.ready()
        self.forward, self.backward = _graph(self._forward, pool), backward

    @property
    def captured(self) -> bool:
        """Whether there is a graph of it, or is about to be one."""
        return self.uses >= CAPTURED_AT

    def release(self) -> None:
        """Launches kernels one by one until the next capture."""
        self.uses = min(self.uses, CAPTURED_AT - 1)
        self.forward, self.backward = self._forward, self._backward

    def load(self, h_TK: Tensor, context: DevicePacked, runs: tuple[Run, ...]) -> None:
        """Puts a pack into the storage that the passes read. Rows of padding are zeros at positions from 0 on, and no collector
        sees them."""
        rows, count = self.rows, len(h_TK)
        rows.h_TK[:count], rows.position_T[:count] = h_TK, context.positions_T
        rows.h_TK[count:].zero_()
        rows.position_T[count:] = rows.counting_T[: len(rows.h_TK) - count]
        rows.seen_T[:count].fill_(True)
        rows.seen_T[count:].fill_(False)
        self.index.fill(runs)
        if self.scales is not None and context.scales is not None:
            self.scales.k.copy_(context.scales.k)
            self.scales.v.copy_(context.scales.v)
        if self.collector is not None:
            self.collector.clear()

    def ready(self) -> None:
        """Makes what the backward pass reads of the weights, where a version is new."""
        for projection in self._projections():
            self.kernels.ready(weight_of(projection))

    def begin_totals(self) -> None:
        """The totals become the gradients: zero where there is none, else what was there."""
        fresh = []
        for parameter in self.parameters:
            total, held = self.graphs.totals.parts[id(parameter)], parameter.grad
            if held is total:
                continue
            if held is None:
                fresh.append(total)
            else:
                total.copy_(held)
            parameter.grad = total
        if fresh:
            torch._foreach_zero_(fresh)

    def _forward(self) -> None:
        decoder, rows = self.decoder, self.rows
        context = DevicePacked(
            rows.position_T,
            self.index,  # type: ignore[arg-type]
            self.scales,
            collector=self.collector,
            quantize=self.quantize,
            seen_T=rows.seen_T,
        )
        h_TK, delta_TK, self.saved = rows.h_TK, None, []
        for number in range(len(decoder.model.layers)):
            step = Step.of(decoder, number, context)
            h_TK, delta_TK, kept = step.forward(h_TK, delta_TK)
            self.saved.append((step, kept))
        self.last_TK, out = normed(decoder.model.norm, h_TK, delta_TK, None)
        assert isinstance(out, Tensor)
        rows.out_TK.copy_(out)

    def _backward(self) -> None:
        norm, wanted, totals = self.decoder.model.norm, {id(p) for p in self.parameters}, self.graphs.totals
        assert norm.working.plain is not None and self.last_TK is not None
        dh_TK, dw = self.kernels.norm_grad(
            self.rows.grad_TK, self.last_TK, norm.working.plain, norm.eps, None
        )
        totals.add({id(norm.weight): dw} if id(norm.weight) in wanted else {})
        self.last_TK = None  # what a later capture may overwrite, like everything that was saved
        while self.saved:
            step, kept = self.saved.pop()
            saved = step.restored(kept)
            del kept
            dh_TK, grads = layer_backward(step, saved, dh_TK, dh_TK, wanted, totals)
            totals.add(grads)
        self.rows.dh_TK.copy_(dh_TK)


class _Replayed(torch.autograd.Function):
    """From embedded rows to final hidden states. anchor: some parameter, so that there is a backward pass if rows need none."""

    @staticmethod
    def forward(
        ctx: Any,
        h_TK: Tensor,
        anchor: Tensor | None,
        captured: CapturedPass,
        context: DevicePacked,
        runs: tuple[Run, ...],
    ) -> Tensor:
        captured.load(h_TK, context, runs)
        captured.forward()
        if captured.collector is not None and context.collector is not None:
            elements = 0 if context.scales is None else 2 * len(h_TK) * context.scales.k.numel()
            context.collector.add(captured.collector, elements * captured.decoder.spec.head_dim)
        captured.graphs.turn += 1
        ctx.captured, ctx.turn, ctx.count = captured, captured.graphs.turn, len(h_TK)
        return captured.rows.out_TK[: len(h_TK)].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TK: Tensor) -> Any:
        captured, count, rows = ctx.captured, ctx.count, ctx.captured.rows
        if ctx.turn != captured.graphs.turn:
            raise RuntimeError(
                "another training pass took the place of this one before its backward pass; take the gradient of one "
                "micro-batch before the next, or go without graphs"
            )
        captured.graphs.turn += 1
        rows.grad_TK[:count] = grad_TK
        rows.grad_TK[count:].zero_()
        captured.ready()
        captured.begin_totals()
        captured.backward()
        return (rows.dh_TK[:count].clone() if ctx.needs_input_grad[0] else None), None, None, None, None


def _parameters(decoder: Decoder) -> Iterator[Tensor]:
    """Of all layers and of the final norm."""
    for layer in decoder.model.layers:
        assert isinstance(cast("Any", layer).mlp, MLP)
        yield from parameters_of(layer)  # type: ignore[arg-type]
    yield decoder.model.norm.weight


def _graph(work: Callable[[], None], pool: Any) -> Callable[[], None]:
    """What does this work whenever it is called: a graph of it, or where there is no GPU the work itself."""
    if not torch.cuda.is_available():
        return work
    torch.cuda.current_blas_handle()  # a thread's first one can't be made while it captures
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        work()
    return graph.replay


def _new_pool() -> Any:
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
