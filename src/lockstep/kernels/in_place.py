"""Working copies of a device backend: where they lie, and their refresh without moving them.

Captured graphs, stacks and whoever made something of a weight point at its storage, so a refresh writes into it. Weights that
share an input are views of one stack from their first refresh on:

    codes      rows of the stack's codes
    scale      rows of the stack's scales, where parts end at a block's edge; else the stack has a scale for each row, and a part
               its own blocks beside them (`PackedWeight.row_scale`)

Every master is read and every code written by one pass; the host learns what came of it in a few waves. If a master was not
finite, working copies are neither of the old version nor of the new one; whoever asked must not use them (`models/decoder.py`
gives them no version).

Next: `triton/refresh.py` for the pass, `renew.py` for what is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.kernels.library import library_scale
from lockstep.kernels.reference import PackedWeight
from lockstep.kernels.renew import Renewed, Source, non_finite
from lockstep.kernels.triton.refresh import Added, Codes, Findings, Pass
from lockstep.numerics.formats import BLOCK, E4M3, Operand
from lockstep.numerics.quantize import Quantized

SQUARE = (BLOCK, BLOCK)


def refresh(sources: Iterable[Source]) -> Iterator[Renewed]:
    """See `ReferenceKernels.refresh`. The device begins with the first sources before the last are taken, and what came of the
    first is told while it works on the last. Raises ConfigError for a master on another device than the GPU."""
    work: list[tuple[Source, Tensor, PackedWeight]] = []
    run = Pass()
    for source in sources:
        master, held = source.master, source.held
        known = None if held is None else held.version.known
        if held is not None and known is not None and (known.source is source or known.holds(source)):
            place = held
            run.again(known.added)
            known.source = source
        else:
            place = held if held is not None and _fits(source, held) else empty(source)
            master = _master(source)
            added = run.add(master, _target(place), pow2=source.operand.scale == "pow2")
            place.version.known = _Known(source.operand, source.master.shape, added)
        work.append((source, master, place))
        _count(place)
    run.launch()
    for (source, _, place), found in zip(work, run.findings(), strict=True):
        yield _renewed(source, place, found)


@dataclass
class _Known:
    """How a place was remade last: looking at every tensor anew takes the host longer than the device has work with it. source:
    what was asked when that came again, which whoever asks may recognize (`Working.sources`); not before, since a working copy
    must not keep a master that nobody else keeps."""

    operand: Operand
    shape: torch.Size
    added: Added
    source: Source | None = None

    def holds(self, source: Source) -> bool:
        """Whether this master goes to the place in the same way. The place itself can't change: its version holds this."""
        master = source.master
        return (
            master.data_ptr() == self.added.addresses[0]
            and source.operand is self.operand
            and master.shape == self.shape
            and master.dtype == torch.float32
            and master.device == self.added.device
            and master.is_contiguous()
        )


def _renewed(source: Source, place: PackedWeight, found: Findings) -> Renewed:
    if not found.finite:
        raise ValueError(f"{source.name}: {non_finite(source)}")
    changed = source.master.numel() if source.fresh or place is not source.held else found.changed
    max_rel = found.error / found.peak if found.peak and place.codes is not None else 0.0
    return Renewed(place, changed, max_rel, found.fingerprint)


def reserve(sources: Sequence[Source]) -> list[PackedWeight]:
    """Uninitialised weights, views of one stack."""
    first, sizes = sources[0], [len(s.master) for s in sources]
    group = first.operand.group
    if group is not None and any(size % BLOCK for size in sizes[:-1]):
        group = (1, BLOCK)
    return _views(_empty((sum(sizes), first.master.shape[1]), group, first.master.device), sizes)


def stacked(parts: Sequence[PackedWeight]) -> list[PackedWeight]:
    """Weights copied into one stack, as views of it."""
    if parts[0].codes is None:
        plain = [p.plain for p in parts if p.plain is not None]
        return _views(PackedWeight(None, torch.cat(plain), None), [len(p) for p in plain])
    codes = [p.codes for p in parts if p.codes is not None]
    sizes = [len(c.codes) for c in codes]
    group = SQUARE if all(size % BLOCK == 0 for size in sizes[:-1]) else (1, BLOCK)
    views = _views(_empty((sum(sizes), codes[0].shape[1]), group, codes[0].codes.device), sizes)
    for view, old in zip(views, codes, strict=True):
        assert view.codes is not None
        view.codes.codes.view(torch.uint8).copy_(old.codes.view(torch.uint8))
        view.codes.scale.copy_(old.scale)
        if view.library_scale is not None:
            view.library_scale.copy_(_library(old))
        if view.row_scale is not None:
            view.row_scale.copy_(old.scale.repeat_interleave(BLOCK, 0)[: len(old.codes)])
    return views


