"""Vocabulary: embedding table and output head, split by tokens over the ranks of a stage.

Letters: N tokens of the flat batch, V tokens of the vocabulary, E width of the table, R rows that need logits.

Every rank holds ceil(V / ranks) rows, zero-padded after the end of the vocabulary, so that logits of one shape are
gathered. A tied head is the table; the last stage of a pipeline reads its own copy.
"""

import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from torch import Tensor

from exeplan.kernels.products.linear import Linear
from exeplan.runner.compute.weights.checkpoint import Weights
from exeplan.runner.compute.weights.shard import Shard, ShardRange


class Vocabulary:
    """The table on the first shard, the head on the last."""

    def __init__(self, weights: Weights, shard: Shard, table: str, head: str, size: int, width: int) -> None:
        """`table` and `head` are tensor names, equal where the head is tied."""
        self.group, self.size = shard.group, size
        self.num_rows = -(-size // self.group.size)
        self.start = min(self.group.rank * self.num_rows, size)
        tied = shard.first and head == table
        if shard.first:
            self.table_VE = self._take(weights, table, width)
        if shard.last:
            self.output = Linear(self.table_VE if tied else self._take(weights, head, width))
            if tied and self.output.packed:  # A second copy of the table.
                weights.num_bytes += self.table_VE.nbytes

    def embed(self, token_N: Tensor) -> Tensor:
        """Rows of the table, `[N, E]`."""
        if self.group.size == 1:
            return self.table_VE[token_N]
        row_N = token_N - self.start
        elsewhere_N = (row_N < 0) | (row_N >= self.num_rows)
        rows_NE = self.table_VE[row_N.masked_fill_(elsewhere_N, 0)]
        return self.group.all_reduce(rows_NE.masked_fill_(elsewhere_N[:, None], 0))

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Logits of the whole vocabulary, `[R, V]`, on all ranks."""
        logits_RV: Tensor = self.output(hidden_RE)
        if self.group.size == 1:
            return logits_RV
        return self.group.all_gather(logits_RV)[:, : self.size]

    def _take(self, weights: Weights, name: str, width: int) -> Tensor:
        rows = ShardRange(self.size, self.start, min(self.start + self.num_rows, self.size))
        table_VE = weights.take(name, rows, width)
        return table_VE if len(rows) == self.num_rows else F.pad(table_VE, (0, 0, 0, self.num_rows - len(rows)))
