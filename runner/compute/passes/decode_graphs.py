"""DecodeGraphs: CUDA graphs of a model's decode iteration, captured for a ladder of batch sizes.

A batch replays the graph of the next larger size. Letters: B sequences of a batch, T blocks of the longest sequence,
E hidden size, V vocabulary.

A graph reads its batch from static tensors, which one copy and two launches fill: six numbers a sequence, and the
block table. A padding row has no slot to write and attends to no token. On a pipeline each stage captures its own
layers, from hidden states to hidden states; the last stage also takes the most likely token of each sequence and keeps
it on the device for the next iteration. Prefills are not captured: they have too many shapes, and their kernels run
long enough to hide Python's launches.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exeplan.kernels.select import Kernels
from exeplan.kernels.to_device import to_device
from exeplan.runner.compute.blocks.layers import Model
from exeplan.runner.compute.passes.graph_capture import CapturedFunction, GraphCapturer
from exeplan.runner.compute.passes.kv_cache import KVCache
from exeplan.runner.compute.passes.paged_step import NOWHERE, TABLE_WIDTH, PagedAttention, Singles
from exeplan.runner.compute.weights.shard import Shard

_FINE, _MIDDLE = 64, 256
_PADDING = np.array([{"prev_row": NOWHERE, "slot": NOWHERE}.get(name, 0) for name in Singles._fields], dtype=np.int32)
"""The numbers of a padding row."""


def ladder(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture, up to `max_num_seqs`, so dense that padding stays a small share of each batch."""
    sizes = [1, 2, 4, *range(8, _FINE, 8), *range(_FINE, _MIDDLE, 16), *range(_MIDDLE, max_num_seqs + 64, 64)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class DecodeGraphs:
    """The CUDA graphs of one shard on one device."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        kernels: Kernels,
        shard: Shard,
        *,
        hidden_size: int,
        vocab_size: int,
        dtype: torch.dtype,
        max_num_seqs: int,
        max_num_blocks: int,
        encodes: bool,
        prev_token_B: Tensor,
    ) -> None:
        """No sequence has more than `max_num_blocks` blocks. `encodes`: sequences begin with encoder tokens.

        `prev_token_B`, at least `[max_num_seqs]`, holds the tokens of the previous pass; each replay writes its own.
        """
        self._model, self._cache, self._kernels, self._shard = model, cache, kernels, shard
        self._encodes, self._prev_token_B = encodes, prev_token_B
        device, rows = cache.device, -(-max_num_seqs // TABLE_WIDTH) * TABLE_WIDTH
        width = -(-max_num_blocks // TABLE_WIDTH) * TABLE_WIDTH
        self._fields = to_device(np.repeat(_PADDING[:, None], rows, 1), device)
        self._table_BT = torch.zeros((rows, width), dtype=torch.int32, device=device)
        self._hidden_BE = torch.zeros((0 if shard.first else rows, hidden_size), dtype=dtype, device=device)
        # In one place for all graphs: logits of its own would take each as much again.
        self._logits_BV = torch.empty((rows if shard.last else 0, vocab_size), device=device)
        self._capturer = GraphCapturer(device)
        self.captured: dict[int, CapturedFunction] = {}
        """By batch size."""
        self.sizes = ladder(max_num_seqs)

    @property
    def num_bytes(self) -> int:
        """Device memory of the graphs."""
        return self._capturer.num_bytes

    def capture(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Captures all sizes, the largest first; calls `progress` with the number captured and the number of sizes."""
        for done, size in enumerate(reversed(self.sizes), 1):
            self.captured[size] = self._capturer.capture(partial(self.iteration, size))
            progress(done, len(self.sizes))

    def fit(self, num_rows: int) -> bool:
        return 0 < num_rows <= self.sizes[-1]

    def replay(self, singles: Singles, table_BT: NDArray[np.int32], hidden_BE: Tensor | None) -> tuple[Tensor, ...]:
        """One decode iteration of B sequences: logits `[B, V]` (float32), tokens, and whether the logits were finite.

        A shard that is not the last returns hidden states `[B, E]` only. The next call overwrites the logits.
        """
        rows = len(singles.token)
        size = next(size for size in self.sizes if size >= rows)
        self._fill(singles, table_BT, size)
        if hidden_BE is not None:
            self._hidden_BE[:rows].copy_(hidden_BE)
        outputs = tuple(output[:rows] for output in self.captured[size].replay())
        # Hidden states are sent while the next iteration runs, which would overwrite them.
        return outputs if self._shard.last else tuple(output.clone() for output in outputs)

    def _fill(self, singles: Singles, table_BT: NDArray[np.int32], size: int) -> None:
        """Fills the static tensors from one copy."""
        rows, width = table_BT.shape
        numbers = np.empty(len(singles) * size + table_BT.size, dtype=np.int32)
        fields = numbers[: len(singles) * size].reshape(-1, size)
        fields[:] = _PADDING[:, None]
        fields[:, :rows] = singles
        numbers[len(singles) * size :] = table_BT.ravel()
        on_device = to_device(numbers, self._fields.device)
        self._fields[:, :size].copy_(on_device[: len(singles) * size].view(-1, size))
        self._table_BT[:rows, :width].copy_(on_device[len(singles) * size :].view(rows, width))

    def iteration(self, size: int) -> tuple[Tensor, ...]:
        """The captured function: one iteration of `size` rows over the static tensors."""
        token, prev_row, position, slot, end, first = self._fields[:, :size].unbind(0)
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
            token_B = torch.where(prev_row < 0, token, self._prev_token_B[prev_row.clamp(min=0).long()])
            hidden_BE = self._model.embed(token_B, position_B)
        else:
            hidden_BE = self._hidden_BE[:size]
        angles = self._model.angles(position_B, position_B + 1)
        for layer in self._model.layers:
            hidden_BE = layer(hidden_BE, angles, attend)
        if not self._shard.last:
            return (hidden_BE,)
        logits_BV = self._logits_BV[:size]
        logits_BV.copy_(self._model.head(hidden_BE))
        token_B, sound_B = self._kernels.most_likely(logits_BV)
        self._prev_token_B[:size].copy_(token_B)
        return logits_BV, token_B, sound_B
