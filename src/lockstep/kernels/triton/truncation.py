"""Where a row's truncation ends, and which ids it keeps: `../truncation.py` on a GPU, a program a row.

Thresholds are found by halving: floats in the order of their bits are integers, and a count or a sum over the row says of one
whether enough lies at or above it. As soon as at most `NEAR` logits are left between what is enough and what isn't, these are
listed, and the other halvings go over the list. Nothing is sorted, and the way to a threshold doesn't change it.

Shapes: R rows, V vocabulary, W ids of a row that are listed at most.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels import truncation
from lockstep.kernels.operation import operation
from lockstep.kernels.triton.head import SEGMENT, cooled

SHARE_BITS, MASS = tl.constexpr(truncation.SHARE_BITS), tl.constexpr(truncation.MASS)
WHOLE = tl.constexpr(1 << truncation.SHARE_BITS)
LOW_BITS = tl.constexpr((1 << truncation.SHARE_BITS) - 1)
FAR = tl.constexpr(28.0)
"""A logit that is so far below the largest has a mass of zero: 2^40 exp(-28) is less than one."""
BY_VALUE = tl.constexpr(12)
"""Halvings of an interval of values, before those of keys, which always come to an end."""
NEAR = 8192
"""Logits of a row that are listed, at most."""


@triton.jit
def _key(x):
    """An integer of a float, in the same order; and back, since the map is its own inverse on bits."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _at_least(x_ptr, count, temperature, peak, key, SEG: tl.constexpr, WEIGHED: tl.constexpr):
    """(how many, their mass or once more how many) of so many logits have this key or a larger one."""
    many, mass = tl.zeros((SEG,), tl.int32), tl.zeros((SEG,), tl.int64)
    for start in range(0, count, SEG):
        c = start + tl.arange(0, SEG)
        x = cooled(tl.load(x_ptr + c, mask=c < count, other=-float("inf")), temperature)
        inside = (c < count) & (_key(x) >= key)
        many += inside.to(tl.int32)
        if WEIGHED:
            mass += tl.where(inside, (tl.exp(x - peak) * MASS).to(tl.int64), 0)
    found = tl.sum(many, 0)
    return found, tl.sum(mass, 0) if WEIGHED else found.to(tl.int64)


@triton.jit
def _between(x_ptr, near_ptr, V, temperature, low, last, SEG: tl.constexpr, NEAR: tl.constexpr):
    """Lists the logits with keys from `low` to `last`, over their temperature; how many."""
    count = tl.full((), 0, tl.int32)
    for start in range(0, V, SEG):
        c = start + tl.arange(0, SEG)
        x = cooled(tl.load(x_ptr + c, mask=c < V, other=-float("inf")), temperature)
        key = _key(x)
        number = ((c < V) & (key >= low) & (key <= last)).to(tl.int32)
        place = count + tl.cumsum(number, 0) - number
        tl.store(near_ptr + place, x, mask=(number > 0) & (place < NEAR))
        count += tl.sum(number, 0)
    return count


@triton.jit
def _largest(
    x_ptr,
    near_ptr,
    V,
    temperature,
    peak,
    floor,
    wanted,
    SEG: tl.constexpr,
    NEAR: tl.constexpr,
    WEIGHED: tl.constexpr,
):
    """The largest key that so much lies at or above of; floor: a key with enough."""
    low, from_low = floor.to(tl.int64), V + 0
    high, from_high = _key(peak).to(tl.int64) + 1, tl.full((), 0, tl.int32)  # never enough
    above, tries = tl.full((), 0, tl.int64), tl.full((), 0, tl.int32)
    while (high - low > 1) & (from_low - from_high > NEAR):
        middle = (low + high) >> 1
        if (
            tries < BY_VALUE
        ):  # most logits are far below the largest: halves of values leave fewer than halves of keys
            value = 0.5 * (tl.maximum(_value(low.to(tl.int32)), peak - FAR) + _value(high.to(tl.int32)))
            middle = tl.minimum(tl.maximum(_key(value).to(tl.int64), low + 1), high - 1)
        many, amount = _at_least(x_ptr, V, temperature, peak, middle.to(tl.int32), SEG, WEIGHED)
        if amount >= wanted:
            low, from_low = middle, many
        else:
            high, from_high, above = middle, many, amount
        tries += 1
    if high - low > 1:
        count = _between(
            x_ptr, near_ptr, V, temperature, low.to(tl.int32), (high - 1).to(tl.int32), SEG, NEAR
        )
        tl.debug_barrier()  # the list is there
        while high - low > 1:
            middle = (low + high) >> 1
            many, amount = _at_least(near_ptr, count, 1.0, peak, middle.to(tl.int32), SEG, WEIGHED)
            if above + amount >= wanted:
                low = middle
            else:
                high = middle
        tl.debug_barrier()  # it has been read
    return low.to(tl.int32)


