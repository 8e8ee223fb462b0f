"""The matrix products that are compared: the library's, ours, and BF16.

    library   cuBLASLt's block-scaled FP8 product, through `scaled_mm`
    triton    `kernels/triton/gemm.py`, FP8
    narrow    `kernels/triton/narrow_gemm.py`, FP8 for few rows
    bf16      cuBLAS, what FP8 has to beat; not the same bits in every batch
    bf16-row  `kernels/triton/gemm.py`, BF16: what the row law costs there

Legend: M rows, K inputs, N outputs. Next: `gemm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.bench.shapes import LinearShape
from lockstep.numerics.formats import BLOCK, E4M3, square_blocks
from lockstep.numerics.quantize import Quantized, quantize

CHOICES = ("library", "triton", "narrow", "bf16", "bf16-row")
FP8 = ("library", "triton", "narrow")
EXACT = (*FP8, "bf16-row")
"""Those that have to give a row the same bits in every batch; the FP8 ones also have to agree with each other."""
NARROW_ROWS = 256
"""Most rows of the narrow product."""
Form = dict[str, int]
"""How the narrow kernel is launched: tiles, stages, groups of warps. It has no part in the bits."""


@dataclass(frozen=True)
class Weight:
    """One weight [N, K] in every form. library_scale: None for shapes that the library refuses."""

    shape: LinearShape
    plain: Tensor
    codes: Quantized
    library_scale: Tensor | None

    def copy(self) -> Weight:
        """The same values elsewhere in memory."""
        codes = Quantized(copied(self.codes.codes), self.codes.scale.clone(), self.codes.group)
        scale = library_scale(codes) if self.library_scale is not None else None
        return Weight(self.shape, self.plain.clone(), codes, scale)

    def choices(self, rows: int) -> tuple[str, ...]:
        """Products that exist for this shape and number of rows."""
        left_out = {"library", "narrow"} if self.library_scale is None else set()
        if rows > NARROW_ROWS:
            left_out.add("narrow")
        return tuple(name for name in CHOICES if name not in left_out)


@dataclass(frozen=True)
class Rows:
    """Activations [M, K] in both forms."""

    plain: Tensor
    codes: Quantized


def make_weight(shape: LinearShape, device: torch.device, seed: int = 0) -> Weight:
    """Random values of a usual size."""
    generator = torch.Generator(device).manual_seed(seed)
    w = torch.randn(shape.outputs, shape.inputs, generator=generator, device=device) * 0.02
    codes = quantize(w, square_blocks("fp32"))
    return Weight(shape, w.bfloat16(), codes, library_scale(codes))


def library_scale(weight: Quantized) -> Tensor | None:
    """Scales as `scaled_mm` wants them: K / 128 padded to a multiple of four, transposed. None where it takes no such shape."""
    outputs, inputs = weight.shape
    if outputs % BLOCK or inputs % BLOCK or inputs == BLOCK:
        return None
    return F.pad(weight.scale, (0, -weight.scale.shape[1] % 4)).contiguous().t()


def make_rows(x_MK: Tensor) -> Rows:
    """Quantizes by the Triton kernel. Its storage is padded to a multiple of four rows, which the library needs."""
    from lockstep.kernels.triton.quantize import quantize_rows

    return Rows(x_MK, Quantized(*quantize_rows(x_MK, pow2=False), (1, BLOCK)))


def random_rows(count: int, inputs: int, device: torch.device, seed: int = 1) -> Tensor:
    """[count, inputs] BF16; rows of different sizes, so that scales differ."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(count, inputs, generator=generator, device=device)
    return (x * torch.exp2(torch.randn(count, 1, generator=generator, device=device))).bfloat16()


def forms(choice: str, rows: int, columns: int) -> tuple[Form, ...]:
    """The forms of a product that the backend chooses from for so many rows and outputs."""
    if choice != "narrow":
        return ({},)
    from lockstep.kernels.products import NARROW
    from lockstep.kernels.triton.narrow_gemm import fits

    return tuple(form for form in NARROW if fits(rows, columns, **form))


def product(choice: str, x: Rows, w: Weight, form: Form | None = None) -> Tensor:
    """x w^T [M, N] in BF16 by one of CHOICES."""
    from lockstep.kernels.triton import gemm

    if choice == "library":
        return library_product(x.codes, w)
    if choice == "triton":
        return gemm.fp8_matmul(
            x.codes.codes, x.codes.scale, w.codes.codes, w.codes.scale, w_group=w.codes.group[0]
        )
    if choice == "narrow":
        from lockstep.kernels.triton.narrow_gemm import narrow_matmul

        return narrow_matmul(x.codes.codes, x.codes.scale, w.codes.codes, w.codes.scale, **(form or {}))
    if choice == "bf16":
        return x.plain @ w.plain.t()
    return gemm.bf16_matmul(x.plain, w.plain)


def library_product(x: Quantized, w: Weight) -> Tensor:
    """cuBLASLt's product; rows are padded to a multiple of four with zeros."""
    assert w.library_scale is not None, f"the library takes no weight of {w.shape}"
    count, padded = x.shape[0], -(-x.shape[0] // 4) * 4
    codes, scale = x.codes, x.scale
    if count != padded:
        codes = F.pad(codes.view(torch.uint8), (0, 0, 0, padded - count)).view(E4M3)
        scale = F.pad(scale, (0, 0, 0, padded - count), value=1.0)
    if scale.stride() != (1, padded):
        scale = scale.t().contiguous().t()
    kinds = F.ScalingType
    y = F.scaled_mm(
        codes,
        w.codes.codes.t(),
        scale,
        kinds.BlockWise1x128,
        w.library_scale,
        kinds.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return y[:count]


def moved_bytes(shape: LinearShape, rows: int, *, fp8: bool) -> int:
    """Each operand read once, the BF16 result written once; scales counted."""
    size = rows * shape.inputs + shape.inputs * shape.outputs
    if not fp8:
        return 2 * size + 2 * rows * shape.outputs
    blocks = -(-shape.inputs // BLOCK)
    return size + 4 * blocks * (rows + -(-shape.outputs // BLOCK)) + 2 * rows * shape.outputs


def copied(codes: Tensor) -> Tensor:
    """A clone of e4m3 codes."""
    return codes.view(torch.uint8).clone().view(E4M3)
