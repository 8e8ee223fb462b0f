"""Gradient of silu(gate) up, straight into the operands of the two products that follow.

    s = sigmoid(gate);   d(gate) = dy up (s + gate s (1 - s));   d(up) = dy gate s         each rounded once to BF16

A program takes a tile of 128 tokens by 128 columns of y, reads dy, gate and up once, and writes both halves of the gradient
[T, 2 N] as 1x128 rows, as columns along tokens, or both. What is quantized is the BF16 value, as if it had gone through memory.
Gate and up are BF16, or the 1x128 codes that the forward pass kept.

Next: `columns.py` for the two forms and their bytes.
"""

from __future__ import annotations

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from lockstep.kernels.operation import operation
from lockstep.kernels.triton.columns import (
    Codes,
    aligned,
    column_scales,
    column_shelf,
    empty_forms,
    programs,
    quantize_both,
    row_scales,
    store_columns,
    store_rows,
    tile_layout,
    tile_places,
    widened,
    words,
)
from lockstep.kernels.triton.numbers import sigmoid
from lockstep.kernels.triton.ring import boxes
from lockstep.kernels.triton.sizes import cdiv
from lockstep.numerics.formats import BLOCK, E4M3

WARPS = 8
"""Of a program: 8 or 16. No bit depends on it."""
TOGETHER, REGISTERS = 2, 128
"""Programs on a multiprocessor, and what a thread has of it."""


@gluon.jit
def _gradient(dy, gate, up):
    """(d(gate), d(up)) in BF16 of FP32 tiles."""
    s = sigmoid(gate)
    silu = gate * s
    d_gate = dy * up * gl.fma(silu, 1.0 - s, s)
    return d_gate.to(gl.bfloat16), (dy * silu).to(gl.bfloat16)


@gluon.jit
def _values(x, scale_ptr, known, FROM_CODES: gl.constexpr):
    """Gate or up in FP32; of codes with their rows' scales, of those that are `known`."""
    if FROM_CODES:
        x = x.to(gl.float32) * gl.expand_dims(gl.load(scale_ptr, mask=known, other=0.0), 1)
    return widened(x)


