"""Which samples share a micro-batch, and which rank computes it. By the row law neither changes a sample's numbers.

Next: `microbatch.py` for the rows, `ranks.py` for what is divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lockstep.data.packing import GroupLengths, fill_ratio, pack
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
        by_scales: dict[int, list[int]] = {}
        for i, sample in enumerate(batch):
            by_scales.setdefault(sample.completion.scale_version, []).append(i)
        if len(by_scales) > 1:  # rows of a forward pass share their KV scales
            parts = [
                (members, self.pack([batch[i] for i in members], metrics)) for members in by_scales.values()
            ]
            return [[members[i] for i in chosen] for members, bins in parts for chosen in bins]
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
        return [[order[i] for i in members] for members in bins]

    def divided(self, batch: list[Sample], metrics: dict[str, float]) -> Division[list[Sample]]:
        """The samples of each micro-batch of a mini-batch, shared among ranks by their tokens."""
        packs = [[batch[i] for i in members] for members in self.pack(batch, metrics)]
        prompts = [{s.completion.prompt_ids for s in samples} for samples in packs]
        rows = [
            sum(map(len, own)) + sum(len(s.completion.token_ids) for s in samples)
            for own, samples in zip(prompts, packs, strict=True)
        ]
        return self.parts.ranks.divide(packs, rows)

    def microbatches(self, packs: Iterable[list[Sample]]) -> Iterator[tuple[list[Sample], MicroBatch]]:
        """Micro-batches of these samples, one at a time, with their samples."""
        for samples in packs:
            yield samples, self.microbatch(samples)

    def microbatch(self, samples: list[Sample]) -> MicroBatch:
        """Packed rows of these samples."""
        return self.parts.microbatch([s.completion for s in samples], share_prompts=self.spec.share_prompts)
