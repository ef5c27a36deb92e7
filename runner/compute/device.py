"""The torch device that a plan's device is on this host."""

import torch

from exeplan.errors import InputError


def local_device(kind: str, number: int = 0) -> torch.device:
    """The CPU, or the GPU of that number, which becomes this process's own. Raises InputError when it is not there."""
    if kind != "cuda":
        return torch.device(kind)
    count = torch.cuda.device_count()
    if number >= count:
        raise InputError(f"the plan needs CUDA GPU number {number} of this host, which has {count or 'none'}")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device
