"""Options of the rollout side: how prompts are sampled and how much memory the engine may use."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Truncation of the distribution. Training refuses anything but 1, 0 and 0: the importance ratio of a truncated
    sample against the full softmax would be off by the kept mass. Evaluation may use them."""

    stop: tuple[str, ...] = ()
    """Completions end after the first of these strings (kept in the text)."""

    stop_token_ids: tuple[int, ...] = ()
    """Completions end after one of these tokens, besides the model's own end tokens."""

    ignore_eos: bool = False
    """Go on after the model's end token (benchmarks)."""

    max_running: int = 64
    """Most sequences decoded in one engine step."""

    max_batched_tokens: int = 1024
    """Most tokens computed in one engine step; longer prompts are prefilled in chunks."""

    page_size: int = 64
    """Tokens in a page of the KV cache. Any value gives the same bits."""

    cache_tokens: int = 0
    """Capacity of the KV cache in tokens; 0 derives it from `cache_gb` or from what the step needs at most."""

    cache_gb: float = 0.0
    """Capacity of the KV cache in GB; 0 leaves it to `cache_tokens`."""

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "samples_per_prompt", "max_new_tokens", "max_running", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_batched_tokens < self.max_running:
            raise ValueError(
                "max_batched_tokens must be at least max_running: each running sequence decodes one token"
            )
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0 or not 0 <= self.min_p < 1:
            raise ValueError("need temperature >= 0, 0 < top_p <= 1, top_k >= 0 and 0 <= min_p < 1")
        if self.cache_tokens < 0 or self.cache_gb < 0:
            raise ValueError("cache_tokens and cache_gb can't be negative")
