"""Operands of weight gradients: a matrix transposed and grouped along tokens, alone or beside its 1x128 rows, in one pass.

A program takes a tile of 128 tokens by 128 columns, which holds whole groups of both kinds, so x is read once. Within the tile
a thread owns 64 / WARPS neighbouring tokens of 8 neighbouring columns. Rows of codes leave as they came; for the transposed
form the codes of four tokens are packed into one word in registers, words change owner through shared memory, and a lane
writes 16 bytes. Tokens are padded to a multiple of 128 with zero codes.

Gradients have a scale for every column of a tile, inputs one for the tile (`square`): the library multiplies by such an operand
a quarter faster than by two with a scale for each column, and e4m3 has room for it, 2^17 between its largest and smallest code.

What each pass moves, in bytes for an element (scales add 1/32 for each form written or read):

    pass                                    reads            writes           in all
    quantize_both                           2                1 + 1            4
      rows alone, columns alone             2                1                3
    regroup                                 1                1                2
    columns_of, also of a norm              2                1                3
    swiglu_backward, BF16 gate and up       2 + 2 x 2        2 x (1 + 1)      10   (of one of the N columns of y)
      gate and up as codes                  2 + 2 x 1        2 x (1 + 1)      8
      BF16 result                           2 + 2 x 2        2 x 2            10
    norm_backward                           2 + 2 + 2        2                8
    rope_backward                           2 + 2            2                6    (2 + 0 read for v without scales)

A non-finite value makes the scale of its groups NaN or infinity, and with it the products that meet them: a gradient that
overflowed must not turn into plausible codes.

The codes are those of the true quotient x / scale, rounded as a division rounds it, in two or three instructions instead of ten
and a branch. BF16 values: x r + x (1 / scale - r), with r a little too small, which keeps a zero's sign. FP32 values: from x r
one step of correction (Markstein, IBM J. Res. Dev. 34, 1990). Both were checked for all that matters, which is which side of a
midpoint between two codes they end up on: every BF16 x and amax, and every FP32 scale with the values next to each midpoint.
`tests/kernels/test_quotient.py` repeats the first and a sample of the second.

Next: `swiglu_backward.py`, which makes both forms of what it computes.
"""

from __future__ import annotations

import torch
import triton.experimental.gluon.language as gl
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from lockstep.kernels.operation import operation
from lockstep.kernels.triton.numbers import (
    AMAX_FLOOR,
    approximate_reciprocal,
    corrected,
    floored_scale_of,
    split_reciprocal,
)
from lockstep.kernels.triton.quantize import empty_codes, quantize_rows
from lockstep.kernels.triton.ring import boxes
from lockstep.kernels.triton.sizes import cdiv, processors
from lockstep.numerics.formats import BLOCK, E4M3

Codes = tuple[Tensor, Tensor]
"""e4m3 codes and their scales."""
WARPS = 8
"""Of a program: 4, 8 or 16. No bit depends on it."""
AHEAD = True
"""Whether a program takes one tile after the other and copies the next one in while it works. No bit depends on it."""
TOGETHER, REGISTERS = 2, 128
"""Programs on a processor then, and what a thread has of it."""
NAN_STAYS = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=NAN_STAYS)


