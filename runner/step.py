"""Step: one pass over the layers as tensors, with everything that all layers share worked out once.

Letters: N tokens of the flat batch (prefilled sequences first, then one token per decoded sequence), R rows that
need logits, M = H + 2K heads of queries, keys and values, D head_dim.

Every matrix product runs over the flat batch; only `attend` knows where a sequence begins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exeplan.kernels.attention import CachedRows, decode_attention, prefill_attention
from exeplan.runner.kv_cache import KVCache
from exeplan.runner.layers import AttentionShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence in a step: all its tokens when it is prefilled, `computed` of them cached when it is decoded."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int


class Step:
    """Built once for a batch and passed through all layers."""

    def __init__(
        self,
        cache: KVCache,
        prefill: Sequence[Row],
        decode: Sequence[Row],
        *,
        token_ids: Mapping[str, Sequence[int]],
        pad_to: int = 0,
    ) -> None:
        """Every row must already have its blocks; `pad_to` > 0 pads prefilled rows on the right to that many tokens."""
        self._cache, self._decode = cache, decode
        self._padded = [max(row.num_tokens, pad_to) for row in prefill]
        self._cached: dict[tuple[int, int | None], CachedRows] = {}
        self.num_prefill_tokens = sum(self._padded)
        counts = np.array([row.num_tokens for row in prefill], dtype=np.int64)
        starts = np.cumsum([0, *self._padded], dtype=np.int64)

        tokens, positions, lengths, slots = ([_NO_INTEGERS] for _ in range(4))
        for row, padded in zip(prefill, self._padded, strict=True):
            tokens.append(_padded(token_ids[row.request_id][: row.num_tokens], padded))
            positions.append(np.arange(padded))
            lengths.append(np.maximum(positions[-1] + 1, row.num_prompt_tokens))
            slots.append(cache.slots(row.request_id, 0, row.num_tokens))
        for row in decode:
            tokens.append(np.array([token_ids[row.request_id][row.num_tokens - 1]]))
            slots.append(cache.slots(row.request_id, row.num_tokens - 1, row.num_tokens))
        last_B = np.array([row.num_tokens for row in decode], dtype=np.int64)

        self.token_N = self._tensor(np.concatenate(tokens))
        self.position_N = self._tensor(np.concatenate([*positions, last_B - 1]))
        self.length_N = self._tensor(np.concatenate([*lengths, last_B]))
        """How long each token's sequence was when the token was first computed."""
        self.logit_R = self._tensor(np.concatenate([starts[:-1] + counts - 1, starts[-1] + np.arange(len(decode))]))
        """Rows of the batch whose logits are wanted: the last token of each prefilled sequence, every decoded one."""
        self._stored_rows = cache.store_rows(np.concatenate(slots))
        self._stored = self._tensor(self._not_padding(counts)) if pad_to else None

    def attend(self, shape: AttentionShape, qkv_NMD: Tensor) -> Tensor:
        """Stores the keys and values of one layer and attends: `[N, H * D]`."""
        kv_NMD = qkv_NMD[:, shape.num_heads :]
        self._cache.store(shape.layer, self._stored_rows, kv_NMD if self._stored is None else kv_NMD[self._stored])
        outputs = self._attend_prefill(shape, qkv_NMD[: self.num_prefill_tokens])
        if self._decode:
            outputs.append(self._attend_decode(shape, qkv_NMD[self.num_prefill_tokens :, : shape.num_heads]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_prefill(self, shape: AttentionShape, qkv_NMD: Tensor) -> list[Tensor]:
        """Over the fresh keys and values, which need no look into the cache."""
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        outputs = []
        for qkv_TMD in torch.split_with_sizes(qkv_NMD, self._padded):
            q, k, v = torch.split_with_sizes(qkv_TMD[None], (heads, kv_heads, kv_heads), 2)
            out = prefill_attention(q, k, v, scale=shape.scale, window=shape.window)
            outputs.append(out.reshape(len(qkv_TMD), -1))
        return outputs

    def _attend_decode(self, shape: AttentionShape, q_BHD: Tensor) -> Tensor:
        keys_RD, values_RD = self._cache.table(shape.layer)
        cached = self._cached.get((shape.num_heads, shape.window))
        if cached is None:
            rows = [self._cache.rows(self._seen_slots(row, shape.window)) for row in self._decode]
            cached = CachedRows(rows, shape.num_heads, self._cache.num_rows, keys_RD)
            self._cached[shape.num_heads, shape.window] = cached
        return decode_attention(q_BHD, keys_RD, values_RD, cached, scale=shape.scale).flatten(1)

    def _seen_slots(self, row: Row, window: int | None) -> NDArray[np.int64]:
        first = 0 if window is None else max(0, row.num_tokens - window)
        return self._cache.slots(row.request_id, first, row.num_tokens)

    def _not_padding(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of the batch that are real tokens."""
        starts = np.cumsum([0, *self._padded], dtype=np.int64)
        real = [start + np.arange(count) for start, count in zip(starts, counts, strict=False)]
        return np.concatenate([*real, starts[-1] + np.arange(len(self._decode))])

    def _tensor(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._cache.device)


_NO_INTEGERS = np.zeros(0, dtype=np.int64)


def _padded(token_ids: Sequence[int], length: int) -> NDArray[np.int64]:
    padded = np.zeros(length, dtype=np.int64)
    padded[: len(token_ids)] = token_ids
    return padded
