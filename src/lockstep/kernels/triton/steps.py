"""Bookkeeping of a decode step on the device, so that step follows step without the host.

A row of the running batch has a token to compute at a position; after the draw it has the next token at the next position, or
it is no longer alive. A row that isn't alive computes a harmless step into a spare page and reports token -1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.sizes import power_of_2


@triton.jit
def _prepare(
    position_ptr, table_ptr, alive_ptr, slot_ptr, length_ptr, rows, stride, spare, BLOCK: tl.constexpr
):
    r = tl.arange(0, BLOCK)
    ok = r < rows
    alive = tl.load(alive_ptr + r, mask=ok, other=0) > 0
    position = tl.load(position_ptr + r, mask=ok, other=0)
    page = tl.load(table_ptr + r * stride + position // 64, mask=ok & alive, other=0).to(tl.int64)
    slot = tl.where(alive, page * 64 + position % 64, spare.to(tl.int64) * 64 + r % 64)
    tl.store(slot_ptr + r, slot, mask=ok)
    tl.store(length_ptr + r, tl.where(alive, position + 1, 1).to(tl.int32), mask=ok)


def prepare(position_R: Tensor, table_RP: Tensor, alive_R: Tensor, spare: int) -> tuple[Tensor, Tensor]:
    """(slot int64, keys int32) [R] of the step at hand."""
    rows = len(position_R)
    slots = torch.empty(rows, dtype=torch.int64, device=position_R.device)
    lengths = torch.empty(rows, dtype=torch.int32, device=position_R.device)
    _prepare[(1,)](
        position_R,
        table_RP,
        alive_R,
        slots,
        lengths,
        rows,
        table_RP.stride(0),
        spare,
        power_of_2(rows),
        num_warps=4,
    )
    return slots, lengths


@triton.jit
def _advance(
    drawn_token_ptr,
    drawn_logp_ptr,
    token_ptr,
    position_ptr,
    drawn_ptr,
    limit_ptr,
    stop_ptr,
    alive_ptr,
    out_token_ptr,
    out_logp_ptr,
    cursor_ptr,
    rows,
    out_stride,
    depth,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.arange(0, BLOCK)
    ok = r < rows
    cursor = tl.load(cursor_ptr)
    alive = tl.load(alive_ptr + r, mask=ok, other=0) > 0
    token = tl.load(drawn_token_ptr + r, mask=ok, other=0)
    logp = tl.load(drawn_logp_ptr + r, mask=ok, other=0.0)
    position = tl.load(position_ptr + r, mask=ok, other=0)
    drawn = tl.load(drawn_ptr + r, mask=ok, other=0)
    tl.store(out_token_ptr + cursor * out_stride + r, tl.where(alive, token, -1), mask=ok)
    tl.store(out_logp_ptr + cursor * out_stride + r, logp, mask=ok)
    going = alive & (drawn + 1 < tl.load(limit_ptr + r, mask=ok, other=0))
    for s in range(STOPS):
        going = going & (tl.load(stop_ptr + r * STOPS + s, mask=ok, other=-1) != token)
    tl.store(token_ptr + r, token, mask=ok & alive)
    tl.store(position_ptr + r, position + 1, mask=ok & going)
    tl.store(drawn_ptr + r, drawn + 1, mask=ok & alive)
    tl.store(alive_ptr + r, going.to(tl.int32), mask=ok)
    tl.debug_barrier()
    tl.store(cursor_ptr, (cursor + 1) % depth)


def advance(
    drawn_token_R: Tensor,
    drawn_logp_R: Tensor,
    token_R: Tensor,
    position_R: Tensor,
    drawn_R: Tensor,
    limit_R: Tensor,
    stops_RS: Tensor,
    alive_R: Tensor,
    out_token: Tensor,
    out_logp: Tensor,
    cursor: Tensor,
) -> None:
    """Takes the draw in: notes it in row `cursor` of the output ring and moves every living row on.

    A row stops at one of its stop tokens, or when `limit_R` tokens are drawn.
    """
    rows = len(drawn_token_R)
    _advance[(1,)](
        drawn_token_R,
        drawn_logp_R,
        token_R,
        position_R,
        drawn_R,
        limit_R,
        stops_RS,
        alive_R,
        out_token,
        out_logp,
        cursor,
        rows,
        out_token.stride(0),
        out_token.shape[0],
        stops_RS.shape[1],
        power_of_2(rows),
        num_warps=4,
    )
