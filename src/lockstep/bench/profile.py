"""Which kernels a piece of work spends its time in.

A kernel may begin while the one before it ends, and then waits for it (programmatic dependent launch). So what counts here is the
time that a kernel adds: from where all before it had ended, or from its own start if that is later. These add up, with the
gaps, to the time from the first start to the last end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

LINES = 30
GAP = "(gaps: nothing ran)"


def profile(title: str, work: Callable[[], object]) -> list[str]:
    """What kernels add to one run, most first: milliseconds, share, launches, name. The work should be warm."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as recorded:
        work()
        torch.cuda.synchronize()
    added = times_added(
        (event.name, event.time_range.start / 1e3, event.time_range.end / 1e3)
        for event in recorded.events() or ()
        if event.device_type.name == "CUDA"
    )
    total = sum(ms for ms, _ in added.values()) or 1.0
    lines = [f"{title}: {total:.3f} ms from the first kernel's start to the last one's end"]
    for name, (ms, count) in sorted(added.items(), key=lambda item: -item[1][0])[:LINES]:
        lines.append(f"{ms:9.3f} ms {100 * ms / total:5.1f} % {count:5}  {name[:90]}")
    return lines


def times_added(kernels: Iterable[tuple[str, float, float]]) -> dict[str, tuple[float, int]]:
    """(time added, launches) by name, of kernels with start and end; `GAP` has the time in which none ran."""
    found: dict[str, tuple[float, int]] = {}

    def add(name: str, ms: float) -> None:
        total, count = found.get(name, (0.0, 0))
        found[name] = (total + ms, count + 1)

    ordered = sorted(kernels, key=lambda kernel: kernel[1:])
    reached = ordered[0][1] if ordered else 0.0
    for name, start, end in ordered:
        if start > reached:
            add(GAP, start - reached)
        add(name, max(end - max(start, reached), 0.0))
        reached = max(reached, end)
    return found
