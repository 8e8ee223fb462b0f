"""A ring of slots in shared memory, filled by bulk copies: what the Gluon kernels share.

A slot is given back when what was loaded from it is in registers. Neither a barrier nor the arrival that gives it back waits for
a load, which may stand behind the stores of the tile before, longer than the next copy takes to land: so something that waits for
it comes in between, a product that reads the registers or the branch of a wait (`tests/kernels/test_slots.py`).
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def arrived(ready, at, STAGES: gl.constexpr):
    """Waits for what is at place `at` of the ring's history. The branch in here also waits for loads into registers."""
    mbarrier.wait(ready.index(at % STAGES), (at // STAGES) & 1)
