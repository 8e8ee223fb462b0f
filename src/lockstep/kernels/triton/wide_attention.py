"""Prefill attention for head sizes 64 and 128 over pages of BF16, or of codes' values in FP16: the bits of `attention.py`, at the
tensor cores' pace.

The definition is that file's: 64 keys a step, chunks of CHUNK keys, P rounded before both of its products. A row's
bits come from the chain of warpgroup instructions that it passes through, and these are the same: D / 16 for the scores, four
for the values, four for the denominator, each on the running sum times the decay. Which warpgroup holds a row doesn't matter.

What differs is who waits for whom. One warp does nothing but copy pages into a ring of slots. Each of two warpgroups owns 64
rows: of one head (a tile of 128 queries), or of two heads that share their keys (a tile of 64). In a warpgroup the
scores of step j + 1 are issued together with the values' product of step j, so that the exponentials of one step hide behind
the product of the step before. With PINGPONG warpgroups take turns at issuing, so that the exponentials of one hide behind the
products of the other. A program takes one tile after another (the index has the longest first); the copies of the next tile
run while the last one is divided and stored.

A step that none of a warpgroup's rows sees is left out, and a step that all of them see needs no mask: neither changes a bit,
since a row's state isn't touched by keys that it doesn't see.

Next: `attention.py`, which launches this.
"""

from __future__ import annotations

from dataclasses import dataclass

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

from lockstep.kernels import attention_form as form
from lockstep.kernels.triton.columns import divided
from lockstep.kernels.triton.numbers import half, scale_of
from lockstep.kernels.triton.ring import arrived, boxes
from lockstep.kernels.triton.sizes import processors

PAGE = gl.constexpr(form.PAGE)
EMPTY = gl.constexpr(-1e30)
GROUPS = gl.constexpr(2)
"""Warpgroups that compute. Three of them have too few registers each: their states spill."""
ONES = gl.constexpr(8)
"""Columns of the denominator's product: the narrowest instruction."""


@gluon.jit
def _rounds(total):
    """Pieces of work of this program: piece r of a round that goes up through the programs, then down, then up again."""
    programs = gl.num_programs(0)
    whole = total // programs
    return whole + (_work(whole) < total).to(gl.int32)


@gluon.jit
def _work(r):
    """Piece of work of a round. The longest come first: going back and forth, programs get equally much."""
    programs, own = gl.num_programs(0), gl.program_id(0)
    return r * programs + gl.where(r % 2 == 0, own, programs - 1 - own)


@gluon.jit
def _place(work, tile_ptr, GROUP: gl.constexpr, HEADS: gl.constexpr, G: gl.constexpr):
    """(first query row, rows, position, table offset, KV head, first query head within its group) of a piece of work."""
    PARTS: gl.constexpr = (GROUP + HEADS - 1) // HEADS
    part = work % (G * PARTS)
    tile_ptr += work // (G * PARTS) * 4
    first, count = gl.load(tile_ptr), gl.load(tile_ptr + 1)
    position, table = gl.load(tile_ptr + 2), gl.load(tile_ptr + 3)
    return first, count, position, table, part // PARTS, part % PARTS * HEADS


