"""Inverse frequencies of the rotary embedding, in float64, for the kinds a checkpoint may ask for.

`llama3` follows Llama 3.1's own code: low frequencies are divided by the factor, high ones kept, those between blended
linearly in wavelength.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.models.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """[head_dim / 2] float64."""
    base = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / base
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        mixed = (1 - blend) * base / rope.factor + blend * base
        return torch.where(wavelength > low, base / rope.factor, torch.where(wavelength < high, base, mixed))
    return base
