"""`lockstep bench quant`: what surrounds the products, as a share of copy bandwidth, fused against one thing after the other.

    quantize      BF16 rows to codes and scales
    norm          residual sum, RMSNorm, codes and scales in one pass
    swiglu        silu(gate) up, codes and scales in one pass
    rope          q/k norm, rotation, write to the paged cache (BF16 or FP8) in one pass

and, with many rows, what the backward pass has:

    both          BF16 gradients to rows and to columns along tokens
    regroup       codes of rows to codes of columns
    d swiglu      gradient of gate and up, as rows and columns (from BF16 gate and up, or from codes)
    d norm        gradient of the norm added to the residual stream's, and of its weight
    d rope        gradient of the projected row, through saturation, rotation and q/k norm

All of them move bytes and compute little. Few rows (decode) are timed in a CUDA graph on warm operands: there the figure is
microseconds, most of them a launch. Many rows are timed with the L2 emptied: there the figure is the share of a large copy's
bandwidth.

Next: `timing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.bench.results import rounded
from lockstep.bench.shapes import MODELS, AttentionShape, attentions, mlp_widths, norm_widths
from lockstep.bench.timing import Call, Ceilings, events_ms, graph_ms
from lockstep.kernels.attention_form import PAGE
from lockstep.numerics.formats import BLOCK, E4M3

ROWS = (64, 256, 4096, 16_384)
GRAPH_ROWS = 256
Say = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """One operation. nbytes: least traffic. separate: the same result by several launches, where there is such a way."""

    name: str
    size: str
    rows: int
    nbytes: int
    call: Call
    separate: Call | None = None


def run_quant(
    ceilings: Ceilings, models: Sequence[str] = MODELS, rows: Sequence[int] = ROWS, *, say: Say = print
) -> list[dict[str, Any]]:
    """One record for each operation, width and number of rows."""
    records = []
    for count in rows:
        for work in works(models, count):
            records.append(_record(work, ceilings))
            say(_line(records[-1]))
    return records


def works(models: Sequence[str], rows: int) -> Iterator[Work]:
    """Every operation at every width of these models."""
    for width in norm_widths(models):
        yield quantize_work(rows, width)
        yield norm_work(rows, width)
    for width in mlp_widths(models):
        yield swiglu_work(rows, width)
    for shape in attentions(models):
        for fp8 in (False, True):
            yield rope_work(rows, shape, fp8=fp8)
    if rows > GRAPH_ROWS:
        yield from backward_works(models, rows)


def backward_works(models: Sequence[str], rows: int) -> Iterator[Work]:
    """What surrounds the products of the backward pass; bytes as in `kernels/triton/columns.py`."""
    for width in dict.fromkeys(norm_widths(models) + mlp_widths(models)):
        yield from columns_works(rows, width)
    for width in norm_widths(models):
        yield norm_backward_work(rows, width)
    for width in mlp_widths(models):
        for fp8 in (False, True):
            yield swiglu_backward_work(rows, width, fp8=fp8)
    for shape in attentions(models):
        yield rope_backward_work(rows, shape)


def quantize_work(rows: int, width: int) -> Work:
    """x [M, K] to codes and scales."""
    from lockstep.kernels.triton.quantize import quantize_rows

    x = _random(rows, width)
    nbytes = 2 * x.numel() + _code_bytes(rows, width)
    return Work("quantize", f"K {width}", rows, nbytes, partial(quantize_rows, x, pow2=False))


def norm_work(rows: int, width: int) -> Work:
    """h and the layer's output [M, K] to their sum and its normalised codes."""
    from lockstep.kernels.triton.norm import rms_norm
    from lockstep.kernels.triton.quantize import quantize_rows

    h, delta = _random(rows, width), _random(rows, width)
    weight = torch.ones(width, dtype=torch.bfloat16, device="cuda")

    def separate() -> None:
        _, y = rms_norm(h + delta, weight, 1e-6, fp8=False)
        assert isinstance(y, Tensor)
        quantize_rows(y, pow2=False)

    nbytes = 3 * 2 * h.numel() + 2 * width + _code_bytes(rows, width)
    call = partial(rms_norm, h, weight, 1e-6, delta_TK=delta, fp8=True)
    return Work("norm", f"K {width}", rows, nbytes, call, separate)


