"""PagedStep: a batch as the tensors that the paged kernels take; the GPU's counterpart of `Step`.

Letters: N tokens of the flat batch (sequences with several new tokens first, then those with one), B sequences, T
blocks of the longest one, R sequences that need logits, M = H + 2K heads of queries, keys and values, D head_dim.

Everything that the host knows of a batch goes to the device in one asynchronous copy; after that a layer costs only
its launches. A token that the host does not know yet, because the previous pass is still running, is read on the
device, where that pass keeps its tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exeplan.core.batch import BLOCK_SIZE, num_blocks_for
from exeplan.kernels.attention.online_softmax import PagedKV
from exeplan.kernels.attention.spans import Span, Spans
from exeplan.kernels.select import Kernels
from exeplan.kernels.to_device import to_device
from exeplan.runner.compute.blocks.layers import AttentionShape
from exeplan.runner.compute.passes.step import StepSequence

_ALIGNED = 4
"""Integers in 16 bytes: kernels are recompiled for pointers and strides that are not aligned to 16 bytes."""
TABLE_WIDTH = 16
"""Widths of block tables are multiples of this, for the same reason."""
NOWHERE = -1
"""The slot of a padding token, and the previous row of a token that the host knows."""


class PagedCache(Protocol):
    """Where keys and values are stored: a KV cache, or a buffer from which they are transferred."""

    @property
    def device(self) -> torch.device: ...

    def blocks(self, request_id: str) -> NDArray[np.int32]: ...

    def both_tables(self, layer: int) -> Tensor: ...

    def store(self, layer: int, slot_N: Tensor, kv_NMD: Tensor) -> None: ...


class Singles(NamedTuple):
    """Sequences that compute one token, on the host: int32 arrays `[B]`."""

    token: NDArray[np.int32]
    prev_row: NDArray[np.int32]
    """Index of the token among those of the previous pass; NOWHERE for a token that the host knows."""
    position: NDArray[np.int32]
    """Counted from the end of the encoder's tokens."""
    slot: NDArray[np.int32]
    end: NDArray[np.int32]
    """End of the cached tokens that it attends to, including its own; 0 for padding."""
    first: NDArray[np.int32]
    """The first of them, after the encoder's tokens."""


def singles_of(
    sequences: Sequence[StepSequence],
    table_BT: NDArray[np.int32],
    token_ids: Mapping[str, Sequence[int]],
    prev_rows: Mapping[str, int],
) -> Singles:
    """`prev_rows` names the sequences whose token is still on the device."""
    prev_row = np.array([prev_rows.get(sequence.request_id, NOWHERE) for sequence in sequences], dtype=np.int32)
    known = [
        0 if sequence.request_id in prev_rows else token_ids[sequence.request_id][sequence.start]
        for sequence in sequences
    ]  # A token on the device is not in the list yet.
    position = np.array([sequence.start for sequence in sequences], dtype=np.int32)
    first = np.array([sequence.num_encoded for sequence in sequences], dtype=np.int32)
    slot = _slots(table_BT, np.arange(len(sequences)), position)
    return Singles(np.array(known, dtype=np.int32), prev_row, position - first, slot, position + 1, first)


