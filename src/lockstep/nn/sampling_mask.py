"""The sampling mask: which ids a truncated distribution kept, token by token, and sums over exactly those.

Top-k, min-p and top-p draw from q(v) = p(v) / sum of p over the kept ids, not from the softmax p. Scoring the draw under p
puts every importance ratio off by the kept mass (field failure 37). So the sampler records what it kept, and both sides
normalise over the recorded ids; the trainer never decides anew which ids those are.

Row law: a token's kept logits are gathered side by side, ids ascending, and padded to a power of two. `tree_sum` halves; halving
a longer padding adds zeros first and leaves the shorter tree, so how far a neighbour pads changes no bit.

Shapes: N tokens, M ids kept by all of them together, C rows at hand, W padded width, V vocabulary. Next: `head.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.rowwise import tree_sum

Kept = tuple[Tensor, float]
"""What one token's draw recorded: the kept ids, ascending int32 [k], and their mass under the full distribution."""


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The kept ids of N tokens.

    ids_M: int32, those of the first token, then those of the second; ascending within a token. offsets: int64 [N + 1], token i
    has `ids_M[offsets[i] : offsets[i + 1]]`; a token with none is normalised over the whole vocabulary. mass_N: FP32, the mass
    that the kept ids had under the full tempered distribution; 1 for a token with none.
    """

    ids_M: Tensor
    offsets: Tensor
    mass_N: Tensor

    @staticmethod
    def of(tokens: Sequence[Kept | None]) -> SamplingMask:
        """The mask of tokens in a row; None is a token that recorded nothing."""
        empty = torch.empty(0, dtype=torch.int32)
        ids = [empty if kept is None else kept[0] for kept in tokens]
        counts = torch.tensor([0, *map(len, ids)])
        mass = torch.tensor([1.0 if kept is None else kept[1] for kept in tokens], dtype=torch.float32)
        return SamplingMask(torch.cat([empty, *ids]), counts.cumsum(0), mass)

    @staticmethod
    def join(parts: Sequence[SamplingMask | None], lengths: Sequence[int]) -> SamplingMask | None:
        """Masks side by side; `lengths` are their tokens. None parts recorded nothing, and so does a None result."""
        if all(part is None for part in parts):
            return None
        masks = [SamplingMask.of([None] * n) if p is None else p for p, n in zip(parts, lengths, strict=True)]
        counts = torch.cat([mask.counts_N for mask in masks])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        return SamplingMask(
            torch.cat([m.ids_M for m in masks]), offsets, torch.cat([m.mass_N for m in masks])
        )

    def __len__(self) -> int:
        return len(self.mass_N)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingMask):
            return NotImplemented
        mine, theirs = (self.ids_M, self.offsets, self.mass_N), (other.ids_M, other.offsets, other.mass_N)
        return all(torch.equal(a, b) for a, b in zip(mine, theirs))

    def __hash__(self) -> int:
        return hash((len(self), len(self.ids_M)))

    @property
    def counts_N(self) -> Tensor:
        """Ids that each token kept; 0 where nothing was recorded."""
        return self.offsets.diff()

    def select(self, chosen_N: Tensor) -> SamplingMask:
        """The mask of the tokens that `chosen_N` (bool) names."""
        counts = self.counts_N
        ids = self.ids_M[chosen_N.repeat_interleave(counts)]
        offsets = torch.cat([counts.new_zeros(1), counts[chosen_N].cumsum(0)])
        return SamplingMask(ids, offsets, self.mass_N[chosen_N])

    def to(self, device: torch.device) -> SamplingMask:
        """The same on another device."""
        return SamplingMask(self.ids_M.to(device), self.offsets.to(device), self.mass_N.to(device))

    def rows(self, start: int, end: int) -> KeptRows | None:
        """Tokens `start` to `end`, padded; None when none of them recorded anything."""
        offsets = self.offsets[start : end + 1]
        counts = offsets.diff()
        widest = int(counts.max()) if len(counts) else 0
        if widest == 0:
            return None
        width = torch.arange(1 << (widest - 1).bit_length(), device=counts.device)
        inside = width < counts[:, None]
        place = (offsets[:-1, None] + width).clamp_(max=len(self.ids_M) - 1)
        return KeptRows(self.ids_M[place].long().masked_fill_(~inside, 0), inside)


@dataclass(frozen=True)
class KeptRows:
    """Some tokens' kept ids, padded to a power of two. ids_CW: int64, 0 where padded. inside_CW: bool, False where padded."""

    ids_CW: Tensor
    inside_CW: Tensor

    @staticmethod
    def first(ids_CW: Tensor, count_C: Tensor) -> KeptRows:
        """The first so many ids of each row."""
        width = torch.arange(ids_CW.shape[1], device=ids_CW.device)
        inside = width < count_C[:, None]
        return KeptRows(ids_CW.long().masked_fill_(~inside, 0), inside)

    @property
    def recorded_C(self) -> Tensor:
        """Whether a token recorded anything; the others are normalised over the vocabulary."""
        return self.inside_CW[:, 0]

    def log_normalizer(self, logits_CV: Tensor, full_C: Tensor) -> Tensor:
        """log sum exp [C] FP32 over each token's kept ids; `full_C`, over the vocabulary, for tokens without any."""
        return self.normalizer_of(self.gathered(logits_CV), full_C)

    def normalizer_of(self, logits_CW: Tensor, full_C: Tensor) -> Tensor:
        """The same of the kept ids' logits, [C, W] FP32, -inf where padded."""
        peak = logits_CW.amax(-1)
        kept = peak + tree_sum((logits_CW - peak[:, None]).exp_()).log()
        return torch.where(self.recorded_C, kept, full_C)

    def entropy(self, logits_CV: Tensor, log_normalizer_C: Tensor) -> Tensor:
        """Entropy [C] FP32 of the renormalised distributions, in nats; meaningless for tokens without kept ids."""
        log_q = self.gathered(logits_CV) - log_normalizer_C[:, None]
        return -tree_sum((log_q.exp() * log_q).masked_fill_(~self.inside_CW, 0.0))

    def outside(self, vocabulary: int) -> Tensor:
        """[C, V] bool: ids with probability 0. Nothing is outside where nothing was recorded."""
        inside = torch.zeros(len(self.ids_CW), vocabulary, dtype=torch.bool, device=self.ids_CW.device)
        row, column = self.inside_CW.nonzero(as_tuple=True)
        inside[row, self.ids_CW[row, column]] = True
        return ~inside & self.recorded_C[:, None]

    def gathered(self, logits_CV: Tensor, temperature_C: Tensor | None = None) -> Tensor:
        """Each token's kept logits [C, W], -inf where padded; over the temperature if that is given."""
        logits_CW = logits_CV.gather(1, self.ids_CW)
        logits_CW = logits_CW if temperature_C is None else logits_CW.div_(temperature_C[:, None])
        return logits_CW.masked_fill_(~self.inside_CW, -torch.inf)
