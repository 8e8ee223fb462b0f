"""A sample on its way: tokens so far, pages it holds, how much of it is in the cache. It remembers; others decide."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lockstep.nn.sampling_mask import Kept, SamplingMask
from lockstep.rollout.noise import row_state
from lockstep.rollout.types import Completion, FinishReason, Request, VersionSpan


@dataclass(eq=False)
class Group:
    """The samples of one prompt. Once a leader has computed the prompt, `pages` holds it for those still to come, and
    `hidden` [K] is its last hidden state, from which every sample draws its first token."""

    request: Request
    waiting: int
    leader: Sequence | None = None
    pages: list[int] | None = None
    hidden: Tensor | None = None


@dataclass(eq=False)
class Sequence:
    """One sample. `computed` tokens have their keys and values in `pages`."""

    group: Group
    sample_index: int
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    hidden: Tensor | None = None
    finish_reason: FinishReason | None = None
    routes: Tensor | None = None
    preemptions: int = 0
    decoding: bool = False
    """Holds a row of a decode loop, which advances it."""

    @property
    def prompt_length(self) -> int:
        return len(self.group.request.prompt_ids)

    @property
    def output(self) -> list[int]:
        """Tokens drawn so far."""
        return self.tokens[self.prompt_length :]

    @property
    def fresh(self) -> bool:
        """Nothing drawn yet: the prompt's pages are all it needs."""
        return len(self.tokens) == self.prompt_length

    def noise(self, seed: int, step: int) -> tuple[int, int]:
        """What the next draw's noise is made from: the sample's `row_state`, and the position that goes into it."""
        request = self.group.request
        state = row_state(seed, step, request.prompt_index, self.sample_index)
        return state, request.first_position + len(self.output)

    def take(self, token: int, logprob: float, kept: Kept | None) -> None:
        """The token that was drawn from `hidden`, and what truncation kept if that is recorded."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if kept is not None:
            self.kept.append(kept)
        self.hidden = None

    def completion(self, version: int, scale_version: int) -> Completion:
        """The finished sample."""
        assert self.finish_reason is not None
        request, output = self.group.request, tuple(self.output)
        return Completion(
            request.prompt_ids,
            request.prompt_index,
            self.sample_index,
            output,
            tuple(self.logprobs),
            self.finish_reason,
            (VersionSpan(version, 0, len(output)),),
            scale_version,
            request.params,
            sampling_mask=SamplingMask.of(self.kept) if self.kept else None,
            routes=self.routes,
        )
