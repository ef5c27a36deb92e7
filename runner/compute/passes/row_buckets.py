"""Row buckets: the layers of a pass run over a few more rows than the batch has, so that few row counts ever occur.

oneDNN compiles code for every row count of a product, about 0.5 MiB and 0.6 ms each, and caches a thousand of them:
with prompts of all lengths a server's memory would grow for hours. With at most sixteen row counts between a power of
two and the next it soon stops growing, and the padding, 2 % in the mean, costs no more than the compilation did.

Not here: padding that a policy asks for, which is a part of its batches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from torch import Tensor

from exeplan.kernels.products.linear import row_bucket
from exeplan.runner.compute.blocks.layers import Attend, LastLayer, Layer
from exeplan.runner.compute.blocks.rotary import Angles


@dataclass(frozen=True, slots=True)
class RowBucket:
    """The padding behind a batch's rows: it attends to nothing and is dropped after the last layer."""

    num_rows: int
    num_padding: int

    @classmethod
    def of(cls, num_rows: int) -> "RowBucket":
        """The bucket of a pass of `num_rows` rows."""
        return cls(num_rows, row_bucket(num_rows) - num_rows)

    def pad(self, x_N: Tensor, value: float = 0) -> Tensor:
        """A padded copy, or the tensor itself where there is no padding."""
        return F.pad(x_N, (0, 0) * (x_N.ndim - 1) + (0, self.num_padding), value=value) if self.num_padding else x_N

    def through(self, layers: Iterable[Layer], hidden_NE: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
        """The output of the layers, `[N, E]`, without padding; `angles` includes padding.

        Padding is copies of the last row, which go to the same experts: no weights are read for it.
        """
        hidden_NE = self.like_last(hidden_NE)
        for layer in layers:
            hidden_NE = layer(hidden_NE, angles, self._padded(attend))
        return hidden_NE[: self.num_rows]

    def to_wanted(
        self,
        layers: Sequence[LastLayer],
        hidden_NE: Tensor,
        angles: Angles | None,
        attend: Attend,
        wanted_R: Tensor,
        bucket: "RowBucket",
    ) -> Tensor:
        """The same of some rows, `[R, E]`: the last layer computes no others behind its attention. They are padded to
        a bucket of their own."""
        *others, last = layers
        hidden_NE = self.like_last(self.through(others, hidden_NE, angles, attend))
        return last(hidden_NE, angles, self._padded(attend), bucket.like_last(wanted_R))[: bucket.num_rows]

    def _padded(self, attend: Attend) -> Attend:
        if not self.num_padding:
            return attend
        return lambda shape, qkv_NMD: self.like_last(attend(shape, qkv_NMD[: self.num_rows]))

    def like_last(self, x_NE: Tensor) -> Tensor:
        """Padded by copies of the last row, or the tensor itself where there is no padding."""
        return torch.cat([x_NE, x_NE[-1:].expand(self.num_padding, *x_NE.shape[1:])]) if self.num_padding else x_NE
