"""What goes into an engine and what comes out: token ids in, token ids and their FP32 log-probabilities out.

Text is a view; nothing that was sampled is tokenized again (field failure 59).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from lockstep.nn.sampling_mask import SamplingMask

FinishReason = Literal["stop", "length"]
TIES = 16
"""Top-k keeps what is as likely as its last id, and equal logits aren't rare: a tie at the edge once in some thousand tokens."""
Progress = Callable[[int, int], None]
"""Called with the number of finished samples and of all."""


@dataclass(frozen=True)
class SamplingParams:
    """How a completion is drawn. `temperature` 0 is greedy; its log-probabilities are those at temperature 1.

    `max_kept` above 0 makes truncated sampling replayable: the ids that truncation kept are recorded with every token, at most
    so many and a few that are as likely as the last one (`TIES`), and log-probabilities are those of the truncated distribution.
    At 0 they are those of the full softmax.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    max_kept: int = 0

    @property
    def truncated(self) -> bool:
        """Whether tokens are drawn from less than the full softmax."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def records(self) -> bool:
        """Whether draws record what truncation kept."""
        return self.truncated and self.max_kept > 0

    @property
    def room(self) -> int:
        """Ids that a draw may record."""
        return self.max_kept + TIES if self.records else 0

    @property
    def score_temperature(self) -> float:
        """Temperature of the reported log-probabilities."""
        return self.temperature if self.temperature > 0 else 1.0


@dataclass(frozen=True)
class Request:
    """A prompt and how many completions to draw from it. `prompt_index` keys the randomness, with the sample number and the
    position in the sample.

    A later turn of a conversation asks for one sample: `first_sample` is then the conversation's number, `first_position` the
    number of tokens it has sampled already, so that no turn gets the noise of another.
    """

    prompt_ids: tuple[int, ...]
    prompt_index: int
    samples: int
    params: SamplingParams
    first_sample: int = 0
    first_position: int = 0


@dataclass(frozen=True)
class VersionSpan:
    """Tokens `start` to `end` of a completion were drawn under this weight version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Completion:
    """A finished sample: the sample contract, checked at the trainer's door (`trainer/sample.py`, docs/samples.md).

    token_ids: the response. Where a conversation has several turns, what stands between them is part of it, masked out.
    logprobs: log p of each token under the tempered distribution that it was drawn from, FP32 values; NaN where the token
    was not sampled. loss_mask: whether each token is trained; None trains all. spans: weight versions, covering all tokens.
    sampling_mask: what truncation kept at each token (`SamplingParams.max_kept`); log p is renormalised over it.
    routes: experts of every token but the last, prompt included, [P + N - 1, sparse layers, k] integers, where the trainer is to
    repeat them (`rollout.routes`).
    """

    prompt_ids: tuple[int, ...]
    prompt_index: int
    sample_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]
    scale_version: int
    params: SamplingParams
    loss_mask: tuple[bool, ...] | None = None
    sampling_mask: SamplingMask | None = None
    routes: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def trained(self) -> tuple[bool, ...]:
        """Whether each token is trained."""
        return (True,) * len(self.token_ids) if self.loss_mask is None else self.loss_mask

    @property
    def trained_tokens(self) -> int:
        """Tokens that are trained: what denominators count."""
        return len(self.token_ids) if self.loss_mask is None else sum(self.loss_mask)

    @property
    def trained_logprobs(self) -> tuple[float, ...]:
        """Log-probabilities of the trained tokens."""
        if self.loss_mask is None:
            return self.logprobs
        return tuple(p for p, trained in zip(self.logprobs, self.trained, strict=True) if trained)


class Engine(Protocol):
    """A rollout engine. Anything that draws samples for training implements this and passes `tests/contract`."""

    @property
    def version(self) -> int:
        """Weight version the engine would sample under."""

    @property
    def scale_version(self) -> int:
        """Version of its KV scales; 0 without FP8 KV."""

    def generate(
        self,
        requests: Sequence[Request],
        *,
        seed: int,
        step: int,
        expected_version: int,
        expected_scale_version: int | None = None,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """All completions, ordered by request and sample. `progress` hears of finished samples.

        Raises ContractError when the engine's weights are not `expected_version`, or its KV scales not
        `expected_scale_version` (None: any), CapacityError when a request can never fit.
        """

    def digest(self) -> str:
        """SHA-256 of the weights it would sample under, as `Decoder.digest` defines it."""
