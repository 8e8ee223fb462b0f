"""A decoder whose masters are made on a device, and not moved there; and one over the masters of another.

Next: `decoder.py`.
"""

from __future__ import annotations

import torch

from lockstep.kernels.table import Kernels
from lockstep.models.decoder import Decoder
from lockstep.models.frequencies import inverse_frequencies
from lockstep.models.spec import ModelSpec
from lockstep.numerics.flow import Flow


def empty_decoder(spec: ModelSpec, flow: Flow, kernels: Kernels, device: torch.device) -> Decoder:
    """Masters on `device`, holding nothing yet; `meta` makes none at all.

    Rotary frequencies are made on the CPU whatever the device, so that every machine has the same.
    """
    if device.type == "cpu":
        return Decoder(spec, flow, kernels)
    with torch.device("meta"):
        decoder = Decoder(spec, flow, kernels)
    rope = decoder.model.rope
    rope.inverse = inverse_frequencies(spec.rope, spec.head_dim).double()
    rope.table_PD = torch.empty(0, 2, len(rope.inverse))
    return decoder if device.type == "meta" else decoder.to_empty(device=device)


def sharing_decoder(other: Decoder, flow: Flow, kernels: Kernels | None = None) -> Decoder:
    """A decoder with a flow of its own, whose parameters are the very tensors of `other`. Refresh it before its first forward."""
    decoder = empty_decoder(other.spec, flow, kernels or other.kernels, torch.device("meta"))
    decoder.share_masters(other)
    decoder.checkpointing, decoder.save_fp8 = other.checkpointing, other.save_fp8
    decoder.deterministic = other.deterministic
    return decoder
