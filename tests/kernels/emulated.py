"""Checks of Gluon kernels under `emulator.py`, one a call: `python emulated.py NAME`. `test_emulated.py` calls them."""

from __future__ import annotations

import sys

import emulator

emulator.install()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from lockstep.kernels.triton import columns, swiglu_backward  # noqa: E402
from lockstep.numerics.formats import BLOCK, E4M3, column_groups, row_groups  # noqa: E402
from lockstep.numerics.quantize import Quantized, quantize  # noqa: E402

Codes = tuple[Tensor, Tensor]
SHAPES = ((300, 256), (128, 128), (40, 384), (260, 130), (1, 136))
"""Tokens and width: of several tiles for each program, of one, of part of one; then ragged ones."""


def some(*shape: int) -> Tensor:
    """BF16 values."""
    return (3 * torch.randn(*shape)).bfloat16()


def assert_codes(found: Codes | None, codes: Tensor, scale: Tensor) -> None:
    assert found is not None and torch.equal(found[1], scale)
    assert torch.equal(found[0].view(torch.uint8), codes.view(torch.uint8))


def assert_rows(found: Codes | None, x: Tensor, kind: str) -> None:
    expected = quantize(x.float(), row_groups(kind))
    assert_codes(found, expected.codes, expected.scale)


def assert_columns(found: Codes | None, x: Tensor, kind: str) -> None:
    expected = quantize(F.pad(x.float(), (0, 0, 0, -len(x) % BLOCK)), column_groups(kind))
    assert_codes(found, expected.codes.t(), expected.scale.t())


def held(x: Tensor) -> tuple[Codes, Quantized]:
    """1x128 codes of x in padded storage, as kernels leave them, and the same as one."""
    found = quantize(x.float(), row_groups("fp32"))
    padded = torch.ones(found.scale.shape[1], -(-len(x) // 4) * 4)
    padded[:, : len(x)] = found.scale.t()
    return (found.codes, padded.t()[: len(x)]), found


def quantize_both(kind: str) -> None:
    """Values in BF16 and FP32 to rows and columns."""
    for shape in SHAPES:
        x = some(*shape)
        for values in (x, x.float()):
            rows, along = columns.quantize_both(values, pow2=kind == "pow2")
            assert_rows(rows, x, kind)
            assert_columns(along, x, kind)
        nothing, along = columns.quantize_both(x, pow2=kind == "pow2", rows=False)
        assert nothing is None
        assert_columns(along, x, kind)


def regroup(kind: str) -> None:
    """Codes of rows to columns."""
    for shape in SHAPES:
        codes, x = held(some(*shape))
        assert_columns(columns.regroup(*codes, pow2=kind == "pow2"), x.dequantize(), kind)


def swiglu(kind: str) -> None:
    """The gradient of gate and up, from BF16 and from codes, in the forms that are wanted."""
    for tokens, width in SHAPES[:3]:
        dy, gate_up = some(tokens, width), some(tokens, 2 * width)
        codes, values = held(gate_up)
        for given, x in ((gate_up, gate_up.float()), (codes, values.dequantize())):
            gate, up = x.split(width, 1)
            s = 1.0 / (1.0 + torch.exp2(gate * -1.4426950408889634))
            silu = gate * s
            slope = emulator.fma(silu, 1.0 - s, s).as_subclass(Tensor)
            expected = torch.cat([dy.float() * up * slope, dy.float() * silu], 1).bfloat16()
            for wanted in ((True, True), (True, False), (False, True)):
                rows, along = swiglu_backward.swiglu_backward(
                    dy, given, pow2=kind == "pow2", fp8=True, rows=wanted[0], columns=wanted[1]
                )
                assert (rows is not None, along is not None) == wanted
                if rows is not None:
                    assert_rows(rows, expected, kind)
                if along is not None:
                    assert_columns(along, expected, kind)


def faults(_: str) -> None:
    """What the emulator must notice: a wrong address, a copy that nobody waits for, a wait that never ends."""
    x = torch.arange(8.0)
    for places in (8, -1):
        try:
            emulator.load(emulator.Pointer(x, places))
        except AssertionError:
            continue
        raise SystemExit("an address outside was read")
    tile, barrier = emulator.Descriptor(torch.ones(4, 4), [2, 2]), emulator.Barrier()
    emulator.LATE[0] = True
    smem = emulator.Shared(torch.zeros(2, 2))
    barrier.expect(tile.block_type.nbytes)
    emulator.bulk_copy(tile, [3, 3], barrier, smem)
    assert not torch.equal(smem.load(), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    barrier.wait(0)
    assert torch.equal(smem.load(), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    try:
        barrier.wait(1)
    except AssertionError:
        return
    raise SystemExit("a wait for a phase that nobody ends came back")


CHECKS = {check.__name__: check for check in (quantize_both, regroup, swiglu, faults)}

if __name__ == "__main__":
    torch.manual_seed(0)
    emulator.LATE[0] = sys.argv[3] == "late"
    assert E4M3 == emulator.E4M3
    CHECKS[sys.argv[1]](sys.argv[2])
