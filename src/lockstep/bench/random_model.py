"""A decoder of a given shape with random working copies and no masters: what a rollout needs, in the memory a rollout has."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.kernels.table import Kernels
from lockstep.models.build import empty_decoder
from lockstep.models.decoder import Decoder
from lockstep.models.spec import ModelSpec
from lockstep.nn.norm import RMSNorm
from lockstep.numerics.flow import Flow


@torch.no_grad()
def random_decoder(
    spec: ModelSpec, flow: Flow, kernels: Kernels, device: torch.device, *, seed: int = 0, std: float = 0.02
) -> Decoder:
    """Weights N(0, std), norms near one; each tensor is made, taken into use, and dropped. Version 1."""
    decoder = empty_decoder(spec, flow, kernels, torch.device("meta"))
    generator = torch.Generator(device).manual_seed(seed)
    for name, module in decoder.working():
        shape = module.weight.shape
        value = torch.randn(shape, generator=generator, device=device) * std
        module.weight = nn.Parameter(value + 1.0 if isinstance(module, RMSNorm) else value)
        bias = getattr(module, "bias", None)
        if bias is not None:
            made = torch.randn(bias.shape, generator=generator, device=device) * std
            module.bias = nn.Parameter(made)
        module.refresh(name)
        module.weight = nn.Parameter(torch.empty(shape, device="meta"))
    decoder.stack()  # now, since an engine's cache takes what is free then
    decoder.version = decoder.refreshes = 1
    return decoder
