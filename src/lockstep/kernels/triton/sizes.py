"""Sizes on the host. Triton's own helpers work inside kernels too, and take 3 us a call for it: a seventh of what a launch costs.

Next: `quantize.py`, a launch that uses them.
"""

from __future__ import annotations

from functools import lru_cache

import torch


def cdiv(count: int, size: int) -> int:
    """How many pieces of this size hold `count`."""
    return -(-count // size)


def power_of_2(count: int) -> int:
    """The least power of two that is not smaller than a positive `count`."""
    return 1 << (count - 1).bit_length()


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
