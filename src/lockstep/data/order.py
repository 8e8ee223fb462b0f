"""Orders and random words that are pure functions of a seed, and the same in every version of numpy.

numpy promises that a bit generator's raw output never changes; it promises no such thing for `permutation` or `integers`.
So everything here is made of Philox's raw words: a permutation is the stable order of as many words. The seed and the
stream's number (an epoch, say) are the two halves of the key. Next: `stream.py`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1

Words = npt.NDArray[np.uint64]


def words(seed: int, stream: int, count: int) -> Words:
    """`count` random 64-bit words of the stream, uint64 [count]."""
    key = np.array([seed & _MASK, stream & _MASK], dtype=np.uint64)
    return np.asarray(np.random.Philox(key=key).random_raw(count), dtype=np.uint64)


@lru_cache(maxsize=4)
def permutation(seed: int, stream: int, size: int) -> npt.NDArray[np.int64]:
    """A permutation of 0..size-1, int64 [size], read-only since it is remembered."""
    order = np.argsort(words(seed, stream, size), kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order
