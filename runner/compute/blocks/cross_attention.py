"""Cross attention: queries of the decoder over keys and values of the encoder, which are computed once a prompt.

Letters: N tokens, E hidden size, K key/value heads, D head_dim. Used by encoder-decoder families.
"""

from torch import Tensor

from exeplan.runner.compute.blocks.layers import Attend, AttentionShape, Block


class CrossAttention:
    """`shape.cross` is set, so that `attend` reads the stored `keys_values` of the encoder's output."""

    def __init__(self, shape: AttentionShape, queries: Block, keys_and_values: Block, output: Block) -> None:
        self.shape, self.queries, self.keys_and_values, self.output = shape, queries, keys_and_values, output

    def __call__(self, x_NE: Tensor, attend: Attend) -> Tensor:
        return self.output(attend(self.shape, self.queries(x_NE).view(len(x_NE), -1, self.shape.head_dim)))

    def keys_values(self, encoded_NE: Tensor) -> Tensor:
        """`[N, 2K, D]`, keys before values."""
        return self.keys_and_values(encoded_NE).view(len(encoded_NE), -1, self.shape.head_dim)