@gluon.jit(do_not_specialize=["T", "x_scale_stride", "scale_stride", "total"])
def _swiglu_codes(
    dy_desc,
    x_desc,
    x_scale_ptr,
    codes_ptr,
    scale_ptr,
    words_ptr,
    column_scale_ptr,
    T,
    N,
    x_scale_stride,
    scale_stride,
    words_stride,
    total,
    FROM_CODES: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    POW2: gl.constexpr,
):
    """N is a multiple of 128. A program takes one of `total` tiles after the other. Inputs and results wait in shared memory, so
    that two programs fit a multiprocessor; results lie where inputs were, as far as these are as wide. As soon as a place is
    free, it takes the next tile's input, which arrives while this tile is quantized."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    dy_smem = gl.allocate_shared_memory(gl.bfloat16, [128, 128], dy_desc.layout)
    gate_smem = gl.allocate_shared_memory(x_desc.dtype, [128, 128], x_desc.layout)
    up_smem = gl.allocate_shared_memory(x_desc.dtype, [128, 128], x_desc.layout)
    gate_out, up_out = dy_smem, up_smem
    if FROM_CODES:
        up_out = gl.allocate_shared_memory(gl.bfloat16, [128, 128], plain)
    shelf = column_shelf()
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    fence_async_shared()
    size: gl.constexpr = dy_desc.block_type.nbytes + 2 * x_desc.block_type.nbytes
    blocks, own, programs = N // 128, gl.program_id(0), gl.num_programs(0)
    part: gl.constexpr = gl.BlockedLayout([32 // gl.num_warps(), 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, part))
    owned: gl.constexpr = tile_layout(gl.num_warps())
    t, n = own // blocks * 128, own % blocks * 128
    mbarrier.expect(ready, size)
    tma.async_copy_global_to_shared(dy_desc, [t, n], ready, dy_smem)
    tma.async_copy_global_to_shared(x_desc, [t, n], ready, gate_smem)
    tma.async_copy_global_to_shared(x_desc, [t, N + n], ready, up_smem)
    phase = 0
    for one in range(own, total, programs):
        tile, block = t // 128, n // 128
        mbarrier.wait(ready, phase)
        phase ^= 1
        for first in gl.static_range(0, 128, 64):  # in parts, so that no register is spilled
            row = tile * 128 + first + r
            at, known = x_scale_ptr + block.to(gl.int64) * x_scale_stride + row, row < T
            dy = widened(dy_smem.slice(first, 64, 0).load(part))
            gate = _values(gate_smem.slice(first, 64, 0).load(part), at, known, FROM_CODES)
            at += blocks.to(gl.int64) * x_scale_stride
            up = _values(up_smem.slice(first, 64, 0).load(part), at, known, FROM_CODES)
            d_gate, d_up = _gradient(dy, gate, up)
            gate_out.slice(first, 64, 0).store(d_gate)
            up_out.slice(first, 64, 0).store(d_up)
        later = one + programs
        wanted, t, n = later < total, later // blocks * 128, later % blocks * 128
        gl.thread_barrier()
        mbarrier.expect(ready, size, pred=wanted)
        tma.async_copy_global_to_shared(x_desc, [t, n], ready, gate_smem, pred=wanted)
        if FROM_CODES:
            tma.async_copy_global_to_shared(x_desc, [t, N + n], ready, up_smem, pred=wanted)
        for which in gl.static_range(2):
            if which == 0:
                x = gate_out.load(owned)
            else:
                x = up_out.load(owned)
            to = block + which * blocks
            if COLUMNS:
                column_scales(x, shelf, POW2)
            if ROWS:
                of_rows = row_scales(x, POW2)
            # Whoever knows x's scales has it in registers. The fence before a copy waits for stores, so rows come after it.
            if which == 0:
                gl.thread_barrier()
                fence_async_shared()
                tma.async_copy_global_to_shared(dy_desc, [t, n], ready, dy_smem, pred=wanted)
            elif not FROM_CODES:
                gl.thread_barrier()
                fence_async_shared()
                tma.async_copy_global_to_shared(x_desc, [t, N + n], ready, up_smem, pred=wanted)
            if ROWS:
                store_rows(x, of_rows, tile, to, codes_ptr, scale_ptr, T, 2 * N, scale_stride, POW2)
            if COLUMNS:
                of_columns = shelf.load(gl.SliceLayout(0, owned))
                store_columns(x, of_columns, tile, to, words_ptr, column_scale_ptr, 2 * N, words_stride, POW2)


@gluon.jit(do_not_specialize=["T", "x_scale_stride"])
def _swiglu_plain(
    grad_ptr,
    x_ptr,
    x_scale_ptr,
    out_ptr,
    T,
    N,
    grad_stride,
    x_stride,
    x_scale_stride,
    FROM_CODES: gl.constexpr,
):
    """Any N; a multiple of 128 where gate and up are codes."""
    block, tile = gl.program_id(0), gl.program_id(1)
    t, c = tile_places()
    known = t < T - tile * 128
    inside = gl.expand_dims(known, 1) & gl.expand_dims(c < N - block * 128, 0)
    first = tile.to(gl.int64) * 128
    at = gl.expand_dims(t * grad_stride, 1) + gl.expand_dims(c, 0)
    dy = gl.load(grad_ptr + first * grad_stride + block * 128 + at, mask=inside, other=0.0)
    at = gl.expand_dims(t * x_stride, 1) + gl.expand_dims(c, 0)
    x_ptr += first * x_stride + block * 128
    gate = gl.load(x_ptr + at, mask=inside, other=0.0)
    up = gl.load(x_ptr + N + at, mask=inside, other=0.0)
    at = x_scale_ptr + block.to(gl.int64) * x_scale_stride + tile * 128 + t
    gate = _values(gate, at, known, FROM_CODES)
    up = _values(up, at + (N // 128).to(gl.int64) * x_scale_stride, known, FROM_CODES)
    d_gate, d_up = _gradient(widened(dy), gate, up)
    out_ptr += first * (2 * N) + block * 128
    at = gl.expand_dims(t * (2 * N), 1) + gl.expand_dims(c, 0)
    gl.store(out_ptr + at, d_gate, mask=inside)
    gl.store(out_ptr + N + at, d_up, mask=inside)


def swiglu_backward(
    grad_TN: Tensor,
    gate_up: Tensor | Codes,
    *,
    pow2: bool,
    fp8: bool,
    rows: bool = True,
    columns: bool = True,
) -> tuple[Codes | None, Codes | None] | Tensor:
    """Gradient of gate and up, side by side [T, 2 N]: (rows, columns) as `columns.quantize_both` gives them, each None where it
    isn't wanted; without `fp8` BF16.

    grad_TN: BF16. gate_up: BF16 [T, 2 N] or (codes, scale) of it; N is a multiple of 128 then.
    """
    held, scale = gate_up if isinstance(gate_up, tuple) else (gate_up, None)
    found = _backward(grad_TN, held, scale, pow2=pow2, fp8=fp8, rows=rows, columns=columns)
    if not fp8:
        return found[0]
    return ((found[0], found[1]) if rows else None), ((found[-2], found[-1]) if columns else None)


def _results(grad_TN: Tensor, fp8: bool, rows: bool, columns: bool) -> list[Tensor]:
    """Storage for the gradient [T, 2 N] in BF16, or for the forms that are wanted."""
    tokens, width = grad_TN.shape
    if fp8:
        return empty_forms(tokens, 2 * width, grad_TN.device, rows=rows, columns=columns)
    return [torch.empty(tokens, 2 * width, dtype=torch.bfloat16, device=grad_TN.device)]


@operation("swiglu_backward", fake=_results)
def _backward(
    grad_TN: Tensor,
    held: Tensor,
    held_scale: Tensor | None,
    *,
    pow2: bool,
    fp8: bool,
    rows: bool,
    columns: bool,
) -> list[Tensor]:
    tokens, width = grad_TN.shape
    coded, scale = held_scale is not None, held if held_scale is None else held_scale
    assert held.shape == (tokens, 2 * width) and held.stride(1) == grad_TN.stride(1) == 1
    assert not coded or (width % BLOCK == 0 and scale.stride(0) == 1)
    grid, scale_stride = (cdiv(width, BLOCK), cdiv(tokens, BLOCK)), scale.stride(1) if coded else 0
    if fp8 and width % BLOCK == 0 and aligned(grad_TN, held):
        found = _results(grad_TN, fp8, rows, columns)
        to = (found[0], found[1]) if rows else (grad_TN, grad_TN)
        to_words = (found[-2], found[-1]) if columns else (grad_TN.view(E4M3), grad_TN)
        if tokens and width and (rows or columns):
            total = grid[0] * grid[1]
            _swiglu_codes[(programs(total, grad_TN.device, TOGETHER),)](
                boxes(grad_TN, 128, 128),
                boxes(held, 128, 128),
                scale,
                *to,
                words(to_words[0]),
                to_words[1],
                tokens,
                width,
                scale_stride,
                to[1].stride(1),
                to_words[0].stride(0) // 4,
                total,
                coded,
                rows,
                columns,
                pow2,
                num_warps=WARPS,
                maxnreg=REGISTERS,
            )
        return found
    [out] = _results(grad_TN, False, False, False)
    if tokens and width:
        strides = (grad_TN.stride(0), held.stride(0), scale_stride)
        _swiglu_plain[grid](grad_TN, held, scale, out, tokens, width, *strides, coded, num_warps=8)
    # Where N is ragged, a group has columns of both halves.
    forms = quantize_both(out, pow2=pow2, rows=rows, columns=columns) if fp8 else ((out,),)
    return [part for form in forms if form is not None for part in form]
