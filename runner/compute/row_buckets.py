"""Rounding: the layers of a pass over a few more rows than the batch has, so that few numbers of rows ever occur.

oneDNN makes code for every number of rows that a product meets, about 0.5 MiB and 0.6 ms each, and keeps a thousand of
them: prompts of all lengths would make a service's memory rise for hours. With at most sixteen numbers between a power
of two and the next it soon stops, and the added rows, 2 % in the mean, cost no more than new code did.

Not here: the padding that a policy asks for, which is a part of its batches.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from torch import Tensor

from exeplan.kernels.linear import rounded_rows
from exeplan.runner.compute.layers import Attend, AttentionShape, Layer
from exeplan.runner.compute.rotary import Angles


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rows that are added behind those of a batch. They are nobody's: they attend to nothing and are dropped."""

    num_rows: int
    num_added: int

    @classmethod
    def of(cls, num_rows: int) -> "Rounding":
        """What a pass of so many rows needs."""
        return cls(num_rows, rounded_rows(num_rows) - num_rows)

    def add(self, x_N: Tensor, value: float = 0) -> Tensor:
        """A copy with the added rows, or the tensor itself where there are none."""
        return F.pad(x_N, (0, 0) * (x_N.ndim - 1) + (0, self.num_added), value=value) if self.num_added else x_N

    def through(self, layers: Iterable[Layer], hidden_NE: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
        """What leaves the layers, `[N, E]`, of the batch's rows alone; `angles` are those of all rows."""

        def rounded(shape: AttentionShape, qkv_NMD: Tensor) -> Tensor:
            return self.add(attend(shape, qkv_NMD[: self.num_rows]))

        hidden_NE = self.add(hidden_NE)
        for layer in layers:
            hidden_NE = layer(hidden_NE, angles, rounded if self.num_added else attend)
        return hidden_NE[: self.num_rows]
