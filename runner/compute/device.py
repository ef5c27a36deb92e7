"""The torch device for a plan's device on this host."""

import torch

from exeplan.errors import InputError


def local_device(kind: str, number: int = 0) -> torch.device:
    """The CPU, or the GPU of that number, which becomes the current one. Raises InputError where it does not exist."""
    if kind != "cuda":
        return torch.device(kind)
    count = torch.cuda.device_count()
    if number >= count:
        raise InputError(f"the plan needs CUDA GPU number {number} of this host, which has {count or 'none'}")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device
