"""How many tokens of keys and values a run's engine holds, and what else is in memory beside them.

As the run says; else room for all sequences that run at once, at their greatest length; and where a GPU has less than that left
beside training, what it has left. Then some sequences wait for others, which costs time and no bit.

Next: `footprint.py`, which counts the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.models.spec import ModelSpec
from lockstep.models.trunk_graph import MOST_ROWS
from lockstep.numerics.flow import FlowPair
from lockstep.trainer import footprint
from lockstep.trainer.footprint import Keeping, Load
from lockstep.trainer.spec import RunSpec

SPARE = 0.03
"""Share of a GPU's memory that is left alone, for what is lost between tensors and what nobody counted."""


@dataclass(frozen=True)
class CacheSize:
    """tokens: capacity. wanted: what all sequences that run at once may need."""

    tokens: int
    wanted: int

    @property
    def note(self) -> str | None:
        """One line where it is less than was wanted."""
        if self.tokens >= self.wanted:
            return None
        return (
            f"KV cache: {self.tokens:,} tokens, all that the GPU has left, of {self.wanted:,} that a step's sequences may need; "
            "some may have to wait"
        )


def cache_size(
    spec: RunSpec,
    model: ModelSpec,
    flows: FlowPair,
    prompt: int,
    *,
    fused: bool,
    memory: float | None,
    ranks: int = 1,
) -> CacheSize:
    """prompt: tokens of the longest one. memory: bytes of a GPU that the run may take in all; None where nobody counts. ranks:
    processes with an engine each, that share prompts."""
    rollout, token = spec.rollout, footprint.cache_bytes_a_token(model, flows.rollout)
    if rollout.cache_tokens:
        return CacheSize(rollout.cache_tokens, rollout.cache_tokens)
    if rollout.cache_gb:
        tokens = int(rollout.cache_gb * 1e9) // token
        return CacheSize(tokens, tokens)
    pages = -(-(prompt + max(rollout.max_new_tokens, spec.eval.max_new_tokens)) // rollout.page_size) + 1
    wanted = running(spec, ranks) * pages * rollout.page_size
    if memory is None:
        return CacheSize(wanted, wanted)
    load = load_of(spec, prompt, wanted, fused=fused, ranks=ranks)
    parts = footprint.parts(model, flows, load, keeping_of(spec, model, load, fused=fused))
    others = max(footprint.peak(parts).values()) - wanted * token
    left = int(memory * (1 - SPARE) - others) // token // rollout.page_size * rollout.page_size
    if left < pages * rollout.page_size:  # not even one sequence: then it isn't the cache that is too large
        return CacheSize(wanted, wanted)
    return CacheSize(min(wanted, left), wanted)


def running(spec: RunSpec, ranks: int = 1) -> int:
    """Sequences that run at once on one of so many ranks: of a training step or of an evaluation."""
    rollout, evaluation = spec.rollout, spec.eval
    most = -(-rollout.prompts_per_step // ranks) * rollout.samples_per_prompt
    if evaluation.data is not None:
        most = max(most, -(-evaluation.prompts // ranks) * max(evaluation.samples, 1))
    return min(rollout.max_running, most)


def load_of(spec: RunSpec, prompt: int, cache_tokens: int, *, fused: bool, ranks: int = 1) -> Load:
    """What is in flight at most."""
    r, u = spec.rollout, spec.update
    batch = -(-r.prompts_per_step // u.mini_batches)
    trained = batch * r.samples_per_prompt * r.max_new_tokens
    shared = batch * prompt if u.share_prompts else batch * r.samples_per_prompt * prompt
    rows = min(u.max_tokens_per_microbatch, shared + trained) if u.steps else 0
    return Load(
        rows, min(rows, trained), cache_tokens, running(spec, ranks), r.batched_tokens(gpu=fused), ranks
    )


def keeping_of(spec: RunSpec, model: ModelSpec, load: Load, *, fused: bool) -> Keeping:
    """How the backend trains."""
    captured = fused and spec.update.cuda_graphs and model.moe is None and load.microbatch_tokens <= MOST_ROWS
    return Keeping(fused, spec.update.checkpointing, spec.update.save_fp8, captured)
