"""Kernel: one implementation of an op, and where it serves; a file of this folder lists its own as `KERNELS`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MODEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What models compute in."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Implementations of one op take the same arguments and return the same result up to rounding."""

    op: str
    function: Callable[..., Any]
    device: str | None = None
    """A torch device type; None for any device."""
    dtypes: tuple[torch.dtype, ...] | None = None
    """None for any dtype."""

    def serves(self, device_type: str | None, dtype: torch.dtype) -> bool:
        return self.device in (None, device_type) and (self.dtypes is None or dtype in self.dtypes)

    @property
    def specificity(self) -> tuple[bool, bool]:
        """Of two kernels that serve, the greater one is taken: a kernel for the device before one for any device."""
        return self.device is not None, self.dtypes is not None
