"""What goes into an engine and what comes out: token ids in, token ids and their FP32 log-probabilities out.

Text is a view; nothing that was sampled is tokenized again (field failure 59).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

FinishReason = Literal["stop", "length"]
Progress = Callable[[int, int], None]
"""Called with the number of finished samples and of all."""


@dataclass(frozen=True)
class SamplingParams:
    """How a completion is drawn. `temperature` 0 is greedy; its log-probabilities are those at temperature 1."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def truncated(self) -> bool:
        """Whether tokens are drawn from less than the full softmax."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def score_temperature(self) -> float:
        """Temperature of the reported log-probabilities."""
        return self.temperature if self.temperature > 0 else 1.0


@dataclass(frozen=True)
class Request:
    """A prompt and how many completions to draw from it. `prompt_index` keys the randomness, with the sample number."""

    prompt_ids: tuple[int, ...]
    prompt_index: int
    samples: int
    params: SamplingParams


@dataclass(frozen=True)
class VersionSpan:
    """Tokens `start` to `end` of a completion were drawn under this weight version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Completion:
    """A finished sample. `logprobs[i]` is log p of `token_ids[i]` under the tempered, untruncated distribution."""

    prompt_ids: tuple[int, ...]
    prompt_index: int
    sample_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]
    scale_version: int
    params: SamplingParams


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
        progress: Progress | None = None,
    ) -> list[Completion]:
        """All completions, ordered by request and sample. `progress` hears of finished samples.

        Raises ContractError when the engine's weights are not `expected_version`, CapacityError when a request can
        never fit.
        """

    def digest(self) -> str:
        """SHA-256 of the weights it would sample under, as `Decoder.digest` defines it."""
