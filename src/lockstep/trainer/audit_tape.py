"""A tape of every row-wise operation of a forward pass, in order: how an audit names the one that broke the row law.

Next: `audit_flow.py`, which plays rows in company against the same rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lockstep.kernels.table import Kernels
from lockstep.numerics.quantize import Quantized

OPERATIONS = (
    *("quantize_rows", "linear", "rms_norm", "rope", "swiglu", "quantize_kv", "attention"),
    *("router_scores", "top_experts", "combine"),
)
FUSED_OPERATIONS = ("add_norm", "linear", "swiglu_rows")
"""Where kernels fuse, these and the attention context's `attend_rows`."""


class Tape:
    """Notes the operations of a backend while the block runs. `values`: (name, value by row).

    Between the choice of experts and their combination rows are sorted by expert, so that operations in company and alone
    can't be compared in place; what the experts gave is noted by row, as one operation, when it is combined.
    """

    def __init__(self, kernels: Kernels, context: Any) -> None:
        self.kernels, self.context = kernels, context
        self.values: list[tuple[str, Tensor]] = []
        self.operations = FUSED_OPERATIONS if kernels.fused else OPERATIONS
        self._count: dict[str, int] = {}
        self._sorted_rows = False

    def __enter__(self) -> Tape:
        for name in self.operations:
            setattr(self.kernels, name, self._noted(name, getattr(self.kernels, name)))
        if self.kernels.fused:
            self.context.attend_rows = self._noted("attention", self.context.attend_rows)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.operations:
            delattr(self.kernels, name)

    def _noted(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        part = 1 if name == "add_norm" else 0  # of (residual stream, its norm)

        def run(*args: Any) -> Any:
            if name == "combine":
                self._sorted_rows = False
                self.note("experts", args[0])
            result = operation(*args)
            if not self._sorted_rows:
                self.note(name, result[part] if isinstance(result, tuple) else result)
            self._sorted_rows = self._sorted_rows or name == "top_experts"
            return result

        return run

    def note(self, name: str, value: Quantized | Tensor) -> None:
        """Appends the value of an operation."""
        value = value.dequantize() if isinstance(value, Quantized) else value
        self._count[name] = self._count.get(name, 0) + 1
        self.values.append((f"{name} (call {self._count[name]} of the forward pass)", value.float()))
