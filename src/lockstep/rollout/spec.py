"""Options of the rollout side: how prompts are sampled and how much memory the engine may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RolloutSpec:
    """Sampling and engine options."""

    __pydantic_config__ = {"extra": "forbid"}

    prompts_per_step: int = 8
    """Distinct prompts sampled in each training step."""

    samples_per_prompt: int = 8
    """Completions for each prompt (the group size of GRPO)."""

    max_new_tokens: int = 64
    """Longest completion, in tokens."""

    temperature: float = 1.0
    """Logits are divided by this on both sides; log-probabilities are those of the tempered distribution."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """Truncation of the distribution: the smallest most probable set with this mass, this many of the most probable, those
    of at least this share of the largest probability. 1, 0 and 0 keep everything. Training needs `truncation: replay`."""

    truncation: Literal["refuse", "replay"] = "refuse"
    """What training does about `top_p`, `top_k` and `min_p`. `refuse`: allows none, since ratios against the full softmax
    would be off by the kept mass. `replay`: every token comes with the ids that were kept; both sides normalise over these."""

    max_kept: int = 1024
    """Most ids that `replay` records for a token. `top_k` must be set and not larger, unless the vocabulary is that small."""

    routes: Literal["own", "replay"] = "own"
    """Which experts the trainer computes a token with, in a mixture of experts. `own`: those its router chooses, which in a
    unified flow are the engine's. `replay`: those that the engine's did (R3), for two sides whose bits differ."""

    stop: tuple[str, ...] = ()
    """Completions end after the first of these strings (kept in the text)."""

    stop_token_ids: tuple[int, ...] = ()
    """Completions end after one of these tokens, besides the model's own end tokens."""

    ignore_eos: bool = False
    """Go on after the model's end token (benchmarks)."""

    max_running: int = 64
    """Most sequences decoded in one engine step."""

    max_batched_tokens: int = 0
    """Most tokens computed in one engine step; longer prompts are prefilled in chunks. 0: 8,192 on a GPU, whose products want
    many rows, 1,024 elsewhere, and at least max_running. Any value gives the same bits."""

    page_size: int = 64
    """Tokens in a page of the KV cache. Any value gives the same bits."""

    prefix_cache: bool = True
    """Keep whole pages of prompts after a generation, as long as weights and KV scales stay and nobody needs the pages. The same
    bits either way."""

    window: int = 8
    """Decode steps launched at once on a GPU; the host reads their draws one window later. A sequence that ends inside a window
    wastes the rest of it. Any value gives the same bits."""

    cuda_graphs: bool = True
    """Replay captured decode steps on a GPU. Off gives the same bits, slower."""

    cache_tokens: int = 0
    """Capacity of the KV cache in tokens; 0 derives it from `cache_gb`, or from what the step needs at most and what a GPU has
    left. Any value gives the same bits."""

    cache_gb: float = 0.0
    """Capacity of the KV cache in GB; 0 leaves it to `cache_tokens`."""

    def batched_tokens(self, *, gpu: bool) -> int:
        """`max_batched_tokens`, where it is left open too."""
        return self.max_batched_tokens or max(8192 if gpu else 1024, self.max_running)

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from less than the full softmax."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "samples_per_prompt", "max_new_tokens", "max_running", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_kept < 1:
            raise ValueError("max_kept must be at least 1")
        if self.max_batched_tokens and self.max_batched_tokens < self.max_running:
            raise ValueError(
                "max_batched_tokens must be at least max_running: each running sequence decodes one token"
            )
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0 or not 0 <= self.min_p < 1:
            raise ValueError("need temperature >= 0, 0 < top_p <= 1, top_k >= 0 and 0 <= min_p < 1")
        if self.cache_tokens < 0 or self.cache_gb < 0:
            raise ValueError("cache_tokens and cache_gb can't be negative")