@gluon.jit
def widened(x):
    """BF16 or FP32 values in FP32. Two BF16 values of a word take one instruction each."""
    if x.dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise(
            asm="shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            constraints="=r,=r,r",
            args=[x],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    return x


@gluon.jit
def _scale_of(amax, POW2: gl.constexpr):
    """`numbers.scale_of`, but a NaN stays one."""
    return floored_scale_of(gl.maximum(amax, AMAX_FLOOR, propagate_nan=NAN_STAYS), POW2)


@gluon.jit
def divided(x, scale, AXIS: gl.constexpr, POW2: gl.constexpr, SHORT: gl.constexpr):
    """x / scale as a division rounds it, in FP32; scale from `_scale_of`. SHORT: x are BF16 values."""
    if SHORT and not POW2:
        r, rest = split_reciprocal(scale)
        return gl.fma(x, gl.expand_dims(r, AXIS), x * gl.expand_dims(rest, AXIS))
    r = corrected(gl.full_like(scale, 1.0), scale, approximate_reciprocal(scale))
    if POW2:  # of a power of two r is exact, and so is the product
        return x * gl.expand_dims(r, AXIS)
    bits = scale.to(gl.int32, bitcast=True)  # of a mantissa of ones alone the correction may stop one short
    r = gl.where((bits & 0x7FFFFF) == 0x7FFFFF, (0x7F000000 - bits).to(gl.float32, bitcast=True), r)
    return corrected(x, gl.expand_dims(scale, AXIS), gl.expand_dims(r, AXIS))


@gluon.jit
def _words(x):
    """[C, R / 4] int32 of x [R, C]: the e4m3 codes of four neighbours along R, the first in the lowest byte."""
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    even, odd = gl.split(gl.permute(gl.reshape(x, [R // 4, 2, 2, C]), [3, 0, 1, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return gl.inline_asm_elementwise(
        asm="""
        {
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }
        """,
        constraints="=r,f,f,f,f",
        args=[a, b, c, d],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def tile_layout(warps):
    """Who owns what of a tile."""
    return gl.BlockedLayout([64 // warps, 8], [2, 16], [warps, 1], [1, 0])


@gluon.jit
def tile_places():
    """(tokens [128], columns [128]) of a tile as threads own them."""
    owned: gl.constexpr = tile_layout(gl.num_warps())
    return gl.arange(0, 128, layout=gl.SliceLayout(1, owned)), gl.arange(
        0, 128, layout=gl.SliceLayout(0, owned)
    )


@gluon.jit
def row_scales(x, POW2: gl.constexpr):
    """Of the 1x128 groups of a tile x [128, 128], BF16 or FP32."""
    return _scale_of(gl.reduce(gl.abs(widened(x)), 1, _larger), POW2)


@gluon.constexpr_function
def column_layout(warps):
    """Threads that have a column each, of [warps, 128]."""
    return gl.BlockedLayout([warps, 1], [1, 32], [1, warps], [1, 0])


@gluon.jit
def column_shelf():
    """Shared memory where the scales of a tile's columns wait."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    return gl.allocate_shared_memory(gl.float32, [128], flat)


@gluon.jit
def column_scales(x, shelf, POW2: gl.constexpr):
    """Scales of the 128x1 groups of the same tile to the `shelf`, by threads that have a column each, where warps' maxima meet: a
    reduction over all warps at once stores neighbouring columns a multiple of 128 bytes apart, in one bank of shared memory."""
    WARPS: gl.constexpr = gl.num_warps()
    of_warps = gl.reduce(gl.reshape(gl.abs(widened(x)), [WARPS, 128 // WARPS, 128]), 1, _larger)
    shelf.store(_scale_of(gl.reduce(gl.convert_layout(of_warps, column_layout(WARPS)), 0, _larger), POW2))


@gluon.jit
def store_rows(x, scale, tile, block, codes_ptr, scale_ptr, T, N, scale_stride, POW2: gl.constexpr):
    """1x128 codes and scales of a tile: tokens from 128 `tile`, columns from 128 `block` of [T, N]."""
    t, c = tile_places()
    SHORT: gl.constexpr = x.dtype == gl.bfloat16
    x = widened(x)
    codes = divided(x, scale, 1, POW2, SHORT).to(gl.float8e4nv)
    rows, columns = T - tile * 128, N - block * 128
    inside = gl.expand_dims(t < rows, 1) & gl.expand_dims(c < columns, 0)
    codes_ptr += (tile.to(gl.int64) * 128) * N + block * 128
    gl.store(codes_ptr + gl.expand_dims(t * N, 1) + gl.expand_dims(c, 0), codes, mask=inside)
    gl.store(scale_ptr + block.to(gl.int64) * scale_stride + tile * 128 + t, scale, mask=t < rows)


@gluon.jit
def store_columns(
    x,
    scale,
    tile,
    block,
    words_ptr,
    scale_ptr,
    N,
    words_stride,
    POW2: gl.constexpr,
    SQUARE: gl.constexpr = False,
    scale_stride=0,
):
    """Transposed codes (as words of four) and scales of the same tile; a column group is 128 tokens, zeros past the last. SQUARE:
    the tile's only scale is told once, in a row of `scale_stride`."""
    WARPS: gl.constexpr = gl.num_warps()
    written: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    _, c = tile_places()
    columns = N - block * 128
    SHORT: gl.constexpr = x.dtype == gl.bfloat16
    x = widened(x)
    if SQUARE:
        gl.store(scale_ptr + block * scale_stride + tile + c, scale, mask=c < 1)
    else:
        gl.store(scale_ptr + tile.to(gl.int64) * N + block * 128 + c, scale, mask=c < columns)
    words = gl.convert_layout(_words(divided(x, scale, 0, POW2, SHORT)), written)
    n = gl.arange(0, 128, layout=gl.SliceLayout(1, written))
    w = gl.arange(0, 32, layout=gl.SliceLayout(0, written))
    words_ptr += (block.to(gl.int64) * 128) * words_stride + tile * 32
    at = gl.expand_dims(n * words_stride, 1) + gl.expand_dims(w, 0)
    gl.store(words_ptr + at, words, mask=gl.expand_dims(n < columns, 1) & gl.expand_dims(w < 32, 0))


@gluon.jit
def _square_scales(x, scale, POW2_ROWS: gl.constexpr, POW2: gl.constexpr):
    """The scale of a tile of FP32 values, for each column. They are what codes stand for; scale: those of their rows.

    Where these are no powers of two they tell the largest value: some code of a row is 448, unless all of it is below the
    quantizer's floor, and 448 of its scale is that floor."""
    _, c = tile_places()
    if POW2_ROWS:
        peak = gl.reduce(gl.reduce(gl.abs(x), 1, _larger), 0, _larger)
    else:
        peak = gl.reduce(scale * 448.0, 0, _larger)
    return _scale_of(gl.full_like(c, 0.0, dtype=gl.float32) + peak, POW2)


@gluon.jit
def _row_scales(tile, block, scale_ptr, scale_stride, T):
    """Of the codes of a tile's rows; zeros past the last."""
    t, _ = tile_places()
    at = block.to(gl.int64) * scale_stride + tile * 128 + t
    return gl.load(scale_ptr + at, mask=t < T - tile * 128, other=0.0)


@gluon.jit
def _normed(x, tile, block, inverse_ptr, weight_ptr, T, N):
    """RMSNorm of a tile of BF16 values, rounded to BF16, from what each row is multiplied by and the weight."""
    t, c = tile_places()
    inverse = gl.load(inverse_ptr + tile * 128 + t, mask=t < T - tile * 128, other=0.0)
    weight = gl.load(weight_ptr + block * 128 + c, mask=c < N - block * 128, other=0.0).to(gl.float32)
    return (widened(x) * gl.expand_dims(inverse, 1) * gl.expand_dims(weight, 0)).to(gl.bfloat16)


@gluon.jit
def _through(x, POW2: gl.constexpr):
    """(what the 1x128 codes of a tile's rows stand for, in FP32; their scales)."""
    SHORT: gl.constexpr = x.dtype == gl.bfloat16
    scale = row_scales(x, POW2)
    x = divided(widened(x), scale, 1, POW2, SHORT).to(gl.float8e4nv).to(gl.float32) * gl.expand_dims(scale, 1)
    return x, scale


@gluon.jit(do_not_specialize=["T", "scale_stride", "total"])
def _both(
    x_ptr,
    x_desc,
    inverse_ptr,
    weight_ptr,
    codes_ptr,
    scale_ptr,
    words_ptr,
    column_scale_ptr,
    T,
    N,
    x_stride,
    scale_stride,
    words_stride,
    column_scale_stride,
    blocks,
    total,
    ROWS: gl.constexpr,
    FROM_CODES: gl.constexpr,
    THROUGH: gl.constexpr,
    NORM: gl.constexpr,
    POW2_ROWS: gl.constexpr,
    POW2: gl.constexpr,
    SQUARE: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """x [T, N] (values; or codes, with their scales at `scale_ptr`) to columns, and to rows on demand: `total` tiles, `blocks`
    side by side. THROUGH: columns of what the codes of rows stand for; NORM: of those of x's norm. SQUARE: one scale a tile, of
    codes, given or gone through. AHEAD: a tile is copied in while the one before is worked on."""
    t, c = tile_places()
    own, programs = gl.program_id(0), gl.num_programs(0)
    shelf = column_shelf()
    if AHEAD:
        ring = gl.allocate_shared_memory(x_desc.dtype, [2, 128, 128], x_desc.layout)
        ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for place in gl.static_range(2):
            mbarrier.init(ready.index(place), count=1)
        fence_async_shared()
        mbarrier.expect(ready.index(0), x_desc.block_type.nbytes)
        at = [own // blocks * 128, own % blocks * 128]
        tma.async_copy_global_to_shared(x_desc, at, ready.index(0), ring.index(0))
    turn = 0
    for one in range(own, total, programs):
        tile, block = one // blocks, one % blocks
        slot, later = turn % 2, one + programs
        if AHEAD:
            mbarrier.wait(ready.index(slot), (turn // 2) & 1)
            x = ring.index(slot).load(tile_layout(gl.num_warps()))
            turn += 1
        else:
            inside = gl.expand_dims(t < T - tile * 128, 1) & gl.expand_dims(c < N - block * 128, 0)
            first = x_ptr + (tile.to(gl.int64) * 128) * x_stride + block * 128
            x = gl.load(
                first + gl.expand_dims(t * x_stride, 1) + gl.expand_dims(c, 0), mask=inside, other=0.0
            )
        if FROM_CODES:
            scale = _row_scales(tile, block, scale_ptr, scale_stride, T)
            x = x.to(gl.float32) * gl.expand_dims(scale, 1)
        if NORM:
            x = _normed(x, tile, block, inverse_ptr, weight_ptr, T, N)
        if THROUGH:
            x, scale = _through(x, POW2_ROWS)
        if SQUARE:
            of_columns = _square_scales(x, scale, POW2_ROWS, POW2)
        else:
            column_scales(x, shelf, POW2)
        if ROWS:
            of_rows = row_scales(x, POW2)
        if AHEAD:  # here, since the fence before a copy waits for this thread's stores, and the last tile's are done by now
            gl.thread_barrier()  # all have read what is in the other slot
            mbarrier.expect(ready.index(1 - slot), x_desc.block_type.nbytes, pred=later < total)
            at = [later // blocks * 128, later % blocks * 128]
            tma.async_copy_global_to_shared(
                x_desc, at, ready.index(1 - slot), ring.index(1 - slot), pred=later < total
            )
        if ROWS:
            store_rows(x, of_rows, tile, block, codes_ptr, scale_ptr, T, N, scale_stride, POW2)
        if not SQUARE:
            of_columns = shelf.load(gl.SliceLayout(0, tile_layout(gl.num_warps())))
        store_columns(
            x, of_columns, tile, block, words_ptr, column_scale_ptr, N, words_stride, POW2, SQUARE, column_scale_stride
        )  # fmt: skip


def padded_tokens(tokens: int) -> int:
    """Tokens rounded up to whole groups."""
    return -(-tokens // BLOCK) * BLOCK


def empty_columns(tokens: int, columns: int, device: torch.device, *, square: bool = False) -> Codes:
    """(codes [N, T'], scale [N, T' / 128] with strides (1, N)) without values, T' = `padded_tokens`. square: scales
    [ceil(N / 128), T' / 128], in rows of a multiple of four, as `library.library_scale` has them; zeros beyond the last."""
    padded = padded_tokens(tokens)
    codes, groups = torch.empty(columns, padded, dtype=torch.uint8, device=device).view(E4M3), padded // BLOCK
    if not square:
        return codes, torch.empty(groups, columns, dtype=torch.float32, device=device).t()
    make = torch.empty if groups % 4 == 0 else torch.zeros
    scale = make(cdiv(columns, BLOCK), -(-groups // 4) * 4, dtype=torch.float32, device=device)
    return codes, scale[:, :groups]


def words(codes: Tensor) -> Tensor:
    """The same storage as int32 words of four codes."""
    return codes.view(torch.int32)


def quantize_both(
    x_TN: Tensor, *, pow2: bool, rows: bool = True, columns: bool = True
) -> tuple[Codes | None, Codes | None]:
    """(rows, columns) of BF16 or FP32 values whose last dimension is contiguous, each None where it isn't wanted.

    rows: what `quantize.quantize_rows` gives. columns: (codes [N, T'], scale [N, T' / 128]) of the transposed matrix.
    """
    if not columns:
        return (quantize_rows(x_TN, pow2=pow2) if rows else None), None
    found = _quantize_both(x_TN, pow2=pow2, rows=rows)
    return ((found[0], found[1]) if rows else None), (found[-2], found[-1])


def empty_forms(tokens: int, width: int, device: torch.device, *, rows: bool, columns: bool) -> list[Tensor]:
    """Storage for the forms that are wanted: codes and scales of rows, then of columns."""
    kept = empty_codes(tokens, width, device) if rows else ()
    return [*kept, *(empty_columns(tokens, width, device) if columns else ())]


def _forms(x_TN: Tensor, rows: bool) -> list[Tensor]:
    tokens, width = x_TN.shape
    return empty_forms(tokens, width, x_TN.device, rows=rows, columns=True)


@operation("quantize_both", fake=_forms)
def _quantize_both(x_TN: Tensor, *, pow2: bool, rows: bool) -> list[Tensor]:
    assert x_TN.stride(1) == 1
    found = _forms(x_TN, rows)
    kept = (found[0], found[1]) if rows else None
    _launch(x_TN, x_TN.stride(0), kept, (found[-2], found[-1]), from_codes=False, pow2=pow2)
    return found


def _columns_of(x_TK: Tensor, square: bool) -> Codes:
    tokens, width = x_TK.shape
    return empty_columns(tokens, width, x_TK.device, square=square)


@operation("regroup", fake=lambda codes_TK, square: _columns_of(codes_TK, square))
def regroup(codes_TK: Tensor, scale: Tensor, *, pow2: bool, square: bool) -> tuple[Tensor, Tensor]:
    """Columns (as in `quantize_both`, or with scales as in `empty_columns`) of the FP32 values of 1x128 codes [T, K] with scale
    [T, ceil(K / 128)], which `quantize.quantize_rows` made with the same `pow2`."""
    assert codes_TK.stride(1) == 1
    found = _columns_of(codes_TK, square)
    scale = scale if scale.stride(0) == 1 else scale.t().contiguous().t()
    _launch(
        codes_TK, codes_TK.stride(0), (codes_TK, scale), found, from_codes=True, pow2=pow2, square=square, pow2_rows=pow2
    )  # fmt: skip
    return found


@operation("columns_of", fake=_columns_of)
def columns_of(
    x_TK: Tensor,
    inverse_T: Tensor | None,
    weight_K: Tensor | None,
    *,
    pow2_rows: bool,
    pow2: bool,
    square: bool,
) -> tuple[Tensor, Tensor]:
    """`regroup` of the 1x128 codes that BF16 rows [T, K] have; with `inverse_T` (FP32) and `weight_K` those of x inverse weight,
    rounded to BF16 as `norm.rms_norm` does it."""
    assert x_TK.stride(1) == 1 and (inverse_T is None) == (weight_K is None)
    found = _columns_of(x_TK, square)
    _launch(
        x_TK, x_TK.stride(0), None, found, from_codes=False, pow2=pow2, square=square, through=True, pow2_rows=pow2_rows,
        norm=None if inverse_T is None or weight_K is None else (inverse_T, weight_K),
    )  # fmt: skip
    return found


def _launch(
    x_TN: Tensor,
    x_stride: int,
    rows: Codes | None,
    columns: Codes,
    *,
    from_codes: bool,
    pow2: bool,
    square: bool = False,
    through: bool = False,
    pow2_rows: bool = False,
    norm: tuple[Tensor, Tensor] | None = None,
) -> None:
    """rows: where they go, or where x's scales are. norm: of every row, and the weight."""
    tokens, width = x_TN.shape
    if tokens == 0 or width == 0:
        return
    codes, scale = rows if rows is not None else columns
    blocks = cdiv(width, BLOCK)
    total = blocks * cdiv(tokens, BLOCK)
    ahead = AHEAD and aligned(x_TN)
    _both[(programs(total, x_TN.device, TOGETHER) if ahead else total,)](
        x_TN,
        boxes(x_TN, 128, 128) if ahead else x_TN,
        *(norm if norm is not None else (x_TN, x_TN)),
        codes,
        scale,
        words(columns[0]),
        columns[1],
        tokens,
        width,
        x_stride,
        scale.stride(1),
        columns[0].stride(0) // 4,
        columns[1].stride(0) if square else 0,
        blocks,
        total,
        rows is not None and not from_codes,
        from_codes,
        through,
        norm is not None,
        pow2_rows,
        pow2,
        square,
        ahead,
        num_warps=WARPS,
        maxnreg=REGISTERS if ahead else None,
    )


def aligned(*matrices: Tensor) -> bool:
    """Whether bulk copies take these rows."""
    return all(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in matrices)


def programs(total: int, device: torch.device, together: int) -> int:
    """Of a launch whose programs take one tile after the other, `together` on a processor."""
    return min(total, together * processors(device))
