"""Arrays from the host to a device, by an asynchronous copy."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device. On a GPU the copy goes through pinned memory, in the order of its stream."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
