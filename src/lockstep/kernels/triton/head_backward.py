"""The output head's row sums and gradients beside `head.py`'s: entropies, and from logits to their gradient in one pass.

    log p = x / t - normalizer
    d_x   = (g (1[target] - p) - g_entropy p (log p + entropy)) / t          t: temperature of the row

A row's logits are read once, and what the two products of the head's gradient read is written in BF16. The pass over entropies
can leave p in BF16, from which the gradient is made in place. There 1 - p would cancel: BF16 knows a p near one to 2^-9. So what
concerns the target comes from its log-probability in FP32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.operation import operation
from lockstep.kernels.triton.head import LN2, SEGMENT, cooled, log2
from lockstep.kernels.triton.sizes import cdiv


@triton.jit(do_not_specialize=["stored"])
def _entropy(x_ptr, temperature_ptr, normalizer_ptr, out_ptr, p_ptr, stored, V, SEG: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature, normalizer = tl.load(temperature_ptr + row), tl.load(normalizer_ptr + row)
    total = tl.zeros((SEG,), tl.float32)
    for start in range(0, V, SEG):
        c = start + tl.arange(0, SEG)
        x = tl.load(x_ptr + row * V + c, mask=c < V, other=0.0)
        log_p = cooled(x, temperature) - normalizer
        p = tl.exp(log_p)
        total += tl.where(c < V, p * log_p, 0.0)
        tl.store(p_ptr + row * V + c, p.to(tl.bfloat16), mask=(c < V) & (row < stored))
    tl.store(out_ptr + row, -tl.sum(total, 0))


def _row_numbers(logits_CV: Tensor) -> Tensor:
    """Storage for a number of every row."""
    return torch.empty(logits_CV.shape[0], dtype=torch.float32, device=logits_CV.device)


@operation("entropy", fake=_row_numbers, mutates=("p_SV",))
def entropy(
    logits_CV: Tensor, temperature_C: Tensor, normalizer_C: Tensor, p_SV: Tensor | None = None
) -> Tensor:
    """Entropy [C] FP32, in nats, of p = softmax(logits / temperature); normalizers as `head.log_normalizer` gives them.

    p_SV: BF16, is given p of the first rows, S <= C. One kernel does both, so an entropy has the same bits either way.
    """
    rows, vocabulary = logits_CV.shape
    out = _row_numbers(logits_CV)
    if rows:
        to, stored = (logits_CV.view(torch.bfloat16), 0) if p_SV is None else (p_SV, p_SV.shape[0])
        _entropy[(rows,)](
            logits_CV, temperature_C, normalizer_C, out, to, stored, vocabulary, SEGMENT // 2, num_warps=8
        )
    return out


@triton.jit
def _logits_grad(
    x_ptr,
    out_ptr,
    temperature_ptr,
    normalizer_ptr,
    target_ptr,
    grad_ptr,
    entropy_ptr,
    grad_entropy_ptr,
    V,
    SEG: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * SEG + tl.arange(0, SEG)
    temperature, grad = tl.load(temperature_ptr + row), tl.load(grad_ptr + row)
    x = tl.load(x_ptr + row * V + c, mask=c < V, other=0.0)
    log_p = cooled(x, temperature) - tl.load(normalizer_ptr + row)
    p = tl.exp(log_p)
    d = -p * grad
    if ENTROPY:
        d -= tl.load(grad_entropy_ptr + row) * p * (log_p + tl.load(entropy_ptr + row))
    d = tl.where(c == tl.load(target_ptr + row), d + grad, d)
    tl.store(out_ptr + row * V + c, (d * (1.0 / temperature)).to(tl.bfloat16), mask=c < V)


@operation("logits_grad", fake=lambda: None, mutates=("out_CV",))
def logits_grad(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperature_C: Tensor,
    normalizer_C: Tensor,
    entropy_C: Tensor,
    grad_C: Tensor,
    grad_entropy_C: Tensor | None,
    out_CV: Tensor,
) -> None:
    """Writes d [C, V] BF16 of raw FP32 logits. grad_C, grad_entropy_C: FP32, of log-probabilities and of entropies."""
    rows, vocabulary = logits_CV.shape
    if rows:
        _logits_grad[(rows, cdiv(vocabulary, SEGMENT))](
            logits_CV,
            out_CV,
            temperature_C,
            normalizer_C,
            targets_C,
            grad_C,
            entropy_C,
            grad_C if grad_entropy_C is None else grad_entropy_C,
            vocabulary,
            SEGMENT,
            grad_entropy_C is not None,
            num_warps=8,
        )


@triton.jit
def _complement(log_p):
    """1 - exp(log_p), to 2^-20 of itself also where the two are close."""
    series = 0.5 + log_p * (0.16666667 + log_p * (0.041666667 + log_p * 0.0083333333))
    return tl.where(log_p > -0.125, -log_p * (1.0 + log_p * series), 1.0 - tl.exp(log_p))


@triton.jit
def _stored_logits_grad(
    p_ptr,
    temperature_ptr,
    log_prob_ptr,
    target_ptr,
    grad_ptr,
    entropy_ptr,
    grad_entropy_ptr,
    V,
    SEG: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * SEG + tl.arange(0, SEG)
    temperature, grad = tl.load(temperature_ptr + row), tl.load(grad_ptr + row)
    own, log_prob = c == tl.load(target_ptr + row), tl.load(log_prob_ptr + row)
    p = tl.load(p_ptr + row * V + c, mask=c < V, other=0.0).to(tl.float32)
    d = tl.where(own, _complement(log_prob), -p) * grad
    if ENTROPY:
        # of 2^-126 at least: zero has no logarithm, smaller numbers are taken for zero, and as a constant they would be FP64
        log_p = tl.where(own, log_prob, LN2 * log2(tl.maximum(p, 1.1754944e-38)))
        p = tl.where(own, tl.exp(log_prob), p)
        d -= tl.load(grad_entropy_ptr + row) * p * (log_p + tl.load(entropy_ptr + row))
    tl.store(p_ptr + row * V + c, (d * (1.0 / temperature)).to(tl.bfloat16), mask=c < V)


@operation("stored_logits_grad", fake=lambda: None, mutates=("p_SV",))
def stored_logits_grad(
    p_SV: Tensor,
    targets_S: Tensor,
    temperature_S: Tensor,
    log_prob_S: Tensor,
    entropy_S: Tensor,
    grad_S: Tensor,
    grad_entropy_S: Tensor | None,
) -> None:
    """Writes d [S, V] BF16 of raw logits over p [S, V], which `entropy` stored. log_prob_S: FP32, of the targets. grad_S,
    grad_entropy_S: as for `logits_grad`."""
    rows, vocabulary = p_SV.shape
    if rows:
        _stored_logits_grad[(rows, cdiv(vocabulary, SEGMENT))](
            p_SV,
            temperature_S,
            log_prob_S,
            targets_S,
            grad_S,
            entropy_S,
            grad_S if grad_entropy_S is None else grad_entropy_S,
            vocabulary,
            SEGMENT,
            grad_entropy_S is not None,
            num_warps=8,
        )
