"""Checks of the bookkeeping of decode steps on the device, against the same in Python.

Next: `kernels_check.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lockstep.bench.check import Check, Size, poisoned, same
from lockstep.kernels.attention_form import PAGE

SPARE = 40
STOPS = 3
DEPTH = 4


def step_checks(size: Size) -> Iterator[Check]:
    """Slots and lengths of a step, and what a draw does to the rows."""
    for rows in (5,) if size.small else (1, 5, 64, 200):
        yield from _prepare_checks(rows)
        yield from _advance_checks(rows)


def _prepare_checks(rows: int) -> Iterator[Check]:
    from lockstep.kernels.triton.steps import prepare

    generator = torch.Generator().manual_seed(rows)
    table = torch.randint(0, SPARE, (rows, 9), generator=generator, dtype=torch.int32)
    position = torch.randint(0, 9 * PAGE, (rows,), generator=generator)
    alive = torch.randint(0, 2, (rows,), generator=generator, dtype=torch.int32)
    with poisoned():
        slots, lengths = prepare(position.cuda(), table.cuda(), alive.cuda(), SPARE)
    here = range(rows)
    want = [
        int(table[r, position[r] // PAGE]) * PAGE + int(position[r]) % PAGE
        if alive[r]
        else SPARE * PAGE + r % PAGE
        for r in here
    ]
    seen = [int(position[r]) + 1 if alive[r] else 1 for r in here]
    yield same("prepare", f"slots, {rows} rows", torch.tensor(want), slots)
    yield same("prepare", f"keys, {rows} rows", torch.tensor(seen, dtype=torch.int32), lengths)


def _advance_checks(rows: int) -> Iterator[Check]:
    from lockstep.kernels.triton.steps import advance

    generator = torch.Generator().manual_seed(100 + rows)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, (rows, *shape), generator=generator)

    token, log_p = draw(50), torch.randn(rows, generator=generator)
    state = {
        "token": draw(50),
        "position": draw(1000),
        "drawn": draw(6),
        "alive": draw(2).int(),
    }
    limit, stops = draw(7) + 1, draw(50, STOPS)
    cursor = DEPTH - 1
    there = {name: x.cuda() for name, x in state.items()}
    out_token = torch.full((DEPTH, rows), -7, device="cuda")
    out_log_p = torch.full((DEPTH, rows), -7.0, device="cuda")
    cursor_there = torch.tensor([cursor], dtype=torch.int32, device="cuda")
    advance(
        token.cuda(), log_p.cuda(), there["token"], there["position"], there["drawn"], limit.cuda(),
        stops.cuda(), there["alive"], out_token, out_log_p, cursor_there,
    )  # fmt: skip
    alive = state["alive"].bool()
    going = alive & (state["drawn"] + 1 < limit) & ~(stops == token[:, None]).any(1)
    expected = {
        "token": torch.where(alive, token, state["token"]),
        "position": state["position"] + going,
        "drawn": state["drawn"] + alive,
        "alive": going.int(),
    }
    for name, x in expected.items():
        yield same("advance", f"{name}, {rows} rows", x, there[name])
    noted = torch.full((DEPTH, rows), -7)
    noted[cursor] = torch.where(alive, token, -1)
    yield same("advance", f"tokens noted, {rows} rows", noted, out_token)
    yield same("advance", f"log-probabilities noted, {rows} rows", log_p, out_log_p[cursor])
    yield same("advance", f"cursor, {rows} rows", torch.zeros(1, dtype=torch.int32), cursor_there)
