"""Times of device work, and the ceilings they are held against.

Two clocks. `events_ms` puts device events around each call and empties the L2 before it: for work that takes long against a
launch. `graph_ms` captures many calls in one CUDA graph: for decode, where a launch costs more than the work. It takes one call
for each copy of the operands and goes round (`../kernels/in_turns.py`).

The ceilings are what this card reaches in the same process: a large device copy, bytes read plus written, and a large BF16
product of random values. FP8 is given twice the BF16 rate, as the tensor cores have it. The least time of some work is the
larger of operations over rate and bytes over bandwidth, each input read once and each output written once.

Next: `gemm.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lockstep.kernels.in_turns import captured

Call = Callable[[], object]
LAUNCHES = 20
"""Calls in a graph, at least."""


@dataclass(frozen=True)
class Ceilings:
    """What the card reached: GB/s of a copy (read plus written), TFLOP/s of a BF16 product."""

    copy_gbps: float
    bf16_tflops: float

    @property
    def fp8_tflops(self) -> float:
        """Twice the BF16 rate."""
        return 2 * self.bf16_tflops

    def floor_ms(self, flops: float, nbytes: float, *, fp8: bool) -> float:
        """The least time the work can take."""
        rate = self.fp8_tflops if fp8 else self.bf16_tflops
        return max(flops / rate / 1e9, nbytes / self.copy_gbps / 1e6)

    def record(self) -> dict[str, float]:
        """For a result file."""
        return {
            "copy_gbps": round(self.copy_gbps, 1),
            "bf16_tflops": round(self.bf16_tflops, 1),
            "fp8_tflops": round(self.fp8_tflops, 1),
        }

    def line(self) -> str:
        """For a terminal."""
        return (
            f"ceilings: copy {self.copy_gbps:.0f} GB/s read + written, BF16 product {self.bf16_tflops:.0f} TFLOP/s, "
            f"FP8 taken as {self.fp8_tflops:.0f}"
        )


def events_ms(call: Call, *, rep_ms: int = 60) -> float:
    """Median milliseconds of one call, L2 emptied before each."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=15, rep=rep_ms, return_mode="median"))


def graph_ms(calls: Sequence[Call], *, rep_ms: int = 50) -> float:
    """Median milliseconds of one call, taken in turns within one CUDA graph; a whole number of rounds, at least LAUNCHES."""
    from triton.testing import do_bench

    graph, count = captured(calls, LAUNCHES)
    return float(do_bench(graph.replay, warmup=10, rep=rep_ms, return_mode="median")) / count


def measure_ceilings() -> Ceilings:
    """Takes half a second."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    copy_ms = events_ms(lambda: target.copy_(source))
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_ms = events_ms(lambda: a @ b.t())
    return Ceilings(2 * source.numel() / copy_ms / 1e6, 2 * size**3 / product_ms / 1e9)
