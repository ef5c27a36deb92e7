"""The spans of a flat batch: the rows of each sequence, the tokens that they attend to, and their tiles of queries.

Not here: the location of cached tokens (`online_softmax.PagedKV`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from exeplan.kernels.to_device import to_device


class Span(NamedTuple):
    """The tokens of one sequence in a flat batch."""

    num_queries: int
    num_keys: int | None = None
    """New tokens that are attended to; None for all, fewer where the rest is padding."""
    cached: tuple[int, int] = (0, 0)
    """The first and, exclusive, the last cached token that is attended to; the latter is the first query's position."""

    @property
    def new_keys(self) -> int:
        return self.num_queries if self.num_keys is None else self.num_keys


class Spans:
    """The spans of a batch on a device; built once and shared by all layers."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.spans = tuple(spans)
        self.num_tokens = sum(span.num_queries for span in spans)
        self.is_cached = any(first < end for _, _, (first, end) in spans)
        """Whether any token is read from the cache."""
        starts = np.cumsum([0, *(span.num_queries for span in spans)])
        fields = [
            (start, span.num_queries, span.new_keys, *span.cached) for start, span in zip(starts, spans, strict=False)
        ]
        # Without spans nothing is copied, because CUDA graph capture forbids it.
        empty = torch.empty((0, 5), dtype=torch.int32, device=device)
        self.fields_B5 = to_device(np.array(fields, dtype=np.int32), device) if fields else empty
        """For each span: its first row in the batch, queries, new keys, first and last cached token."""
        self._tiles: dict[int, Tensor] = {}

    def tiles(self, rows: int) -> Tensor:
        """(sequence, first query) of every tile of `rows` queries, `[tiles, 2]`; those with most keys come first."""
        if rows not in self._tiles:
            tiles = [(b, query) for b, span in enumerate(self.spans) for query in range(0, span.num_queries, rows)]
            tiles.sort(key=lambda tile: -(self.spans[tile[0]].cached[1] + tile[1]))
            self._tiles[rows] = to_device(np.array(tiles, dtype=np.int32).reshape(-1, 2), self.fields_B5.device)
        return self._tiles[rows]
