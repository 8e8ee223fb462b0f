"""Counter-based randomness: the noise of a token is a function of (run seed, step, prompt, sample, position), nothing else.

So a sample does not depend on which others ran beside it, on preemption, or on a resume. A 64-bit mix (SplitMix64) of the
five numbers gives a row two 32-bit keys; element v of the row is a 32-bit integer hash of v (Chris Wellons' `triple32`), keyed
at its entry and again after its first round. Gumbel noise turns the uniform into a sample: argmax(logits + noise) is a draw from
the softmax. -log(-log(1 - u)) is taken with u precise near 0, where the winners are.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def row_keys(seed: int, step: int, prompt: int, sample: int, position: int) -> tuple[int, int]:
    """Two signed 32-bit keys of a row."""
    return keys_at(row_state(seed, step, prompt, sample), position)


def keys_at(state: int, position: int) -> tuple[int, int]:
    """The keys of a row whose generator had this `row_state` before the position went in."""
    state = _splitmix64((state ^ position) & _MASK)
    return _signed(state & 0xFFFFFFFF), _signed(state >> 32)


def row_state(seed: int, step: int, prompt: int, sample: int) -> int:
    """The generator's state before the position goes in, as a signed 64-bit integer: a device mixes the position in itself."""
    state = 0x243F6A8885A308D3
    for number in (seed, step, prompt, sample):
        state = _splitmix64(state ^ (number & _MASK))
    return state - (1 << 64) if state >= 1 << 63 else state


def gumbel(keys: list[tuple[int, int]], vocabulary: int, device: torch.device) -> Tensor:
    """[rows, vocabulary] FP32 standard Gumbel noise."""
    key = torch.tensor(keys, dtype=torch.int32, device=device)
    element = torch.arange(vocabulary, dtype=torch.int32, device=device) * _signed(0x9E3779B9)
    bits = _mix(element[None] + key[:, :1], key[:, 1:])
    uniform = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    return uniform.clamp_(max=1.0 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor, key: Tensor) -> Tensor:
    """triple32 with the second key between its first and second round; overwrites x."""
    x = x.bitwise_xor_(_shift_right(x, 17)).mul_(_signed(0xED5AD4BB)).bitwise_xor_(key)
    x = x.bitwise_xor_(_shift_right(x, 11)).mul_(_signed(0xAC4C1B51))
    x = x.bitwise_xor_(_shift_right(x, 15)).mul_(_signed(0x31848BAB))
    return x.bitwise_xor_(_shift_right(x, 14))


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
