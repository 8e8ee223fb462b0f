"""`lockstep bench gemm`: how fast each product is, and whether the exact ones are exact.

Bits come first. Triton multiplies 2,048 rows at once; then every FP8 product multiplies the first and the last M of them, for
every M of a decode batch and around every tile size, and must give those rows the same bits. The BF16 product that
obeys the row law is held against itself.

Then each line is one weight shape at one number of rows: milliseconds of every choice, the fastest FP8 product among those whose
bits agreed at every M (`exact`), and its ratio to BF16 cuBLAS in the same call.

Next: `products.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from lockstep.bench.products import (
    CHOICES,
    EXACT,
    FP8,
    Rows,
    Weight,
    forms,
    make_rows,
    make_weight,
    moved_bytes,
    product,
    random_rows,
)
from lockstep.bench.results import rounded
from lockstep.bench.shapes import CHECKED_ROWS, MODELS, ROWS, LinearShape, linears
from lockstep.bench.timing import Ceilings, events_ms, graph_ms
from lockstep.kernels.in_turns import copies_for

GRAPH_ROWS = 256
"""Up to this many rows a product is timed in a graph over rotated weights."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Bits:
    """What equality showed for one weight shape. changed: numbers of rows at which a choice gave a row other bits than Triton's
    product of 2,048 rows (for BF16: than its own). elements: values compared."""

    changed: dict[str, list[int]]
    elements: int

    def exact(self, name: str) -> bool:
        """Whether this FP8 product may stand for Triton's at every number of rows."""
        return name in FP8 and not self.changed.get(name, [0])


def run_gemm(
    ceilings: Ceilings,
    models: Sequence[str] = MODELS,
    rows: Sequence[int] = ROWS,
    choices: Sequence[str] = CHOICES,
    *,
    say: Say = print,
) -> list[dict[str, Any]]:
    """One record for each shape and number of rows. Triton's product and BF16 cuBLAS are always measured."""
    chosen = [name for name in CHOICES if name in choices or name in ("triton", "bf16")]
    records = []
    for shape in linears(models):
        weight = make_weight(shape, torch.device("cuda"))
        bits = check_bits(weight, chosen)
        say(_bits_line(shape, bits))
        for record in _time_shape(weight, chosen, bits, rows, ceilings):
            records.append(record)
            say(_line(record))
        del weight
        torch.cuda.empty_cache()
    return records


def broken(records: Sequence[dict[str, Any]]) -> list[str]:
    """Shapes in which a kernel of ours gave a row other bits in another batch."""
    own = [name for name in EXACT if name != "library"]
    found = dict.fromkeys(
        record["shape"]["name"]
        for record in records
        if any(record["bits"]["changed"].get(name) for name in own)
    )
    return list(found)


def check_bits(weight: Weight, chosen: Sequence[str] = CHOICES, rows: Sequence[int] = CHECKED_ROWS) -> Bits:
    """Every exact choice at every number of rows, first and last of them, against all rows at once."""
    shape = weight.shape
    x = random_rows(max(rows), shape.inputs, weight.plain.device)
    fp8, bf16 = (product(name, make_rows(x), weight) for name in ("triton", "bf16-row"))
    exact = [name for name in chosen if name in EXACT and name in weight.choices(1)]
    changed: dict[str, list[int]] = {name: [] for name in exact}
    elements = 0
    for count in rows:
        for first in sorted({0, len(x) - count}):
            part = make_rows(x[first : first + count])
            for name in exact:
                if name not in weight.choices(count):
                    continue
                whole = (fp8 if name in FP8 else bf16)[first : first + count]
                found = [
                    product(name, part, weight, form) for form in forms(name, count, weight.shape.outputs)
                ]
                elements += len(found) * whole.numel()
                if not all(torch.equal(y, whole) for y in found) and count not in changed[name]:
                    changed[name].append(count)
    return Bits(changed, elements)


def _time_shape(
    weight: Weight, chosen: Sequence[str], bits: Bits, rows: Sequence[int], ceilings: Ceilings
) -> Iterator[dict[str, Any]]:
    shape = weight.shape
    copies = [weight]
    copies += [weight.copy() for _ in range(copies_for(shape.inputs * shape.outputs) - 1)]
    for count in rows:
        x = make_rows(random_rows(count, shape.inputs, weight.plain.device))
        names = [name for name in weight.choices(count) if name in chosen]
        found = {name: _measure(name, x, copies, ceilings) for name in names}
        exact = min((n for n in names if bits.exact(n)), key=lambda n: found[n]["ms"], default="triton")
        yield {
            "shape": asdict(shape),
            "M": count,
            "choices": found,
            "exact": exact,
            "ratio": rounded(found["bf16"]["ms"] / found[exact]["ms"], 3),
            "bits": asdict(bits),
        }


def _measure(name: str, x: Rows, weights: Sequence[Weight], ceilings: Ceilings) -> dict[str, float]:
    shape, count = weights[0].shape, len(x.plain)
    if (
        name == "library" and count % 4
    ):  # it takes no fewer: time the rows that it multiplies, not their padding
        x = make_rows(F.pad(x.plain, (0, 0, 0, -count % 4)))
    if count <= GRAPH_ROWS:
        candidates = forms(name, count, shape.outputs)
        ms = min(graph_ms([partial(product, name, x, w, form) for w in weights]) for form in candidates)
    else:
        ms = events_ms(partial(product, name, x, weights[0]))
    fp8 = name in FP8
    flops = 2.0 * count * shape.inputs * shape.outputs
    nbytes = moved_bytes(shape, count, fp8=fp8)
    return {
        "ms": rounded(ms),
        "tflops": rounded(flops / ms / 1e9),
        "gbps": rounded(nbytes / ms / 1e6),
        "roofline": rounded(ceilings.floor_ms(flops, nbytes, fp8=fp8) / ms, 3),
    }


def _bits_line(shape: LinearShape, bits: Bits) -> str:
    parts = []
    for name, changed in bits.changed.items():
        where = ", ".join(map(str, changed[:8])) + (", ..." if len(changed) > 8 else "")
        parts.append(f"{name} {'other bits at M = ' + where if changed else 'same bits at every M'}")
    return (
        f"{shape.name}  K {shape.inputs}  N {shape.outputs}: {'; '.join(parts)} ({bits.elements:.1e} values)"
    )


def _line(record: dict[str, Any]) -> str:
    choices, exact = record["choices"], record["exact"]
    times = "  ".join(f"{name} {found['ms']:.4f}" for name, found in choices.items())
    best = choices[exact]
    return (
        f"  M {record['M']:>6}  ms: {times}  | {exact}: {best['tflops']:.0f} TFLOP/s, {best['gbps']:.0f} GB/s, "
        f"{100 * best['roofline']:.0f} % of roofline, {record['ratio']:.2f}x bf16"
    )
