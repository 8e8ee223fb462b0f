"""Which samples go into which micro-batch: whole samples, under a token budget, the same way every time.

Plain integers in and out. The row law makes this free of consequences for the mathematics: a sample's numbers don't depend
on what it is packed with. It is first-fit on groups in order of decreasing size. Samples of one prompt stay together where
they fit, since with a shared prompt a bin pays for it only once. Next: `sft.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.errors import CapacityError, DataError


@dataclass(frozen=True)
class GroupLengths:
    """Tokens of one prompt, and of each of its responses."""

    prompt: int
    responses: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.prompt < 0 or any(length < 0 for length in self.responses):
            raise DataError(f"a length is negative: prompt {self.prompt}, responses {list(self.responses)}")


@dataclass
class _Bin:
    room: int
    samples: list[int] = field(default_factory=list)


def pack(groups: Sequence[GroupLengths], max_tokens: int, share_prompt: bool) -> list[list[int]]:
    """Bins of sample numbers, each bin at most `max_tokens`; every sample is in exactly one bin, ascending within it.

    Samples are numbered through: those of the first group, then those of the second, and so on. A sample counts prompt and
    response; with `share_prompt`, the samples of a group in one bin count the prompt once.
    CapacityError for a sample that is larger than the budget on its own.
    """
    _check(groups, max_tokens)
    bins: list[_Bin] = []
    first = _first_samples(groups)
    sizes = [_cost(group, group.responses, share_prompt) for group in groups]
    for g in sorted(range(len(groups)), key=lambda g: (-sizes[g], g)):
        samples = list(range(first[g], first[g] + len(groups[g].responses)))
        if not samples:
            continue
        if sizes[g] <= max_tokens:
            _place(bins, samples, sizes[g], max_tokens)
        else:
            _split(bins, groups[g], samples, max_tokens, share_prompt)
    return [sorted(b.samples) for b in bins]


def fill_ratio(
    bins: Sequence[Sequence[int]], groups: Sequence[GroupLengths], max_tokens: int, share_prompt: bool
) -> float:
    """Tokens in the bins over their budget; 1.0 without bins."""
    return sum(bin_tokens(bins, groups, share_prompt)) / (max_tokens * len(bins)) if bins else 1.0


def bin_tokens(
    bins: Sequence[Sequence[int]], groups: Sequence[GroupLengths], share_prompt: bool
) -> list[int]:
    """Tokens of each bin."""
    first = _first_samples(groups)
    owner = {s: g for g, start in enumerate(first) for s in range(start, start + len(groups[g].responses))}
    totals = []
    for samples in bins:
        total, seen = 0, set()
        for sample in samples:
            g = owner[sample]
            total += groups[g].responses[sample - first[g]]
            total += 0 if share_prompt and g in seen else groups[g].prompt
            seen.add(g)
        totals.append(total)
    return totals


def _first_samples(groups: Sequence[GroupLengths]) -> list[int]:
    first, number = [], 0
    for group in groups:
        first.append(number)
        number += len(group.responses)
    return first


def _cost(group: GroupLengths, responses: Sequence[int], share_prompt: bool) -> int:
    return sum(responses) + group.prompt * (1 if share_prompt else len(responses))


def _check(groups: Sequence[GroupLengths], max_tokens: int) -> None:
    for g, group in enumerate(groups):
        for i, length in enumerate(group.responses):
            if group.prompt + length > max_tokens:
                raise CapacityError(
                    f"sample {i} of group {g} has {group.prompt} + {length} = {group.prompt + length} tokens",
                    why=f"the budget of a micro-batch is {max_tokens}",
                    fix="raise update.max_tokens_per_microbatch, or lower the limits on prompt and completion",
                )


def _place(bins: list[_Bin], samples: list[int], cost: int, max_tokens: int) -> None:
    """Into the first bin with room, or a new one."""
    target = next((b for b in bins if b.room >= cost), None)
    if target is None:
        target = _Bin(max_tokens)
        bins.append(target)
    target.room -= cost
    target.samples += samples


def _split(
    bins: list[_Bin], group: GroupLengths, samples: list[int], max_tokens: int, share_prompt: bool
) -> None:
    """A group too large for one bin: first-fit, longest response first, into bins of its own that others may fill up."""
    own: list[_Bin] = []
    shared = group.prompt if share_prompt else 0
    each = 0 if share_prompt else group.prompt
    for i in sorted(range(len(samples)), key=lambda i: (-group.responses[i], i)):
        cost = group.responses[i] + each
        target = next((b for b in own if b.room >= cost), None)
        if target is None:
            target = _Bin(max_tokens - shared)
            own.append(target)
        target.room -= cost
        target.samples.append(samples[i])
    bins += own
