"""The gradient of attention on packed training rows: our paths against the library's own backward in the same call.

10 H D operations for every pair of a query and a key that it sees: five products, as a single pass needs them (the deterministic
path does seven, so its rate is an effective one). All paths start from the exact forward's output and log-sum-exp. The
library's own are autograd through `scaled_dot_product_attention` on a dense batch of the same lengths.

Goal D8b: the library's fastest backward over the path that is taken when determinism is not asked for, at 2 sequences of
8,192. The default, deterministic path is printed and written beside it.

Next: `../kernels/attention_library.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.bench.goals import Goal
from lockstep.bench.paged import random_queries
from lockstep.bench.results import rounded
from lockstep.bench.shapes import AttentionShape
from lockstep.bench.timing import events_ms
from lockstep.kernels.attention_form import PLAIN, AttentionForm
from lockstep.kernels.attention_index import Run
from lockstep.numerics.formats import E4M3

if TYPE_CHECKING:
    from lockstep.kernels.packed_index import PackedIndex

PACKS = {
    "16 x 1024": (1024,) * 16,
    "2 x 8192": (8192,) * 2,
    "unequal": (300, 700, 1100, 1500, 1900, 2300, 2900, 5684),
}
"""Sequence lengths; 16,384 rows each."""
GOAL_PACK, GOAL = "2 x 8192", 0.9
Say = Callable[[str], None]
Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""grad, q, k, v, out, lse."""


def packed_runs(prompts: Iterable[tuple[int, Sequence[int]]]) -> list[Run]:
    """Rows side by side of (prompt length, response lengths): the responses of a prompt see its rows."""
    runs: list[Run] = []
    row = 0
    for prompt, responses in prompts:
        slots = torch.arange(row, row + prompt)
        runs.append(Run(row, prompt, 0, slots))
        row += prompt
        for count in responses:
            runs.append(Run(row, count, prompt, torch.cat([slots, torch.arange(row, row + count)])))
            row += count
    return runs


def backward_records(shape: AttentionShape, say: Say) -> list[dict[str, Any]]:
    """One record for each pack and kind of keys; one pack whose responses share a prompt."""
    packs = {name: packed_runs((n, ()) for n in lengths) for name, lengths in PACKS.items()}
    packs["shared prompt"] = packed_runs([(1024, (960,) * 16)])
    records = []
    for name, runs in packs.items():
        baselines = _library_ms(shape, PACKS[name]) if len(set(PACKS.get(name, (0, 1)))) == 1 else {}
        for fp8 in (False, True):
            records.append(_record(shape, name, runs, fp8, baselines))
            say(_line(records[-1]))
    return records


def backward_goals(records: Sequence[dict[str, Any]], model: str) -> list[Goal]:
    """D8b, where the model that it speaks of was measured."""
    found = []
    for record in records:
        named = model in record["shape"]["name"].split(", ")
        if record["kind"] == "backward" and record["pack"] == GOAL_PACK and record["kv"] == "bf16" and named:
            found.append(Goal("D8b", record["ratio"]["fastest"], GOAL, "of the library's fastest backward"))
    return found


def inputs(
    shape: AttentionShape, runs: Sequence[Run], fp8: bool, device: torch.device
) -> tuple[Six, PackedIndex, AttentionForm]:
    """((grad, q, k, v, out, lse), index, form) of random rows, out and lse from the exact forward."""
    from lockstep.kernels.hopper import HopperKernels

    kernels = HopperKernels()
    rows = max(run.row + run.count for run in runs)
    q, grad = (random_queries(rows, shape, device, seed) for seed in (1, 2))
    few = AttentionShape(shape.name, shape.kv_heads, shape.kv_heads, shape.head_dim)
    k, v = (random_queries(rows, few, device, seed) for seed in (3, 4))
    form = PLAIN
    if fp8:
        scales = torch.linspace(0.007, 0.012, shape.kv_heads, device=device)
        form = AttentionForm(scales, scales.flip(0).contiguous())
        k, v = ((x.float() / 0.01).clamp(-448, 448).to(E4M3) for x in (k, v))
    index = kernels.index(runs, shape.group, device)
    out, lse = kernels.attention(q, k, v, index, form)
    return (grad, q, k, v, out, lse), index, form


def _record(
    shape: AttentionShape, name: str, runs: list[Run], fp8: bool, baselines: dict[str, float]
) -> dict[str, Any]:
    from lockstep.kernels.attention_library import attention_grad, choose

    tensors, index, form = inputs(shape, runs, fp8, torch.device("cuda"))
    call = partial(attention_grad, *tensors, index, form)
    pairs = sum(run.count * run.position + run.count * (run.count + 1) / 2 for run in runs)
    flops = 10.0 * pairs * shape.heads * shape.head_dim
    times = {
        "deterministic": events_ms(partial(call, deterministic=True)),
        "flash, deterministic": events_ms(partial(call, deterministic=True, path="flash")),
        "flash, packed": events_ms(partial(call, deterministic=False, path="flash")),
        "fastest": events_ms(partial(call, deterministic=False)),
    }
    best = min(baselines.values(), default=None)
    return {
        "kind": "backward", "shape": asdict(shape), "batch": len(runs), "length": max(r.count for r in runs),
        "pack": name, "kv": "fp8" if fp8 else "bf16",
        "path": choose(index.gradient, shape.head_dim, form, deterministic=False),
        "ms": {key: rounded(ms) for key, ms in times.items()},
        "tflops": {key: rounded(flops / ms / 1e9) for key, ms in times.items()},
        "baselines_tflops": {key: rounded(flops / ms / 1e9) for key, ms in baselines.items()},
        "ratio": {} if best is None else {key: rounded(best / ms, 3) for key, ms in times.items()},
    }  # fmt: skip


def _library_ms(shape: AttentionShape, lengths: Sequence[int]) -> dict[str, float]:
    """Milliseconds of torch's own backward by backend; one that refuses the shape is left out."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    few = AttentionShape(shape.name, shape.kv_heads, shape.kv_heads, shape.head_dim)
    q, k, v = (
        random_queries(sum(lengths), s, torch.device("cuda"), seed)
        .view(len(lengths), lengths[0], s.heads, s.head_dim)
        .transpose(1, 2)
        .requires_grad_()
        for seed, s in enumerate((shape, few, few))
    )
    found = {}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        with sdpa_kernel(backend):
            try:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.group > 1)
            except RuntimeError:  # "No available kernel": the backend doesn't take this shape
                continue
            grad = torch.randn_like(out)
            found[name] = events_ms(partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True))
    return found


def _line(record: dict[str, Any]) -> str:
    ours = ", ".join(f"{key} {tflops:.0f}" for key, tflops in record["tflops"].items())
    theirs = ", ".join(f"{key} {tflops:.0f}" for key, tflops in record["baselines_tflops"].items())
    ratio = ""
    if record["ratio"]:
        ratio = f"; {record['ratio']['fastest']:.2f}x of the fastest, deterministic {record['ratio']['deterministic']:.2f}x"
    return (
        f"  backward {record['pack']:13} {record['kv']:4}  {ours} TFLOP/s (fastest is {record['path']})  | "
        f"{theirs or 'no dense baseline'}{ratio}"
    )
