"""Master weights and their working copies.

The optimizer moves FP32 masters. The forward pass never reads a master: it reads the *working copy*, made once a weight
version straight from the master, on every side (two sources change 2 % of the codes, field failure 14). The source of FP8 codes
is the FP32 master and not its BF16 rounding: a pretrained BF16 weight sits in the middle of its rounding interval, and at a
learning rate of 5e-6 it takes dozens of steps until it leaves it. Codes from the masters follow from the first step, since
weights lie anywhere between two code thresholds.

Next: `linear.py`, where the working copy is FP8 codes; `../kernels/renew.py`, which makes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.kernels.reference import PackedWeight
from lockstep.kernels.renew import Renewed, Source
from lockstep.kernels.table import Kernels
from lockstep.numerics.fingerprint import Fingerprint
from lockstep.numerics.formats import Operand


class Refreshed(NamedTuple):
    """What one refresh did to one tensor. `changed` counts codes (or BF16 values) that differ from the last version in any bit;
    `max_rel` is the largest quantization error as a share of the tensor's largest value."""

    name: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int
    numel: int
    changed: int
    max_rel: float


@dataclass(frozen=True)
class Held:
    """One tensor of a working copy: codes with scales [ceil(N / 128), ceil(K / 128)], or plain values."""

    value: Tensor
    scale: Tensor | None

    @cached_property
    def description(self) -> str:
        """What a fingerprint leaves out. Codes and plain values of equal bytes are different weights."""
        return f"{'codes' if self.scale is not None else str(self.value.dtype)} {list(self.value.shape)}"

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the codes or values."""
        return tuple(self.value.shape)

    @cached_property
    def numel(self) -> int:
        """Codes or values."""
        return self.value.numel()

    @cached_property
    def nbytes(self) -> int:
        """With scales."""
        return self.value.nbytes + (0 if self.scale is None else self.scale.nbytes)


class Known(NamedTuple):
    """Fingerprints that a refresh made on its way, with the tensors they are of; both empty when it made none. text: what a
    digest says of them, under this name. packed: the working copy that has these tensors."""

    held: Sequence[Held] = ()
    found: Sequence[Fingerprint] = ()
    name: str = ""
    text: str = ""
    packed: PackedWeight | None = None

    def of(self, held: Sequence[Held]) -> Sequence[Fingerprint] | None:
        """The fingerprints, as long as these are the tensors that the refresh wrote."""
        if len(self.held) != len(held):
            return None
        if self.held is held:
            return self.found
        same = all(a.value is b.value and a.scale is b.scale for a, b in zip(self.held, held, strict=True))
        return self.found if same else None


NOTHING = Known()
"""Of a working copy that is being remade."""


class Working(nn.Module):
    """A module with one FP32 master `weight` and its working copy `packed`."""

    weight: nn.Parameter

    def __init__(self, kernels: Kernels, operand: Operand, activation: torch.dtype) -> None:
        super().__init__()
        self.kernels, self.operand, self.activation = kernels, operand, activation
        self.kind = str(operand)
        self.packed: PackedWeight | None = None
        self.described: tuple[PackedWeight | None, list[Held]] = None, []
        self.asked: list[Source] = []
        self.known = Known()

    @property
    def working(self) -> PackedWeight:
        """The working copy; a module that was never refreshed has none."""
        assert self.packed is not None, "refresh the decoder before its first forward"
        return self.packed

    def install(self, packed: PackedWeight | None) -> None:
        """Takes a working copy into use that was made elsewhere, or none. Nothing here keeps the old one."""
        self.packed, self.described, self.asked, self.known = packed, (None, []), [], NOTHING

    def forget_master(self) -> None:
        """Keeps no record of what the working copy was made of: for whoever drops the master."""
        self.asked = []
        if self.packed is not None:
            self.packed.version.known = None

    def refresh(self, name: str) -> Refreshed:
        """Remakes the working copy from the master. Raises ValueError when the master holds NaN or infinity."""
        return refresh([(name, self)])[0]

    @property
    def parts(self) -> int:
        """How many tensors the working copy is made of, codes and scales counted once."""
        return 1

    def sources(self, name: str, reserved: PackedWeight | None = None) -> list[Source]:
        """What is to be remade, `parts` of them. reserved: storage for a first working copy."""
        self.__dict__["known"] = NOTHING  # past `nn.Module`, which looks for parameters first
        held, fresh = (reserved, reserved is not None) if self.packed is None else (self.packed, False)
        weight, asked = self._parameters["weight"], self.asked
        assert weight is not None
        if asked and asked[0].held is held and asked[0].name == name:
            master = asked[0].master
            if master.data_ptr() == weight.data_ptr() and master.shape == weight.shape:
                return asked  # the very same list and records, which a backend recognizes
        made = [Source(name, weight.detach(), self.operand, self.activation, held, fresh)]
        self.asked = [] if fresh or held is None else made
        return made

    def take(self, name: str, renewed: Sequence[Renewed]) -> Refreshed:
        """Uses what was made of `sources`; all of it is one record."""
        first = renewed[0]
        if self.packed is not first.packed:
            self.packed = first.packed
        held, found = self.held(), [r.fingerprint for r in renewed if r.fingerprint is not None]
        if len(found) == len(held):
            self.__dict__["known"] = Known(held, found, name, _text(name, held, found), first.packed)
        one = held[0]
        if len(held) == 1:
            return Refreshed(name, self.kind, one.shape, one.nbytes, one.numel, first.changed, first.max_rel)
        nbytes, numel = sum([h.nbytes for h in held]), sum([h.numel for h in held])
        changed = sum([r.changed for r in renewed])
        return Refreshed(name, self.kind, one.shape, nbytes, numel, changed, first.max_rel)

    def told(self, name: str) -> str:
        """What a digest says of the working copy, if the refresh left it; else nothing."""
        known = self.known
        return known.text if known.packed is self.packed and known.name == name else ""

    def held(self) -> list[Held]:
        """The working copy's tensors, `parts` of them; the same list as long as it is the same working copy."""
        packed = self.working
        if self.described[0] is not packed:
            if packed.codes is not None:
                held = Held(packed.codes.codes, packed.codes.scale)
            else:
                assert packed.plain is not None
                held = Held(packed.plain, None)
            self.described = packed, [held]
        return self.described[1]