def block_table(cache: PagedCache, sequences: Sequence[StepSequence]) -> NDArray[np.int32]:
    """The blocks of sequences, `[B, T]`; entries after a sequence's last block are never read."""
    blocks = [cache.blocks(sequence.request_id) for sequence in sequences]
    longest = max(
        (max(len(ids), num_blocks_for(sequence.end)) for ids, sequence in zip(blocks, sequences, strict=True)),
        default=1,
    )
    table_BT = np.zeros((len(sequences), -(-longest // TABLE_WIDTH) * TABLE_WIDTH), dtype=np.int32)
    for line, ids in zip(table_BT, blocks, strict=True):
        line[: len(ids)] = ids
    return table_BT


class PagedAttention:
    """Attention of a batch whose tensors are on the device; `first_B` is None where no encoder is involved."""

    def __init__(
        self,
        cache: PagedCache,
        kernels: Kernels,
        *,
        slot_N: Tensor,
        table_BT: Tensor,
        end_B: Tensor,
        first_B: Tensor | None,
        spans: Sequence[StepSequence] = (),
        padded: Sequence[int] = (),
    ) -> None:
        """`slot_N` of all tokens, `table_BT` of all sequences, `end_B` and `first_B` of those with one new token."""
        self._cache, self._kernels = cache, kernels
        self._slot_N, self._end_B, self._first_B = slot_N, end_B, first_B
        self._span_table, self._single_table = table_BT[: len(spans)], table_BT[len(spans) :]
        self._span_sequences, self._padded = spans, padded
        self._spans = self._make_spans(cross=False)
        self._cross_spans: Spans | None = None

    def __call__(self, shape: AttentionShape, qkv_NMD: Tensor) -> Tensor:
        """Stores the keys and values of one layer and attends: `[N, H * D]`. Cross attention passes queries only."""
        if shape.cross:
            return self._cross(shape, qkv_NMD)
        heads, last_key = shape.num_heads, shape.num_heads + shape.num_kv_heads
        self._cache.store(shape.layer, self._slot_N, qkv_NMD[:, heads:])
        out_NHD = self._kernels.mixed_attention(
            qkv_NMD[:, :heads],
            qkv_NMD[:, heads:last_key],
            qkv_NMD[:, last_key:],
            self._spans,
            self._paged(shape, self._span_table) if self._spans.is_cached else None,
            self._paged(shape, self._single_table),
            self._end_B,
            scale=shape.scale,
            first_B=self._first_B,
            window=shape.window,
            bias=shape.bias and shape.bias.by_distance,
        )
        return out_NHD.flatten(1)

    def _cross(self, shape: AttentionShape, q_NHD: Tensor) -> Tensor:
        """Over the encoder's keys and values of each sequence."""
        assert self._first_B is not None
        q_BHD = q_NHD[self._spans.num_tokens :]
        single = self._paged(shape, self._single_table)
        out_BHD = self._kernels.paged_attention(q_BHD, single, self._first_B, scale=shape.scale)
        if not self._span_sequences:
            return out_BHD.flatten(1)
        self._cross_spans = self._cross_spans or self._make_spans(cross=True)
        q_NHD = q_NHD[: self._spans.num_tokens]
        nothing = q_NHD[:, : shape.num_kv_heads]  # All keys are cached ones.
        cache = self._paged(shape, self._span_table)
        out_NHD = self._kernels.ragged_attention(
            q_NHD, nothing, nothing, self._cross_spans, scale=shape.scale, causal=False, cache=cache
        )
        return torch.cat([out_NHD, out_BHD]).flatten(1)

    def _paged(self, shape: AttentionShape, table_BT: Tensor) -> PagedKV:
        keys_RD, values_RD = self._cache.both_tables(shape.layer).unbind(0)
        return PagedKV(keys_RD, values_RD, table_BT, shape.num_kv_heads)

    def _make_spans(self, *, cross: bool) -> Spans:
        made = [
            Span(
                padded,
                0 if cross else sequence.end - sequence.start,
                (0, sequence.num_encoded) if cross else (sequence.num_encoded, sequence.start),
            )
            for sequence, padded in zip(self._span_sequences, self._padded, strict=True)
        ]
        return Spans(made, self._slot_N.device)


class PagedStep:
    """Built once for a batch and passed through all layers."""

    def __init__(
        self,
        cache: PagedCache,
        spans: Sequence[StepSequence],
        singles: Sequence[StepSequence],
        *,
        token_ids: Mapping[str, Sequence[int]],
        kernels: Kernels,
        wanted: Sequence[int] | None = None,
        pad_to: int = 0,
        prev_rows: Mapping[str, int] | None = None,
        prev_token_B: Tensor | None = None,
    ) -> None:
        """As for `Step`; `prev_rows` names the sequences whose token is in `prev_token_B`, and its index there."""
        padded = [max(sequence.end - sequence.start, pad_to) for sequence in spans]
        starts = np.cumsum([0, *padded], dtype=np.int32)
        self.first_rows: Sequence[int] | NDArray[np.int32] = starts[:-1]
        """As in `Step`."""
        table_BT = block_table(cache, [*spans, *singles])
        single = singles_of(singles, table_BT[len(spans) :], token_ids, prev_rows or {})
        tokens, positions, lengths, slots = _spans_of(spans, padded, table_BT, token_ids)
        counts = np.array([sequence.end - sequence.start for sequence in spans], dtype=np.int32)
        last_R = np.concatenate([starts[:-1] + counts - 1, starts[-1] + np.arange(len(singles), dtype=np.int32)])

        self.num_span_tokens = int(starts[-1])
        self.num_tokens = self.num_span_tokens + len(singles)
        on_device = _sent_together(
            cache.device,
            np.concatenate([tokens, single.token]),
            np.concatenate([positions, single.position]),
            np.concatenate([lengths, single.end]),
            last_R if wanted is None else last_R[list(wanted)],
            np.concatenate([slots, single.slot]),
            table_BT,
            single.end,
            single.first,
            single.prev_row,
        )
        self.token_N, self.position_N, self.length_N, self.logit_R = (field.long() for field in on_device[:4])
        """`length_N` is the length of each token's sequence when the token was first computed."""
        slot_N, table, end_B, first_B, prev_row_B = on_device[4:]
        if prev_rows:
            assert prev_token_B is not None
            token_B = self.token_N[self.num_span_tokens :]
            token_B.copy_(torch.where(prev_row_B < 0, token_B, prev_token_B[prev_row_B.clamp(min=0).long()]))
        self.attend = PagedAttention(
            cache,
            kernels,
            slot_N=slot_N,
            table_BT=table,
            end_B=end_B,
            first_B=first_B if any(sequence.num_encoded for sequence in (*spans, *singles)) else None,
            spans=spans,
            padded=padded,
        )


def _spans_of(
    sequences: Sequence[StepSequence],
    padded: Sequence[int],
    table_BT: NDArray[np.int32],
    token_ids: Mapping[str, Sequence[int]],
) -> tuple[NDArray[np.int32], ...]:
    """Tokens, positions, lengths and slots of sequences that compute several tokens."""
    tokens, positions, lengths, slots = ([_NO_INTEGERS] for _ in range(4))
    for number, (sequence, width) in enumerate(zip(sequences, padded, strict=True)):
        position = np.arange(sequence.start, sequence.start + width, dtype=np.int32)
        real = sequence.end - sequence.start
        ids, slot = np.zeros(width, dtype=np.int32), np.full(width, NOWHERE, dtype=np.int32)
        ids[:real] = token_ids[sequence.request_id][sequence.start : sequence.end]
        slot[:real] = _slots(table_BT, number, position[:real])
        tokens.append(ids)
        positions.append(position - sequence.num_encoded)
        lengths.append(np.maximum(position + 1, sequence.num_prompt_tokens))
        slots.append(slot)
    return tuple(np.concatenate(parts) for parts in (tokens, positions, lengths, slots))


def _slots(table_BT: NDArray[np.int32], line: Any, position: NDArray[np.int32]) -> NDArray[np.int32]:
    return table_BT[line, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def _sent_together(device: torch.device, *fields: NDArray[np.int32]) -> list[Tensor]:
    """The arrays on the device, in their shapes, by one copy."""
    starts = np.cumsum([0, *(-(-field.size // _ALIGNED) * _ALIGNED for field in fields)]).tolist()
    joined = np.zeros(starts[-1], dtype=np.int32)
    for start, field in zip(starts, fields, strict=False):
        joined[start : start + field.size] = field.ravel()
    whole = to_device(joined, device)
    return [whole[start : start + field.size].view(field.shape) for start, field in zip(starts, fields, strict=False)]


_NO_INTEGERS = np.zeros(0, dtype=np.int32)
