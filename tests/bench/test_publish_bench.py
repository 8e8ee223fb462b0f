"""The benchmark of publication: what it counts and what it calls reached."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lockstep.bench.publish import GOAL_MODEL, Published, goals, least_bytes, move
from lockstep.numerics.flow import fp8_flow
from lockstep.sync.receipt import Receipt

RECEIPT = Receipt(9, 3, 100, "d" * 64, 1.5, 0.03, "w", 0)
FOUND = Published(GOAL_MODEL, (20.0, 40.0, 30.0), 25.0, 2.0, ("kernels",), 60_000_000_000, 3000.0, RECEIPT)


def test_bytes_are_the_least(toy: SimpleNamespace) -> None:
    decoder = toy.make_decoder(toy.SPECS["qwen2"], fp8_flow())
    expected = 0
    for _, module in decoder.working():
        rows, columns = module.weight.shape if module.weight.dim() == 2 else (1, len(module.weight))
        if module.operand.is_fp8:
            expected += 6 * rows * columns + 4 * -(-rows // 128) * -(-columns // 128)
        else:
            expected += 8 * rows * columns
        bias = getattr(module, "bias", None)
        expected += 0 if bias is None else 8 * len(bias)
    assert least_bytes(decoder) == expected


def test_masters_move_by_little_and_all_of_them(toy: SimpleNamespace) -> None:
    decoder = toy.make_decoder(toy.SPECS["qwen2"], fp8_flow())
    before = {n: p.detach().clone() for n, p in decoder.named_parameters()}
    move(decoder, seed=3)
    for name, parameter in decoder.named_parameters():
        moved = (parameter.detach() - before[name]).abs()
        assert 0 < float(moved.max()) <= 1.1e-5 and bool((moved > 0).any()), name


def test_goals_are_of_the_named_model_only() -> None:
    ms, share = goals([FOUND])
    assert (ms.id, ms.value, ms.reached) == ("C9a", 30.0, True)
    assert share.id == "C9b" and share.value == pytest.approx(0.667) and share.reached
    slow = goals([replace(FOUND, times=(51.0,))])
    assert not any(goal.reached for goal in slow)
    assert goals([replace(FOUND, model="qwen3-0.6b")]) == []


def test_lines_and_record() -> None:
    record, lines = FOUND.record(), FOUND.lines()
    assert record["ms"] == 30.0 and record["gbps"] == 2000.0 and record["share_of_copy"] == 0.667
    assert "30.00 ms (from 20.00 to 40.00)" in lines[1] and "67 % of copy" in lines[1]
    assert "refresh 25.00, digest 2.00, receipt, scales and engine 3.00" in lines[2]
    assert torch.isfinite(torch.tensor(record["times_ms"])).all()
