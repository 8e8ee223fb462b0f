"""Continuous batching without waiting: the host fills rows and launches windows of decode steps; it reads what a window drew
while the next one runs.

A window is a few replays of the captured step. Rows stop by themselves on the device, so a sequence that ends inside a window
wastes at most the rest of that window and the one in flight. Prompts are prefilled between windows, on the same stream, and
enter free rows. When pages run short, everything in flight is read first; then the scheduler preempts as it always does.

Which sequences share a window changes no sample: rows are independent, and noise is keyed by sample and position.

Next: `decode_state.py` for the step, `scheduler.py` for admission and preemption.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.errors import ContractError
from lockstep.nn.kv_scales import KVScales
from lockstep.rollout.draws import Draws
from lockstep.rollout.runner import Runner
from lockstep.rollout.scheduler import Scheduler
from lockstep.rollout.sequence import Sequence
from lockstep.rollout.types import FinishReason

if TYPE_CHECKING:
    from lockstep.rollout.decode_state import DecodeState

AHEAD = 2
"""Windows in flight before the oldest is read."""


@dataclass(frozen=True)
class Flight:
    """Steps that were launched: whose rows, and where their draws will be (pinned host memory) once `event` has passed."""

    owners: tuple[Sequence | None, ...]
    draws: Draws
    flag: Tensor
    event: torch.cuda.Event


class DecodeLoop:
    """Runs the sequences of one generation to their ends. waited: seconds in which the host had nothing to do."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        state: DecodeState,
        scales: KVScales | None,
        finish_reason: Callable[[Sequence, int], FinishReason | None],
        *,
        seed: int,
        step: int,
    ) -> None:
        self.scheduler, self.runner, self.state, self.scales = scheduler, runner, state, scales
        self.finish_reason, self.seed, self.step = finish_reason, seed, step
        self.owners: list[Sequence | None] = [None] * state.rows
        self.row_of: dict[Sequence, int] = {}
        self.flights: deque[Flight] = deque()
        self.finished = self.windows = 0
        self.waited = 0.0
        self._staging = [
            torch.zeros(state.table.shape, dtype=torch.int32).pin_memory() for _ in range(AHEAD + 2)
        ]
        state.use_scales(scales)
        state.truncate([s.group.request.params for s in scheduler.waiting])
        state.check_storage()
        state.alive.zero_()  # a generation that was broken off leaves rows that run
        state.flag.zero_()
        state.cursor.zero_()  # the halves of the buffers alternate from here on, on both sides

    def advance(self) -> None:
        """Admits, launches one window, and reads the oldest in flight."""
        self.admit()
        launching = self.unfinished()
        if launching:
            self.reserve()
            launching = bool(self.row_of)
        if launching:
            self.launch()
        while len(self.flights) > (AHEAD if launching else 0):
            self.read()

    def unfinished(self) -> bool:
        """Whether some sequence may draw more tokens than are in flight for it already."""
        flying: dict[Sequence, int] = dict.fromkeys(self.row_of, 0)
        for flight in self.flights:
            for owner in flight.owners:
                if owner in flying:
                    flying[owner] += len(flight.draws.token)
        return any(len(s.output) + n < s.group.request.params.max_tokens for s, n in flying.items())

    def admit(self) -> None:
        """Prefills waiting prompts into free rows until nothing more fits, each of them to its end."""
        scheduler = self.scheduler
        while (scheduler.waiting and len(scheduler.running) < self.state.rows) or self._prefilling():
            work = scheduler.schedule()
            found = self.runner.forward(work, self.scales, self.state.flag) if work else []
            for item, hidden in zip(work, found, strict=True):
                if item.sequence.computed == len(item.sequence.tokens):
                    item.sequence.hidden = hidden
                    if item.sequence.fresh:
                        scheduler.prompt_computed(item.sequence)
            ready = [s for s in scheduler.running if s.hidden is not None]
            if ready:
                self.enter(ready)
            if not work and not ready:
                return

    def _prefilling(self) -> bool:
        """Whether some prompt is computed in part: it was longer than the token budget left to it."""
        return any(s.hidden is None and not s.decoding for s in self.scheduler.running)

    def enter(self, ready: list[Sequence]) -> None:
        """Draws the first token of sequences that are computed, and gives them rows."""
        from lockstep.rollout.decode_state import Entry  # needs Triton

        free = iter([r for r, owner in enumerate(self.owners) if owner is None])
        entries = []
        for sequence in ready:
            params, request = sequence.group.request.params, sequence.group.request
            row = next(free)
            state, drawn = sequence.noise(self.seed, self.step)
            entries.append(
                Entry(
                    row,
                    len(sequence.tokens),
                    drawn,
                    request.first_position + params.max_tokens,
                    state,
                    params,
                )
            )
            self.owners[row], self.row_of[sequence] = sequence, row
        hidden = torch.stack([s.hidden for s in ready if s.hidden is not None])
        draws = self.state.enter(hidden, entries)
        for sequence in ready:
            sequence.hidden, sequence.decoding = None, True
        self.note(tuple(ready), Draws(*(x[None] for x in draws.tensors)))

    def reserve(self) -> None:
        """Pages for what may be written until this window ends; preempts when there are none left."""
        for sequence in list(self.row_of):
            if sequence in self.row_of and not self._grow(sequence):
                while self.flights:
                    self.read()
                if sequence in self.row_of:
                    self._make_room(sequence)

    def _grow(self, sequence: Sequence) -> bool:
        request = sequence.group.request
        ahead = (len(self.flights) + 1) * self.state.window + 1
        needed = min(len(sequence.tokens) + ahead, len(request.prompt_ids) + request.params.max_tokens)
        return self.scheduler.cache.grow(sequence.pages, needed)

    def _make_room(self, sequence: Sequence) -> None:
        while sequence in self.row_of and not self._grow(sequence):
            if self.scheduler.drop_one_prompt():
                continue
            victim = self.scheduler.running[-1]
            self.free(victim, kill=True)
            self.scheduler.preempt(victim)

    def launch(self) -> None:
        """One window over the rows in use."""
        self.compact()
        state = self.state
        batch = bucket(max(self.row_of.values()) + 1, state.rows)
        table = self._staging[self.windows % len(self._staging)]
        longest = 1
        for sequence, row in self.row_of.items():
            pages = sequence.pages
            table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            longest = max(longest, len(pages) * self.scheduler.cache.page_size)
        state.table.copy_(table, non_blocking=True)
        state.launch(batch, longest)
        half = (self.windows % 2) * state.window
        rows = slice(half, half + state.window)
        self.windows += 1
        self.note(tuple(self.owners[:batch]), state.out(rows, batch))

    def note(self, owners: tuple[Sequence | None, ...], draws: Draws) -> None:
        """Copies draws to the host behind the work that makes them."""
        copies = [
            torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
            for x in (*draws.tensors, self.state.flag)
        ]
        event = torch.cuda.Event()
        event.record()
        self.flights.append(Flight(owners, Draws(*copies[:-1]), copies[-1], event))

    def read(self) -> None:
        """Takes in what the oldest steps in flight drew.

        Raises ContractError when a key or value was not finite, CapacityError when truncation kept more ids than are recorded.
        """
        flight = self.flights.popleft()
        begun = time.perf_counter()
        flight.event.synchronize()
        self.waited += time.perf_counter() - begun
        if int(flight.flag):
            raise ContractError("non-finite key or value on its way into the cache")
        tokens, logps = flight.draws.token.t().tolist(), flight.draws.logp.t().tolist()
        for row, (sequence, drawn, scores) in enumerate(zip(flight.owners, tokens, logps, strict=True)):
            if sequence is None or sequence.finish_reason is not None:
                continue
            params = sequence.group.request.params
            for step, (token, logp) in enumerate(zip(drawn, scores, strict=True)):
                if token < 0:
                    break
                sequence.take(token, logp, flight.draws.kept(step, row, params) if params.records else None)
                sequence.computed = len(sequence.tokens) - 1
                reason = self.finish_reason(sequence, token)
                if reason is not None:
                    sequence.finish_reason = reason
                    self.free(sequence, kill=reason == "stop" and bool(sequence.group.request.params.stop))
                    self.scheduler.finish(sequence)
                    self.finished += 1
                    break

    def free(self, sequence: Sequence, *, kill: bool) -> None:
        """Takes a sequence out of its row; `kill` where the device doesn't know that it ended."""
        row = self.row_of.pop(sequence)
        self.owners[row] = None
        sequence.decoding = False
        if kill:
            self.state.kill([row])

    def compact(self) -> None:
        """Moves rows together when a smaller batch would hold them. Rows in flight keep their order in what was launched."""
        used = sorted(self.row_of.values())
        if bucket(len(used), self.state.rows) >= bucket(used[-1] + 1, self.state.rows):
            return
        self.state.permute(used)
        owners = [self.owners[r] for r in used]
        self.owners = owners + [None] * (self.state.rows - len(owners))
        self.row_of = {s: r for r, s in enumerate(owners) if s is not None}


def bucket(rows: int, most: int) -> int:
    """The batch size that is computed for so many rows: few sizes, so that few graphs are captured."""
    size = next((b for b in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128) if b >= rows), -(-rows // 64) * 64)
    return min(size, most)
