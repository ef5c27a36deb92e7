"""Residents: the sequences that hold blocks of one KV cache, and how many of their tokens are cached.

The scheduler grants blocks (`SequenceState.num_blocks`), and the cache follows. When a sequence of a decoder-only model
decodes, all its tokens but the last are cached. An encoder-decoder model's may lack output tokens: after a preemption
its prompt is prefilled again, and its output is recomputed with the next decode.

Letters: L layers, K key/value heads, N tokens, B bytes of one head of one token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.runner.compute.blocks.encoder import num_encoder_tokens
from exeplan.runner.compute.passes.kv_cache import KVCache


class Residents:
    """`encodes` is True for an encoder-decoder model."""

    def __init__(self, cache: KVCache, *, encodes: bool) -> None:
        self._cache, self._encodes = cache, encodes
        self._sequences: dict[str, SequenceState] = {}
        self._num_blocks: dict[str, int] = {}
        """Blocks that each holds here."""
        self._num_cached: dict[str, int] = {}
        """Cached tokens of each sequence of an encoder-decoder model that has cached output tokens."""

    def place(self, batch: Batch) -> None:
        """Gives every sequence of the batch its granted blocks, after freeing those of preempted sequences."""
        chunks = batch.chunks or (None,) * len(batch.prefill)
        beginning = [s for s, chunk in zip(batch.prefill, chunks, strict=True) if not (chunk and chunk.start)]
        for sequence in [*beginning, *(s for s in self._sequences.values() if s.num_blocks == 0)]:
            self.free(sequence.request_id)
        for sequence in (*batch.decode, *batch.prefill):
            if self._num_blocks.get(sequence.request_id) != sequence.num_blocks:
                self._hold(sequence)

    def replace(self, sequences: Sequence[SequenceState]) -> None:
        """Gives sequences that start over their granted blocks."""
        for sequence in sequences:
            self.free(sequence.request_id)
            self._hold(sequence)

    def free(self, request_id: str) -> None:
        """Frees the blocks of a request; one that never ran is accepted."""
        self._sequences.pop(request_id, None)
        self._num_blocks.pop(request_id, None)
        self._num_cached.pop(request_id, None)
        self._cache.free(request_id)

    def set_cached(self, request_id: str, num_tokens: int) -> None:
        """The first `num_tokens` tokens of a sequence are cached now."""
        self._num_cached[request_id] = num_tokens

    def first_missing(self, sequence: SequenceState) -> int:
        """The first token that a decode computes: the last one, or an earlier one that is not cached."""
        return min(self._cached(sequence), sequence.num_tokens - 1) if self._encodes else sequence.num_tokens - 1

    @torch.inference_mode()
    def save(self, sequence: SequenceState, part_L2KNB: Tensor) -> int:
        """Copies the bytes of a sequence's first N keys and values to `part_L2KNB`, or of all that are cached.

        Returns the number of tokens copied.
        """
        count = part_L2KNB.shape[3]
        if self._encodes:
            count = min(count, self._cached(sequence))
        self._cache.read(sequence.request_id, part_L2KNB[:, :, :, :count])
        return count

    @torch.inference_mode()
    def restore(self, sequence: SequenceState, part_L2KNB: Tensor) -> None:
        """Adds a new sequence with its granted blocks, and reads the keys and values that `save` wrote elsewhere."""
        self._hold(sequence)
        self._cache.write(sequence.request_id, part_L2KNB)
        if self._encodes:
            self._num_cached[sequence.request_id] = part_L2KNB.shape[3]

    def _cached(self, sequence: SequenceState) -> int:
        return self._num_cached.get(sequence.request_id, num_encoder_tokens(sequence))

    def _hold(self, sequence: SequenceState) -> None:
        hint = num_blocks_for(sequence.num_prompt_tokens + sequence.max_output_tokens)
        self._cache.resize(sequence.request_id, sequence.num_blocks, hint)
        self._sequences[sequence.request_id] = sequence
        self._num_blocks[sequence.request_id] = sequence.num_blocks
