"""What the tests of the Triton kernels share: they skip where the kernels can't run, and run with the library's workspace at
zero, which torch reads at the first product of the process."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from lockstep.kernels.table import WORKSPACE, hopper_missing

os.environ.setdefault(WORKSPACE, "0")


@pytest.fixture(scope="session")
def hopper() -> SimpleNamespace:
    """The kernel modules, by name."""
    reason = hopper_missing()
    if reason:
        pytest.skip(reason)
    from lockstep.kernels.triton import attention, gemm, head, narrow_gemm, norm, quantize, rope, swiglu

    return SimpleNamespace(
        attention=attention,
        gemm=gemm,
        head=head,
        narrow_gemm=narrow_gemm,
        norm=norm,
        quantize=quantize,
        rope=rope,
        swiglu=swiglu,
    )
