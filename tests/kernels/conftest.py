"""What the tests of the Triton kernels share: they skip where the kernels can't run, and run with the library's workspace at
zero, which torch reads at the first product of the process."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


class Driver:
    """As much of a Triton driver as compilation asks for."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """(name, compiled kernel) of what launchers launched, on tensors of the CPU: for a Hopper GPU, and not started."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: list[tuple[str, Any]] = []
    compile_only = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        assert all(int(n) >= 1 for n in grid), (self.__name__, grid)
        kernel = compile_only(self, *args, grid=grid, warmup=True, **kwargs)
        found.append((self.__name__, kernel))
        return kernel

    processors = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: processors)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(driver, "_active", Driver())
    return found


@pytest.fixture
def codes() -> Callable[..., torch.Tensor]:
    """Makes e4m3 zeros of a shape."""
    return lambda *shape: torch.zeros(*shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
