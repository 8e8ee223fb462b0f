"""Where each tensor of a publication goes in a decoder: by exact module path, looked up anew each time.

Nothing is hung on parameters and no reference to a module is kept, so a plan outlives a decoder whose modules or parameters
were rebuilt in between (verl 540, sglang 5424, vllm 28425 lost a `weight_loader` attribute that way). Working copies are
exchanged, never written into: what was there can be put back whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.kernels.reference import PackedWeight
from lockstep.models.decoder import Decoder
from lockstep.nn.linear import Linear
from lockstep.nn.working import Working
from lockstep.sync.records import Record
from lockstep.sync.roles import Slot, slots

Held = PackedWeight | Tensor | None
"""A working copy: packed weight, bias, or nothing yet."""


@dataclass(frozen=True)
class LoadPlan:
    """The slots of a decoder, by the name of their tensor."""

    slots: Mapping[str, Slot]

    @classmethod
    def of(cls, decoder: Decoder) -> LoadPlan:
        """The plan of this decoder as it is now."""
        return cls({slot.name: slot for slot in slots(decoder)})

    def prepare(self, decoder: Decoder, record: Record) -> PackedWeight | Tensor:
        """The record as its module will hold it, on the decoder's device; nothing is installed."""
        device = next(decoder.parameters()).device
        slot = self.slots[record.name]
        value = record.value
        if isinstance(value, Tensor):
            moved = value.to(device)
            return moved if slot.leaf == "bias" else decoder.kernels.pack(moved)
        return decoder.kernels.pack(type(value)(value.codes.to(device), value.scale.to(device), value.group))

    def install(self, decoder: Decoder, values: Mapping[str, Held]) -> dict[str, Held]:
        """Exchanges working copies; returns those that were there, for `install` to put back."""
        before: dict[str, Held] = {}
        for name, value in values.items():
            slot = self.slots[name]
            module = decoder.get_submodule(slot.path)
            if slot.leaf == "bias":
                assert isinstance(module, Linear) and not isinstance(value, PackedWeight)
                before[name], module.working_bias = module.working_bias, value
            else:
                assert isinstance(module, Working) and not isinstance(value, Tensor)
                before[name] = module.packed
                module.install(value)
        return before


def release_masters(decoder: Decoder) -> None:
    """Replaces every master by NaN of the same shape that takes four bytes: a receiver has working copies only.

    Nothing can then remake them from weights that were never trained: a `refresh` is refused as non-finite (TRL 5312).
    """
    for name, parameter in list(decoder.named_parameters()):
        path, _, leaf = name.rpartition(".")
        module = decoder.get_submodule(path)
        if isinstance(module, Working):
            module.forget_master()
        empty = torch.full((1,), float("nan"), device=parameter.device).expand(parameter.shape)
        setattr(module, leaf, nn.Parameter(empty, requires_grad=False))
