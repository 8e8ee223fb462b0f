"""From logits to a sample and its log-probability, row by row.

The log-normalizer is computed by the same two launches for the sampler and for the trainer: segments of a row, each reduced
in a program of its own, and a second program that adds them up. Sampling is a third and a fourth launch over the same
logits: Gumbel noise from a counter-based generator (`rollout/noise.py` has the definition), then the largest score, ties to
the lower token. Two precise logarithms for each logit would take four times as long as reading it: the third launch finds by
approximate ones which segments may hold the largest score, the fourth computes those.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.operation import operation
from lockstep.kernels.triton.sizes import cdiv, power_of_2

SEGMENT = 4096
LN2 = tl.constexpr(0.6931471805599453)
MARGIN = tl.constexpr(0.02)
"""Noise by approximate logarithms is off by 0.002 at most: -log(u) of a tail u near one, known to 2^-22, is 0.0001 or more."""


def _row_numbers(logits_TV: Tensor) -> Tensor:
    """Storage for a number of every row."""
    return torch.empty(logits_TV.shape[0], dtype=torch.float32, device=logits_TV.device)


def _tokens(logits_RV: Tensor) -> Tensor:
    """Storage for a token of every row."""
    return torch.empty(logits_RV.shape[0], dtype=torch.int64, device=logits_RV.device)


@triton.jit
def cooled(x, temperature):
    """x / temperature, rounded once. Most rows have temperature 1, and a division for each logit takes as long as reading it."""
    if temperature != 1.0:
        x = tl.div_rn(x, temperature + tl.zeros_like(x))
    return x


@triton.jit
def _segments(x_ptr, temperature_ptr, part_ptr, V, segments, SEG: tl.constexpr):
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = segment * SEG + tl.arange(0, SEG)
    temperature = tl.load(temperature_ptr + row)
    x = cooled(tl.load(x_ptr + row * V + c, mask=c < V, other=-float("inf")), temperature)
    m = tl.max(x, 0)
    part = part_ptr + (row * segments + segment) * 2
    tl.store(part, m)
    tl.store(part + 1, tl.sum(tl.exp(x - m), 0))


@triton.jit
def _normalizer(part_ptr, out_ptr, segments, SP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SP)
    part = part_ptr + (row * segments + s) * 2
    m = tl.load(part, mask=s < segments, other=-float("inf"))
    total = tl.load(part + 1, mask=s < segments, other=0.0)
    peak = tl.max(m, 0)
    tl.store(out_ptr + row, peak + tl.log(tl.sum(total * tl.exp(m - peak), 0)))


@operation("log_normalizer", fake=_row_numbers)
def log_normalizer(logits_TV: Tensor, temperature_T: Tensor) -> Tensor:
    """log sum exp(logits / temperature) [T] FP32 of FP32 logits."""
    rows, vocabulary = logits_TV.shape
    out = _row_numbers(logits_TV)
    if rows:
        segments = cdiv(vocabulary, SEGMENT)
        part = torch.empty(rows, segments, 2, dtype=torch.float32, device=logits_TV.device)
        _segments[(rows, segments)](
            logits_TV, temperature_T, part, vocabulary, segments, SEGMENT, num_warps=8
        )
        _normalizer[(rows,)](part, out, segments, power_of_2(segments), num_warps=1)
    return out


@triton.jit
def _target(x_ptr, temperature_ptr, normalizer_ptr, target_ptr, out_ptr, rows, V, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = row < rows
    target = tl.load(target_ptr + row, mask=ok, other=0)
    x = tl.load(x_ptr + row.to(tl.int64) * V + target, mask=ok, other=0.0)
    x = tl.div_rn(x, tl.load(temperature_ptr + row, mask=ok, other=1.0))
    tl.store(out_ptr + row, x - tl.load(normalizer_ptr + row, mask=ok, other=0.0), mask=ok)


@operation("target_log_prob", fake=_row_numbers)
def target_log_prob(
    logits_TV: Tensor, temperature_T: Tensor, normalizer_T: Tensor, targets_T: Tensor
) -> Tensor:
    """log p of the targets (int64), [T] FP32."""
    rows, vocabulary = logits_TV.shape
    out = _row_numbers(logits_TV)
    if rows:
        _target[(cdiv(rows, 128),)](
            logits_TV, temperature_T, normalizer_T, targets_T, out, rows, vocabulary, 128, num_warps=4
        )
    return out


@triton.jit
def _shift(x, count: tl.constexpr):
    return (x >> count) & ((1 << (32 - count)) - 1)


@triton.jit
def _splitmix(x):
    x = x + (-7046029254386353131)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * (-4658895280553007687)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * (-7723592293110705685)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def log2(x):
    """To 2^-22, of x or absolutely, whichever is larger."""
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _uniform(c, key):
    """Numbers in (0, 1) of tokens c under a row's 64-bit key."""
    low, high = key.to(tl.int32), (key >> 32).to(tl.int32)
    bits = c * (-1640531527) + low
    bits = ((bits ^ _shift(bits, 17)) * (-312814405)) ^ high
    bits = (bits ^ _shift(bits, 11)) * (-1404298415)
    bits = (bits ^ _shift(bits, 15)) * 830770091
    bits = bits ^ _shift(bits, 14)
    uniform = ((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    return tl.minimum(uniform, 1.0 - 1.0 / 16777216.0)


@triton.jit
def _segment_scores(
    x_ptr,
    temperature_ptr,
    state_ptr,
    position_ptr,
    threshold_ptr,
    row,
    segment,
    V,
    SEG: tl.constexpr,
    TRUNCATED: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Scores of a segment of a row, or what comes within MARGIN of them for a quarter of the instructions."""
    c = segment * SEG + tl.arange(0, SEG)
    temperature = tl.load(temperature_ptr + row)
    x = tl.load(x_ptr + row * V + c, mask=c < V, other=-float("inf"))
    if temperature > 0.0:
        x = cooled(x, temperature)
        if TRUNCATED:
            x = tl.where(x >= tl.load(threshold_ptr + row), x, -float("inf"))
        uniform = _uniform(c, _splitmix(tl.load(state_ptr + row) ^ tl.load(position_ptr + row).to(tl.int64)))
        if EXACT:
            # -log1p(-u) = u for the smallest u; log of the exact complement elsewhere
            tail = 1.0 - uniform
            x = x - tl.log(tl.where(uniform < 0.0001, uniform + 0.5 * uniform * uniform, -tl.log(tail)))
        else:
            x = x - LN2 * log2(tl.where(uniform < 0.0001, uniform, -LN2 * log2(1.0 - uniform)))
    return x


@triton.jit
def _scores(
    x_ptr,
    temperature_ptr,
    state_ptr,
    position_ptr,
    threshold_ptr,
    part_ptr,
    V,
    segments,
    SEG: tl.constexpr,
    TRUNCATED: tl.constexpr,
):
    """About the largest score of every segment."""
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = _segment_scores(
        x_ptr, temperature_ptr, state_ptr, position_ptr, threshold_ptr, row, segment, V, SEG, TRUNCATED, False
    )
    tl.store(part_ptr + row * segments + segment, tl.max(x, 0))


@triton.jit
def _best(
    x_ptr,
    temperature_ptr,
    state_ptr,
    position_ptr,
    threshold_ptr,
    part_ptr,
    token_ptr,
    V,
    segments,
    SP: tl.constexpr,
    SEG: tl.constexpr,
    TRUNCATED: tl.constexpr,
):
    """The largest score of a row, from the segments that may have it: as a rule from one."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SP)
    peak = tl.max(tl.load(part_ptr + row * segments + s, mask=s < segments, other=-float("inf")), 0)
    least = peak  # of a greedy row, or an infinite one
    if (tl.load(temperature_ptr + row) > 0.0) & (peak < float("inf")):
        least = peak - (MARGIN + tl.abs(peak) * 0.000001)
    best, token = tl.full((), -float("inf"), tl.float32), tl.full((), 0, tl.int32)
    for segment in range(segments):
        if tl.load(part_ptr + row * segments + segment) >= least:
            x = _segment_scores(
                x_ptr,
                temperature_ptr,
                state_ptr,
                position_ptr,
                threshold_ptr,
                row,
                segment,
                V,
                SEG,
                TRUNCATED,
                True,
            )
            score, at = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
            token = tl.where(score > best, segment * SEG + at, token)
            best = tl.maximum(best, score)
    tl.store(token_ptr + row, token.to(tl.int64))


@operation("sample", fake=_tokens)
def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    state_R: Tensor,
    position_R: Tensor,
    threshold_R: Tensor | None = None,
) -> Tensor:
    """Tokens [R] int64: argmax(logits / temperature + Gumbel noise); temperature 0 is greedy.

    state_R: int64, the generator's state after (seed, step, prompt, sample); position_R: int64 number of the drawn token.
    threshold_R: FP32, what is less, over the temperature, isn't drawn (`truncation.py`).
    """
    rows, vocabulary = logits_RV.shape
    segments = cdiv(vocabulary, SEGMENT)
    part = torch.empty(rows, segments, dtype=torch.float32, device=logits_RV.device)
    tokens = _tokens(logits_RV)
    if rows:
        truncated = threshold_R is not None
        bound = temperature_R if threshold_R is None else threshold_R
        given = (logits_RV, temperature_R, state_R, position_R, bound, part)
        _scores[(rows, segments)](*given, vocabulary, segments, SEGMENT, truncated, num_warps=8)
        sizes = (vocabulary, segments, power_of_2(segments), SEGMENT, truncated)
        _best[(rows,)](*given, tokens, *sizes, num_warps=8)
    return tokens
