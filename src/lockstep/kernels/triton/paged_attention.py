"""Decode attention over e4m3 pages for groups of up to eight query heads: the bits of `attention_loop.py`, at the memory's pace.

The definition is that file's: one query a sequence, its group of heads as the right operand of the warpgroup instruction, keys
(then values) as the left one, 64 keys a step, chunks of CHUNK keys. A column's bits don't depend on how many columns there are,
so eight take the place of sixteen: half of the exponentials, and registers for four programs on each processor.

Where the kernel before writes the last page alone, the first ones are fetched while it runs.

Pages come by bulk copies into a ring. A page stores codes by the words that lanes need: of a key side by side
(`numbers.place_of`), of values where a warp reads them together (`numbers.value_place`). Lanes widen words in registers, where
the instruction takes its left operand from.

Next: `attention.py`, which launches this.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.kernels.triton.columns import divided
from lockstep.kernels.triton.numbers import WIDEN, half, scale_of
from lockstep.kernels.triton.ring import arrived
from lockstep.kernels.triton.wide_attention import EMPTY, PAGE

QUERIES = gl.constexpr(8)
"""Columns of the products: the narrowest instruction."""
STAGES = 2
"""Slots of the ring. Four programs share a processor, so there are copies enough under way."""


@gluon.jit
def _widened(words, R: gl.constexpr, L: gl.constexpr, out: gl.constexpr):
    """[R, L] FP16 as a left operand, of words [R, L / 4] laid out as `place_of` says. Each thread holds its elements already."""
    words = gl.reshape(words, [R, 4, L // 16])
    first, second = gl.inline_asm_elementwise(
        WIDEN, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    a, b = (first & 0xFFFF).to(gl.int16), (first >> 16).to(gl.int16)
    c, d = (second & 0xFFFF).to(gl.int16), (second >> 16).to(gl.int16)
    x = gl.permute(gl.join(gl.join(a, b), gl.join(c, d)), (0, 2, 4, 1, 3))
    x = gl.reshape(x, [R, L]).to(gl.float16, bitcast=True)
    return gl.convert_layout(x, gl.DotOperandLayout(0, out, 2), assert_trivial=True)


@gluon.jit
def _by_dimension(words, D: gl.constexpr):
    """[D, 16] words of the tile [D / 2, 32] of a page's values; no word changes hands."""
    words = gl.permute(gl.reshape(words, [4, D // 8, 4, 8]), (1, 3, 2, 0))
    return gl.reshape(words, [D, 16])


@gluon.jit
def _fill(k_desc, v_desc, rings, ready, slot, page, g, G: gl.constexpr, D: gl.constexpr, wanted):
    """Copies keys and values of a page into a slot."""
    k_ring, v_ring = rings
    bar = ready.index(slot)
    mbarrier.expect(bar, k_desc.block_type.nbytes + v_desc.block_type.nbytes, pred=wanted)
    at = page * G + g
    tma.async_copy_global_to_shared(k_desc, [at * PAGE, 0], bar, k_ring.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(v_desc, [at * (D // 2), 0], bar, v_ring.index(slot), pred=wanted)


@gluon.jit(do_not_specialize=["table_stride", "splits"])
def _paged(
    q_ptr, k_desc, v_desc, o_ptr, part_ptr, state_ptr, table_ptr, length_ptr, ks_ptr, vs_ptr, scale_ptr, scale_stride,
    base, table_stride, splits, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, STEPS: gl.constexpr,
    SPLIT: gl.constexpr, OUT8: gl.constexpr, POW2: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
    K_WORDS: gl.constexpr, V_WORDS: gl.constexpr,
):  # fmt: skip
    fp16: gl.constexpr = gl.float16
    out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    column: gl.constexpr = gl.SliceLayout(0, out)
    row: gl.constexpr = gl.SliceLayout(1, out)
    Q: gl.constexpr = H // G
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_ring = gl.allocate_shared_memory(gl.int32, [STAGES, PAGE, D // 4], k_desc.layout)
    v_ring = gl.allocate_shared_memory(gl.int32, [STAGES, D // 2, PAGE // 2], v_desc.layout)
    q_smem = gl.allocate_shared_memory(fp16, [QUERIES, D], flat)
    p_smem = gl.allocate_shared_memory(fp16, [QUERIES, PAGE], flat)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(ready.index(place), count=1)
    g, b, chunk = gl.program_id(0), gl.program_id(1).to(gl.int64), gl.program_id(2)
    rings = (k_ring, v_ring)
    if not EARLY:
        gdc_wait()
    # Past the first-level cache, which may hold the last step's: nothing has been waited for yet.
    n = gl.load(length_ptr + b, cache_modifier=".cg")
    pages = gl.cdiv(n, PAGE)
    start = chunk * STEPS
    stop = gl.minimum(start + STEPS, pages)
    table_ptr += b * table_stride
    fence_async_shared()
    first = ()
    for place in gl.static_range(STAGES):
        at = start + place
        page = gl.load(table_ptr + at, mask=at < stop, other=0, cache_modifier=".cg")
        _fill(k_desc, v_desc, rings, ready, place, page, g, G, D, (at < stop) & (at < pages - 1))
        first = first + (page,)  # type: ignore[assignment]  # noqa: RUF005
    if EARLY:
        gdc_wait()
    gdc_launch_dependents()
    if start >= pages:
        return
    for place in gl.static_range(STAGES):
        at = start + place
        _fill(k_desc, v_desc, rings, ready, place, first[place], g, G, D, (at < stop) & (at == pages - 1))
    spread: gl.constexpr = gl.BlockedLayout([1, D // 16], [2, 16], [4, 1], [1, 0])
    i, d = gl.arange(0, QUERIES, gl.SliceLayout(1, spread)), gl.arange(0, D, gl.SliceLayout(0, spread))
    q_at = gl.expand_dims((b * H + g * Q + i) * D, 1) + gl.expand_dims(d, 0)
    q_smem.store(half(gl.load(q_ptr + q_at, mask=gl.expand_dims(i < Q, 1), other=0.0)))
    fence_async_shared()
    factor = base * gl.load(ks_ptr + g)
    zero = gl.zeros([PAGE, QUERIES], gl.float32, out)
    ones = gl.full([PAGE, PAGE], 1.0, fp16, gl.DotOperandLayout(0, out, 2))
    m = gl.full([QUERIES], EMPTY, gl.float32, column)
    den = gl.zeros([PAGE, QUERIES], gl.float32, out)
    acc = gl.zeros([D, QUERIES], gl.float32, out)
    for j in range(start, stop):
        slot = (j - start) % STAGES
        later = j + STAGES
        page = gl.load(table_ptr + later, mask=later < stop, other=0)
        arrived(ready, j - start, STAGES)
        values = v_ring.index(slot).load(V_WORDS)
        k = _widened(k_ring.index(slot).load(K_WORDS), PAGE, D, out)
        s = warpgroup_mma(k, q_smem.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        keys = j * PAGE + gl.arange(0, PAGE, row)
        s = gl.where(gl.expand_dims(keys < n, 1), s, -float("inf"))
        new = gl.maximum(m, gl.max(s, 0) * factor)
        wide = gl.expand_dims(new, 0) + gl.zeros_like(s)
        p = gl.exp2(gl.fma(s, factor + gl.zeros_like(s), -wide))
        decay = gl.expand_dims(gl.exp2(m - new), 0)
        m = new
        p_smem.permute((1, 0)).store(p.to(fp16))
        fence_async_shared()
        v = _widened(_by_dimension(values, D), D, PAGE, out)
        _fill(k_desc, v_desc, rings, ready, slot, page, g, G, D, later < stop)
        den = warpgroup_mma(ones, p_smem.permute((1, 0)), den * decay, is_async=True)
        acc = warpgroup_mma(v, p_smem.permute((1, 0)), acc * decay, is_async=True)
        den, acc = warpgroup_mma_wait(num_outstanding=0, deps=(den, acc))
    total = gl.max(den, 0)
    i, d = gl.arange(0, QUERIES, column), gl.arange(0, D, row)
    inside = i < Q
    head = g * Q + i
    if SPLIT:
        part = (b * H + head) * splits + chunk
        gl.store(state_ptr + part * 2, m, mask=inside)
        gl.store(state_ptr + part * 2 + 1, total, mask=inside)
        at = gl.expand_dims(part * D, 0) + gl.expand_dims(d, 1)
        gl.store(part_ptr + at, acc, mask=gl.expand_dims(inside, 0))
    else:
        o = acc * gl.expand_dims(gl.div_rn(1.0, total) * gl.load(vs_ptr + g), 0)
        at = gl.expand_dims((b * H + head) * D, 0) + gl.expand_dims(d, 1)
        if OUT8:
            y = o.to(gl.bfloat16).to(gl.float32)
            scale = scale_of(gl.max(gl.abs(y), 0), POW2)
            codes = divided(y, scale, 0, POW2, True).to(gl.float8e4nv)
            gl.store(o_ptr + at, codes, mask=gl.expand_dims(inside, 0))
            gl.store(scale_ptr + head.to(gl.int64) * scale_stride + b, scale, mask=inside)
        else:
            gl.store(o_ptr + at, o.to(gl.bfloat16), mask=gl.expand_dims(inside, 0))


def takes(q_BHD: Tensor, k_pages: Tensor) -> bool:
    """Whether these shapes can be launched: e4m3 pages, heads of 64 or 128, groups of up to eight."""
    _, heads, dim = q_BHD.shape
    return k_pages.element_size() == 1 and dim in (64, 128) and heads // k_pages.shape[1] <= QUERIES.value


def launch(
    q_BHD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    part: Tensor,
    state: Tensor,
    lengths_B: Tensor,
    table_BP: Tensor,
    scales: tuple[Tensor, Tensor],
    out_scale: Tensor,
    *,
    base: float,
    splits: int,
    steps: int,
    codes: bool,
    pow2: bool,
    early: bool,
    stages: int = STAGES,
) -> None:
    """Writes what `attention.decode` returns, or where there are several `splits` their parts and states. early: see there."""
    batch, heads, dim = q_BHD.shape
    kv_heads = k_pages.shape[1]
    _paged[(kv_heads, batch, splits)](
        q_BHD, _words(k_pages, 64, dim // 4), _words(v_pages, dim // 2, 32), out, part, state, table_BP, lengths_B,
        *scales, out_scale, out_scale.stride(1), base, table_BP.stride(0), splits, heads, kv_heads, dim, steps,
        splits > 1, codes, pow2, stages, early, _key_lanes(dim), _value_lanes(dim), num_warps=4, launch_pdl=True,
    )  # fmt: skip


@lru_cache
def _key_lanes(dim: int) -> gl.DistributedLinearLayout:
    """Who holds which word of 64 keys [64, dim / 4]: as the instruction spreads its left operand, a lane has its words of a key,
    then of the key 8 further on."""
    lane = dim // 16
    within = [[0, 1 << bit] for bit in range(lane.bit_length() - 1)]
    lanes = [[0, lane], [0, 2 * lane], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [*within, [8, 0]], lanes, [[16, 0], [32, 0]], [], [PAGE.value, dim // 4]
    )


@lru_cache
def _value_lanes(dim: int) -> gl.DistributedLinearLayout:
    """Likewise of values [dim / 2, 32], whose words stand as `numbers.value_place` says: of a dimension the groups of 16 tokens,
    then of the dimension 8 further on, then 64."""
    group = dim // 8
    held = [[group, 0], [2 * group, 0], [1, 0], *([[8, 0]] if dim == 128 else [])]
    lanes = [[0, 8], [0, 16], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(held, lanes, [[2, 0], [4, 0]], [], [dim // 2, 32])


def _words(pages: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Codes as words, one head's tile of a page at a time."""
    words = pages.view(torch.uint8).view(torch.int32).view(-1, columns)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=4 * columns, element_bitwidth=32, rank=2)
    return TensorDescriptor.from_tensor(words, [rows, columns], layout)
