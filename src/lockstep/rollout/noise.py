"""Counter-based randomness: the noise of a token is a function of (run seed, step, prompt, sample, position), nothing else.

So a sample does not depend on which others ran beside it, on preemption, or on a resume. A 64-bit mix (SplitMix64) of the
five numbers gives a row two 32-bit keys; element v of the row is a 32-bit integer hash of v under both keys (Chris
Wellons' `triple32`, then `lowbias32`). Gumbel noise turns the uniform into a sample: argmax(logits + noise) is a draw from
the softmax. -log(-log(1 - u)) is taken with u precise near 0, where the winners are.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def row_keys(seed: int, step: int, prompt: int, sample: int, position: int) -> tuple[int, int]:
    """Two signed 32-bit keys of a row."""
    state = 0x243F6A8885A308D3
    for number in (seed, step, prompt, sample, position):
        state = _splitmix64(state ^ (number & _MASK))
    return _signed(state & 0xFFFFFFFF), _signed(state >> 32)


def gumbel(keys: list[tuple[int, int]], vocabulary: int, device: torch.device) -> Tensor:
    """[rows, vocabulary] FP32 standard Gumbel noise."""
    key = torch.tensor(keys, dtype=torch.int32, device=device)
    element = torch.arange(vocabulary, dtype=torch.int32, device=device) * _signed(0x9E3779B9)
    bits = _lowbias32(_triple32(element[None] + key[:, :1]) ^ key[:, 1:])
    uniform = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    return _exponential(uniform).log_().neg_()


def _exponential(uniform: Tensor) -> Tensor:
    """-log(1 - u) in (0, inf): the series where 1 - u would lose u's low bits, torch's log elsewhere."""
    small = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3.0)))
    return torch.where(uniform < 2.0**-7, small, -(1.0 - uniform).clamp_(min=2.0**-24).log_())


def _triple32(x: Tensor) -> Tensor:
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x = (x ^ _shift_right(x, shift)).mul_(_signed(factor))
    return x ^ _shift_right(x, 14)


def _lowbias32(x: Tensor) -> Tensor:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ _shift_right(x, shift)).mul_(_signed(factor))
    return x ^ _shift_right(x, 16)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Logical shift of int32."""
    return (x >> count).bitwise_and_((1 << (32 - count)) - 1)


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x
