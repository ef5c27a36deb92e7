"""KVCache: the keys and values of all sequences, in blocks; each sequence has few runs of adjacent blocks.

Letters: L layers, K key/value heads, S slots (tokens), R = K * S rows, D head_dim.

Each layer has a table of keys and one of values, `[R, D]`: attention and the store use row indices, without views,
gathers or copies. Of latent attention it has one table, of the vectors that are both. For each head, the tokens of
adjacent blocks are adjacent rows, which memory streams at twice the rate of scattered blocks. So a new sequence is
allocated with a hint of how long it may grow, and blocks are reserved for it: other sequences take them only when all
else is full.

The scheduler (`exeplan.scheduling.scheduler`) decides how many blocks a sequence may hold; here they are only located.
"""

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.models.model import ModelSpec
from exeplan.errors import InputError
from exeplan.kernels.select import Kernels
from exeplan.kernels.to_device import to_device
from exeplan.runner.compute.passes.host_allocator import in_huge_pages
from exeplan.runner.compute.weights.shard import Shard, kv_range, whole
from exeplan.units import show_bytes

log = logging.getLogger(__name__)
_NO_BLOCKS = np.zeros(0, dtype=np.int32)
_NO_SLOTS = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class _Holding:
    """The blocks of one sequence, as runs [first block, blocks]."""

    number: int
    runs: list[list[int]] = field(default_factory=list)
    blocks: NDArray[np.int32] | None = None
    """All block ids in order, cached until the runs change."""

    @property
    def num_blocks(self) -> int:
        return sum(length for _, length in self.runs)


