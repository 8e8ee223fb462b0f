"""Rewards onto samples, and what a step's completions and rewards look like under TRL's metric names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.data.example import batch_columns
from lockstep.errors import DataError
from lockstep.rewards.evaluate import RewardBatch, Rewards
from lockstep.rollout.types import Completion
from lockstep.trainer.ranks import Ranks
from lockstep.trainer.sample import Sample


def score(rewards: Rewards, samples: Sequence[Sample], ranks: Ranks) -> dict[str, float]:
    """Fills in rewards and their parts. Samples of a prompt are scored by one rank, in one call with others."""
    if not samples:
        raise DataError(
            "no completion of this step kept the sample contract", fix="see data/dropped_* in metrics.jsonl"
        )
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    division = ranks.divide(list(groups.values()))
    own = [sample for group in division.own for sample in group]
    batch = RewardBatch.joined(ranks.gather(_scored(rewards, own)))
    for i, sample in enumerate(
        sample for group in division.items for sample in group
    ):  # as the ranks' blocks are
        sample.reward = batch.total[i]
        sample.parts = {name: part[i] for name, part in batch.parts.items()}
    return batch.metrics


def _scored(rewards: Rewards, samples: Sequence[Sample]) -> RewardBatch:
    return rewards.score(
        [s.example.prompt for s in samples],
        [
            [{"role": "assistant", "content": s.text}] if isinstance(s.example.prompt, list) else s.text
            for s in samples
        ],
        [s.completion.token_ids for s in samples],
        batch_columns(s.example for s in samples),
    )


def add_counts(first: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    """The first draw's metrics with the counts of another added: means stay those of an unselected batch."""
    counted = ("data/dropped_", "rewards/timeouts", "rewards/crashes", "rewards/errors", "rewards/unscored")
    names = [n for n in first.keys() | more.keys() if n.startswith(counted)]
    return first | {n: first.get(n, 0.0) + more.get(n, 0.0) for n in names}


def completion_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Lengths under TRL's names, and how much of the distribution truncated sampling kept."""
    lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.float64)
    clipped = torch.tensor([c.finish_reason == "length" for c in completions])
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(clipped.double().mean()),
    }
    if not bool(clipped.all()):
        metrics["completions/mean_terminated_length"] = float(lengths[~clipped].mean())
    masks = [c.sampling_mask for c in completions if c.sampling_mask is not None]
    if masks:
        mass = torch.cat([m.mass_N[m.counts_N > 0] for m in masks]).double()
        metrics["rollout/kept_mass_mean"] = float(mass.mean())
        metrics["rollout/kept_mass_min"] = float(mass.min())
    trained = torch.tensor([c.trained_tokens for c in completions], dtype=torch.float64)
    if bool((trained < lengths).any()):
        metrics["completions/trained_ratio"] = float(trained.sum() / lengths.sum())
    return metrics


def reward_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean reward, its spread within groups, and the share of groups that teach nothing."""
    groups: dict[int, list[float]] = {}
    for sample in samples:
        assert sample.reward is not None
        groups.setdefault(sample.group, []).append(sample.reward)
    if not groups:
        return {}
    spreads = [float(torch.tensor(r, dtype=torch.float64).std()) for r in groups.values() if len(r) > 1]
    values = [r for rewards in groups.values() for r in rewards]
    return {
        "reward": sum(values) / len(values),
        "reward_std": sum(spreads) / max(len(spreads), 1),
        "frac_reward_zero_std": sum(s == 0 for s in spreads) / max(len(spreads), 1),
    }
