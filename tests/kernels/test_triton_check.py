"""Every Triton kernel against the reference, in full and in small size: what `lockstep bench check` runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lockstep.bench.check import Size
from lockstep.bench.kernels_check import CHECKS, run_checks, verdict

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("small", [True, False], ids=["small", "full"])
def test_within_the_stated_bounds(name: str, small: bool, hopper: SimpleNamespace) -> None:
    checks = run_checks(Size(small=small), [name])
    failed = [check.line() for check in checks if not check.passed]
    assert checks and not failed, "\n".join([verdict(checks), *failed])
