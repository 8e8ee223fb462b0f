"""A warpgroup product whose operands `cp.async` writes stands behind a proxy fence, in every compiled kernel.

Shared memory has two proxies: copies and stores write through the generic one, warpgroup products read through the asynchronous
one. Without a fence in between the product may see old bytes, once in a billion times. Read off the PTX of every launch, so it
takes Triton 3.6 and no GPU; elsewhere this is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", minversion="3.6")
Codes = Callable[..., torch.Tensor]

STORES, COPIES = r"st\.shared|stmatrix", r"cp\.async\.wait_group"
LABEL = re.compile(r"^\$L__BB\d+_\d+:")


def unfenced(ptx: str, *, copies: bool = True) -> Iterator[int]:
    """Lines of warpgroup products behind a write to shared memory with no fence in between, in the order of the text: a loop's
    body is one stretch of it. copies: what `cp.async` brings is an operand, and not read into registers first."""
    arrives, waiting = re.compile(f"{COPIES}|{STORES}" if copies else STORES), False
    for number, line in enumerate(ptx.splitlines()):
        if LABEL.match(line):
            waiting = False
        elif arrives.search(line):
            waiting = True
        elif "fence.proxy.async" in line:
            waiting = False
        elif "wgmma.mma_async" in line and waiting:
            yield number


def test_products(compiled: list[tuple[str, Any]], codes: Codes) -> None:
    from lockstep.kernels.triton import gemm
    from lockstep.kernels.triton.quantize import empty_codes

    for rows in (8, 24, 96, 688):
        for columns, depth in ((960, 576), (576, 1536), (4096, 4096)):
            x, scale = empty_codes(rows, depth, torch.device("cpu"))
            blocks = torch.ones(-(-columns // 128), -(-depth // 128))
            gemm.fp8_matmul(x, scale, codes(columns, depth), blocks, w_group=128)
            plain = torch.zeros(rows, depth, dtype=torch.bfloat16)
            gemm.bf16_matmul(plain, torch.zeros(columns, depth, dtype=torch.bfloat16))
    assert {name for name, _ in compiled} == {"_fp8", "_bf16"}
    assert all("cp.async" in kernel.asm["ptx"] for _, kernel in compiled), "the loops are pipelined"
    assert [found for _, kernel in compiled if (found := list(unfenced(kernel.asm["ptx"])))] == []


@pytest.mark.parametrize("kv8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads, groups, dim", [(9, 3, 64), (32, 8, 128), (32, 8, 80)])
def test_attention(
    heads: int,
    groups: int,
    dim: int,
    kv8: bool,
    compiled: list[tuple[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    codes: Codes,
) -> None:
    from lockstep.kernels.packed_index import PrefillIndex
    from lockstep.kernels.triton import attention

    monkeypatch.setattr(attention, "WIDE", False)
    monkeypatch.setattr(attention, "PAGED", False)
    shapes = (groups, 64, dim), (groups, dim, 64)
    k, v = (codes(9, *s) if kv8 else torch.zeros(9, *s, dtype=torch.bfloat16) for s in shapes)
    scales = (torch.ones(groups), torch.ones(groups)) if kv8 else None
    q, table = torch.zeros(128, heads, dim, dtype=torch.bfloat16), torch.zeros(9, dtype=torch.int32)
    for block in (64, 128):
        index = PrefillIndex(torch.zeros(3, 4, dtype=torch.int32), table, 128, block)
        attention.prefill(q, k, v, index, scales, lse=True)
    lengths, tables = torch.ones(128, dtype=torch.int32), torch.zeros(128, 3, dtype=torch.int32)
    attention.decode(q, k, v, attention.DecodeIndex(lengths, tables, 192), scales)
    assert {name for name, _ in compiled} == {"prefill_kernel", "decode_kernel"}
    ptx = [(name, kernel.asm["ptx"]) for name, kernel in compiled]
    assert [(n, found) for n, text in ptx if (found := list(unfenced(text, copies=not kv8)))] == []


def test_a_missing_fence_is_found() -> None:
    good = "cp.async.wait_group 0;\nbar.sync 0;\nfence.proxy.async.shared::cta;\nwgmma.mma_async x;"
    assert list(unfenced(good)) == []
    assert list(unfenced(good.replace("fence.proxy.async", "nothing"))) == [3]