def refresh(
    modules: Iterable[tuple[str, Working]], reserved: Mapping[Working, PackedWeight] | None = None
) -> list[Refreshed]:
    """Remakes the working copies of all modules, which share one backend; reserved: storage of first ones. A backend may begin
    with the first of them before it asks for the last.

    Raises ValueError that names the first master with NaN or infinity. Working copies may be of either version then.
    """
    reserved, rest = reserved or {}, iter(modules)
    met = list(islice(rest, 1))
    if not met:
        return []

    def sources() -> Iterator[Source]:
        yield from met[0][1].sources(met[0][0], reserved.get(met[0][1]))
        for name, module in rest:
            met.append((name, module))
            yield from module.sources(name, reserved.get(module))

    refreshed = list[Refreshed]()
    with torch.no_grad():
        renewed = met[0][1].kernels.refresh(sources())
        for first in renewed:
            name, module = met[len(refreshed)]
            refreshed.append(module.take(name, [first, *islice(renewed, module.parts - 1)]))
    return refreshed


def contents(named: Sequence[tuple[str, Working]]) -> list[str]:
    """What a digest says of each module: its name, and type, shape and fingerprint of its tensors, read anew where the refresh
    didn't leave them."""
    told = [module.told(name) for name, module in named]
    if all(told):  # as after every refresh of a device backend, and then the host should not dwell on it
        return told
    held = [module.held() for _, module in named]
    found = [module.known.of(parts) for (_, module), parts in zip(named, held, strict=True)]
    unknown = [h for parts, known in zip(held, found, strict=True) if known is None for h in parts]
    made = iter(named[0][1].kernels.fingerprints([(h.value, h.scale) for h in unknown]) if unknown else ())
    return [
        _text(name, parts, known or list(islice(made, len(parts))))
        for (name, _), parts, known in zip(named, held, found, strict=True)
    ]


def _text(name: str, held: Sequence[Held], found: Sequence[Fingerprint]) -> str:
    parts = zip(held, found, strict=True)
    return name + "".join([f" {h.description} {first:016x}{second:016x}\n" for h, (first, second) in parts])
