"""Which kernels a piece of work spends its time in."""

from __future__ import annotations

from collections.abc import Callable

import torch

LINES = 30


def profile(title: str, work: Callable[[], object]) -> list[str]:
    """The longest kernels of one run, by device time: milliseconds, share, launches, name. The work should be warm."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as recorded:
        work()
        torch.cuda.synchronize()
    kernels: dict[str, tuple[float, int]] = {}
    for event in recorded.events() or ():
        if event.device_type.name == "CUDA":
            ms, count = kernels.get(event.name, (0.0, 0))
            kernels[event.name] = (ms + event.device_time_total / 1e3, count + 1)
    total = sum(ms for ms, _ in kernels.values()) or 1.0
    lines = [f"{title}: {total:.3f} ms of kernels"]
    for name, (ms, count) in sorted(kernels.items(), key=lambda item: -item[1][0])[:LINES]:
        lines.append(f"{ms:9.3f} ms {100 * ms / total:5.1f} % {count:5}  {name[:90]}")
    return lines
