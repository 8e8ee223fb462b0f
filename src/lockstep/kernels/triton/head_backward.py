"""The output head's row sums and gradients beside `head.py`'s: entropies, and from logits to their gradient in one pass.

    log p = x / t - normalizer
    d_x   = (g (1[target] - p) - g_entropy p (log p + entropy)) / t          t: temperature of the row

A row's logits are read once, and what the two products of the head's gradient read is written in BF16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.operation import operation
from lockstep.kernels.triton.head import SEGMENT, cooled
from lockstep.kernels.triton.sizes import cdiv


@triton.jit
def _entropy(x_ptr, temperature_ptr, normalizer_ptr, out_ptr, V, SEG: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature, normalizer = tl.load(temperature_ptr + row), tl.load(normalizer_ptr + row)
    total = tl.zeros((SEG,), tl.float32)
    for start in range(0, V, SEG):
        c = start + tl.arange(0, SEG)
        x = tl.load(x_ptr + row * V + c, mask=c < V, other=0.0)
        log_p = cooled(x, temperature) - normalizer
        total += tl.where(c < V, tl.exp(log_p) * log_p, 0.0)
    tl.store(out_ptr + row, -tl.sum(total, 0))


def _row_numbers(logits_CV: Tensor) -> Tensor:
    """Storage for a number of every row."""
    return torch.empty(logits_CV.shape[0], dtype=torch.float32, device=logits_CV.device)


@operation("entropy", fake=_row_numbers)
def entropy(logits_CV: Tensor, temperature_C: Tensor, normalizer_C: Tensor) -> Tensor:
    """Entropy [C] FP32, in nats, of softmax(logits / temperature); normalizers as `head.log_normalizer` gives them."""
    rows, vocabulary = logits_CV.shape
    out = _row_numbers(logits_CV)
    if rows:
        _entropy[(rows,)](logits_CV, temperature_C, normalizer_C, out, vocabulary, SEGMENT // 2, num_warps=8)
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
