"""A call or more of every operation that the kernels declare, with the form that its results must have.

Made by torch's factories alone, so that under a fake mode the same calls have fake arguments. Sizes are ragged on purpose: 103
rows are padded to 104, 200 columns are a group and a half.

Legend: T rows, K inputs, N outputs, H heads, G key/value heads, D head size, V vocabulary, W keys of all runs, P pages.
Next: `../kernels/operation.py` for the declaration; `tests/kernels/test_operations.py` for who compares.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.attention_index import Run
from lockstep.numerics.formats import BLOCK, E4M3

Form = tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]
"""Shape, type and stride."""
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
T, H, G, D, V, P = 103, 4, 2, 128, 5001, 3
RUNS = (Run(0, 70, 0, torch.arange(70)), Run(70, 33, 0, torch.arange(70, 103)))
WIDTH = (H + 2 * G) * D


@dataclass(frozen=True)
class Call:
    """Of one operation. forms: of its results. mutated: parameters whose values change."""

    name: str
    args: tuple[Any, ...]
    forms: list[Form]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def has_codes(self) -> bool:
        """Whether an argument is in FP8, of which torch compares no two."""
        return any(isinstance(x, Tensor) and x.dtype == E4M3 for x in self.args)


@dataclass(frozen=True)
class Tables:
    """What attention and its gradient walk over, as lists."""

    tiles: list[list[int]]
    pages: list[int]
    slots: list[int]
    key_tiles: list[list[int]]
    query_tiles: list[list[int]]
    order: list[int]
    begin: list[int]
    spaced_rows: int


def tables() -> Tables:
    """Of `RUNS`. Outside of any fake mode, since it reads values."""
    from lockstep.kernels.gradient_index import gradient_index
    from lockstep.kernels.packed_index import tables_of

    index, gradient = tables_of(RUNS), gradient_index(RUNS)
    assert index.prefill.block == 64 and index.pages == P
    return Tables(
        index.prefill.tiles_N4.tolist(),
        index.prefill.table.tolist(),
        index.slots_W.tolist(),
        gradient.key_tiles_N6.tolist(),
        gradient.query_tiles_N5.tolist(),
        gradient.order_W.tolist(),
        gradient.begin_S1.tolist(),
        gradient.spaced_rows,
    )


def dense(*shape: int, dtype: torch.dtype = BF16) -> Form:
    """Form of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return shape, dtype, tuple(strides)


