"""DecodeGraphs: a model's decode iteration, recorded for a ladder of batch sizes and replayed for the next larger one.

Letters: B rows of a batch, P rows that it was padded to, T blocks of the longest sequence, E hidden size, V vocabulary.

A recording reads its batch from static tensors, which one copy and two launches fill: six numbers a row, and the block
table. Rows of padding have no slot to write and see no token. On a pipeline every stage records its own layers, from
hidden states to hidden states; the last one chooses the most likely token of each row, too, and leaves it on the
device, where the next iteration finds it. Prefills run as they come: their shapes are too many, and their kernels long
enough for Python to keep ahead.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exeplan.kernels.select import Kernels
from exeplan.kernels.sending import sent
from exeplan.runner.compute.kv_cache import KVCache
from exeplan.runner.compute.layers import Model
from exeplan.runner.compute.paged_step import NOWHERE, TABLE_WIDTH, PagedAttention, Singles
from exeplan.runner.compute.recording import Recorded, Recorder
from exeplan.runner.compute.shard import Shard

_FINE, _MIDDLE = 64, 256
_PADDING = np.array([{"source": NOWHERE, "slot": NOWHERE}.get(name, 0) for name in Singles._fields], dtype=np.int32)
"""The numbers of a row that is none."""


def ladder(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes worth a recording, up to one that holds `max_num_seqs` rows: padding stays a small share of rows."""
    sizes = [1, 2, 4, *range(8, _FINE, 8), *range(_FINE, _MIDDLE, 16), *range(_MIDDLE, max_num_seqs + 64, 64)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class DecodeGraphs:
    """The recordings of one shard on one device."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        kernels: Kernels,
        shard: Shard,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        max_num_seqs: int,
        max_num_blocks: int,
        encodes: bool,
        recent_B: Tensor,
    ) -> None:
        """No row has more than `max_num_blocks` blocks. `encodes` says that rows begin with tokens that were encoded.

        `recent_B`, `[max_num_seqs]` at least, holds the tokens of the last pass, and takes those of each replay.
        """
        self._model, self._cache, self._kernels, self._shard = model, cache, kernels, shard
        self._encodes, self._recent_B = encodes, recent_B
        device, rows = cache.device, -(-max_num_seqs // TABLE_WIDTH) * TABLE_WIDTH
        width = -(-max_num_blocks // TABLE_WIDTH) * TABLE_WIDTH
        self._fields = sent(np.repeat(_PADDING[:, None], rows, 1), device)
        self._table_BT = torch.zeros((rows, width), dtype=torch.int32, device=device)
        self._hidden_BE = torch.zeros((0 if shard.first else rows, hidden_size), dtype=dtype, device=device)
        self._recorder = Recorder(device)
        self.recorded: dict[int, Recorded] = {}
        """By size."""
        self.sizes = ladder(max_num_seqs)

    @property
    def num_bytes(self) -> int:
        """Memory of the device that the recordings take."""
        return self._recorder.num_bytes

    def record(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Records all sizes, the largest first; `progress` is told how many are done."""
        for done, size in enumerate(reversed(self.sizes), 1):
            self.recorded[size] = self._recorder.record(partial(self.iteration, size))
            progress(done, len(self.sizes))

    def fit(self, num_rows: int) -> bool:
        return 0 < num_rows <= self.sizes[-1]

    def replay(self, singles: Singles, table_BT: NDArray[np.int32], hidden_BE: Tensor | None) -> tuple[Tensor, ...]:
        """One decode iteration of B rows: their logits `[B, V]` (float32), tokens, and whether those are sound.

        On a shard that is not the last only their hidden states `[B, E]`. Logits are gone with the next call.
        """
        rows = len(singles.token)
        size = next(size for size in self.sizes if size >= rows)
        self._fill(singles, table_BT, size)
        if hidden_BE is not None:
            self._hidden_BE[:rows].copy_(hidden_BE)
        outputs = tuple(output[:rows] for output in self.recorded[size].replay())
        # Hidden states are sent beside the next iteration, which would overwrite them.
        return outputs if self._shard.last else tuple(output.clone() for output in outputs)

    def _fill(self, singles: Singles, table_BT: NDArray[np.int32], size: int) -> None:
        """The static tensors, from one copy."""
        rows, width = table_BT.shape
        packed = np.empty(len(singles) * size + table_BT.size, dtype=np.int32)
        fields = packed[: len(singles) * size].reshape(-1, size)
        fields[:] = _PADDING[:, None]
        fields[:, :rows] = singles
        packed[len(singles) * size :] = table_BT.ravel()
        on_device = sent(packed, self._fields.device)
        self._fields[:, :size].copy_(on_device[: len(singles) * size].view(-1, size))
        self._table_BT[:rows, :width].copy_(on_device[len(singles) * size :].view(rows, width))

    def iteration(self, size: int) -> tuple[Tensor, ...]:
        """What is recorded: the iteration of so many rows, over the static tensors."""
        token, source, position, slot, end, first = self._fields[:, :size].unbind(0)
        position_B = position.long()
        attend = PagedAttention(
            self._cache,
            self._kernels,
            slot_N=slot,
            table_BT=self._table_BT[:size],
            end_B=end,
            first_B=first if self._encodes else None,
        )
        if self._shard.first:
            token_B = torch.where(source < 0, token, self._recent_B[source.clamp(min=0).long()])
            hidden_BE = self._model.embed(token_B, position_B)
        else:
            hidden_BE = self._hidden_BE[:size]
        angles = self._model.angles(position_B, position_B + 1)
        for layer in self._model.layers:
            hidden_BE = layer(hidden_BE, angles, attend)
        if not self._shard.last:
            return (hidden_BE,)
        logits_BV = self._model.head(hidden_BE).float().contiguous()
        token_B, sound_B = self._kernels.most_likely(logits_BV)
        self._recent_B[:size].copy_(token_B)
        return logits_BV, token_B, sound_B
