"""How far a quantized tensor is from its source: SQNR, saturation, underflow, relative error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.numerics.formats import E4M3_MAX
from lockstep.numerics.quantize import Quantized, widen


@dataclass(frozen=True)
class QuantizationError:
    """sqnr_db: signal to quantization noise in dB. saturated and underflowed: shares of elements at the largest code,
    and of non-zero elements that became zero. max_rel: largest error as a share of the source's largest value."""

    sqnr_db: float
    saturated: float
    underflowed: float
    max_rel: float


def sqnr_db(source: Tensor, approximation: Tensor) -> float:
    """10 log10(|x|^2 / |x - y|^2), in dB; infinity when equal."""
    source, approximation = source.double(), approximation.double()
    noise = (source - approximation).square().sum()
    if noise == 0:
        return float("inf")
    return float(10 * torch.log10(source.square().sum() / noise))


def measure(source: Tensor, quantized: Quantized) -> QuantizationError:
    """Errors of `quantized` against the tensor it was made from."""
    values = quantized.dequantize()
    codes = widen(quantized.codes).abs()
    nonzero = source != 0
    peak = float(source.abs().max())
    return QuantizationError(
        sqnr_db(source, values),
        float((codes == E4M3_MAX).float().mean()),
        float(((codes == 0) & nonzero).float().sum() / nonzero.sum().clamp(min=1)),
        float((source.float() - values).abs().max()) / peak if peak else 0.0,
    )