def rows(width: int, count: int = T) -> list[Form]:
    """Forms of 1x128 codes and their scales, whose storage has whole fours of rows."""
    return [dense(count, width, dtype=E4M3), ((count, -(-width // BLOCK)), FP32, (1, -(-count // 4) * 4))]


def columns(width: int, count: int = T, *, square: bool = False) -> list[Form]:
    """Forms of codes and scales grouped along tokens, with a scale for each column or for 128 of them."""
    groups = -(-count // BLOCK)
    scale: Form = ((width, groups), FP32, (1, width))
    if square:
        scale = (-(-width // BLOCK), groups), FP32, (-(-groups // 4) * 4, 1)
    return [dense(width, groups * BLOCK, dtype=E4M3), scale]


class Maker:
    """Random arguments on a device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def some(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        """Values around zero."""
        return torch.randn(shape, device=self.device).to(dtype)

    def positive(self, *shape: int) -> Tensor:
        """FP32 scales or temperatures."""
        return torch.rand(shape, device=self.device) + 0.5

    def whole(self, *shape: int, below: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers."""
        return torch.randint(below, shape, device=self.device, dtype=dtype)

    def listed(self, values: Any, dtype: torch.dtype) -> Tensor:
        """A table."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def codes(self, width: int, count: int = T) -> tuple[Tensor, Tensor]:
        """1x128 rows as the kernels store them."""
        padded = -(-count // 4) * 4
        return self.some(padded, width, dtype=E4M3)[:count], self.positive(-(-width // BLOCK), padded).t()[
            :count
        ]


def calls(device: str, found: Tables) -> list[Call]:
    """Of every operation."""
    make = Maker(device)
    return [
        *_rows(make),
        *_products(make),
        *_rotations(make, found),
        *_attention(make, found),
        *_head(make),
        *_backward(make),
    ]


def _rows(make: Maker) -> list[Call]:
    some, made = make.some, []
    for width in (200, 256):
        x, delta, weight, gate_up = some(T, width), some(T, width), some(width), some(T, 2 * width)
        for pow2 in (False, True):
            kind = {"pow2": pow2}
            made += [
                Call("quantize_rows", (x,), rows(width), kind),
                *(
                    Call(
                        "add_norm",
                        (x, weight, 1e-6, added),
                        [*total, *rows(width), dense(T, dtype=FP32)],
                        kind | {"fp8": True},
                    )
                    for added, total in ((delta, [dense(T, width)]), (None, []))
                ),
                Call("swiglu", (gate_up,), rows(width), kind | {"fp8": True, "keep": False}),
            ]
            if width % BLOCK == 0:
                both = [*rows(width), *rows(2 * width)]
                made.append(Call("swiglu", (gate_up,), both, kind | {"fp8": True, "keep": True}))
        plain = {"fp8": False, "pow2": False}
        made += [
            Call("add_norm", (x, weight, 1e-6, delta), [dense(T, width)] * 2, plain),
            Call("add_norm", (x, weight, 1e-6, None), [dense(T, width)], plain),
            Call("swiglu", (gate_up,), [dense(T, width)], plain | {"keep": False}),
        ]
    return [*made, Call("quantize_rows", (some(T, 1000)[:, 40:300],), rows(260), {"pow2": False})]


def _products(make: Maker) -> list[Call]:
    from lockstep.kernels.library import library_scale
    from lockstep.numerics.quantize import Quantized

    made = []
    for count in (1, T, 300):
        codes, scale = make.codes(256, count)
        weight = Quantized(make.some(384, 256, dtype=E4M3), make.positive(3, 2), (BLOCK, BLOCK))
        for given in (library_scale(weight), None):
            args = (codes, scale, weight.codes, weight.scale, given, BLOCK)
            made.append(Call("fp8_linear", args, [dense(count, 384)]))
        made.append(Call("bf16_product", (make.some(count, 256), make.some(384, 256)), [dense(count, 384)]))
    ragged = (*make.codes(200), make.some(330, 200, dtype=E4M3), make.positive(330, 2), None, 1)
    x, weight_NK = make.some(T, 200), make.some(330, 200)
    return [
        *made,
        Call("bf16_product", (x, weight_NK), [dense(T, 330)]),
        Call("bf16_product", (x, weight_NK), [dense(T, 330, dtype=FP32)], {"dtype": FP32}),
        Call("fp8_linear", ragged, [dense(T, 330)]),
        Call("bf16_linear", (x, weight_NK), [dense(T, 330)]),
        Call("bf16_linear", (x, weight_NK), [dense(T, 330, dtype=FP32)], {"dtype": FP32}),
    ]


def _rotations(make: Maker, found: Tables) -> list[Call]:
    qkv, table, positions = (
        make.some(T, WIDTH),
        make.some(128, 2, D // 2, dtype=FP32),
        make.whole(T, below=128),
    )
    slots = make.listed(found.slots, torch.int64)
    flag = make.listed([0], torch.int32)
    k, v, order = make.some(T, G, D), make.some(T, G, D), make.listed(list(range(T)), torch.int64)
    scales, made = (make.positive(G), make.positive(G)), []
    for norms in ((make.some(D), make.some(D)), (None, None)):
        sizes = {"heads": H, "kv_heads": G, "eps": 1e-6}
        three = [dense(T, n, D) for n in (H, G, G)]
        made.append(Call("rope_rows", (qkv, table, positions, *norms), three, sizes))
        sizes = {"heads": H, "eps": 1e-6}
        for dtype, given in ((BF16, (None, None)), (E4M3, scales)):
            pages = make.some(P, G, 64, D, dtype=dtype), make.some(P, G, D, 64, dtype=dtype)
            for raised in (flag, None):
                args = (qkv, table, positions, slots, *pages, *norms, *given, raised)
                made.append(Call("rope_and_write", args, [dense(T, H, D)], sizes | {"early": raised is None}))
            made.append(Call("write_pages", (k, v, order, slots, *pages, *given), []))
    maxima, count = make.positive(2, 3, G)[:, 1], make.listed([0], torch.int64)
    return [
        *made,
        Call(
            "watch_kv",
            (k, v, *scales, maxima, count, make.listed([True] * (T - 1) + [False], torch.bool)),
            [],
        ),
        Call("watch_kv", (k, v, None, None, maxima, count, None), []),
        Call("kv_codes", (k, scales[0]), [dense(T, G, D, dtype=E4M3)]),
        *(
            Call("kv_values", (*codes, listed), [dense(n, G, D), dense(n, G, D)])
            for codes in [(make.some(T, G, D, dtype=E4M3), make.some(T, G, D, dtype=E4M3))]
            for listed, n in ((None, T), (make.listed([0, 2, 1, 0], torch.int64), 4))
        ),
    ]


def _attention(make: Maker, found: Tables) -> list[Call]:
    q, k, v, grad = make.some(T, H, D), make.some(T, G, D), make.some(T, G, D), make.some(T, H, D)
    tiles, table = make.listed(found.tiles, torch.int32), make.listed(found.pages, torch.int32)
    lengths, pages_BP = make.listed([70, 33], torch.int32), make.listed([[0, 1], [2, 0]], torch.int32)
    lse, made = [dense(T, H, dtype=FP32)], []
    for dtype, given in ((BF16, (None, None)), (E4M3, (make.positive(G), make.positive(G)))):
        pages = make.some(P, G, 64, D, dtype=dtype), make.some(P, G, D, 64, dtype=dtype)
        for codes in (None, "fp32", "pow2"):
            out = [dense(T, H, D)] if codes is None else rows(H * D)
            args = (q, *pages, tiles, table, *given)
            sizes = {"longest": 70, "block": 64, "codes": codes}
            made.append(Call("prefill_attention", args, out, sizes | {"lse": False}))
            made.append(Call("prefill_attention", args, [*out, *lse], sizes | {"lse": True}))
            out = [dense(2, H, D)] if codes is None else rows(H * D, 2)
            for longest, begun in ((70, False), (5000, True)):
                sizes = {"longest": longest, "codes": codes, "early": begun}
                made.append(Call("decode_attention", (q[:2], *pages, lengths, pages_BP, *given), out, sizes))
        if dtype == E4M3:
            n = len(found.pages)
            wide = [dense(n, G, 64, D, dtype=FP16), dense(n, G, D, 64, dtype=FP16)]
            made.append(Call("widen_pages", (*pages, table), wide))
    walked = (make.listed(found.key_tiles, torch.int32), make.listed(found.query_tiles, torch.int32))
    order, begin = make.listed(found.order, torch.int64), make.listed(found.begin, torch.int64)
    for shared, scales in ((False, (None, None)), (True, (make.positive(G), make.positive(G)))):
        partial = FP32 if shared else BF16
        sizes = {"spaced_rows": found.spaced_rows, "whole": not shared, "shared": shared, "stages": 3}
        args = (grad, q, k, v, grad, make.positive(T, H), *walked, *scales)
        three = [dense(T, H, D), *[dense(T, G, D, dtype=partial)] * 2]
        made.append(Call("attention_grad", args, three, sizes))
        to = {"known": T, "rows": T + 5, "dtype": BF16}
        args = (k.to(partial), v.to(partial), order, begin)
        made.append(Call("attention_grad_sum", args, [dense(T + 5, G, D)] * 2, to))
    return made


def _head(make: Maker) -> list[Call]:
    logits, temperature, normalizer = make.some(T, V, dtype=FP32), make.positive(T), make.positive(T) + 9
    targets, number = make.whole(T, below=V), [dense(T, dtype=FP32)]
    grads = (targets, temperature, normalizer, make.positive(T), make.positive(T))
    counts = make.whole(T, below=V).int()
    return [
        Call("log_normalizer", (logits, temperature), number),
        Call("target_log_prob", (logits, temperature, normalizer, targets), number),
        *(
            Call("entropy", (logits, temperature, normalizer, p), number)
            for p in (None, make.some(T, V), make.some(40, V), make.some(0, V))
        ),
        Call(
            "sample",
            (logits, temperature, make.whole(T, below=1 << 40), make.whole(T, below=99)),
            [dense(T, dtype=torch.int64)],
        ),
        Call(
            "sample",
            (
                logits,
                temperature,
                make.whole(T, below=1 << 40),
                make.whole(T, below=99),
                make.some(T, dtype=FP32),
            ),
            [dense(T, dtype=torch.int64)],
        ),
        Call("truncation_threshold", (logits, temperature, counts, make.some(T, dtype=FP32), counts), number),
        Call(
            "kept_ids",
            (logits, temperature, make.some(T, dtype=FP32), counts, 64),
            [dense(T, 64, dtype=torch.int32), dense(T, dtype=torch.int32)],
        ),
        Call("logits_grad", (logits, *grads, make.positive(T), make.some(T, V)), []),
        Call("logits_grad", (logits, *grads, None, make.some(T, V)), []),
        *(
            Call("stored_logits_grad", (make.some(T, V), *stored, entropies), [])
            for stored in [(targets, temperature, -make.positive(T), make.positive(T), make.positive(T))]
            for entropies in (make.positive(T), None)
        ),
    ]


def _backward(make: Maker) -> list[Call]:
    some, made = make.some, []
    for width in (200, 256):
        x, gate_up, dw = some(T, width), some(T, 2 * width), dense(width, dtype=FP32)
        for pow2 in (False, True):
            kind = {"pow2": pow2}
            made += [
                Call("quantize_both", (x,), [*rows(width), *columns(width)], kind | {"rows": True}),
                Call("quantize_both", (x.float(),), columns(width), kind | {"rows": False}),
            ]
            for square in (False, True):
                how, form = kind | {"square": square}, columns(width, square=square)
                normed = x, make.positive(T), some(width)
                made += [
                    Call("regroup", make.codes(width), form, how),
                    Call("columns_of", (x, None, None), form, how | {"pow2_rows": pow2}),
                    Call("columns_of", normed, form, how | {"pow2_rows": False}),
                ]
            for held in ((gate_up, None), make.codes(2 * width)):
                if width % BLOCK and held[1] is not None:
                    continue
                for r, c in ((True, True), (True, False), (False, True)):
                    forms = [*(rows(2 * width) if r else []), *(columns(2 * width) if c else [])]
                    flags = kind | {"fp8": True, "rows": r, "columns": c}
                    made.append(Call("swiglu_backward", (x, *held), forms, flags))
        flags = {"pow2": False, "fp8": False, "rows": True, "columns": True}
        made.append(Call("swiglu_backward", (x, gate_up, None), [dense(T, 2 * width)], flags))
        for grad, added in ((x, x), (x.float(), None)):
            args = (grad, some(T, width), some(width), 1e-6, added)
            made.append(Call("norm_backward", args, [dense(T, width), dw]))
    qkv, table, positions = some(T, WIDTH), some(128, 2, D // 2, dtype=FP32), make.whole(T, below=128)
    heads = (some(T, H, D), some(T, G, D), some(T, G, D, dtype=FP32))
    for norms in ((some(D), some(D)), (None, None)):
        for scales in ((make.positive(G), make.positive(G)), (None, None)):
            weights = [] if norms[0] is None else [dense(D, dtype=FP32)] * 2
            args = (*heads, qkv, table, positions, *norms, *scales)
            made.append(Call("rope_backward", args, [dense(T, WIDTH), *weights], {"eps": 1e-6}))
    return made
