"""What exactness costs, end to end: the rollout with our dispatch against one that may take the fastest of everything.

The free side runs in a process of its own, since cuBLASLt reads its workspace setting once: there it has 32 MiB and may split K.
For each weight shape and number of rows the free side takes the fastest of the library and every form of the narrow kernel, and
for the head the faster of cuBLAS and ours. Attention, norms and sampling are ours on both sides: no decode attention over FP8
pages that we measured is faster, exact or not.

Goal C6: at most 3 % longer. Next: `rollout.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from lockstep.bench.goals import Goal
from lockstep.bench.rollout import Throughput, Work, ours
from lockstep.bench.shapes import preset
from lockstep.bench.timing import Ceilings
from lockstep.errors import UserError
from lockstep.kernels.reference import PackedWeight
from lockstep.kernels.table import WORKSPACE, Kernels

FREE_WORKSPACE = "32768"
"""KiB: torch's own choice on this architecture."""
JOB = "LOCKSTEP_PRICE_JOB"


def free_kernels() -> Kernels:
    """The fastest of each, whatever its bits."""
    from lockstep.kernels.hopper import HopperKernels
    from lockstep.kernels.products import Products, elapsed

    class FreeProducts(Products):
        def proven(self, *weight: object) -> bool:
            return True

        def agree(self, ours: Tensor, library: Tensor) -> bool:
            return True

    class FreeKernels(HopperKernels):
        def __init__(self) -> None:
            super().__init__()
            self.fp8_linear = FreeProducts().linear
            self._head: dict[int, bool] = {}

        def raw_logits(self, h_TK: Tensor, head_weight: PackedWeight) -> Tensor:
            """[T, V] FP32, by cuBLAS where that is faster."""
            weight, count = head_weight.plain, len(h_TK)
            assert weight is not None

            def library() -> Tensor:
                return torch.mm(h_TK, weight.t(), out_dtype=torch.float32)

            if count not in self._head:
                if torch.cuda.is_current_stream_capturing():
                    return super().raw_logits(h_TK, head_weight)
                exact = elapsed([lambda: HopperKernels.raw_logits(self, h_TK, head_weight)])
                self._head[count] = elapsed([library]) < exact
            return library() if self._head[count] else super().raw_logits(h_TK, head_weight)

    return FreeKernels()


def run_price(ceilings: Ceilings, model: str, work: Work, say: Callable[[str], None]) -> list[Throughput]:
    """(ours, free) under fp8+kv8. Raises UserError when the other process fails."""
    exact = next(iter(ours(ceilings, preset(model), [work], "fp8+kv8")))
    say(exact.line())
    job = {"model": model, "work": asdict(work), "ceilings": asdict(ceilings)}
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.bench.price"],
        env=os.environ | {JOB: json.dumps(job), WORKSPACE: FREE_WORKSPACE},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    marked = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not marked:
        last = " | ".join((done.stderr or done.stdout).strip().splitlines()[-4:])
        raise UserError("the free side did not finish", where="bench price", why=last)
    free = Throughput(**json.loads(marked[-1].removeprefix("RESULT ")))
    say(free.line())
    return [exact, free]


def goals(found: Sequence[Throughput]) -> list[Goal]:
    """C6."""
    exact, free = found
    return [
        Goal("C6", exact.seconds / free.seconds - 1.0, 0.03, "of the free time more", higher_is_better=False)
    ]


def main() -> None:
    """The free side."""
    job = json.loads(os.environ[JOB])
    work, ceilings = Work(**job["work"]), Ceilings(**job["ceilings"])
    kernels = free_kernels()
    found = next(iter(ours(ceilings, preset(job["model"]), [work], "fp8+kv8", kernels, "free")))
    print("RESULT " + json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