def empty(source: Source) -> PackedWeight:
    """Uninitialised storage for a working copy that stands alone."""
    shape = tuple(source.master.shape)
    return _empty(shape, source.operand.group, source.master.device)


def _empty(shape: tuple[int, ...], group: tuple[int, int] | None, device: torch.device) -> PackedWeight:
    if group is None:
        return PackedWeight(None, torch.empty(shape, dtype=torch.bfloat16, device=device), None)
    blocks = [-(-size // width) for size, width in zip(shape, group, strict=True)]
    codes = torch.empty(shape, dtype=torch.uint8, device=device).view(E4M3)
    whole = Quantized(codes, torch.empty(blocks, device=device), group)
    return PackedWeight(whole, None, None, library_scale(whole))


def _views(stack: PackedWeight, sizes: Sequence[int]) -> list[PackedWeight]:
    """The parts of a stack, one below the other."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    ranges = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    if stack.plain is not None:
        return [PackedWeight(None, stack.plain[rows], None, stack=stack) for rows in ranges]
    return [_view(stack, rows) for rows in ranges]


def _view(stack: PackedWeight, rows: slice) -> PackedWeight:
    assert stack.codes is not None
    codes = stack.codes.codes[rows]
    if stack.codes.group != SQUARE:
        scale = torch.empty(-(-len(codes) // BLOCK), stack.codes.scale.shape[1], device=codes.device)
        part = Quantized(codes, scale, SQUARE)
        return PackedWeight(part, None, None, library_scale(part), stack, stack.codes.scale[rows])
    blocks = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
    part = Quantized(codes, stack.codes.scale[blocks], SQUARE)
    library = None if stack.library_scale is None else stack.library_scale[:, blocks]
    return PackedWeight(part, None, None, library if library is not None else library_scale(part), stack)


def _library(codes: Quantized) -> Tensor:
    scale = library_scale(codes)
    assert scale is not None, "a view has a library scale where its weight alone would have one"
    return scale


def _fits(source: Source, held: PackedWeight) -> bool:
    """Whether the working copy can be written where it is."""
    master, codes, plain = source.master, held.codes, held.plain
    if codes is not None:
        return (
            codes.group == source.operand.group
            and codes.codes.shape == master.shape
            and codes.codes.device == master.device
            and codes.codes.is_contiguous()
            and codes.scale.is_contiguous()
        )
    return (
        plain is not None
        and not source.operand.is_fp8
        and plain.shape == master.shape
        and plain.dtype == torch.bfloat16
        and plain.device == master.device
        and plain.is_contiguous()
    )


def _target(place: PackedWeight) -> Codes | Tensor:
    if place.codes is None:
        assert place.plain is not None
        return place.plain
    library = None if place.library_scale is None else place.library_scale.t()
    return Codes(place.codes.codes, place.codes.scale, library, place.row_scale)


def _master(source: Source) -> Tensor:
    """The master as the pass reads it. Raises ValueError for one that a receiver has released: it is one NaN, expanded."""
    master = source.master
    if not master.is_cuda or source.activation != torch.bfloat16:
        raise ConfigError(
            f"{source.name} is on {master.device} and its activations are {source.activation}",
            where="kernels",
            why="the Hopper kernels refresh masters on a GPU, and keep what isn't quantized in BF16",
            fix="move the decoder to the GPU, or use kernels: reference",
        )
    if 0 in master.stride() and not bool(torch.isfinite(master.as_strided((1,), (1,)))):
        raise ValueError(f"{source.name}: {non_finite(source)}")
    return master.float().contiguous()


def _count(place: PackedWeight) -> None:
    """What was made from the old values is stale now."""
    place.version.count += 1
    if place.stack is not None:
        place.stack.version.count += 1
