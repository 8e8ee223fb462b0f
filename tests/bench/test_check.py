"""The two measures that every kernel check rests on, and the definition of a draw's state."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lockstep.bench.check import BOUNDS_DB, near, poisoned, same
from lockstep.bench.checks_products import draw_state
from lockstep.bench.checks_rows import hostile_rows, rope_inputs, rope_reference
from lockstep.bench.sanitize import (
    FAULT,
    TOOLS,
    Verdict,
    goals,
    read_findings,
    read_summary,
    run_sanitizer,
)
from lockstep.bench.shapes import AttentionShape
from lockstep.numerics.formats import E4M3, row_groups
from lockstep.numerics.quantize import quantize
from lockstep.rollout import noise


def test_same_bits_sees_what_equality_does_not() -> None:
    zero = torch.zeros(4)
    assert same("k", "c", zero, zero).passed
    assert same("k", "c", zero, -zero).value == 0.0
    nan = torch.full((4,), math.nan)
    assert same("k", "c", nan, nan).passed
    codes = torch.tensor([1.0, 2.0]).to(E4M3)
    assert same("k", "c", codes, codes).passed and not same("k", "c", codes, -codes.float()).passed
    one_off = torch.arange(1000.0)
    one_off[7] += 1e-3
    found = same("k", "c", torch.arange(1000.0), one_off)
    assert found.value == 0.999 and not found.passed


def test_sqnr_of_bf16_rounding_and_of_what_is_not_finite() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    found = near("fp8_matmul", "c", x, x.bfloat16())
    assert found.passed and 50 < found.value < 60 and found.bound == BOUNDS_DB["fp8_matmul"]
    assert near("rope", "c", x, x.clone()).value == 999.0
    broken = x.clone()
    broken[17] = math.nan
    for wrong in (broken, x[:-1], torch.full_like(x, math.inf)):
        assert not near("rope", "c", x, wrong).passed


def test_memory_is_poisoned_within_and_as_before_after() -> None:
    with poisoned():
        assert bool(torch.empty(1000).isnan().all())
        assert bool((torch.empty(1000, dtype=torch.uint8) == 255).all())
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    "name", [(0, 0, 0, 0, 0), (1, 2, 3, 4, 5), (2**40, 7, 99, 3, 16_000), (-1, 0, 0, 0, 1)]
)
def test_the_state_of_a_draw_is_the_one_of_the_definition(name: tuple[int, ...]) -> None:
    key = draw_state(*name) & ((1 << 64) - 1)
    low, high = noise.row_keys(*name)
    assert (low & 0xFFFFFFFF, high & 0xFFFFFFFF) == (key & 0xFFFFFFFF, key >> 32)
    assert -(1 << 63) <= draw_state(*name) < 1 << 63


def test_hostile_rows_are_hostile_and_can_be_quantized() -> None:
    x = hostile_rows(64, 576)
    assert bool(torch.isfinite(x).all()) and bool((x == 0).all(1).any())
    amax = x.float().abs().amax(1)
    assert float(amax.max()) > 1e28 and float(amax[amax > 0].min()) < 1e-35
    quantize(x, row_groups("fp32"))


def test_rope_reference_turns_only_queries_and_keys() -> None:
    shape = AttentionShape("small", 4, 2, 16, norm=True)
    qkv, positions, table = rope_inputs(shape, 9)
    ones = torch.ones(16).bfloat16()
    q, k, v = rope_reference(qkv, positions, table, shape, (ones, ones))
    assert (q.shape, k.shape, v.shape) == ((9, 4, 16), (9, 2, 16), (9, 2, 16))
    assert torch.equal(v, qkv.view(9, 8, 16)[:, 6:])
    assert torch.allclose(q.float().square().mean(-1), torch.ones(9, 4), atol=0.02)


def test_the_sanitizers_own_words_decide() -> None:
    memcheck = "========= COMPUTE-SANITIZER\nall fine\n========= ERROR SUMMARY: 0 errors\n"
    racecheck = "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n"
    assert read_summary(memcheck) == ("ERROR SUMMARY: 0 errors", 0)
    assert read_summary(racecheck)[1] == 2
    assert read_summary("========= ERROR SUMMARY: 1 error\n")[1] == 1
    assert read_summary("killed") == ("", None)
    unprinted = (
        "========= ERROR SUMMARY: 292 errors\n========= ERROR SUMMARY: 192 errors were not printed. Use x\n"
    )
    assert read_summary(unprinted)[1] == 292


def test_what_was_found_is_listed_by_place() -> None:
    output = """========= Invalid __global__ read of size 4 bytes
=========     at _decode+0x1a50 in /x/src/lockstep/kernels/triton/attention_loop.py:88
=========     by thread (3,0,0) in block (5,0,0)
=========     Access at 0x7f is out of bounds
some line of the program
========= Invalid __global__ read of size 4 bytes
=========     at _decode+0x1a70 in /x/src/lockstep/kernels/triton/attention_loop.py:88
=========     by thread (4,0,0) in block (5,0,0)
=========
========= Error: Race reported between Read access at _wide+0x220 in wide_attention.py:343
=========     and Write access at _wide+0xc400 in wide_attention.py:343 [24 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
    assert read_findings(output) == {
        "Invalid __global__ read of size 4 bytes | _decode attention_loop.py:88": 2,
        "Error: Race reported between Read access at _wide in wide_attention.py:343 | _wide wide_attention.py:343": 1,
    }

    def said(tool: str, faults: int | None = 0, code: int = 0) -> Verdict:
        return Verdict(tool, "", faults, code, 1.0, {}, "")

    assert goals([said(tool) for tool in TOOLS])[0].value == 1.0
    assert goals([said(TOOLS[0])])[0].value == 0.0
    for bad in (said(TOOLS[1], 1), said(TOOLS[1], None), said(TOOLS[1], 0, 3), said(TOOLS[1], 0, -1)):
        assert goals([said(TOOLS[0]), bad])[0].value == 0.0


@pytest.mark.parametrize(("code", "errors", "clean"), [(0, 0, True), (FAULT, 3, False), (3, 0, False)])
def test_a_tool_is_run_over_the_small_checks(
    code: int, errors: int, clean: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a program in its place that notes what it was called with."""
    program = tmp_path / "compute-sanitizer"
    lines = ("#!/bin/sh", 'echo "$@" "$PYTORCH_NO_CUDA_MEMORY_CACHING"')
    lines += (f'echo "========= ERROR SUMMARY: {errors} errors"', f"exit {code}", "")
    program.write_text("\n".join(lines), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    said: list[str] = []
    (verdict,) = run_sanitizer(["memcheck"], ["rope", "head"], say=said.append)
    assert (verdict.clean, verdict.exit_code, verdict.faults) == (clean, code, errors)
    called = verdict.tail.splitlines()[0]
    assert called.startswith(f"--tool memcheck --error-exitcode {FAULT} ")
    assert called.endswith("-m lockstep bench check --small --no-write --only rope,head 1")
    assert f"ERROR SUMMARY: {errors} errors" in said[0] and ("ok" in said[0]) == clean
