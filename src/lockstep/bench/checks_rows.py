"""Checks of what works on rows: quantization, RMSNorm, SwiGLU, rotary embedding and the write to the paged cache.

The reference is `kernels/reference.py` on the CPU, for codes `numerics/quantize.py`. Fused kernels must give the bytes that
quantizing their unfused result gives: that is what lets one side fuse and the other not.

Legend: M rows, K and N columns, T tokens, H query heads, G key/value heads, D head size. Next: `checks_products.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lockstep.bench.check import Check, Size, near, poisoned, same
from lockstep.bench.shapes import AttentionShape, attentions, mlp_widths, norm_widths
from lockstep.kernels.attention_form import PAGE
from lockstep.kernels.reference import ReferenceKernels
from lockstep.numerics.formats import E4M3, ScaleKind, row_groups
from lockstep.numerics.quantize import quantize

SMALL_WIDTHS = (576, 130)
EPS = 1e-6
KINDS: tuple[ScaleKind, ...] = ("fp32", "pow2")


def hostile_rows(rows: int, columns: int, seed: int = 0) -> Tensor:
    """[rows, columns] BF16 on the CPU: sizes over forty binades, zero rows, subnormals, huge values, one outlier, zero groups."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-30, 11, (rows, 1), generator=generator).float())
    kinds = torch.arange(rows) % 8
    x[kinds == 1] = 0
    x[kinds == 2] *= 1e-38
    x[kinds == 3] *= 1e30
    x[kinds == 4, columns // 2] = 3e4
    x[kinds == 5, : columns // 2] = 0
    x[kinds == 6] = -x[kinds == 6].abs()
    return x.bfloat16()


def quantize_checks(size: Size) -> Iterator[Check]:
    """Codes and scales of rows."""
    from lockstep.kernels.triton.quantize import quantize_rows

    for width in SMALL_WIDTHS if size.small else norm_widths(ragged=True) + mlp_widths():
        x = hostile_rows(9 if size.small else 67, width)
        for kind in KINDS:
            expected = quantize(x, row_groups(kind))
            with poisoned():
                codes, scale = quantize_rows(x.cuda(), pow2=kind == "pow2")
            yield same("quantize_rows", f"codes, K {width}, {kind}", expected.codes, codes)
            yield same("quantize_rows", f"scales, K {width}, {kind}", expected.scale, scale)


def norm_checks(size: Size) -> Iterator[Check]:
    """RMSNorm with and without a residual, with and without codes."""
    from lockstep.kernels.triton.norm import rms_norm

    for width in SMALL_WIDTHS if size.small else norm_widths(ragged=True):
        rows = 5 if size.small else 67
        x, delta = _random(rows, width, 1), _random(rows, width, 2)
        weight = 1 + 0.3 * _random(1, width, 3)[0]
        x[1] = delta[1] = 0
        total = x + delta
        expected = ReferenceKernels().rms_norm(total, weight, EPS)
        there = x.cuda(), weight.cuda(), EPS
        with poisoned():
            summed, y = rms_norm(*there, delta_TK=delta.cuda(), fp8=False)
            _, alone = rms_norm(total.cuda(), weight.cuda(), EPS, fp8=False)
        assert isinstance(y, Tensor) and isinstance(alone, Tensor)
        yield same("rms_norm", f"residual sum, K {width}", total, summed)
        yield near("rms_norm", f"with residual, K {width}", expected, y)
        yield same("rms_norm", f"without residual, K {width}", y, alone)
        for kind in KINDS:
            with poisoned():
                summed, fused = rms_norm(*there, delta_TK=delta.cuda(), fp8=True, pow2=kind == "pow2")
            codes = quantize(y.cpu(), row_groups(kind))
            yield same("rms_norm", f"fused codes, K {width}, {kind}", codes.codes, fused[0])
            yield same("rms_norm", f"fused scales, K {width}, {kind}", codes.scale, fused[1])
            yield same("rms_norm", f"fused residual sum, K {width}, {kind}", total, summed)


def swiglu_checks(size: Size) -> Iterator[Check]:
    """silu(gate) up, with and without codes."""
    from lockstep.kernels.triton.swiglu import swiglu

    for width in SMALL_WIDTHS if size.small else mlp_widths(ragged=True):
        gate_up = 3 * _random(5 if size.small else 67, 2 * width, 4)
        gate_up[1] = 0
        expected = ReferenceKernels().swiglu(gate_up[:, :width], gate_up[:, width:])
        with poisoned():
            y = swiglu(gate_up.cuda(), fp8=False)
        assert isinstance(y, Tensor)
        yield near("swiglu", f"N {width}", expected, y)
        for kind in KINDS:
            with poisoned():
                fused = swiglu(gate_up.cuda(), fp8=True, pow2=kind == "pow2")
            codes = quantize(y.cpu(), row_groups(kind))
            yield same("swiglu", f"fused codes, N {width}, {kind}", codes.codes, fused[0])
            yield same("swiglu", f"fused scales, N {width}, {kind}", codes.scale, fused[1])


def rope_checks(size: Size) -> Iterator[Check]:
    """Rows, the paged write in one kernel, and the paged write of rows."""
    shapes = attentions(extra=True)
    for shape in (shapes[0], shapes[-3]) if size.small else shapes:
        yield from _rope_rows_checks(shape, 7 if size.small else 70)


def _rope_rows_checks(shape: AttentionShape, tokens: int) -> Iterator[Check]:
    from lockstep.kernels.triton import rope

    heads, kv, dim = shape.heads, shape.kv_heads, shape.head_dim
    name = f"H {heads} G {kv} D {dim}{', norm' if shape.norm else ''}"
    qkv, positions, table = rope_inputs(shape, tokens)
    norms = tuple(1 + 0.3 * _random(1, dim, seed)[0] for seed in (5, 6)) if shape.norm else None
    expected = rope_reference(qkv, positions, table, shape, norms)
    there = qkv.cuda(), table.cuda(), positions.cuda()
    norms_there = (norms[0].cuda(), norms[1].cuda()) if norms is not None else None
    with poisoned():
        q, k, v = rope.rope_rows(*there, heads=heads, kv_heads=kv, norms=norms_there, eps=EPS)
    for part, want, found in zip("qk", expected, (q, k)):
        yield near("rope", f"{part}, {name}", want, found)
    yield same("rope", f"v, {name}", expected[2], v)
    pages = tokens // PAGE + 3
    slots = torch.randperm(pages * PAGE, generator=torch.Generator().manual_seed(7))[:tokens].cuda()
    own = torch.arange(tokens, device="cuda")
    for fp8 in (False, True):
        scales = (_scales(kv, 8).cuda(), _scales(kv, 9).cuda()) if fp8 else None
        fused, written, of_codes = (empty_pages(pages, shape, fp8=fp8) for _ in range(3))
        flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        q_paged = rope.rope_and_write(
            *there, slots, *fused, heads=heads, norms=norms_there, eps=EPS, scales=scales, flag=flag
        )
        rope.write_pages(k, v, own, slots, *written, scales)
        if scales is not None:
            k_codes, v_codes = _codes(k, scales[0]), _codes(v, scales[1])
            raw = [_raw(x) for x in of_codes]
            rope.write_pages(_raw(k_codes), _raw(v_codes), own, slots, raw[0], raw[1], None)
            expected_pages = of_codes
            wide = empty_pages(pages, shape, fp8=False)
            rope.write_pages(k, v, own, slots, *wide, scales)
            for part, x, found in zip("kv", (k_codes, v_codes), wide):
                want = _placed(x.float().bfloat16(), slots, pages)
                want = want if part == "k" else want.transpose(2, 3)
                yield same("rope", f"{part} pages of the codes' values, {name}", want, found)
        else:
            expected_pages = _placed(k, slots, pages), _placed(v, slots, pages).transpose(2, 3)
        case = f"{'fp8' if fp8 else 'bf16'} cache, {name}"
        yield same("rope", f"q beside the write, {case}", q, q_paged)
        for part, pages_want, pages_fused, pages_written in zip(
            "kv", expected_pages, fused, written, strict=True
        ):
            yield same("rope", f"{part} pages, {case}", pages_want, pages_fused)
            yield same("rope", f"{part} pages of rows, {case}", pages_want, pages_written)
        yield same("rope", f"all finite, {case}", torch.zeros(1, dtype=torch.int32), flag)


def rope_inputs(shape: AttentionShape, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """(projected rows, positions, table of cos and sin) on the CPU."""
    positions = torch.randint(0, 5000, (tokens,), generator=torch.Generator().manual_seed(10))
    angle = torch.arange(5000, dtype=torch.float64)[:, None] * 1e6 ** -(
        torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    )
    table = torch.stack([angle.cos(), angle.sin()], 1).float().contiguous()
    return _random(tokens, shape.row_width, 11), positions, table


def rope_reference(
    qkv: Tensor, positions: Tensor, table: Tensor, shape: AttentionShape, norms: tuple[Tensor, ...] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(q [T, H, D], k, v [T, G, D]) by the reference."""
    reference = ReferenceKernels()
    parts = qkv.view(len(qkv), -1, shape.head_dim).split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    q, k, v = parts
    if norms is not None:
        q, k = (reference.rms_norm(x, w, EPS) for x, w in zip((q, k), norms, strict=True))
    cos, sin = table[positions, 0], table[positions, 1]
    return reference.rope(q, cos, sin), reference.rope(k, cos, sin), v


def empty_pages(pages: int, shape: AttentionShape, *, fp8: bool) -> tuple[Tensor, Tensor]:
    """(k [pages, G, 64, D], v [pages, G, D, 64]) of zeros on the GPU."""
    raw, dtype = (torch.uint8, E4M3) if fp8 else (torch.bfloat16, torch.bfloat16)
    heads, dim = shape.kv_heads, shape.head_dim
    k = torch.zeros(pages, heads, PAGE, dim, dtype=raw, device="cuda").view(dtype)
    return k, torch.zeros(pages, heads, dim, PAGE, dtype=raw, device="cuda").view(dtype)


def _placed(x_TGD: Tensor, slots: Tensor, pages: int) -> Tensor:
    """[pages, G, 64, D]: rows at their slots, zeros elsewhere."""
    out = x_TGD.new_zeros(pages, PAGE, *x_TGD.shape[1:])
    out[slots // PAGE, slots % PAGE] = x_TGD
    return out.transpose(1, 2)


def _codes(x_TGD: Tensor, scale_G: Tensor) -> Tensor:
    """The reference's codes of keys or values."""
    return ReferenceKernels().quantize_kv(x_TGD.cpu(), scale_G.cpu()).cuda()


def _raw(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def _scales(heads: int, seed: int) -> Tensor:
    return torch.rand(heads, generator=torch.Generator().manual_seed(seed)) * 0.02 + 0.002


def _random(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).bfloat16()