class KVCache:
    """`num_blocks` blocks for all layers of a model, or for the layers and heads of a shard of it."""

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        shard: Shard | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """With `kernels`, these store keys and values, by slots; without, torch does, by rows.

        Raises InputError where the host's memory has no room for them.
        """
        shard, self._kernels = shard or whole(spec), kernels
        self.num_blocks = num_blocks
        self.num_kv_heads = len(kv_range(spec, shard.group))
        self.num_slots = num_blocks * BLOCK_SIZE
        width = spec.latent.kept if spec.latent else spec.head_dim
        shape = (shard.num_layers, spec.num_kv_tables, self.num_kv_heads * self.num_slots, width)
        name, size = f"a KV cache of {self.num_slots:,} tokens", show_bytes(math.prod(shape) * dtype.itemsize)
        # A CPU's pages are all written: a large cache takes a while. Stages that only prefill have one block.
        if num_blocks > 1 and device.type == "cpu" and shard.group.rank == 0:
            log.info("allocating %s, %s", name, size)
        try:
            self._tables = torch.empty(shape, dtype=dtype, device=device)
            if device.type == "cpu":
                in_huge_pages(self._tables)
            self._tables.zero_()
        except RuntimeError:
            if device.type != "cpu":  # Of a GPU's memory, its owner knows how much is free.
                raise
            raise InputError(f"{name} takes {size}, which this host does not have; lower kv_cache_tokens") from None
        self._layers = self._tables.flatten(1, 2).unbind(0)
        self._held = np.zeros(num_blocks, dtype=bool)
        # The holding that a block is reserved for; 0 for none.
        self._reserved_for = np.zeros(num_blocks, dtype=np.int64)
        self._holdings: dict[str, _Holding] = {}
        self._numbers = itertools.count(1)

    @property
    def num_bytes(self) -> int:
        return self._tables.nbytes

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return self._tables.itemsize

    @property
    def device(self) -> torch.device:
        return self._tables.device

    @property
    def free_blocks(self) -> int:
        return self.num_blocks - int(self._held.sum())

    def table(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, `[R, D]` each; slot s of head k is row `k * num_slots + s`.

        Of latent attention both are the table of latent vectors.
        """
        tables = self._tables[layer]
        return tables[0], tables[-1]

    def both_tables(self, layer: int) -> Tensor:
        """`[2, R, D]`, keys before values, as the kernels take them; `[1, R, D]` of latent vectors."""
        return self._tables[layer]

    def blocks(self, request_id: str) -> NDArray[np.int32]:
        """The blocks of a sequence, in order; the first slot of block b is `b * BLOCK_SIZE`."""
        holding = self._holdings[request_id]
        if holding.blocks is None:
            runs = [np.arange(first, first + length, dtype=np.int32) for first, length in holding.runs]
            holding.blocks = np.concatenate([_NO_BLOCKS, *runs])
        return holding.blocks

    def store(self, layer: int, row_X: Tensor, kv_NMD: Tensor) -> None:
        """Writes keys and values `[N, 2K, D]` of N tokens into the rows that `store_rows` returned for their slots."""
        if self._kernels:
            return self._kernels.store_slots(kv_NMD, row_X, self._tables[layer])
        self._layers[layer].index_copy_(0, row_X, kv_NMD.reshape(-1, kv_NMD.shape[-1]))

    def store_layers(self, first: int, slot_N: NDArray[np.int64], kv_LNMD: Tensor) -> None:
        """Writes keys and values of N tokens into their slots of several layers at once, from layer `first` on.

        They may be in another device's memory. A token whose slot is negative is not written.
        """
        tables_L2RD = self._tables[first : first + len(kv_LNMD)]
        if self._kernels:
            kv_LNMD = kv_LNMD.to(self.device, non_blocking=True)
            return self._kernels.scatter_slots(kv_LNMD, to_device(slot_N, self.device), tables_L2RD)
        if len(kept_N := np.flatnonzero(slot_N >= 0)) < len(slot_N):
            slot_N, kv_LNMD = slot_N[kept_N], kv_LNMD[:, torch.from_numpy(kept_N)]
        rows = self.store_rows(slot_N)
        tables_L2RD.flatten(1, 2).index_copy_(1, rows, kv_LNMD.reshape(len(kv_LNMD), -1, kv_LNMD.shape[-1]))

    def read(self, request_id: str, out_L2KNB: Tensor) -> None:
        """Copies the first N keys and values of a sequence to another tensor, as bytes B of a head."""
        for run, piece in self._pieces(request_id, out_L2KNB):
            piece.copy_(run)

    def write(self, request_id: str, in_L2KNB: Tensor) -> None:
        """The reverse of `read`."""
        for run, piece in self._pieces(request_id, in_L2KNB):
            run.copy_(piece)

    def _pieces(self, request_id: str, tokens_L2KNB: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The runs of a sequence's blocks as bytes, each with its part of `tokens_L2KNB`, layer by layer: a copy
        between devices takes as many bytes again on the GPU, of which there may be few."""
        num_layers, num_tokens = len(self._tables), tokens_L2KNB.shape[3]
        width = self._tables.shape[-1] * self.itemsize
        shape = (num_layers, self._tables.shape[1], self.num_kv_heads, self.num_slots, width)
        held_L2KSB = self._tables.view(torch.uint8).view(shape)
        for low, high, shift in self._spans(request_id, 0, num_tokens):
            for held_2KSB, tokens_2KNB in zip(held_L2KSB, tokens_L2KNB, strict=True):
                yield held_2KSB[:, :, low + shift : high + shift], tokens_2KNB[:, :, low:high]

    def store_rows(self, slot_N: NDArray[np.int64]) -> Tensor:
        """For each token the rows of its 2K keys and values, flattened; its slot where kernels store them."""
        if self._kernels:
            return to_device(slot_N, self.device)
        heads = np.arange(self._tables.shape[1] * self.num_kv_heads, dtype=np.int64) * self.num_slots
        return torch.from_numpy((slot_N[:, None] + heads).ravel()).to(self.device)

    def slots(self, request_id: str, start: int, stop: int) -> NDArray[np.int64]:
        """The slots of tokens `start .. stop` of a sequence, in order."""
        spans = self._spans(request_id, start, stop)
        pieces = [np.arange(low + shift, high + shift) for low, high, shift in spans]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _spans(self, request_id: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Tokens `start .. stop` of a sequence by runs: first, last exclusive, and the offset from token to slot."""
        position = 0
        for first, blocks in self._holdings[request_id].runs:
            low, high = max(position, start), min(position + blocks * BLOCK_SIZE, stop)
            if low < high:
                yield low, high, first * BLOCK_SIZE - position
            position += blocks * BLOCK_SIZE

    def slots_of_all(self, request_ids: Sequence[str], tokens: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
        """The slots of tokens `start .. stop` of each sequence, concatenated."""
        held = [self._holdings[request_id].runs for request_id in request_ids]
        if not held or any(len(runs) != 1 for runs in held):
            slots = [self.slots(name, *span) for name, span in zip(request_ids, tokens, strict=True)]
            return np.concatenate([_NO_SLOTS, *slots])
        # Every sequence is one run: vectorized over sequences.
        start_B, stop_B = np.array(tokens, dtype=np.int64).T
        first_B = np.array([runs[0][0] for runs in held], dtype=np.int64) * BLOCK_SIZE + start_B
        count_B = stop_B - start_B
        return np.arange(count_B.sum()) + np.repeat(first_B - (count_B.cumsum() - count_B), count_B)

    def rows(self, slot_C: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows `[K, C]` of those slots, the same in the key table and the value table."""
        heads = np.arange(self.num_kv_heads, dtype=np.int64) * self.num_slots
        return heads[:, None] + slot_C

    def resize(self, request_id: str, num_blocks: int, hint_blocks: int) -> None:
        """Grows a sequence to `num_blocks` blocks; `hint_blocks` is how many it may need at most."""
        holding = self._holdings.get(request_id)
        if holding is None:
            holding = self._holdings[request_id] = _Holding(next(self._numbers))
        while (missing := num_blocks - holding.num_blocks) > 0:
            holding.blocks = None
            if not self._extend(holding, missing):
                self._place(holding, missing, max(missing, hint_blocks - holding.num_blocks))

    def free(self, request_id: str) -> None:
        """Frees all blocks of a sequence; one that holds none is accepted."""
        holding = self._holdings.pop(request_id, None)
        if holding is None:
            return
        for first, length in holding.runs:
            self._held[first : first + length] = False
        self._reserved_for[self._reserved_for == holding.number] = 0

    def _extend(self, holding: _Holding, missing: int) -> bool:
        """Grows the last run by the free blocks right after it; False when there are none."""
        if not holding.runs:
            return False
        run = holding.runs[-1]
        end = run[0] + run[1]
        reserved_for = self._reserved_for[end : end + missing]
        barred = self._held[end : end + missing] | ((reserved_for != 0) & (reserved_for != holding.number))
        free = int(barred.argmax()) if barred.any() else len(barred)
        self._held[end : end + free] = True
        run[1] += free
        return free > 0

    def _place(self, holding: _Holding, missing: int, hint: int) -> None:
        """Starts a new run where the hint fits, and reserves it."""
        self._reserved_for[self._reserved_for == holding.number] = 0
        start, length = self._choose(hint)
        taken = min(missing, length)
        self._held[start : start + taken] = True
        self._reserved_for[start : start + min(hint, length)] = holding.number
        holding.runs.append([start, taken])

    def _choose(self, hint: int) -> tuple[int, int]:
        """First block and length of a free run: the smallest that fits, else the largest, else half a reserved one."""
        starts, lengths = _free_runs(self._held | (self._reserved_for != 0))
        if len(lengths):
            fits = np.flatnonzero(lengths >= hint)
            best = fits[lengths[fits].argmin()] if len(fits) else lengths.argmax()
            return int(starts[best]), int(lengths[best])
        starts, lengths = _free_runs(self._held)
        if not len(lengths):
            raise RuntimeError("more KV blocks were granted than the cache has")
        best = lengths.argmax()
        half = int(lengths[best]) // 2  # The holding that it is reserved for keeps the adjacent half.
        return int(starts[best]) + half, int(lengths[best]) - half


def _free_runs(taken: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Starts and lengths of the runs of False."""
    edges = np.flatnonzero(np.diff(np.concatenate(([True], taken, [True])).astype(np.int8)))
    return edges[::2], edges[1::2] - edges[::2]
