"""Launches in turns over copies of an operand: how work is timed that meets each operand once, cold, as a decode step does.

Repeated over one operand it would time the second-level cache. Emptying that cache by writing to it does not help: what was
written is still to be written back, and the kernel that is timed pays for it.

Next: `products.py`, which chooses kernels by such times, and `../bench/timing.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

L2_BYTES = 50_000_000
"""Of an H100 (an H200 has 60 MB)."""
ROTATED_BYTES = 4 * L2_BYTES


def copies_for(nbytes: int) -> int:
    """How many operands of this size outgrow the L2 together, so that each is read from memory in its turn."""
    return max(1, math.ceil(ROTATED_BYTES / max(nbytes, 1)))


def captured(launches: Sequence[Callable[[], object]], least: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """(a CUDA graph of these launches one after the other, how many it holds): a whole number of rounds, at least so many."""
    for launch in launches:
        launch()  # compiles, allocates, proves what has to be proven: nothing of that can be captured
    torch.cuda.synchronize()
    graph, rounds = torch.cuda.CUDAGraph(), math.ceil(least / len(launches))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    return graph, rounds * len(launches)
