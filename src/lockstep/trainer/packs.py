"""Which samples share a micro-batch, and which rank computes it. By the row law neither changes a sample's numbers.

Next: `microbatch.py` for the rows, `ranks.py` for what is divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lockstep.data.packing import GroupLengths, bin_tokens, fill_ratio, pack
from lockstep.trainer.microbatch import MicroBatch
from lockstep.trainer.ranks import Division
from lockstep.trainer.sample import Sample
from lockstep.trainer.setup import Parts


class Packs:
    """Packs samples as `update` says."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.spec = parts, parts.spec.update

    def pack(self, batch: list[Sample], metrics: dict[str, float]) -> list[list[int]]:
        """Micro-batches of sample numbers under the token budget. Samples of a group that have one prompt stand together;
        a conversation's later segments have prompts of their own."""
        return [members for members, _ in self._bins(batch, metrics)]

    def divided(self, batch: list[Sample], metrics: dict[str, float]) -> Division[list[Sample]]:
        """The samples of each micro-batch of a mini-batch, shared among ranks by their tokens."""
        bins = self._bins(batch, metrics)
        packs = [[batch[i] for i in members] for members, _ in bins]
        return self.parts.ranks.divide(packs, [tokens for _, tokens in bins])

    def _bins(self, batch: list[Sample], metrics: dict[str, float]) -> list[tuple[list[int], int]]:
        """Sample numbers and tokens of each micro-batch."""
        by_scales: dict[int, list[int]] = {}
        for i, sample in enumerate(batch):
            by_scales.setdefault(sample.completion.scale_version, []).append(i)
        if len(by_scales) > 1:  # rows of a forward pass share their KV scales
            return [
                ([members[i] for i in chosen], tokens)
                for members in by_scales.values()
                for chosen, tokens in self._bins([batch[i] for i in members], metrics)
            ]
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for i, sample in enumerate(batch):
            groups.setdefault((sample.group, sample.completion.prompt_ids), []).append(i)
        order = [i for members in groups.values() for i in members]
        lengths = [
            GroupLengths(len(prompt), tuple(len(batch[i].completion.token_ids) for i in members))
            for (_, prompt), members in groups.items()
        ]
        budget, share = self.spec.max_tokens_per_microbatch, self.spec.share_prompts
        bins = pack(lengths, budget, share)
        metrics["data/microbatches"] = metrics.get("data/microbatches", 0.0) + len(bins)
        metrics["data/packing_fill"] = fill_ratio(bins, lengths, budget, share)
        found = [[order[i] for i in members] for members in bins]
        return list(zip(found, bin_tokens(bins, lengths, share), strict=True))

    def microbatches(self, packs: Iterable[list[Sample]]) -> Iterator[tuple[list[Sample], MicroBatch]]:
        """Micro-batches of these samples, one at a time, with their samples."""
        for samples in packs:
            yield samples, self.microbatch(samples)

    def microbatch(self, samples: list[Sample]) -> MicroBatch:
        """Packed rows of these samples."""
        return self.parts.microbatch([s.completion for s in samples], share_prompts=self.spec.share_prompts)
