"""Checks of matrix products and of the output head.

FP8 products are held against `block_matmul`, whose block sums are exact in float64; BF16 products against float64 before their
rounding. Both must give a row the same bits in every batch. The head's sampler is held against the definition of the noise in
`rollout/noise.py`: it may only pick another token where the two scores are nearly equal, since the device's logarithm rounds
otherwise than the CPU's.

Legend: M rows, K inputs, N outputs, V vocabulary. Next: `checks_attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lockstep.bench.check import Check, Size, near, poisoned, same
from lockstep.bench.products import NARROW_ROWS, forms, random_rows
from lockstep.bench.shapes import LinearShape, heads, linears
from lockstep.kernels.reference import block_matmul
from lockstep.kernels.truncation import Truncation, threshold
from lockstep.numerics.formats import BLOCK, square_blocks
from lockstep.numerics.quantize import Quantized, quantize
from lockstep.rollout import noise

SMALL_LINEARS = (
    LinearShape("small", 576, 192),
    LinearShape("small", 256, 256),
    LinearShape("ragged", 200, 72),
)
SMALL_NARROW = (LinearShape("small", 256, 256), LinearShape("small", 1152, 128))
SMALL_HEADS = (LinearShape("small head", 64, 5000),)
MANY_ROWS = 700
BATCHES = (1, 2, 3, 16, 17, 32, 33, 64, 65, 128, 129, 300, 512, 513)
SMALL_BATCHES = (1, 17, 33, 65)
NEAR_TIE = 1e-3
"""Scores that differ by less may be ordered otherwise by a device."""


def fp8_checks(size: Size) -> Iterator[Check]:
    """Block-scaled FP8 products."""
    from lockstep.kernels.triton import gemm
    from lockstep.kernels.triton.quantize import quantize_rows

    for shape in SMALL_LINEARS if size.small else linears(ragged=True):
        case = f"K {shape.inputs} N {shape.outputs}"
        count = max(SMALL_BATCHES) if size.small else MANY_ROWS
        x = random_rows(count, shape.inputs, torch.device("cpu")).cuda()
        w = quantize(_weight(shape, size.home), square_blocks("fp32"))
        w_codes, w_scale = w.codes.cuda(), w.scale.cuda()
        found = {}
        for rows in (*(SMALL_BATCHES if size.small else BATCHES), count):
            codes, scale = quantize_rows(x[:rows], pow2=False)
            with poisoned():
                found[rows] = gemm.fp8_matmul(codes, scale, w_codes, w_scale, w_group=BLOCK)
        whole = Quantized(codes.to(size.home), scale.to(size.home), (1, BLOCK))
        yield near("fp8_matmul", case, block_matmul(whole, w).bfloat16(), found[count])
        yield _row_law("fp8_matmul", case, found, count)
        widest = torch.repeat_interleave(w_scale, BLOCK, 0)[: shape.outputs].contiguous()
        y = gemm.fp8_matmul(codes, scale, w_codes, widest, w_group=1)
        yield same("fp8_matmul", f"a scale for each output, {case}", found[count], y)


def narrow_checks(size: Size) -> Iterator[Check]:
    """The FP8 product for few rows: the bits of the other one."""
    from lockstep.kernels.triton.gemm import fp8_matmul
    from lockstep.kernels.triton.narrow_gemm import narrow_matmul
    from lockstep.kernels.triton.quantize import quantize_rows

    for shape in SMALL_NARROW if size.small else linears():
        if shape.ragged:
            continue
        x = random_rows(NARROW_ROWS, shape.inputs, torch.device("cpu")).cuda()
        w = quantize(_weight(shape, size.home), square_blocks("fp32"))
        w_codes, w_scale = w.codes.cuda(), w.scale.cuda()
        codes, scale = quantize_rows(x, pow2=False)
        expected = fp8_matmul(codes, scale, w_codes, w_scale, w_group=BLOCK)
        counts = (1, 3, 16, 17) if size.small else (*range(1, 130), 191, 192, 193, 255, NARROW_ROWS)
        found = []
        for rows in counts:
            codes, scale = quantize_rows(x[:rows], pow2=False)
            for form in forms("narrow", rows, shape.outputs):
                with poisoned():
                    y = narrow_matmul(codes, scale, w_codes, w_scale, **form)
                found.append(int((y.view(torch.int16) != expected[:rows].view(torch.int16)).sum()))
        most = len(forms("narrow", 1, shape.outputs))
        case = f"{len(counts)} batch sizes, {most} forms, K {shape.inputs} N {shape.outputs}"
        yield same("narrow_matmul", case, torch.zeros(len(found)), torch.tensor(found).float())


def bf16_checks(size: Size) -> Iterator[Check]:
    """BF16 products with FP32 results, heads included, and their rounding to BF16."""
    from lockstep.kernels.triton import gemm

    for shape in SMALL_LINEARS + SMALL_HEADS if size.small else linears(ragged=True) + heads():
        case = f"K {shape.inputs} N {shape.outputs}"
        count = max(SMALL_BATCHES) if size.small else MANY_ROWS
        x = random_rows(count, shape.inputs, torch.device("cpu"))
        w = _weight(shape, size.home).bfloat16()
        x_there, w_there = x.cuda(), w.cuda()
        found = {}
        for rows in (*(SMALL_BATCHES if size.small else BATCHES), count):
            with poisoned():
                found[rows] = gemm.bf16_matmul(x_there[:rows], w_there, dtype=torch.float32)
        few = x[:33].to(size.home).double() @ w.double().t()
        yield near("bf16_matmul", case, few, found[count][:33])
        yield _row_law("bf16_matmul", case, found, count)
        rounded = gemm.bf16_matmul(x_there[:33], w_there)
        yield same("bf16_matmul", f"rounded, {case}", found[count][:33].bfloat16(), rounded)


def head_checks(size: Size) -> Iterator[Check]:
    """Log-normalizer, log-probability of the chosen token, and the choice."""
    from lockstep.kernels.triton import head

    rows, vocabulary = (3, 5000) if size.small else (300, 151_936)
    generator = torch.Generator().manual_seed(12)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    temperature = torch.ones(rows)
    temperature[1] = 0.7
    x, t = logits.cuda(), temperature.cuda()
    case = f"V {vocabulary}"
    with poisoned():
        found = head.log_normalizer(x, t)
    scaled = logits.double() / temperature.double()[:, None]
    expected = torch.logsumexp(scaled, -1)
    yield near("log_normalizer", case, expected, found)
    alone = [head.log_normalizer(x[i : i + 1].contiguous(), t[i : i + 1].contiguous()) for i in range(3)]
    yield same("log_normalizer", f"rows alone, {case}", found[:3], torch.cat(alone))
    target = torch.randint(vocabulary, (rows,), generator=generator)
    log_prob = scaled.gather(1, target[:, None])[:, 0] - expected
    with poisoned():
        chosen = head.target_log_prob(x, t, found, target.cuda())
    yield near("target_log_prob", case, log_prob, chosen)
    yield from _sample_checks(logits, temperature, case)
    yield from _truncation_checks(logits, temperature, case)


def _sample_checks(logits: Tensor, temperature: Tensor, case: str) -> Iterator[Check]:
    from lockstep.kernels.triton import head

    rows, vocabulary = logits.shape
    states = torch.tensor([draw_state(1, 2, 3, row) for row in range(rows)])
    positions = torch.full((rows,), 17)
    with poisoned():
        tokens = head.sample(logits.cuda(), temperature.cuda(), states.cuda(), positions.cuda()).cpu()
    keys = [noise.row_keys(1, 2, 3, row, 17) for row in range(rows)]
    scores = logits / temperature[:, None] + noise.gumbel(keys, vocabulary, torch.device("cpu"))
    inside = (tokens >= 0) & (tokens < vocabulary)
    got = scores.gather(1, tokens.clamp(0, vocabulary - 1)[:, None])[:, 0]
    best = scores.amax(1)
    yield same("sample", f"as defined, {case}", torch.ones(rows), (inside & (best - got < NEAR_TIE)).float())
    ties = torch.zeros(2, vocabulary)
    ties[1, [vocabulary - 1, vocabulary // 2, 7]] = 1.0
    greedy = head.sample(ties.cuda(), torch.zeros(2).cuda(), states[:2].cuda(), positions[:2].cuda())
    yield same("sample", f"greedy, ties to the lower token, {case}", torch.tensor([0, 7]), greedy)


def _truncation_checks(logits: Tensor, temperature: Tensor, case: str) -> Iterator[Check]:
    """Top-k and min-p to the bit; of top-p the mass that is kept, since the last bit of an exponential is the device's own."""
    from lockstep.kernels.triton.truncation import kept_ids, truncation_threshold

    rows, given = len(logits), (logits.cuda(), temperature.cuda())
    scaled = (given[0] / given[1][:, None]).cpu()
    p = scaled.double().softmax(1)
    for what, top_k, min_p, top_p in (("top-k and min-p", 50, 1e-3, 1.0), ("top-p", 4000, 0.0, 0.9)):
        asked = Truncation.of([top_k] * rows, [min_p] * rows, [top_p] * rows, torch.device("cuda"))
        with poisoned():
            least = truncation_threshold(*given, *asked.parts)
        expected = threshold(scaled, Truncation(*(x.cpu() for x in asked.parts)))
        if top_p == 1.0:
            yield same("truncation", f"{what}, {case}", expected, least)
        else:
            mass = [p.masked_fill(scaled < x[:, None], 0.0).sum(1) for x in (expected, least.cpu())]
            yield near("truncation", f"{what}, {case}", mass[0], mass[1], 60.0)
        with poisoned():
            ids, count = kept_ids(*given, least, torch.ones_like(asked.top_k_R), 4096)
        inside = scaled >= least.cpu()[:, None]
        listed = torch.cat([some[:n] for some, n in zip(ids.cpu(), count.tolist(), strict=True)])
        yield same("kept ids", f"{what}, {case}", inside.nonzero()[:, 1].float(), listed.float())


def draw_state(*numbers: int) -> int:
    """The generator's state after these numbers as a signed 64-bit integer: SplitMix64 of each, from the definition's seed."""
    mask, state = (1 << 64) - 1, 0x243F6A8885A308D3
    for number in numbers:
        state = ((state ^ (number & mask)) + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state - (1 << 64) if state >> 63 else state


def _row_law(kernel: str, case: str, found: dict[int, Tensor], count: int) -> Check:
    """Every batch of the first rows against the same rows of the largest."""
    smaller: Sequence[int] = [rows for rows in found if rows != count]
    expected = torch.cat([found[count][:rows] for rows in smaller])
    return same(
        kernel, f"{len(smaller)} batch sizes, {case}", expected, torch.cat([found[r] for r in smaller])
    )


def _weight(shape: LinearShape, device: torch.device) -> Tensor:
    """[N, K] FP32."""
    generator = torch.Generator(device).manual_seed(shape.inputs + shape.outputs)
    return torch.randn(shape.outputs, shape.inputs, generator=generator, device=device) * 0.02