@triton.jit
def _threshold(
    x_ptr,
    temperature_ptr,
    top_k_ptr,
    least_ptr,
    share_ptr,
    out_ptr,
    near_ptr,
    V,
    SEG: tl.constexpr,
    NEAR: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k, share = tl.load(top_k_ptr + row).to(tl.int64), tl.load(share_ptr + row).to(tl.int64)
    x_ptr += row * V
    near_ptr += row * NEAR
    most = tl.full((SEG,), -float("inf"), tl.float32)
    for start in range(0, V, SEG):
        c = start + tl.arange(0, SEG)
        most = tl.maximum(most, cooled(tl.load(x_ptr + c, mask=c < V, other=-float("inf")), temperature))
    peak = tl.max(most, 0)
    least = tl.full((), -float("inf"), tl.float32)
    if (top_k > 0) & (top_k < V):
        least = _value(_largest(x_ptr, near_ptr, V, temperature, peak, _key(least), top_k, SEG, NEAR, False))
    least = tl.maximum(least, peak + tl.load(least_ptr + row))
    if share < WHOLE:
        _, mass = _at_least(x_ptr, V, temperature, peak, _key(least), SEG, True)
        wanted = (mass >> SHARE_BITS) * share + (((mass & LOW_BITS) * share) >> SHARE_BITS)
        floor = _key(tl.maximum(least, peak - FAR))  # what is less has no mass
        least = _value(_largest(x_ptr, near_ptr, V, temperature, peak, floor, wanted, SEG, NEAR, True))
    tl.store(out_ptr + row, least)


def _row_numbers(logits_RV: Tensor) -> Tensor:
    """Storage for a number of every row."""
    return torch.empty(logits_RV.shape[0], dtype=torch.float32, device=logits_RV.device)


@operation("truncation_threshold", fake=_row_numbers)
def truncation_threshold(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, least_R: Tensor, share_R: Tensor
) -> Tensor:
    """`truncation.threshold` of raw FP32 logits over their temperatures, [R] FP32. The rest: see `truncation.Truncation`."""
    rows, vocabulary = logits_RV.shape
    out = _row_numbers(logits_RV)
    if rows:
        near = torch.empty(rows, NEAR, dtype=torch.float32, device=logits_RV.device)
        given = (logits_RV, temperature_R, top_k_R, least_R, share_R, out, near)
        _threshold[(rows,)](*given, vocabulary, SEGMENT // 2, NEAR, num_warps=8)
    return out


@triton.jit
def _kept_ids(x_ptr, temperature_ptr, threshold_ptr, width_ptr, ids_ptr, count_ptr, V, W, SEG: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature, threshold = tl.load(temperature_ptr + row), tl.load(threshold_ptr + row)
    count = tl.full((), 0, tl.int32)
    if tl.load(width_ptr + row) > 0:
        for start in range(0, V, SEG):
            c = start + tl.arange(0, SEG)
            x = cooled(tl.load(x_ptr + row * V + c, mask=c < V, other=-float("inf")), temperature)
            inside = (c < V) & (x >= threshold)
            number = inside.to(tl.int32)
            place = count + tl.cumsum(number, 0) - number
            tl.store(ids_ptr + row * W + place, c, mask=inside & (place < W))
            count += tl.sum(number, 0)
    tl.store(count_ptr + row, count)


def _ids_and_counts(logits_RV: Tensor, width: int) -> list[Tensor]:
    rows, device = logits_RV.shape[0], logits_RV.device
    return [
        torch.empty(rows, width, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
    ]


@operation("kept_ids", fake=_ids_and_counts)
def kept_ids(
    logits_RV: Tensor, temperature_R: Tensor, threshold_R: Tensor, most_R: Tensor, width: int
) -> list[Tensor]:
    """[ids int32 [R, width], how many int32 [R]] of what is not below a row's threshold, ascending; none of rows whose `most_R`
    (int32) is 0. A row that keeps more than `width` says so and lists the first ones. Behind a row's ids lies anything."""
    rows, vocabulary = logits_RV.shape
    ids, count = _ids_and_counts(logits_RV, width)
    if rows:
        given = (logits_RV, temperature_R, threshold_R, most_R, ids, count)
        _kept_ids[(rows,)](*given, vocabulary, width, SEGMENT, num_warps=8)
    return [ids, count]
