"""A slot of shared memory is given back when what was loaded from it has arrived in registers, in every compiled kernel.

A load may wait behind a tile's stores longer than the next copy takes to land, and neither a barrier nor the arrival that gives
the slot back waits for it: rows then get a later tile's values (seen once in some ten thousand tiles of `wide_attention.py`).
Read off the machine code of every launch, so it takes Triton 3.6 with its assembler and no GPU.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton", minversion="3.6")
Codes = Callable[..., torch.Tensor]
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
if not (TOOLS / "nvdisasm").is_file():
    pytest.skip("needs Triton's disassembler", allow_module_level=True)

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(\S.*?;)\s*/\* 0x[0-9a-f]{16} \*/")
NONE = 7
"""In place of a scoreboard's number."""


class Instruction(NamedTuple):
    """text: as disassembled. sets: the scoreboard that its result clears. waits: bit mask of scoreboards that must be clear
    before this one starts."""

    text: str
    sets: int
    waits: int


def machine_code(ptx: str, folder: Path) -> list[Instruction]:
    """Instructions in the order of the text. The second word of each holds its control bits from bit 41 on: stall (4), yield, the
    scoreboard it sets (3), another for its operands (3), those it waits for (6)."""
    (folder / "kernel.ptx").write_text(ptx)
    built = ["-arch=sm_90a", "-o", str(folder / "kernel.cubin"), str(folder / "kernel.ptx")]
    subprocess.run([str(TOOLS / "ptxas"), *built], check=True, capture_output=True)
    told = [str(TOOLS / "nvdisasm"), "-hex", str(folder / "kernel.cubin")]
    lines = subprocess.run(told, check=True, capture_output=True, text=True).stdout.splitlines()
    found = []
    for line, following in pairwise(lines):
        match = INSTRUCTION.search(line)
        if match:
            control = int(re.findall(r"0x[0-9a-f]{16}", following)[0], 16) >> 41
            found.append(Instruction(match[1], control >> 5 & 7, control >> 11 & 63))
    return found


def early(code: list[Instruction], gives: str = "SYNCS.ARRIVE.TRANS64.A1T0") -> Iterator[str]:
    """Instructions that give a slot away (arrivals at a barrier, or the copy itself) and that nothing keeps behind the loads from
    shared memory before them."""
    waiting: dict[int, str] = {}
    for text, sets, waits in code:
        waiting = {board: load for board, load in waiting.items() if not waits >> board & 1}
        if "LDS" in text and sets != NONE:
            waiting[sets] = text
        if gives in text and waiting:
            yield f"{waiting} | {text}"


def test_it_finds_an_early_arrival() -> None:
    load, use = Instruction("LDSM.16.M88.4 R88, [R13] ;", 1, 0), Instruction("HGMMA R24, R88 ;", NONE, 0b10)
    give = Instruction("@!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR29], RZ ;", NONE, 0)
    other = Instruction("FADD R3, R4, R5 ;", NONE, 0b100)
    assert len(list(early([load, other, give, use]))) == 1
    assert list(early([load, use, give])) == []


