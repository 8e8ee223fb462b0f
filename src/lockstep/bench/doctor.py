"""What `lockstep doctor` says about the GPU: driver, the library's workspace, a self-test of every kernel, and whether FP8 pays.

Next: `layer.py` for the verdict, `kernels_check.py` for the self-test.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.bench.check import Size
from lockstep.bench.kernels_check import run_checks, summary, verdict
from lockstep.bench.layer import judge_here
from lockstep.bench.machine import driver, require_hopper, workspace_meaning
from lockstep.bench.shapes import layer_linears
from lockstep.kernels.table import WORKSPACE, hopper_missing

Say = Callable[[str], None]


def examine(model: str, workspace: str | None, say: Say) -> bool:
    """Says it line by line; whether every kernel passed. A machine without the right GPU passes: nothing runs there.

    workspace: the library's setting as the process was started with. Raises ConfigError for a model shape that doesn't exist.
    """
    layer_linears(model)
    say(f"driver       {driver() if torch.cuda.is_available() else 'none'}")
    say(f"workspace    {WORKSPACE} {workspace_meaning(workspace)}")
    reason = hopper_missing()
    if reason is not None:
        say(f"self-test    skipped: {reason}; the kernels need compute capability 9.0 (Hopper) and triton")
        return True
    require_hopper("the self-test")
    checks = run_checks(Size(small=True))
    for line in summary(checks):
        say(f"self-test    {line}")
    say(f"self-test    {verdict(checks)}")
    found = judge_here(model)
    for times in (found.decode, found.training):
        say(f"{model:12} linears of a layer, FP8 over BF16, {times.line()}")
    say(f"verdict      {found.line()} ({model})")
    return all(check.passed for check in checks)
