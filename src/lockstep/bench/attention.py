"""`lockstep bench attention`: prefill and its gradient against the library's kernels, decode against the card's copy bandwidth.

Prefill does 4 H D operations for every pair of a query and a key that it may see. It is held against torch's
flash and cuDNN kernels on the same lengths in the same call (BF16 keys; they have no paged cache and obey no row law).

Decode reads every key and value once and does little else, so its measure is bandwidth: bytes of keys and values a second as a
share of a large copy's. Caches are rotated within a CUDA graph like the weights of a product.

Goals: C7a, share of copy bandwidth with FP8 keys and values at 64 sequences of 8,192 tokens; C7b, at 8 of 16,384; D8a, the
forward over cuDNN's at 2 sequences of 8,192 in BF16; D8b, the gradient likewise.

Next: `attention_backward.py`, `paged.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.bench.attention_backward import backward_goals, backward_records
from lockstep.bench.goals import Goal
from lockstep.bench.paged import Paged, make_paged, random_queries
from lockstep.bench.results import rounded
from lockstep.bench.shapes import AttentionShape, attentions
from lockstep.bench.timing import Call, Ceilings, events_ms, graph_ms
from lockstep.kernels.in_turns import copies_for

PREFILL = ((16, 1024), (8, 2048), (4, 4096), (2, 8192))
DECODE = ((64, 1024), (64, 2048), (64, 8192), (256, 1536), (8, 16_384))
"""(sequences, tokens of each)."""
GOAL_MODEL = "qwen3-8b"
GOALS = {(64, 8192): ("C7a", 0.85), (8, 16_384): ("C7b", 0.60)}
FORWARD_GOAL = (2, 8192), 0.8
Say = Callable[[str], None]


def run_attention(
    ceilings: Ceilings, models: Sequence[str] = (GOAL_MODEL,), *, say: Say = print
) -> list[dict[str, Any]]:
    """One record for each shape, kind of cache and size."""
    records = []
    for shape in attentions(models):
        say(f"{shape.name}: {shape.heads} query heads, {shape.kv_heads} of keys, {shape.head_dim} wide")
        for batch, length in PREFILL:
            records += _prefill_records(shape, batch, length, say)
        records += backward_records(shape, say)
        for batch, length in DECODE:
            for fp8 in (False, True):
                records.append(_decode_record(shape, batch, length, fp8, ceilings))
                say(_decode_line(records[-1]))
    return records


def goals(records: Sequence[dict[str, Any]]) -> list[Goal]:
    """C7a, C7b, D8a and D8b, where the model that they speak of was measured."""
    found = []
    for record in records:
        size = (record["batch"], record["length"])
        named = GOAL_MODEL in record["shape"]["name"].split(", ")
        goal = GOALS.get(size)
        if record["kind"] == "decode" and record["kv"] == "fp8" and goal is not None and named:
            found.append(Goal(goal[0], record["share_of_copy"], goal[1], "of copy bandwidth"))
        if record["kind"] == "prefill" and record["kv"] == "bf16" and size == FORWARD_GOAL[0] and named:
            ratio = record["ratio"].get("cudnn", 0.0)  # a card without cuDNN's kernel reaches nothing
            found.append(Goal("D8a", ratio, FORWARD_GOAL[1], "of cuDNN's forward"))
    return found + backward_goals(records, GOAL_MODEL)


def _prefill_records(shape: AttentionShape, batch: int, length: int, say: Say) -> list[dict[str, Any]]:
    from lockstep.kernels.triton import attention

    device = torch.device("cuda")
    flops = 2.0 * batch * length * (length + 1) * shape.heads * shape.head_dim
    q = random_queries(batch * length, shape, device)
    baselines = _library_ms(shape, batch, length, device)
    records = []
    for fp8 in (False, True):
        paged = make_paged([length] * batch, shape, fp8=fp8, device=device)
        times = {}
        for block in (64, 128):
            index = paged.prefill_index(paged.lengths, block)
            call = partial(attention.prefill, q, *paged.pages, index, paged.scales, lse=True)
            times[f"tile {block}"] = events_ms(call)
        ms = min(times.values())
        record = {
            "kind": "prefill", "shape": asdict(shape), "batch": batch, "length": length, "kv": "fp8" if fp8 else "bf16",
            "ms": {name: rounded(t) for name, t in times.items()},
            "tflops": rounded(flops / ms / 1e9),
            "baselines_tflops": {name: rounded(flops / t / 1e9) for name, t in baselines.items()},
            "ratio": {name: rounded(t / ms, 3) for name, t in baselines.items()},
        }  # fmt: skip
        records.append(record)
        say(_prefill_line(record))
    return records


def _library_ms(shape: AttentionShape, batch: int, length: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of torch's causal attention by backend; a backend that refuses the shape is left out."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (
        random_queries(batch * length, s, device, seed)
        .view(batch, length, s.heads, s.head_dim)
        .transpose(1, 2)
        for seed, s in enumerate((shape, _kv_side(shape), _kv_side(shape)))
    )
    found = {}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        call = partial(_sdpa, q, k, v, shape.group > 1)
        with sdpa_kernel(backend):
            try:
                call()
            except RuntimeError:  # "No available kernel": the backend doesn't take this shape
                continue
            found[name] = events_ms(call)
    return found


def _sdpa(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _kv_side(shape: AttentionShape) -> AttentionShape:
    return AttentionShape(shape.name, shape.kv_heads, shape.kv_heads, shape.head_dim)


def _decode_record(
    shape: AttentionShape, batch: int, length: int, fp8: bool, ceilings: Ceilings
) -> dict[str, Any]:
    device = torch.device("cuda")
    one = make_paged([length] * batch, shape, fp8=fp8, device=device)
    caches = [one, *(one.copy() for _ in range(copies_for(one.nbytes) - 1))]
    q = random_queries(batch, shape, device)
    ms = graph_ms([_decode_call(q, paged) for paged in caches])
    gbps = one.nbytes / ms / 1e6
    return {
        "kind": "decode", "shape": asdict(shape), "batch": batch, "length": length, "kv": "fp8" if fp8 else "bf16",
        "ms": rounded(ms),
        "gbps": rounded(gbps),
        "share_of_copy": rounded(gbps / ceilings.copy_gbps, 3),
    }  # fmt: skip


def _decode_call(q: Tensor, paged: Paged) -> Call:
    from lockstep.kernels.triton import attention

    index = paged.decode_index(range(len(paged.lengths)), paged.lengths)
    return partial(attention.decode, q, *paged.pages, index, paged.scales)


def _prefill_line(record: dict[str, Any]) -> str:
    tiles = ", ".join(f"{name} {ms:.3f} ms" for name, ms in record["ms"].items())
    against = ", ".join(
        f"{name} {tflops:.0f} TFLOP/s ({record['ratio'][name]:.2f}x)"
        for name, tflops in record["baselines_tflops"].items()
    )
    return (
        f"  prefill {record['batch']:>3} x {record['length']:<5} {record['kv']:4}  {tiles}  | "
        f"{record['tflops']:.0f} TFLOP/s; {against or 'no baseline takes this shape'}"
    )


def _decode_line(record: dict[str, Any]) -> str:
    return (
        f"  decode  {record['batch']:>3} x {record['length']:<5} {record['kv']:4}  {record['ms']:.4f} ms  | "
        f"{record['gbps']:.0f} GB/s, {100 * record['share_of_copy']:.0f} % of copy"
    )
