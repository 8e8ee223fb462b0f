"""From the host to a device without waiting for what the device is doing."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(x: Tensor, device: torch.device | None) -> Tensor:
    """x on `device`. To a GPU it goes through pinned memory, in the order of the stream: a plain `to` waits for the GPU first."""
    if device is None or device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
