"""What a running batch is on the device, and the decode step over it, eager or as a CUDA graph.

A row holds one sequence. A step reads each row's token and position, computes the decoder over the paged cache, draws, and
moves the row on (`kernels/triton/steps.py`); nothing in it waits for the host, so steps are captured once for each batch size
and replayed. Capture changes no bit: the same kernels run on the same tensors.

Next: `decode_loop.py`, which fills rows, launches windows of steps and reads what they drew.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.attention_form import CHUNK
from lockstep.kernels.triton import head as sampling
from lockstep.kernels.triton import steps
from lockstep.kernels.triton.attention import DecodeIndex
from lockstep.kernels.triton.truncation import kept_ids, truncation_threshold
from lockstep.kernels.truncation import Truncation
from lockstep.kernels.upload import upload
from lockstep.models.decoder import Decoder
from lockstep.nn.device_context import DevicePages
from lockstep.nn.kv_scales import KVScales
from lockstep.nn.sampling_mask import KeptRows
from lockstep.rollout.device_cache import MAX_STOPS, DeviceCache
from lockstep.rollout.draws import Draws
from lockstep.rollout.sampler import truncation_of
from lockstep.rollout.types import SamplingParams


@dataclass(frozen=True)
class Entry:
    """A sequence about to enter a row: its next token is drawn as number `drawn` of at most `limit`, at `position`."""

    row: int
    position: int
    drawn: int
    limit: int
    noise: int
    params: SamplingParams


@dataclass(frozen=True)
class Truncated:
    """Truncation of every row, and where draws leave what was kept. most_R: int32, how many ids a row records, or 0. outs: count,
    ids and mass of `Draws`, of as many steps as `DecodeState.out_token` has; nothing where no row of the generation records."""

    rows: Truncation
    most_R: Tensor
    outs: tuple[Tensor, ...]

    @classmethod
    def empty(cls, rows: int, steps: int, width: int, device: torch.device) -> Truncated:
        """No truncation; room for `width` ids."""
        none = Truncation.of([0] * rows, [0.0] * rows, [1.0] * rows, device)
        most = torch.zeros(rows, dtype=torch.int32, device=device)
        if not width:
            return cls(none, most, ())
        count, ids = most.repeat(steps, 1), most.repeat(steps, 1)[..., None].repeat(1, 1, width)
        return cls(none, most, (count, ids, count.float()))

    @property
    def width(self) -> int:
        """Ids of a draw that there is room for."""
        return self.outs[1].shape[2] if self.outs else 0

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """What there is of every row."""
        return (*self.rows.parts, self.most_R)

    def first(self, batch: int) -> Truncated:
        """Of the first rows."""
        rows = Truncation(*(x[:batch] for x in self.rows.parts))
        return Truncated(rows, self.most_R[:batch], tuple(x[:, :batch] for x in self.outs))


class DecodeState:
    """Rows of the running batch. table_RP: int32 pages of every row, [rows, pages of the longest sequence]. truncated: None in a
    generation that truncates nothing, whose steps don't look for it."""

    def __init__(
        self, decoder: Decoder, cache: DeviceCache, rows: int, longest: int, window: int, *, graphs: bool
    ) -> None:
        self.decoder, self.cache, self.rows, self.window, self.graphs = decoder, cache, rows, window, graphs
        device = cache.k.device
        self.pages = cache.pages_for(longest)

        def numbers(dtype: torch.dtype, *shape: int, fill: float = 0) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        self.token, self.position = numbers(torch.int64, rows), numbers(torch.int64, rows)
        self.drawn, self.limit = numbers(torch.int64, rows), numbers(torch.int64, rows)
        self.noise = numbers(torch.int64, rows)
        self.temperature, self.score_temperature = (numbers(torch.float32, rows, fill=1.0) for _ in range(2))
        self.stops = numbers(torch.int64, rows, MAX_STOPS, fill=-1)
        self.alive = numbers(torch.int32, rows)
        self.table = numbers(torch.int32, rows, self.pages)
        self.out_token = numbers(torch.int64, 2 * window, rows, fill=-1)
        self.out_logp = numbers(torch.float32, 2 * window, rows)
        self.cursor = numbers(torch.int32, 1)
        self.flag = numbers(torch.int32, 1)
        self.scales: KVScales | None = None
        self.truncated: Truncated | None = None
        self._room: Truncated | None = None
        self._captured: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._signature: tuple[int, ...] = ()
        self._pool: Any = None

    def use_scales(self, scales: KVScales | None) -> None:
        """Takes KV scales over into the storage that captured steps read."""
        if scales is None:
            self.scales = None
        elif self.scales is None:
            self.scales = KVScales(scales.k.clone(), scales.v.clone(), scales.version)
        else:
            self.scales.k.copy_(scales.k)
            self.scales.v.copy_(scales.v)

    def truncate(self, params: Sequences[SamplingParams]) -> None:
        """Prepares for requests with these parameters. Captured steps that leave fewer ids are forgotten."""
        if not any(p.truncated for p in params):
            self.truncated = None
            return
        most = max(p.room for p in params)
        width = 1 << (most - 1).bit_length() if most else 0
        if self._room is None or self._room.width < width:
            self._captured = {key: graph for key, graph in self._captured.items() if not key[2]}
            self._room = Truncated.empty(self.rows, len(self.out_token), width, self.token.device)
        self.truncated = self._room

    def check_storage(self) -> None:
        """Forgets captured steps when a working copy has moved to other storage since, or the rotary table has grown."""
        signature = self.decoder.places()
        if signature != self._signature:
            self._signature = signature
            self._captured.clear()

    @torch.no_grad()
    def enter(self, hidden_NK: Tensor, entries: Sequences[Entry]) -> Draws:
        """Draws the next token of each entry [N] from its hidden state and fills its row."""
        device = hidden_NK.device

        def column(values: list[Any]) -> Tensor:
            return upload(torch.tensor(values), device)

        row = column([e.row for e in entries])
        drawn, limit = column([e.drawn for e in entries]), column([e.limit for e in entries])
        noise = column([e.noise for e in entries])
        temperature = column([e.params.temperature for e in entries])
        score = torch.where(temperature > 0, temperature, 1.0)
        stops = column(
            [[*s, *[-1] * (MAX_STOPS - len(s))] for s in (sorted(e.params.stop_token_ids) for e in entries)]
        )
        truncated = None
        if self.truncated is not None:
            params = [e.params for e in entries]
            most = column([p.room for p in params]).int()
            truncated = replace(self.truncated, rows=truncation_of(params, device), most_R=most)
            for target, value in zip(self.truncated.columns, truncated.columns, strict=True):
                target.index_copy_(0, row, value)
        draws = self._draw(hidden_NK, temperature, score, noise, drawn, truncated)
        token = draws.token
        going = (drawn + 1 < limit) & (stops != token[:, None]).all(1)
        values = (
            (self.token, token),
            (self.position, column([e.position for e in entries])),
            (self.drawn, drawn + 1),
            (self.limit, limit),
            (self.noise, noise),
            (self.temperature, temperature),
            (self.score_temperature, score),
            (self.stops, stops),
            (self.alive, going.int()),
        )
        for target, value in values:
            target.index_copy_(0, row, value)
        return draws

    def kill(self, rows: Sequences[int]) -> None:
        """Makes rows harmless."""
        self.alive.index_fill_(0, torch.tensor(rows, device=self.alive.device), 0)

    def permute(self, order: Sequences[int]) -> None:
        """Row i becomes what row order[i] was, for the first len(order) rows; the others are dead."""
        index = torch.tensor(order, device=self.alive.device)
        count = len(order)
        for x in (
            self.token,
            self.position,
            self.drawn,
            self.limit,
            self.noise,
            self.temperature,
            self.score_temperature,
            self.stops,
            self.alive,
            *(() if self.truncated is None else self.truncated.columns),
        ):
            x[:count] = x[index]
        self.alive[count:] = 0

    def launch(self, batch: int, longest: int) -> None:
        """A window of steps over the first `batch` rows, none of which gets beyond `longest` keys.

        The first batch is captured for longer sequences as well: their kernels take seconds to compile, which would fall into
        the middle of a rollout."""
        splits = -(-longest // CHUNK)
        if not self.graphs:
            for _ in range(self.window):
                self._step(batch, splits)
            return
        key = (batch, splits, self.truncated is not None)
        if key not in self._captured:
            longer = splits * CHUNK < self.pages * self.cache.page_size and not self._captured
            self._captured[key] = self._capture(batch, splits)
            if longer:
                self._captured[batch, splits + 1, key[2]] = self._capture(batch, splits + 1)
        for _ in range(self.window):
            self._captured[key].replay()

    def _capture(self, batch: int, splits: int) -> torch.cuda.CUDAGraph:
        """The step as a graph. The warm-up that compiles kernels runs on dead rows, so it changes nothing. A pool that lost its
        last graph is not used again: torch takes it for gone, whatever still lies in it."""
        if not self._captured:
            self._pool = torch.cuda.graph_pool_handle()
        saved = self.alive.clone(), self.cursor.clone()
        self.alive.zero_()
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self._step(batch, splits)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        only_here = "thread_local"  # a thread that watches other GPUs' messages goes on
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=only_here):
            self._step(batch, splits)
        torch.cuda.synchronize()
        self.alive.copy_(saved[0])
        self.cursor.copy_(saved[1])
        return graph

    @torch.no_grad()
    def _step(self, batch: int, splits: int) -> None:
        table = self.table[:batch]
        position, alive = self.position[:batch], self.alive[:batch]
        slots, lengths = steps.prepare(position, table, alive, self.cache.spare)
        context = DevicePages(
            position,
            slots,
            DecodeIndex(lengths, table, splits * CHUNK),
            self.cache.k,
            self.cache.v,
            self.scales,
            self.flag,
        )
        hidden = self.decoder.hidden(self.token[:batch], context)  # type: ignore[arg-type]
        truncated = None if self.truncated is None else self.truncated.first(batch)
        draws = self._draw(
            hidden,
            self.temperature[:batch],
            self.score_temperature[:batch],
            self.noise[:batch],
            self.drawn[:batch],
            truncated,
        )
        if truncated is not None:
            for out, made in zip(truncated.outs, draws.tensors[2:], strict=True):
                out.index_copy_(0, self.cursor.long(), made[None])
        steps.advance(
            draws.token,
            draws.logp,
            self.token,
            self.position,
            self.drawn,
            self.limit,
            self.stops,
            self.alive,
            self.out_token,
            self.out_logp,
            self.cursor,
        )

    def out(self, steps: slice, batch: int) -> Draws:
        """What steps drew for the first rows."""
        kept = () if self.truncated is None else self.truncated.outs
        return Draws(*(x[steps, :batch] for x in (self.out_token, self.out_logp, *kept)))

    def _draw(
        self,
        hidden_NK: Tensor,
        temperature: Tensor,
        score: Tensor,
        noise: Tensor,
        drawn: Tensor,
        truncated: Truncated | None,
    ) -> Draws:
        kernels = self.decoder.kernels
        logits = kernels.raw_logits(hidden_NK, self.decoder.head.working)  # type: ignore[attr-defined]
        least = None if truncated is None else truncation_threshold(logits, score, *truncated.rows.parts)
        token = sampling.sample(logits, temperature, noise, drawn, least)
        normalizer = sampling.log_normalizer(logits, score)
        kept: tuple[Tensor, ...] = ()
        if truncated is not None and least is not None and truncated.width:
            ids, count = kept_ids(logits, score, least, truncated.most_R, truncated.width)
            full, rows = normalizer, KeptRows.first(ids, count)
            normalizer = rows.normalizer_of(rows.gathered(logits, score), full)
            kept = count, ids, (normalizer - full).exp().clamp(max=1.0)
        return Draws(token, sampling.target_log_prob(logits, score, normalizer, token), *kept)
