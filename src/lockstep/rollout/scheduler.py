"""Who computes how many tokens in the next engine step. It decides; the cache counts and the runner computes.

Continuous batching: running sequences come first and advance by what they lack (one token in decode, a chunk in prefill),
then waiting ones are admitted while the token budget, the running limit and the pages allow. Of a group only one sequence,
the leader, computes the prompt; the others wait for it and then fork its pages, which costs at most one page copy each.

When a page is missing, the youngest running sequence is preempted: it gives its pages back and waits in front, to be
recomputed from its tokens. That changes no bit of its sample, since a row's result depends on its prefix only and its noise
on its position; that is why recomputation is the only policy here, and swapping isn't needed. A sequence alone with the
cache always fits, because a request that could not is refused on entry; so every step makes progress.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lockstep.errors import CapacityError
from lockstep.rollout.cache import PagedCache
from lockstep.rollout.sequence import Group, Sequence
from lockstep.rollout.types import Request


@dataclass(frozen=True)
class Work:
    """Compute the next `count` tokens of a sequence."""

    sequence: Sequence
    count: int


@dataclass
class Scheduler:
    """Queues and limits."""

    cache: PagedCache
    max_running: int
    max_batched_tokens: int
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    preemptions: int = 0
    recalled: int = 0

    def add(self, request: Request) -> list[Sequence]:
        """Queues all samples of a request. Raises CapacityError when even one alone could never fit."""
        longest = len(request.prompt_ids) + request.params.max_tokens
        needed = self.cache.pages_for(longest)
        if needed > self.cache.num_pages:
            size = self.cache.page_size
            raise CapacityError(
                f"a request of {len(request.prompt_ids)} prompt and {request.params.max_tokens} new tokens can never fit",
                why=f"it needs {needed} pages of {size} tokens, the KV cache has {self.cache.num_pages}",
                fix=f"set rollout.cache_tokens to at least {needed * size}, or shorten prompts or max_new_tokens",
            )
        group = Group(request, request.samples)
        self.groups.append(group)
        numbers = range(request.first_sample, request.first_sample + request.samples)
        added = [Sequence(group, i, list(request.prompt_ids)) for i in numbers]
        self.waiting.extend(added)
        return added

    @property
    def done(self) -> bool:
        """Nothing left to compute."""
        return not self.waiting and not self.running

    def schedule(self) -> list[Work]:
        """The next step's work. Sequences in `running` with a hidden state and no work draw a token right away."""
        work: list[Work] = []
        budget = self.max_batched_tokens
        preempted_before = self.preemptions
        for sequence in list(self.running):
            if sequence not in self.running or sequence.hidden is not None or sequence.decoding:
                continue
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if count > 0 and self._make_room(sequence, count, work):
                work.append(Work(sequence, count))
                budget -= count
        if self.preemptions == preempted_before:
            self._admit(work, budget)
        while not self.running and self.drop_one_prompt():  # prompts kept for others hold every page
            self._admit(work, budget)
        moving = any(s.hidden is not None or s.decoding for s in self.running)
        assert work or moving, "an engine step without progress"
        return work

    def _admit(self, work: list[Work], budget: int) -> None:
        for sequence in list(self.waiting):
            if len(self.running) >= self.max_running:
                return
            group = sequence.group
            if sequence.fresh and group.pages is not None:
                pages = self.cache.fork(group.pages, sequence.prompt_length)
                if pages is None:
                    return
                sequence.pages, sequence.computed, sequence.hidden = (
                    pages,
                    sequence.prompt_length,
                    group.hidden,
                )
                self._enter(sequence)
                continue
            if sequence.fresh and group.leader is not None:
                continue
            sequence.pages = self.cache.recall(sequence.tokens)
            sequence.computed = len(sequence.pages) * self.cache.page_size
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if count == 0 or not self.cache.grow(sequence.pages, len(sequence.tokens)):
                self.cache.release(sequence.pages)
                sequence.computed = 0
                return
            self.recalled += sequence.computed
            if sequence.fresh:
                group.leader = sequence
            self._enter(sequence)
            work.append(Work(sequence, count))
            budget -= count

    def _enter(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        if sequence.fresh:
            sequence.group.waiting -= 1
            if sequence.group.pages is not None and sequence.group.waiting == 0:
                self._drop_prompt(sequence.group)

    def prompt_computed(self, leader: Sequence) -> None:
        """Called when a leader's prompt is in the cache and its last hidden state known."""
        group = leader.group
        self.cache.remember(leader.tokens, leader.pages)
        if group.leader is leader and group.pages is None and group.waiting:
            group.pages, group.hidden = self.cache.share(leader.pages), leader.hidden
        group.leader = None

    def finish(self, sequence: Sequence) -> None:
        """Takes a finished sequence out and frees its pages."""
        self.running.remove(sequence)
        self.cache.release(sequence.pages)

    def _make_room(self, sequence: Sequence, count: int, work: list[Work]) -> bool:
        """Pages for `count` more tokens, preempting younger sequences; False when `sequence` itself had to go."""
        while not self.cache.grow(sequence.pages, sequence.computed + count):
            if self.drop_one_prompt():
                continue
            victim = self.running[-1]
            self.preempt(victim)
            work[:] = [w for w in work if w.sequence is not victim]
            if victim is sequence:
                return False
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Sends a running sequence back to the front of the queue, without its pages."""
        self.running.remove(sequence)
        self.cache.release(sequence.pages)
        if sequence.fresh:
            sequence.group.waiting += 1
        if sequence.group.leader is sequence:
            sequence.group.leader = None
        sequence.computed, sequence.hidden = 0, None
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def drop_one_prompt(self) -> bool:
        """Gives up the pages of a prompt that was kept for samples still to come; False when there is none."""
        for group in self.groups:
            if group.pages is not None:
                self._drop_prompt(group)
                return True
        return False

    def _drop_prompt(self, group: Group) -> None:
        if group.pages is not None:
            self.cache.release(group.pages)
        group.pages, group.hidden = None, None
