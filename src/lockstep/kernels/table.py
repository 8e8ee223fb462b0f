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

from importlib.util import find_spec
from typing import Literal

import torch

from lockstep.errors import ConfigError
from lockstep.kernels.reference import ReferenceKernels

Kernels = ReferenceKernels
"""The operations a model calls. Device backends subclass it and override what they have."""

WORKSPACE = "CUBLASLT_WORKSPACE_SIZE"
"""Environment variable, KiB: scratch memory of cuBLASLt. torch reads it at the first product and never again."""

KernelsName = Literal["auto", "reference", "exact", "hopper"]


def select(name: KernelsName, *, dense: bool = True) -> Kernels:
    """The backend of this name. `auto` is `hopper` where it runs and the model is `dense` (what has experts it can sample from
    but not train), else `reference`.

    Raises ConfigError where the Hopper kernels are asked for and can't run.
    """
    refuse_missing(name)
    if name == "hopper" or (name == "auto" and dense and not hopper_missing()):
        from lockstep.kernels.hopper import HopperKernels  # needs Triton, which exists for GPUs only

        return HopperKernels()
    return ReferenceKernels(exact=name == "exact")


def refuse_missing(name: KernelsName) -> None:
    """Raises ConfigError where these are the Hopper kernels and they can't run here."""
    reason = hopper_missing()
    if name == "hopper" and reason:
        raise ConfigError(
            "the Hopper kernels need an NVIDIA GPU of compute capability 9.0 and triton",
            where="kernels",
            why=reason,
            fix="use kernels: reference",
        )


def hopper_missing() -> str | None:
    """Why the Hopper kernels can't run here, or None."""
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU here"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}"
    if find_spec("triton") is None:
        return "triton is not installed"
    return None


def device_of(kernels: Kernels) -> torch.device:
    """Where these kernels work: the GPU in use for those of a GPU, else the CPU."""
    on_gpu = kernels.name == "hopper"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