@gluon.jit
def _fill(k_desc, v_desc, rings, ready, free, at, k_row, v_row, has_k, has_v, STAGES: gl.constexpr):
    """Copies keys of one step and values of the step before into a slot, once all have read what it held."""
    slot = at % STAGES
    mbarrier.wait(free.index(slot), ((at // STAGES) & 1) ^ 1, pred=at >= STAGES)
    bar = ready.index(slot)
    size: gl.constexpr = k_desc.block_type.nbytes
    mbarrier.expect(bar, size * 2, pred=has_k & has_v)
    mbarrier.expect(bar, size, pred=has_k != has_v)
    tma.async_copy_global_to_shared(k_desc, [k_row, 0], bar, rings[0].index(slot), pred=has_k)
    tma.async_copy_global_to_shared(v_desc, [v_row, 0], bar, rings[1].index(slot), pred=has_v)


@gluon.jit
def _copy(
    source, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr
):
    """The warp that copies: queries of a piece of work, then keys of a step and values of the step before."""
    q_desc, k_desc, v_desc, smem, bars, tile_ptr, table_ptr, total = source
    q_smem, rings = smem
    q_ready, q_free, ready, free = bars
    UNITS: gl.constexpr = BLOCK // 64
    GROUP: gl.constexpr = H // G
    ring = 0
    for turn in range(_rounds(total)):
        first, count, position, table, g, within = _place(_work(turn), tile_ptr, GROUP, GROUPS // UNITS, G)
        mbarrier.wait(q_free, (turn & 1) ^ 1, pred=turn > 0)
        mbarrier.expect(q_ready, q_desc.block_type.nbytes * GROUPS)
        for w in gl.static_range(GROUPS):
            h = g * GROUP + gl.minimum(within + w // UNITS, GROUP - 1)
            tma.async_copy_global_to_shared(q_desc, [first + w % UNITS * 64, h * D], q_ready, q_smem.index(w))
        steps = gl.cdiv(position + count, PAGE)
        page = gl.load(table_ptr + table)
        # Not `before = page`: a name that at first is another's alias isn't carried by the loop. It would stay the first page.
        before = 0
        for j in range(steps + 1):
            following = gl.load(table_ptr + table + j + 1, mask=j + 1 < steps, other=0)
            k_row, v_row = (page * G + g) * PAGE, (before * G + g) * D
            _fill(k_desc, v_desc, rings, ready, free, ring + j, k_row, v_row, j < steps, j > 0, STAGES)
            before = page
            page = following
        ring += steps + 1


@gluon.jit
def _scores(q, k_ring, zero, at, STAGES: gl.constexpr):
    """Starts q k^T of a step."""
    return warpgroup_mma(q, k_ring.index(at % STAGES).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _values(p, v_ring, ones, acc, den, at, STAGES: gl.constexpr):
    """Starts the two products with p: den + p 1 and acc + p v, the values being those that came with the keys of step `at`."""
    slot = at % STAGES
    out: gl.constexpr = acc.type.layout
    sums: gl.constexpr = den.type.layout
    p = p.to(v_ring.dtype)
    left = gl.convert_layout(p, gl.DotOperandLayout(0, sums, 2), assert_trivial=True)
    den = warpgroup_mma(left, ones.permute((1, 0)), den, is_async=True)
    left = gl.convert_layout(p, gl.DotOperandLayout(0, out, 2), assert_trivial=True)
    acc = warpgroup_mma(left, v_ring.index(slot).permute((1, 0)), acc, is_async=True)
    return acc, den


@gluon.jit
def _soft(s, m, factor, rows, key, MASK: gl.constexpr):
    """(p, new maximum, decay of the old state) of one step: `attention.py`'s, masked with -inf."""
    if MASK:
        keys = key + gl.arange(0, 64, layout=gl.SliceLayout(0, s.type.layout))
        s = gl.where(gl.expand_dims(keys, 0) <= gl.expand_dims(rows, 1), s, -float("inf"))
    new = gl.maximum(m, gl.max(s, 1) * factor)
    wide = gl.expand_dims(new, 1) + gl.zeros_like(s)
    p = gl.exp2(gl.fma(s, factor + gl.zeros_like(s), -wide))
    return p, new, gl.exp2(m - new)


@gluon.jit
def _times(x, decay):
    """x times a factor for each row."""
    rows: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.expand_dims(gl.convert_layout(decay, rows, assert_trivial=True), 1)


@gluon.jit
def _joined(big, x, one, y):
    """fma(big, x, one * y) with a factor for each row."""
    rows: gl.constexpr = gl.SliceLayout(1, one.type.layout)
    wide = gl.expand_dims(gl.convert_layout(x, rows, assert_trivial=True), 1) + gl.zeros_like(one)
    return gl.fma(big, wide, _times(one, y))


@gluon.jit
def _steps(
    begin, end, ring, turn, p, m, den, acc, q, zero, rows, factor, ones, rings, bars, turns,
    WHICH: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Steps `begin` to `end` of a chunk. On entry and exit, the values' product of the step before `begin` is still to come, and
    the slot that it needs has arrived."""
    k_ring, v_ring = rings
    ready, free = bars
    for j in range(begin, end):
        at = ring + j
        if PINGPONG:
            mbarrier.wait(turns.index(WHICH), (turn & 1) ^ (WHICH == 0))
        else:
            arrived(ready, at, STAGES)  # it has, but the branch is of use: see below
        pending = _scores(q, k_ring, zero, at, STAGES)
        acc, den = _values(p, v_ring, ones, acc, den, at, STAGES)
        if PINGPONG:
            mbarrier.arrive(turns.index((WHICH + 1) % GROUPS), count=1)
            turn += 1
        s = warpgroup_mma_wait(num_outstanding=2, deps=(pending,))
        new_p, m, decay = _soft(s, m, factor, rows, j * PAGE, MASK)
        # The branch in here also keeps the compiler from waiting for the values' product before it takes the exponentials.
        arrived(ready, at + 1, STAGES)
        acc, den = warpgroup_mma_wait(num_outstanding=0, deps=(acc, den))
        mbarrier.arrive(free.index(at % STAGES), count=1)
        acc, den, p = _times(acc, decay), _times(den, decay), new_p
    return turn, p, m, den, acc


@gluon.jit
def _attend(
    shared, pointers, WHICH: gl.constexpr, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    CHUNKS: gl.constexpr, STEPS: gl.constexpr, SCALED: gl.constexpr, LSE: gl.constexpr, OUT8: gl.constexpr,
    POW2: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr, HELD: gl.constexpr, SPILL: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 rows of each piece of work."""
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES, 16])
    row: gl.constexpr = gl.SliceLayout(1, score)
    UNITS: gl.constexpr = BLOCK // 64
    GROUP: gl.constexpr = H // G
    smem, ones, big_smem, bars, turns = shared
    o_ptr, lse_ptr, scale_ptr, scale_stride, tile_ptr, ks_ptr, vs_ptr, base, total = pointers
    q_smem, rings = smem
    k_ring, v_ring = rings
    q_ready, q_free, ready, free = bars
    zero = gl.zeros([64, 64], gl.float32, score)
    ring = 0
    turn = 0
    for place in range(_rounds(total)):
        first, count, position, _, g, within = _place(_work(place), tile_ptr, GROUP, GROUPS // UNITS, G)
        all_steps = gl.cdiv(position + count, PAGE)
        within += WHICH // UNITS
        h = g * GROUP + within
        first += WHICH % UNITS * 64
        position += WHICH % UNITS * 64
        count = gl.where(within < GROUP, gl.minimum(count - WHICH % UNITS * 64, 64), 0)
        if PINGPONG:  # turns must go round
            steps = all_steps
        else:
            steps = gl.where(count > 0, gl.cdiv(position + count, PAGE), 0)
        plain = (position + 1) // PAGE  # steps that every row sees whole
        rows = position + gl.arange(0, 64, layout=row)
        factor = base
        if SCALED:
            factor = base * gl.load(ks_ptr + g)
        mbarrier.wait(q_ready, place & 1)
        q = q_smem.index(WHICH)
        if HELD:
            q = q.load(gl.DotOperandLayout(0, score, 2))
            if k_ring.dtype == gl.float16:
                q = half(q)
        big_m = gl.full([64], EMPTY, gl.float32, row)
        big_l = gl.zeros([64, ONES], gl.float32, sums)
        big_a = gl.zeros([64, D], gl.float32, out)
        arrived(ready, ring, STAGES)
        for start in range(0, steps, STEPS):
            stop = gl.minimum(start + STEPS, steps)
            pending = _scores(q, k_ring, zero, ring + start, STAGES)
            s = warpgroup_mma_wait(num_outstanding=0, deps=(pending,))
            mbarrier.arrive(free.index((ring + start) % STAGES), count=1)
            if HELD:  # not before: a product has read the registers, so the load isn't waiting behind the last tile's stores
                mbarrier.arrive(q_free, count=1, pred=start == 0)
            m = gl.full([64], EMPTY, gl.float32, row)
            p, m, _decay = _soft(s, m, factor, rows, start * PAGE, True)
            arrived(ready, ring + start + 1, STAGES)
            den = gl.zeros([64, ONES], gl.float32, sums)
            acc = gl.zeros([64, D], gl.float32, out)
            middle = gl.maximum(gl.minimum(plain, stop), start + 1)
            turn, p, m, den, acc = _steps(
                start + 1, middle, ring, turn, p, m, den, acc, q, zero, rows, factor, ones,
                rings, (ready, free), turns, WHICH, STAGES, PINGPONG, False,
            )  # fmt: skip
            turn, p, m, den, acc = _steps(
                middle, stop, ring, turn, p, m, den, acc, q, zero, rows, factor, ones,
                rings, (ready, free), turns, WHICH, STAGES, PINGPONG, True,
            )  # fmt: skip
            acc, den = _values(p, v_ring, ones, acc, den, ring + stop, STAGES)
            acc, den = warpgroup_mma_wait(num_outstanding=0, deps=(acc, den))
            mbarrier.arrive(free.index((ring + stop) % STAGES), count=1, pred=stop == steps)
            if CHUNKS:
                new = gl.maximum(big_m, m)
                x, y = gl.exp2(big_m - new), gl.exp2(m - new)
                big_l = _joined(big_l, x, den, y)
                if SPILL:
                    held = big_smem.index(WHICH)
                    big_a = gl.zeros([64, D], gl.float32, out)
                    if start > 0:
                        big_a = held.load(out)
                    big_a = _joined(big_a, x, acc, y)
                    if stop < steps:
                        held.store(big_a)
                else:
                    big_a = _joined(big_a, x, acc, y)
                big_m = new
            else:
                big_m, big_l, big_a = m, den, acc
        if HELD:
            mbarrier.arrive(q_free, count=1, pred=steps == 0)
        else:
            mbarrier.arrive(q_free, count=1)
        seen = steps + (steps > 0).to(gl.int32)
        for j in range(seen, all_steps + 1):  # keys of other warpgroups' rows alone
            at = ring + j
            arrived(ready, at, STAGES)
            mbarrier.arrive(free.index(at % STAGES), count=1)
        _finish(
            big_m, big_l, big_a, o_ptr, lse_ptr, vs_ptr, scale_ptr, scale_stride, first, count, h, g,
            H, D, SCALED, LSE, OUT8, POW2,
        )  # fmt: skip
        ring += all_steps + 1


@gluon.jit
def _finish(
    m, den, acc, o_ptr, lse_ptr, vs_ptr, scale_ptr, scale_stride, first, count, h, g, H: gl.constexpr,
    D: gl.constexpr, SCALED: gl.constexpr, LSE: gl.constexpr, OUT8: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    """Every row times its share, one over the denominator (and times the scale of values); stored as BF16 or as 1x128 codes."""
    row: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    whole = gl.convert_layout(gl.max(den, 1), row, assert_trivial=True)
    share = gl.div_rn(1.0, whole)
    if SCALED:
        share = share * gl.load(vs_ptr + g)
    o = acc * gl.expand_dims(share, 1)
    r = gl.arange(0, 64, layout=row)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, acc.type.layout))
    line = first.to(gl.int64) + r
    at = gl.expand_dims(line * (H * D) + h * D, 1) + gl.expand_dims(d, 0)
    inside = gl.expand_dims(r < count, 1)
    if OUT8:
        y = o.to(gl.bfloat16).to(gl.float32)
        scale = scale_of(gl.max(gl.abs(y), 1), POW2)
        gl.store(o_ptr + at, divided(y, scale, 1, POW2, True).to(gl.float8e4nv), mask=inside)
        gl.store(scale_ptr + h.to(gl.int64) * scale_stride + line, scale, mask=r < count)
    else:
        gl.store(o_ptr + at, o.to(gl.bfloat16), mask=inside)
    if LSE:
        high = gl.convert_layout(m, row, assert_trivial=True)
        gl.store(lse_ptr + line * H + h, high + gl.log2(whole), mask=r < count)


@gluon.jit(do_not_specialize=["total"])
def _wide(
    q_desc, k_desc, v_desc, o_ptr, lse_ptr, tile_ptr, table_ptr, ks_ptr, vs_ptr, scale_ptr, scale_stride, base,
    total, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, CHUNKS: gl.constexpr,
    STEPS: gl.constexpr, SCALED: gl.constexpr, LSE: gl.constexpr, OUT8: gl.constexpr, POW2: gl.constexpr,
    STAGES: gl.constexpr, PINGPONG: gl.constexpr, HELD: gl.constexpr, SPILL: gl.constexpr,
):  # fmt: skip
    gl.static_assert(GROUPS % (BLOCK // 64) == 0)
    kind: gl.constexpr = k_desc.dtype
    gl.static_assert(HELD or kind == gl.bfloat16, "queries become FP16 in registers")
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 64, D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(kind, [STAGES, 64, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(kind, [STAGES, D, 64], v_desc.layout)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ones = gl.allocate_shared_memory(kind, [ONES, 64], flat)
    spread: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    ones.store(gl.full([ONES, 64], 1.0, kind, spread))
    rows: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])
    big_smem = ones
    if SPILL:
        big_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, 64, D], rows)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [1], barriers)
    q_free = gl.allocate_shared_memory(gl.int64, [1], barriers)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], barriers)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=GROUPS)
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=GROUPS)
    for w in gl.static_range(GROUPS):
        mbarrier.init(turns.index(w), count=1)
    fence_async_shared()
    smem = (q_smem, (k_ring, v_ring))
    bars = (q_ready, q_free, ready, free)
    shared = (smem, ones, big_smem, bars, turns)
    pointers = (o_ptr, lse_ptr, scale_ptr, scale_stride, tile_ptr, ks_ptr, vs_ptr, base, total)
    source = (q_desc, k_desc, v_desc, smem, bars, tile_ptr, table_ptr, total)
    # fmt: off
    gl.warp_specialize(
        [
            (_attend, (shared, pointers, 0, H, G, D, BLOCK, CHUNKS, STEPS, SCALED, LSE, OUT8, POW2, STAGES, PINGPONG, HELD,
                       SPILL)),
            (_attend, (shared, pointers, 1, H, G, D, BLOCK, CHUNKS, STEPS, SCALED, LSE, OUT8, POW2, STAGES, PINGPONG, HELD,
                       SPILL)),
            (_copy, (source, H, G, D, BLOCK, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on


@dataclass(frozen=True)
class Plan:
    """How a launch is arranged. No bit depends on it.

    stages: slots of the ring. pingpong: the warpgroups take turns. held: queries stay in registers instead of shared memory.
    spill: the state of the chunks before waits in shared memory. persistent: one program a multiprocessor.
    """

    stages: int = 4
    pingpong: bool = False
    held: bool = True
    spill: bool = True
    persistent: bool = True


PLAN = Plan()


def takes(q_THD: Tensor, k_pages: Tensor, block: int) -> bool:
    """Whether this can be launched: BF16 queries over BF16 or FP16 pages, and `shapes`."""
    kinds = (torch.bfloat16, torch.float16)
    return q_THD.dtype == torch.bfloat16 and k_pages.dtype in kinds and shapes(q_THD, k_pages.shape[1], block)


def shapes(q_THD: Tensor, kv_heads: int, block: int) -> bool:
    """Whether heads are of 64 or 128, and no warpgroup is idle in every program."""
    _, heads, dim = q_THD.shape
    return dim in (64, 128) and (block == 128 or (block == 64 and heads > kv_heads))


def launch(
    q_THD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    lse_TH: Tensor,
    tiles_N4: Tensor,
    table: Tensor,
    scales: tuple[Tensor, Tensor],
    out_scale: Tensor,
    *,
    base: float,
    block: int,
    chunks: bool,
    steps: int,
    scaled: bool,
    lse: bool,
    codes: bool,
    pow2: bool,
    plan: Plan = PLAN,
) -> None:
    """Writes what `attention.prefill` returns. base: score factor without the key scale. steps: of a chunk."""
    rows, heads, dim = q_THD.shape
    kv_heads = k_pages.shape[1]
    together = GROUPS.value // (block // 64)
    total = len(tiles_N4) * kv_heads * -(-(heads // kv_heads) // together)
    programs = min(total, processors(q_THD.device)) if plan.persistent else total
    queries = boxes(q_THD.view(rows, heads * dim), 64, dim)
    keys, values = boxes(k_pages.view(-1, dim), 64, dim), boxes(v_pages.view(-1, 64), dim, 64)
    _wide[(programs,)](
        queries, keys, values, out, lse_TH, tiles_N4, table, *scales, out_scale, out_scale.stride(1), base, total,
        heads, kv_heads, dim, block, chunks, steps, scaled, lse, codes, pow2,
        plan.stages, plan.pingpong, plan.held, plan.spill and chunks, num_warps=4,
    )  # fmt: skip
