"""Which layers to keep in BF16 so that the mismatch falls below a target: greedily by what each layer does alone, and measured.

Layers are added in the order of their effect until the flow that keeps them meets the target; how many that takes is found
by bisection, and every answer is a measurement of that very flow on the probe's tokens. Keeping linears in BF16 does nothing
about FP8 keys and values: where those alone exceed the target, the suggestion turns them off first, and says so.

Next: `../numerics/flow.py`, whose `keep_bf16_layers` takes the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from lockstep.numerics.flow import FlowSpec, build_flows
from lockstep.trainer.probe import Probe, Say


@dataclass(frozen=True)
class Suggestion:
    """layers: those to keep in BF16 besides what the configuration keeps, ascending. before, after: mean |d| as configured
    and with the suggestion, both measured. config: the `flow` section to paste. reached: `after` is within the target."""

    target: float
    layers: tuple[int, ...]
    before: float
    after: float
    reached: bool
    kv_to_bf16: bool
    config: str
    measured: int


class _Trials:
    """Measures flows of a run that keep more layers in BF16."""

    def __init__(self, probe: Probe, spec: FlowSpec, order: Sequence[int]) -> None:
        self.probe, self.spec, self.order = probe, spec, order
        self.found: dict[FlowSpec, float] = {}

    def keeping(self, count: int, **changes: Any) -> FlowSpec:
        """The section with the first `count` layers of the order kept."""
        kept = tuple(sorted({*self.spec.keep_bf16_layers, *self.order[:count]}))
        return replace(self.spec, keep_bf16_layers=kept, **changes)

    def mean(self, spec: FlowSpec) -> float:
        """Mean |d| of the probe's tokens between the two flows of a section."""
        if spec not in self.found:
            flows = build_flows(spec, self.probe.parts.model_spec.num_layers)
            d_N = self.probe.score(flows.trainer) - self.probe.score(flows.rollout)
            self.found[spec] = float(d_N.abs().mean())
        return self.found[spec]

    def fewest(self, target: float, **changes: Any) -> int | None:
        """The smallest number of layers that meets the target, None when all together don't."""
        if self.mean(self.keeping(0, **changes)) <= target:
            return 0
        low, high = 0, len(self.order)
        if self.mean(self.keeping(high, **changes)) > target:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if self.mean(self.keeping(middle, **changes)) <= target:
                high = middle
            else:
                low = middle
        return high


def suggest(probe: Probe, spec: FlowSpec, order: Sequence[int], target: float, say: Say) -> Suggestion:
    """The fewest layers of `order` (largest effect first) that bring mean |d| within `target`."""
    trials = _Trials(probe, spec, order)
    before = trials.mean(spec)
    changes: dict[str, Any] = {}
    count = trials.fewest(target)
    if count is None and spec.kv == "fp8":
        changes = {"kv": "bf16", "attention": "bf16"}
        count = trials.fewest(target, **changes)
    reached = count is not None
    chosen = trials.keeping(len(order) if count is None else count, **changes)
    after = trials.mean(chosen)
    layers = tuple(sorted(set(chosen.keep_bf16_layers) - set(spec.keep_bf16_layers)))
    say(f"keeping {len(layers)} layers in BF16: mean |dlogp| {before:.3g} -> {after:.3g} (target {target:g})")
    return Suggestion(
        target, layers, before, after, reached, bool(changes), flow_yaml(chosen), len(trials.found)
    )


def flow_yaml(spec: FlowSpec) -> str:
    """The `flow` section as YAML: name, KV cache, and whatever is not the default."""
    lines = ["flow:"]
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name in ("name", "kv") or value != field.default:
            lines.append(f"  {field.name}: {list(value) if isinstance(value, tuple) else value}")
    return "\n".join(lines)
