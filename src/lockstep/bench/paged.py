"""Random keys and values of several sequences over scattered 64-token pages, for checks and benchmarks of attention.

They are made as rows, one for each slot, and brought to their pages by `kernels/triton/rope.py`, which alone knows how a page is
laid out. Every slot is written, those that no sequence owns too: the rest of a last page holds values that a kernel must not
let through.

Legend: B sequences, P pages of the longest, S slots (page * 64 + offset), H query heads, G key/value heads, D head size, T query
rows. Next: `attention.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.bench.shapes import AttentionShape
from lockstep.kernels.attention_form import PAGE
from lockstep.numerics.formats import E4M3

if TYPE_CHECKING:
    from lockstep.kernels.packed_index import PrefillIndex
    from lockstep.kernels.triton.attention import DecodeIndex

SPARE = 3
"""Pages that no sequence owns."""


@dataclass(frozen=True)
class Paged:
    """rows: keys and values [S, G, D] by slot, BF16 or e4m3, plain. pages: the same as kernels read them. scales: FP32 [G] of
    keys and of values, for e4m3. table_BP: int32."""

    shape: AttentionShape
    lengths: tuple[int, ...]
    rows: tuple[Tensor, Tensor]
    pages: tuple[Tensor, Tensor]
    table_BP: Tensor
    scales: tuple[Tensor, Tensor] | None

    @property
    def longest(self) -> int:
        """Keys of the longest sequence."""
        return max(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that a decode step over all sequences reads."""
        elements = sum(self.lengths) * self.shape.kv_heads * self.shape.head_dim
        return 2 * elements * self.pages[0].element_size()

    def copy(self) -> Paged:
        """The same pages elsewhere in memory."""
        k, v = (
            x.view(torch.uint8).clone().view(x.dtype) if x.dtype == E4M3 else x.clone() for x in self.pages
        )
        return Paged(self.shape, self.lengths, self.rows, (k, v), self.table_BP, self.scales)

    def prefill_index(
        self, queries: Sequence[int], block: int, *, first: int = 0, longest: int | None = None
    ) -> PrefillIndex:
        """Tiles for the last `queries[b]` positions of every sequence, packed one after the other. first: size of the first
        tile of a sequence, when it should differ from the others. longest: a larger bound than necessary."""
        from lockstep.kernels.packed_index import PrefillIndex

        tiles, row = [], 0
        for b, (length, count) in enumerate(zip(self.lengths, queries, strict=True)):
            start = 0
            while start < count:
                size = min(count - start, first if first and not start else block)
                tiles.append((row + start, size, length - count + start, b * self.table_BP.shape[1]))
                start += size
            row += count
        tiles.sort(key=lambda tile: -tile[2])  # the longest first, as the engine has them
        tiles_N4 = torch.tensor(tiles, dtype=torch.int32, device=self.table_BP.device)
        return PrefillIndex(tiles_N4, self.table_BP.view(-1), longest or self.longest, block)

    def decode_index(
        self, sequences: Sequence[int], lengths: Sequence[int], *, longest: int | None = None
    ) -> DecodeIndex:
        """One query each for these sequences, seeing that many keys; a sequence may appear several times."""
        from lockstep.kernels.triton.attention import DecodeIndex

        device = self.table_BP.device
        lengths_B = torch.tensor(list(lengths), dtype=torch.int32, device=device)
        table = self.table_BP[torch.tensor(list(sequences), device=device)].contiguous()
        return DecodeIndex(lengths_B, table, longest or max(lengths))

    def slots(self, sequence: int) -> Tensor:
        """[keys] int64: slot of every key of a sequence, on the CPU."""
        position = torch.arange(self.lengths[sequence])
        return self.table_BP[sequence].cpu().long()[position // PAGE] * PAGE + position % PAGE

    def values(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Keys and values [keys, G, D] of a sequence in float64, scales applied."""
        slots = self.slots(sequence).to(self.table_BP.device)
        k, v = (_raw(x)[slots].view(x.dtype).float().double() for x in self.rows)
        if self.scales is None:
            return k, v
        k_scale, v_scale = (s.double()[None, :, None] for s in self.scales)
        return k * k_scale, v * v_scale


def make_paged(
    lengths: Sequence[int], shape: AttentionShape, *, fp8: bool, device: torch.device, seed: int = 0
) -> Paged:
    """Keys and values of standard deviation near 1, codes over much of their range."""
    generator = torch.Generator(device).manual_seed(seed)
    counts = [-(-n // PAGE) for n in lengths]
    total = sum(counts) + SPARE
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).int()
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for b, own in enumerate(order[: sum(counts)].split(counts)):
        table[b, : len(own)] = own
    size = total * PAGE, shape.kv_heads, shape.head_dim
    k, v = (_random(size, fp8, generator) for _ in range(2))
    scales = None
    if fp8:
        k_scale, v_scale = (
            torch.rand(shape.kv_heads, generator=generator, device=device) * 0.02 + 0.01 for _ in range(2)
        )
        scales = (k_scale, v_scale)
    return Paged(shape, tuple(lengths), (k, v), in_pages(k, v), table.to(device), scales)


def in_pages(k_SGD: Tensor, v_SGD: Tensor) -> tuple[Tensor, Tensor]:
    """Pages of rows that are given for every slot of them: BF16, or e4m3 codes as they are."""
    from lockstep.kernels.triton.rope import write_pages

    slots, (count, heads, dim) = torch.arange(len(k_SGD), device=k_SGD.device), k_SGD.shape
    k_pages = torch.empty(count // PAGE, heads, PAGE, dim, dtype=_raw(k_SGD).dtype, device=k_SGD.device)
    v_pages = k_pages.new_empty(count // PAGE, heads, dim, PAGE)
    write_pages(_raw(k_SGD), _raw(v_SGD), slots, slots, k_pages, v_pages, None)
    return k_pages.view(k_SGD.dtype), v_pages.view(v_SGD.dtype)


def random_queries(rows: int, shape: AttentionShape, device: torch.device, seed: int = 1) -> Tensor:
    """[T, H, D] BF16; scores far from uniform."""
    generator = torch.Generator(device).manual_seed(seed)
    q = torch.randn(rows, shape.heads, shape.head_dim, generator=generator, device=device)
    return (q * 1.5).bfloat16()


def _random(size: tuple[int, ...], fp8: bool, generator: torch.Generator) -> Tensor:
    x = torch.randn(size, generator=generator, device=generator.device, dtype=torch.bfloat16)
    return x.mul_(60).clamp_(-448, 448).to(E4M3) if fp8 else x


def _raw(x: Tensor) -> Tensor:
    """Codes as bytes, other values as they are."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x
