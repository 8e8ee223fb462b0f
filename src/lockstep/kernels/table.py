"""Which backends there are, and the one function that picks one. Trainer and engine are given the same object.

| operation | reference | exact | hopper |
|---|---|---|---|
| linear, FP8 block-scaled | FP32 sums, fixed order | float64 block sums | cuBLASLt or Triton, warpgroup instruction |
| linear, BF16; output head | FP32 sums, fixed order | float64 sums | Triton |
| attention | FP32 products | float64 products | Triton, over 64-token pages |
| FP8 queries and probabilities | FP32 products | float64 products | - |
| RMSNorm, RoPE, SwiGLU, log-sum-exp | FP32 | FP32 | Triton, fused with quantization |
| router softmax, top-k, combination of experts | FP32 | FP32 | as reference |
"""

from __future__ import annotations

from typing import Literal

from lockstep.kernels.reference import ReferenceKernels

Kernels = ReferenceKernels
"""The operations a model calls. Device backends subclass it and override what they have."""

WORKSPACE = "CUBLASLT_WORKSPACE_SIZE"
"""Environment variable, KiB: scratch memory of cuBLASLt. torch reads it at the first product and never again."""

KernelsName = Literal["auto", "reference", "exact", "hopper"]


def select(name: KernelsName) -> Kernels:
    """The backend of this name; `auto` is the fastest that can train here. `hopper` has no backward pass yet: it serves rollout,
    scoring and benchmarks."""
    if name == "hopper":
        from lockstep.kernels.hopper import HopperKernels  # needs Triton, which exists for GPUs only

        return HopperKernels()
    return ReferenceKernels(exact=name == "exact")
