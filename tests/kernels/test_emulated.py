"""What Gluon kernels compute, run on a CPU by `emulator.py`, whether copies land early or late: of gradients the bytes of the
quantizer's definition. Each check has a process of its own, since there Triton is a stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("emulated.py")
SOURCE = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("kind", ["fp32", "pow2"])
@pytest.mark.parametrize("check", ["quantize_both", "regroup", "columns_of", "swiglu"])
def test_gradients(check: str, kind: str, copies: str) -> None:
    emulated(check, kind, copies)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_rope(kind: str) -> None:
    """fp32: the kind of scale of e4m3 pages; or BF16 pages."""
    emulated("rope_to_pages", kind, "early")


@pytest.mark.parametrize("copies", ["early", "late"])
def test_decode_attention(copies: str) -> None:
    emulated("paged", "fp32", copies)


def test_gradient_of_the_head() -> None:
    """Over probabilities that the forward pass stored."""
    emulated("head_gradient", "fp32", "early")


def test_truncation() -> None:
    emulated("truncated", "fp32", "early")


def test_codes_are_widened_exactly() -> None:
    emulated("widen", "fp32", "early")


def test_the_emulator_notices_faults() -> None:
    emulated("faults", "fp32", "late")


def emulated(*what: str) -> None:
    """Runs a check of `emulated.py`."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *what],
        env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