def swiglu_work(rows: int, width: int) -> Work:
    """gate and up [M, 2 N] to the codes of their product."""
    from lockstep.kernels.triton.quantize import quantize_rows
    from lockstep.kernels.triton.swiglu import swiglu

    gate_up = _random(rows, 2 * width)

    def separate() -> None:
        y = swiglu(gate_up, fp8=False)
        assert isinstance(y, Tensor)
        quantize_rows(y, pow2=False)

    nbytes = 2 * gate_up.numel() + _code_bytes(rows, width)
    return Work("swiglu", f"N {width}", rows, nbytes, partial(swiglu, gate_up, fp8=True), separate)


def rope_work(rows: int, shape: AttentionShape, *, fp8: bool) -> Work:
    """A projected row to q and its place in the cache."""
    from lockstep.kernels.triton import rope

    qkv = _random(rows, shape.row_width)
    pages = -(-rows // PAGE) + 1
    dtype = E4M3 if fp8 else torch.bfloat16
    raw = torch.uint8 if fp8 else torch.bfloat16
    heads, dim = shape.kv_heads, shape.head_dim
    k_pages = torch.zeros(pages, heads, PAGE, dim, dtype=raw, device="cuda").view(dtype)
    v_pages = torch.zeros(pages, heads, dim, PAGE, dtype=raw, device="cuda").view(dtype)
    scales = (torch.full((heads,), 0.02, device="cuda"),) * 2 if fp8 else None
    norms = (torch.ones(dim, dtype=torch.bfloat16, device="cuda"),) * 2 if shape.norm else None
    positions = torch.arange(rows, device="cuda")
    table = torch.randn(rows, 2, dim // 2, device="cuda")

    def separate() -> None:
        _, k, v = rope.rope_rows(
            qkv, table, positions, heads=shape.heads, kv_heads=heads, norms=norms, eps=1e-6
        )
        rope.write_pages(k, v, positions, positions, k_pages, v_pages, scales)

    call = partial(
        rope.rope_and_write, qkv, table, positions, positions, k_pages, v_pages,
        heads=shape.heads, norms=norms, eps=1e-6, scales=scales,
    )  # fmt: skip
    written = rows * dim * (2 * shape.heads + 2 * heads * (1 if fp8 else 2))
    nbytes = 2 * qkv.numel() + written + rows * (4 * dim + 16)
    name = f"rope, {'fp8' if fp8 else 'bf16'} cache"
    return Work(name, f"H {shape.heads} G {heads} D {dim}", rows, nbytes, call, separate)


def columns_works(rows: int, width: int) -> Iterator[Work]:
    """x [M, N] to both forms, and from the codes of one to those of the other."""
    from lockstep.kernels.triton.columns import quantize_both, regroup
    from lockstep.kernels.triton.quantize import quantize_rows

    x = _random(rows, width)
    codes = quantize_rows(x, pow2=False)

    def separate() -> None:
        quantize_rows(x, pow2=False)
        quantize_both(x, pow2=False, rows=False)

    form = _code_bytes(rows, width)
    call = partial(quantize_both, x, pow2=False)
    yield Work("both", f"N {width}", rows, 2 * x.numel() + 2 * form, call, separate)
    yield Work("regroup", f"N {width}", rows, 2 * form, partial(regroup, *codes, pow2=False, square=True))


def norm_backward_work(rows: int, width: int) -> Work:
    """Gradients of a norm's output and of the stream [M, K] to that of the stream before it."""
    from lockstep.kernels.triton.norm_backward import norm_backward

    grad, h, dh = (_random(rows, width) for _ in range(3))
    weight = torch.ones(width, dtype=torch.bfloat16, device="cuda")
    call = partial(norm_backward, grad, h, weight, 1e-6, dh)
    return Work("d norm", f"K {width}", rows, 8 * h.numel() + 6 * width, call)


def swiglu_backward_work(rows: int, width: int, *, fp8: bool) -> Work:
    """Gradient [M, N] to rows and columns of that of gate and up, which are BF16 or (`fp8`) codes."""
    from lockstep.kernels.triton.columns import quantize_both
    from lockstep.kernels.triton.quantize import quantize_rows
    from lockstep.kernels.triton.swiglu_backward import swiglu_backward

    grad, plain = _random(rows, width), _random(rows, 2 * width)
    fp8 = fp8 and width % BLOCK == 0
    gate_up = quantize_rows(plain, pow2=False) if fp8 else plain

    def separate() -> None:
        found = swiglu_backward(grad, gate_up, pow2=False, fp8=False)
        assert isinstance(found, Tensor)
        quantize_both(found, pow2=False)

    form = _code_bytes(rows, 2 * width)
    nbytes = 2 * grad.numel() + (form if fp8 else 2 * plain.numel()) + 2 * form
    name = f"d swiglu, {'codes' if fp8 else 'bf16'}"
    call = partial(swiglu_backward, grad, gate_up, pow2=False, fp8=True)
    return Work(name, f"N {width}", rows, nbytes, call, separate)


def rope_backward_work(rows: int, shape: AttentionShape) -> Work:
    """dq, dk, dv to the gradient of the projected row, with an FP8 cache's scales."""
    from lockstep.kernels.triton.rope_backward import rope_backward

    heads, dim = shape.kv_heads, shape.head_dim
    qkv = _random(rows, shape.row_width)
    dq, dk, dv = (_random(rows, n * dim).view(rows, n, dim) for n in (shape.heads, heads, heads))
    norms = (torch.ones(dim, dtype=torch.bfloat16, device="cuda"),) * 2 if shape.norm else None
    scales = (torch.full((heads,), 0.02, device="cuda"),) * 2
    table = torch.randn(rows, 2, dim // 2, device="cuda")
    positions = torch.arange(rows, device="cuda")
    call = partial(rope_backward, dq, dk, dv, qkv, table, positions, norms=norms, eps=1e-6, scales=scales)
    read = qkv.numel() if shape.norm else qkv.numel() - dq.numel()
    nbytes = 2 * (2 * qkv.numel() + read) + rows * (4 * dim + 8)
    return Work("d rope", f"H {shape.heads} G {heads} D {dim}", rows, nbytes, call)


def _record(work: Work, ceilings: Ceilings) -> dict[str, Any]:
    ms = _ms(work.call, work.rows)
    separate = _ms(work.separate, work.rows) if work.separate is not None else None
    gbps = work.nbytes / ms / 1e6
    return {
        "operation": work.name, "size": work.size, "M": work.rows, "ms": rounded(ms), "gbps": rounded(gbps),
        "share_of_copy": rounded(gbps / ceilings.copy_gbps, 3),
        "separate_ms": None if separate is None else rounded(separate),
        "ratio": None if separate is None else rounded(separate / ms, 3),
    }  # fmt: skip


def _ms(call: Call, rows: int) -> float:
    return graph_ms([call]) if rows <= GRAPH_ROWS else events_ms(call)


def _line(record: dict[str, Any]) -> str:
    ratio = "" if record["ratio"] is None else f", {record['ratio']:.2f}x of separate launches"
    return (
        f"{record['operation']:17} {record['size']:16} M {record['M']:>6}  {1e3 * record['ms']:>8.2f} us  | "
        f"{record['gbps']:.0f} GB/s, {100 * record['share_of_copy']:.0f} % of copy{ratio}"
    )


def _random(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


def _code_bytes(rows: int, columns: int) -> int:
    """Codes and scales written."""
    return rows * columns + 4 * rows * -(-columns // BLOCK)
