"""Publication to the embedded engine after an optimizer step, the way the training loop does it, on random weights.

    masters move             untimed
    publish                  working copies remade in place, KV scales handed over, the engine's echo, the receipt

The clock is the wall's, from a device that is idle to one that is idle again. Bytes are the least: each master read once (4),
each code or BF16 value read (to say what changed) and written once (1 + 1, or 2 + 2). The share is their rate over that of a
large copy on this card in the same call. A publication is refused here, as in a run, when nothing changed; and afterwards the
digest of the last receipt is taken again from the bytes in memory, so one that told of other codes would show.

Next: `../kernels/triton/refresh.py` for the pass, `../sync/publish.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.bench.goals import Goal
from lockstep.bench.profile import profile
from lockstep.bench.results import rounded
from lockstep.bench.rollout import flat_scales
from lockstep.bench.sides import random_masters
from lockstep.bench.timing import Ceilings
from lockstep.errors import ContractError
from lockstep.kernels.table import Kernels
from lockstep.models.decoder import Decoder
from lockstep.models.spec import ModelSpec
from lockstep.nn.kv_scales import KVScales
from lockstep.nn.working import Known
from lockstep.numerics.flow import Flow
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.spec import RolloutSpec
from lockstep.sync.publish import Publisher
from lockstep.sync.receipt import Receipt

GOAL_MODEL = "qwen3-8b"
GOAL_MS, GOAL_SHARE = 50.0, 0.6
STEP = 1e-5
"""How far a master moves, at most, in a step: of AdamW's, at the learning rates of reinforcement learning, it is generous."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Published:
    """Milliseconds of every measured publication; of refresh and digest alone, in one more; and the kernels of one."""

    model: str
    times: tuple[float, ...]
    refresh_ms: float
    digest_ms: float
    kernels: tuple[str, ...]
    nbytes: int
    copy_gbps: float
    receipt: Receipt

    @property
    def ms(self) -> float:
        """Of a publication: the median."""
        return statistics.median(self.times)

    @property
    def gbps(self) -> float:
        """Least traffic over time."""
        return self.nbytes / self.ms / 1e6

    @property
    def share(self) -> float:
        """Of copy bandwidth."""
        return self.gbps / self.copy_gbps

    def lines(self) -> list[str]:
        """For a terminal."""
        rest = self.ms - self.refresh_ms - self.digest_ms
        return [
            self.receipt.line(),
            f"{self.model}: {self.ms:.2f} ms (from {min(self.times):.2f} to {max(self.times):.2f}), "
            f"{self.nbytes / 1e9:.2f} GB, {self.gbps:.0f} GB/s, {100 * self.share:.0f} % of copy",
            f"of these: refresh {self.refresh_ms:.2f}, digest {self.digest_ms:.2f}, receipt, scales and engine {rest:.2f}",
            *self.kernels,
        ]

    def record(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "model": self.model, "ms": rounded(self.ms), "times_ms": [rounded(t) for t in self.times],
            "bytes": self.nbytes, "gbps": rounded(self.gbps), "share_of_copy": rounded(self.share, 3),
            "refresh_ms": rounded(self.refresh_ms), "digest_ms": rounded(self.digest_ms),
            "changed_pct": rounded(self.receipt.changed_pct), "kernels": list(self.kernels),
        }  # fmt: skip


def run_publish(
    spec: ModelSpec, model: str, flow: Flow, kernels: Kernels, ceilings: Ceilings, *, repeats: int, say: Say
) -> Published:
    """Publishes a first version, one to warm up and `repeats` measured ones.

    Raises ContractError when the digest in the last receipt isn't that of the bytes in memory.
    """
    decoder = random_masters(spec, flow, kernels)
    publisher = Publisher(
        decoder, EmbeddedEngine(decoder, RolloutSpec(prefix_cache=False), cache_tokens=1024)
    )
    times = []
    for version in range(2, repeats + 4):
        move(decoder, seed=version)
        ms, receipt = timed(lambda version=version: publish(publisher, version))  # type: ignore[misc]
        if version > 3:
            times.append(ms)
        say(f"v{version}: {ms:.2f} ms{'' if version > 3 else ' (not counted)'}")
    told = receipt.digest
    for _, module in decoder.working():
        module.known = Known()
    if decoder.digest() != told:
        raise ContractError("the receipt's digest is not that of the codes in memory")
    version += 1
    refresh_ms, _ = timed(lambda: decoder.refresh(version))
    digest_ms, _ = timed(decoder.digest)
    lines = tuple(profile("kernels", lambda: publish(publisher, version + 1, must_change=False)))
    return Published(
        model, tuple(times), refresh_ms, digest_ms, lines, least_bytes(decoder), ceilings.copy_gbps, receipt
    )


def publish(publisher: Publisher, version: int, *, must_change: bool = True) -> Receipt:
    """As `trainer/loop.py` does it, with new KV scales where the flow has any."""
    decoder = publisher.trainer

    def scales() -> KVScales:
        flat = flat_scales(decoder).to(decoder.device)
        return KVScales(flat.k, flat.v, version)

    return publisher.publish(version, scales=scales if decoder.flow.kv_fp8 else None, must_change=must_change)


@torch.no_grad()
def move(decoder: Decoder, *, seed: int) -> None:
    """What an optimizer does to the masters."""
    generator = torch.Generator(decoder.device).manual_seed(seed)
    for parameter in decoder.parameters():
        for rows in parameter.split(1 << 14):
            rows.add_(
                torch.rand(rows.shape, generator=generator, device=rows.device).sub_(0.5), alpha=2 * STEP
            )


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(milliseconds by the wall, from an idle device to an idle device; what the work gave)."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    found = work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start), found


def least_bytes(decoder: Decoder) -> int:
    """Traffic of a refresh that reads and writes everything once."""
    held = [h for _, module in decoder.working() for h in module.held()]
    scales = sum(h.scale.numel() for h in held if h.scale is not None)
    return sum(h.value.numel() * (4 + 2 * h.value.element_size()) for h in held) + 4 * scales


def goals(found: Sequence[Published]) -> list[Goal]:
    """C9: an 8B model within 50 ms, at 60 % of copy bandwidth at least."""
    reached = []
    for one in found:
        if one.model == GOAL_MODEL:
            reached.append(Goal("C9a", rounded(one.ms), GOAL_MS, "ms to publish 8B", higher_is_better=False))
            reached.append(Goal("C9b", rounded(one.share, 3), GOAL_SHARE, "of copy bandwidth"))
    return reached
