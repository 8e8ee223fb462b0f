"""The endless order of prompts: which one is the n-th, for any n.

There is no iterator and no state to save. The example at an ordinal is a pure function of the seed and the ordinal, so the
data cursor of a checkpoint is the number of prompts that training has consumed, and nothing that was merely requested can
be skipped on resume. Every epoch has its own permutation. Next: `tokenize.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from lockstep.data.order import permutation
from lockstep.errors import DataError

T = TypeVar("T")


class PromptStream(Generic[T]):
    """`examples` (anything that can be indexed) over and over; with `shuffle`, each epoch in an order of its own."""

    def __init__(self, examples: Sequence[T], seed: int, shuffle: bool = True) -> None:
        if not len(examples):
            raise DataError("there are no examples to make a stream of")
        self.examples, self.seed, self.shuffle = examples, seed, shuffle

    @property
    def epoch_size(self) -> int:
        """Examples in one epoch."""
        return len(self.examples)

    def position(self, ordinal: int) -> tuple[int, int]:
        """The epoch of the ordinal, and which of the examples it is."""
        if ordinal < 0:
            raise IndexError(f"an ordinal counts from 0, got {ordinal}")
        epoch, place = divmod(ordinal, self.epoch_size)
        index = int(permutation(self.seed, epoch, self.epoch_size)[place]) if self.shuffle else place
        return epoch, index

    def at(self, ordinal: int) -> T:
        """The example at this ordinal (0, 1, ...)."""
        return self.examples[self.position(ordinal)[1]]

    def take(self, start: int, count: int) -> list[T]:
        """`count` examples from ordinal `start` on."""
        return [self.at(ordinal) for ordinal in range(start, start + count)]
