"""Device functions that every kernel shares: the quantizer's definition, and FP32 arithmetic whose rounding is spelled out.

Triton's `/` and `sqrt` are approximate, and a compiler may or may not contract a product and a sum into one rounding. Where
two kernels must give one value the same bits (prefill and decode; a fused quantizer and a plain one), the operation is
named: `div_rn`, `fma`. The definition is `numerics/quantize.py`; `tests/kernels/test_triton_quantize.py` compares bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

E4M3_MAX = tl.constexpr(448.0)
AMAX_FLOOR = tl.constexpr(1e-12)


@triton.jit
def after_previous():
    """Lets the next kernel be placed on the chip, then waits until the one before has finished and its writes are visible.

    Kernels that begin with this are launched with `launch_pdl` (programmatic dependent launch): the start-up of one overlaps the
    end of another, which at decode sizes is a fifth of the time. Nothing that another kernel writes may be read before it.

    The next one is let in first: a product then begins on a processor where the product before this kernel has ended, and
    fetches weights while both finish. It still sees all that came before: it waits for this kernel, and this one for those.
    Weights are read before that wait, so what writes weights lets nobody in: such kernels are launched without `launch_pdl`.
    """
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def after_previous_first():
    """`after_previous`, but the next kernel is let in after the wait: what kernels before this one wrote is then complete for it,
    and only what this one writes is not (decode attention reads pages before it waits)."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def operands_arrived():
    """Stands before a `tl.dot` whose operands a pipelined loop copies to shared memory.

    Those copies (`cp.async`) write through the generic proxy, warpgroup products read through the asynchronous one, and PTX
    orders the two by a proxy fence alone. Triton places one where registers are stored (widened codes, probabilities), and none
    behind copies: the product may read what lay there before.
    """
    tl.inline_asm_elementwise(
        "fence.proxy.async.shared::cta; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def approximate_reciprocal(x):
    """1 / x, to an ulp."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def corrected(x, divisor, r):
    """x / divisor from x r and one step of correction; r is the divisor's reciprocal."""
    q = x * r
    error = tl.fma(q, divisor, x * -1.0)
    return tl.fma(error, r * -1.0, q)


@triton.jit
def scale_of(amax, POW2: tl.constexpr):
    """Of groups with these largest values; a NaN among values is no largest one."""
    return floored_scale_of(tl.maximum(amax, AMAX_FLOOR), POW2)


@triton.jit
def floored_scale_of(amax, POW2: tl.constexpr):
    """amax / 448, rounded as a division rounds it (`tests/kernels/test_quotient.py` has every mantissa), then up to a power of
    two on demand. Of an infinite maximum it is NaN, and so are the codes."""
    scale = corrected(amax, E4M3_MAX, 1.0 / 448.0)
    if POW2:
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(scale == scale, bits.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def codes_of(x, scale):
    """e4m3(x / scale) of groups whose scales these are, with one element in place of a group: `div_rn`'s quotient wherever the
    code is not a zero.

    One division for a group: with r the rounded reciprocal, a quotient off by less than one unit in the last place and its exact
    remainder, q + remainder * r is rounded as the quotient itself would be (Markstein 1990). What is below the smallest code
    may lose its sign on the way, so that is put back. Beyond 448 there is rounding at most, which the cast undoes.
    """
    return corrected_codes(x, tl.div_rn(1.0, scale) + tl.zeros_like(x), -scale + tl.zeros_like(x))


@triton.jit
def corrected_codes(x, r, minus):
    """`codes_of` with r, the rounded reciprocals, and -scale for each element. It only reckons, so Gluon kernels call it too."""
    q = x * r
    q = tl.fma(tl.fma(q, minus, x), r, q)
    q = tl.fma(tl.fma(q, minus, x), r, q)
    bits = (q.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True).to(tl.float8e4nv)


@triton.jit
def saturated_codes(x, r, minus):
    """`corrected_codes` under scales that x may exceed: larger values saturate, before they could overflow."""
    return corrected_codes(tl.minimum(tl.maximum(x, minus * 1024.0), minus * -1024.0), r, minus)


@triton.jit
def split_reciprocal(scale):
    """(r, 1 / scale - r), with r a little too small, so that the rest is positive: for BF16 values x and scales that `scale_of`
    made of them, x r + x rest has the code of x / scale and keeps a zero's sign. `columns.py` says how that was checked. It only
    reckons, so Gluon kernels call it too."""
    r = (approximate_reciprocal(scale).to(tl.int32, bitcast=True) - 4).to(tl.float32, bitcast=True)
    e = tl.fma(scale, r, -1.0)
    return r, tl.fma(e, e, e * -1.0) * r


@triton.jit
def short_codes_of(x, scale, POW2: tl.constexpr):
    """`codes_of` BF16 values (in FP32) under scales that `scale_of` made of them, in two instructions each."""
    if POW2:  # then the reciprocal is exact, and so is the product
        q = x * (tl.div_rn(1.0, scale) + tl.zeros_like(x))
    else:
        r, rest = split_reciprocal(scale)
        q = tl.fma(x, r + tl.zeros_like(x), x * rest)
    return q.to(tl.float8e4nv)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) of FP32 values, to a few ulps of its argument; zero where exp(-x) is infinite."""
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 t;
        mul.f32 t, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 t, t;
        add.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 $0, t;
        }""",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def rounded(x):
    """FP32 values rounded to BF16, in FP32, two at a time: one by one they go through the unit for transcendental functions."""
    bits = tl.inline_asm_elementwise(
        """{
        .reg .b32 t;
        cvt.rn.bf16x2.f32 t, $3, $2;
        shl.b32 $0, t, 16;
        and.b32 $1, t, 0xFFFF0000;
        }""",
        "=r,=r,f,f",
        [x],
        dtype=tl.int32,
        is_pure=True,
        pack=2,
    )
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def half_norm(a, b, wa, wb, eps, D: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm over a head given as its halves [heads, D / 2], rounded to the activation type. Gluon kernels call it too."""
    mean = tl.div_rn(tl.sum(a * a + b * b, 1), D * 1.0)
    inverse = tl.expand_dims(tl.div_rn(1.0, tl.sqrt_rn(mean + eps)), 1)
    a = (a * inverse * tl.expand_dims(wa.to(tl.float32), 0)).to(dtype).to(tl.float32)
    b = (b * inverse * tl.expand_dims(wb.to(tl.float32), 0)).to(dtype).to(tl.float32)
    return a, b


@triton.jit
def place_of(i, GROUPS: tl.constexpr):
    """Where element i of a key of 16 * GROUPS codes lies in its row of a page.

    The left operand of a warpgroup product wants, in each of four lanes, elements 2c, 2c + 1, 2c + 8, 2c + 9 of every 16. A
    page stores just these four as one word, and the words of a lane side by side, so that a lane reads its share of a row with
    a few 16-byte loads instead of one byte pair at a time.
    """
    within = i % 16
    lane, pair = (within % 8) // 2, within // 8
    return (lane * GROUPS + i // 16) * 4 + pair * 2 + within % 2


@triton.jit
def value_place(d, i, D: tl.constexpr):
    """Where code d of a value lies in a page's tile of one head, for the page's i-th token.

    A word holds one dimension of four tokens, as above. Words [4, D / 8, 4, 8] stand by group of 16 tokens, dimension / 8, lane
    and dimension % 8: a token writes a byte of every word in D / 8 sectors of 32 bytes. (With a dimension's tokens side by side
    it would touch D sectors, and decode waits for them.) A warp of the left operand reads 128 bytes that lie side by side.
    """
    within = i % 16
    lane, pair = (within % 8) // 2, within // 8
    return (((i // 16 * (D // 8) + d // 8) * 4 + lane) * 8 + d % 8) * 4 + pair * 2 + within % 2


WIDEN = tl.constexpr(
    """{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }"""
)
"""FP16 pairs of a word of four e4m3 codes, exact, one instruction each. To BF16 there is no such instruction: shifts and masks
for it, at half the rate of others, were what attention over codes waited for."""


@triton.jit
def half(q):
    """BF16 queries as products with codes take them: FP16, which holds BF16 values from 2^-15 on exactly, rounds smaller ones to
    multiples of 2^-24, and saturates at 65,504; NaN stays NaN. Gluon kernels call it too."""
    return tl.inline_asm_elementwise(
        "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;",
        "=r,f,f",
        [q.to(tl.float32)],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _widen_words(words):
    return tl.inline_asm_elementwise(
        WIDEN, "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )


@triton.jit
def load_widened(
    pointer, R: tl.constexpr, RP: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, VALUES: tl.constexpr
):
    """[RP, LP] FP16 of a page's tile of one head, zeros beyond: R keys of L codes stored as `place_of` says, or with VALUES R
    dimensions of L tokens as `value_place` does. `pointer`: int32, the tile's words.

    Permuting and joining keys cost nothing: the compiler finds that each thread already holds its elements.
    """
    row = tl.arange(0, RP)[:, None, None]
    lane = tl.arange(0, 4)[None, :, None]
    group = tl.arange(0, LP // 16)[None, None, :]
    if VALUES:
        at = ((group * (R // 8) + row // 8) * 4 + lane) * 8 + row % 8
    else:
        at = row * (L // 4) + lane * (L // 16) + group
    inside = (group < L // 16) & (lane < 4) & (row < R)
    first, second = _widen_words(tl.load(pointer + at, mask=inside, other=0))
    a, b = (first & 0xFFFF).to(tl.int16), (first >> 16).to(tl.int16)
    c, d = (second & 0xFFFF).to(tl.int16), (second >> 16).to(tl.int16)
    x = tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (0, 2, 4, 1, 3))
    return tl.reshape(x, (RP, LP)).to(tl.float16, bitcast=True)