def test_narrow_products(compiled: list[tuple[str, Any]], tmp_path: Path, codes: Codes) -> None:
    from lockstep.kernels.products import FEW_ROWS, NARROW, NARROW_BF16
    from lockstep.kernels.triton.narrow_bf16 import narrow_bf16_matmul
    from lockstep.kernels.triton.narrow_gemm import fits, narrow_matmul
    from lockstep.kernels.triton.quantize import empty_codes

    for rows in FEW_ROWS:
        plain, weight = (torch.zeros(n, 1152, dtype=torch.bfloat16) for n in (rows, 1536))
        for form in NARROW:
            if fits(rows, 1536, **form):
                for depth in (1152, 2048):  # block by block, and two by two
                    x, scale = empty_codes(rows, depth, torch.device("cpu"))
                    narrow_matmul(x, scale, codes(1536, depth), torch.ones(12, depth // 128), **form)
        for form in NARROW_BF16:
            if fits(rows, 1536, **form):
                narrow_bf16_matmul(plain, weight, **form)
    assert {name for name, _ in compiled} == {"_narrow", "_narrow_bf16"}
    code = [machine_code(kernel.asm["ptx"], tmp_path) for _, kernel in compiled]
    assert all(any("SYNCS.ARRIVE" in line.text for line in c) for c in code)
    assert [found for c in code if (found := list(early(c)))] == []


@pytest.mark.parametrize("heads, groups, dim, block", [(9, 3, 64, 64), (32, 8, 128, 128), (28, 4, 128, 64)])
def test_wide_attention(
    heads: int, groups: int, dim: int, block: int, compiled: list[tuple[str, Any]], tmp_path: Path
) -> None:
    from lockstep.kernels.packed_index import PrefillIndex
    from lockstep.kernels.triton import attention

    k, v = (torch.zeros(9, groups, *s, dtype=torch.bfloat16) for s in ((64, dim), (dim, 64)))
    q, table = torch.zeros(128, heads, dim, dtype=torch.bfloat16), torch.zeros(9, dtype=torch.int32)
    for longest in (128, 4096):
        index = PrefillIndex(torch.zeros(3, 4, dtype=torch.int32), table, longest, block)
        attention.prefill(q, k, v, index, (torch.ones(groups), torch.ones(groups)), lse=True)
    assert [name for name, _ in compiled] == ["_wide", "_wide"]
    code = [machine_code(kernel.asm["ptx"], tmp_path) for _, kernel in compiled]
    assert all(any("LDSM" in line.text for line in c) for c in code), "queries are held in registers"
    assert [list(early(c)) for c in code] == [[], []]


@pytest.mark.parametrize("heads, groups, dim", [(9, 3, 64), (32, 8, 128)])
def test_paged_attention(
    heads: int, groups: int, dim: int, compiled: list[tuple[str, Any]], tmp_path: Path, codes: Codes
) -> None:
    from lockstep.kernels.triton import attention

    k, v = codes(9, groups, 64, dim), codes(9, groups, dim, 64)
    q, scales = torch.zeros(128, heads, dim, dtype=torch.bfloat16), (torch.ones(groups), torch.ones(groups))
    lengths, tables = torch.ones(128, dtype=torch.int32), torch.zeros(128, 70, dtype=torch.int32)
    for begun in (False, True):
        for longest in (192, 4480):
            index = attention.DecodeIndex(lengths, tables, longest)
            attention.decode(q, k, v, index, scales, early=begun)
    assert [name for name, _ in compiled] == ["_paged", "_paged", "join_kernel"] * 2
    for kernel in (kernel for name, kernel in compiled if name == "_paged"):
        code = machine_code(kernel.asm["ptx"], tmp_path)
        copies = [line for line in code if "UTMALDG" in line.text]
        assert len(copies) >= 4 and list(early(code, gives="UTMALDG")) == []


@pytest.mark.parametrize("coded", [False, True], ids=["bf16", "codes"])
def test_tiles_of_gradients(
    coded: bool, compiled: list[tuple[str, Any]], tmp_path: Path, codes: Codes
) -> None:
    """A program copies the next tile in while it works on one; what comes round the loop counts too."""
    from lockstep.kernels.triton.columns import quantize_both, regroup
    from lockstep.kernels.triton.swiglu_backward import swiglu_backward

    grad, scale = torch.zeros(300, 1536, dtype=torch.bfloat16), torch.ones(24, 300).t()
    if coded:
        regroup(codes(300, 3072), scale, pow2=False, square=False)
        regroup(codes(300, 3072), scale, pow2=False, square=True)
        swiglu_backward(grad, (codes(300, 3072), scale), pow2=False, fp8=True)
    else:
        quantize_both(grad, pow2=False)
        quantize_both(grad, pow2=True, rows=False)
        quantize_both(grad.float(), pow2=False)
        for rows, columns in ((True, True), (True, False), (False, True)):
            swiglu_backward(
                grad, torch.zeros(300, 3072).bfloat16(), pow2=False, fp8=True, rows=rows, columns=columns
            )
    assert {name for name, _ in compiled} == {"_both", "_swiglu_codes"}
    for _, kernel in compiled:
        code = machine_code(kernel.asm["ptx"], tmp_path)
        assert sum("UTMALDG" in line.text for line in code) >= 2
        assert list(early(code * 2, gives="UTMALDG")) == []
