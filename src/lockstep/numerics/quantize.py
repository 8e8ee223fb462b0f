"""The quantizer. There is one; kernels, weight publication and checkpoint export are tested against it byte for byte.

A group of values shares a scale: `scale = max(amax, floor) / 448` in FP32, or that rounded up to a power of two, and
`code = e4m3(clamp(x / scale))`, rounded to nearest even. The stored scale is the one to multiply by. Four choices matter:

- The floor keeps an all-zero group finite: zero codes and a tiny scale, instead of 0/0 (slime 2256, ao 4713).
- The clamp comes before the cast: torch 2.11 on the CPU casts values above 464 to NaN, torch 2.13 saturates.
- The division is a true FP32 division, not a product with a reciprocal: both round, and they round differently.
- Groups at a ragged edge are shorter; nothing is padded in storage, so codes have the tensor's own shape.

A non-finite input is refused: a NaN in a weight or an activation would turn into a plausible code.

Next: `measures.py` says how good the codes are; `kernels/reference.py` multiplies them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.numerics.formats import AMAX_FLOOR, E4M3, E4M3_MAX, Operand, ScaleKind


@dataclass(frozen=True)
class Quantized:
    """Codes and scales of a matrix.

    codes: [R, C] float8_e4m3fn. scale: [ceil(R / group[0]), ceil(C / group[1])] FP32, what a code is multiplied by.
    """

    codes: Tensor
    scale: Tensor
    group: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def expanded_scale(self) -> Tensor:
        """[R, C] FP32: the scale of every element."""
        rows, columns = self.shape
        scale = self.scale
        if self.group[0] > 1:
            scale = scale.repeat_interleave(self.group[0], 0)[:rows]
        if self.group[1] > 1:
            scale = scale.repeat_interleave(self.group[1], 1)[:, :columns]
        return scale

    def dequantize(self) -> Tensor:
        """[R, C] FP32: code times scale, rounded once."""
        return scale_groups(widen(self.codes), self.scale, self.group)

    def transpose(self) -> Quantized:
        """The transposed matrix with the same codes; groups turn with it."""
        return Quantized(self.codes.t(), self.scale.t(), (self.group[1], self.group[0]))

    def digest(self) -> str:
        """SHA-256 over shape, group, codes and scales: equal on every machine for equal values."""
        h = hashlib.sha256(repr((self.shape, self.group)).encode())
        h.update(self.codes.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        h.update(self.scale.contiguous().cpu().numpy().tobytes())
        return h.hexdigest()


def quantize(x: Tensor, operand: Operand) -> Quantized:
    """Codes and scales of a matrix x [R, C] in any floating type.

    Raises ValueError when `operand` has no groups or x holds NaN or infinity.
    """
    if operand.group is None:
        raise ValueError("a BF16 operand has no codes")
    if x.dim() != 2:
        raise ValueError(f"quantize takes a matrix, not a tensor of shape {tuple(x.shape)}")
    values = x.detach().float()
    amax = group_amax(values, operand.group)
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("non-finite value in a tensor to be quantized")
    scale = scale_from_amax(amax, operand.scale)
    scaled = scale_groups(values, scale, operand.group, divide=True)
    return Quantized(to_codes(scaled), scale, operand.group)


def values_of(x: Quantized | Tensor) -> Tensor:
    """FP32 values of an operand, quantized or plain."""
    return x.dequantize() if isinstance(x, Quantized) else x.float()


def scale_from_amax(amax: Tensor, kind: ScaleKind) -> Tensor:
    """The scale, FP32, of groups whose largest absolute values are `amax`."""
    # A tensor divisor: CUDA multiplies by the reciprocal of a Python number, which rounds differently.
    scale = amax.float().clamp(min=AMAX_FLOOR) / torch.full_like(amax, E4M3_MAX, dtype=torch.float32)
    if kind == "pow2":
        # Adding all-ones mantissa bits carries into the exponent unless the mantissa is zero: exact rounding up.
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return scale


def to_codes(scaled: Tensor) -> Tensor:
    """e4m3 codes of values already divided by their scale. Overwrites `scaled`."""
    return scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def widen(codes: Tensor) -> Tensor:
    """FP32 values of e4m3 codes, exact.

    On the CPU torch converts element by element; moving the seven magnitude bits into a BF16's place and multiplying by
    2^120 (the difference of the exponent biases) gives the same values, subnormals included, 2.5 times faster.
    """
    if codes.is_cuda:
        return codes.float()
    bits = codes.view(torch.int8).to(torch.int16)
    moved = (bits.bitwise_and(0x7F).bitwise_left_shift_(4)).bitwise_or_(bits.bitwise_and_(-32768))
    return moved.view(torch.bfloat16).float().mul_(2.0**120)


def group_amax(x: Tensor, group: tuple[int, int]) -> Tensor:
    """[ceil(R / group[0]), ceil(C / group[1])]: largest absolute value of each group of x [R, C]."""
    if group[1] > 1:
        whole = x.shape[1] // group[1] * group[1]
        parts = [_max_abs(x[:, :whole].unflatten(1, (-1, group[1])), 2)] if whole else []
        if whole < x.shape[1]:
            parts.append(_max_abs(x[:, whole:], 1)[:, None])
        x = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if group[0] > 1:
        x = torch.stack([_max_abs(rows, 0) for rows in x.split(group[0], 0)]) if len(x) else x
    return x if group != (1, 1) else x.abs()


def _max_abs(x: Tensor, dim: int) -> Tensor:
    return x.abs().amax(dim)


def scale_groups(x: Tensor, scale: Tensor, group: tuple[int, int], *, divide: bool = False) -> Tensor:
    """x [R, C] FP32 multiplied (or divided) by the scale of each element's group, as a new tensor."""
    rows, columns = x.shape
    row_scale = scale if group[0] == 1 else scale.repeat_interleave(group[0], 0)[:rows]
    if group[1] == 1:
        return x / row_scale if divide else x * row_scale
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    whole = columns // group[1] * group[1]
    op = torch.div if divide else torch.mul
    if whole:
        blocks = (rows, whole // group[1], group[1])
        op(
            x[:, :whole].unflatten(1, blocks[1:]),
            row_scale[:, : blocks[1], None],
            out=out[:, :whole].unflatten(1, blocks[1:]),
        )
    if whole < columns:
        op(x[:, whole:], row_scale[:, -1:], out=out[:, whole:])
    return out
