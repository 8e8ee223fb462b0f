"""A ring of slots in shared memory, filled by bulk copies: what the Gluon kernels share.

A slot is given back when what was loaded from it is in registers. Neither a barrier nor the arrival that gives it back waits for
a load, which may stand behind the stores of the tile before, longer than the next copy takes to land: so something that waits for
it comes in between, a product that reads the registers or the branch of a wait (`tests/kernels/test_slots.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lockstep.numerics.formats import E4M3


@gluon.jit
def arrived(ready, at, STAGES: gl.constexpr):
    """Waits for what is at place `at` of the ring's history. The branch in here also waits for loads into registers."""
    mbarrier.wait(ready.index(at % STAGES), (at // STAGES) & 1)


def boxes(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """For bulk copies of so many rows and columns of a matrix; what lies outside of it is zero."""
    return TensorDescriptor.from_tensor(x, [rows, columns], box_layout(x.dtype, rows, columns))


@cache
def box_layout(dtype: torch.dtype, *box: int) -> Any:
    """Of such a box in shared memory. Kept: a launch would take longer to work it out than for all else."""
    kinds = {
        torch.bfloat16: gl.bfloat16,
        torch.float16: gl.float16,
        torch.float32: gl.float32,
        E4M3: gl.float8e4nv,
    }
    return gl.NVMMASharedLayout.get_default_for(list(box), kinds[dtype])
