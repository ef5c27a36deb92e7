"""PagedStep: a batch as the tensors that the paged kernels take; what is `Step` where attention runs on a GPU.

Letters: N tokens of the flat batch (rows that compute several tokens first, then those that compute one), B rows, T
blocks of the longest one, R rows that need logits, M = H + 2K heads of queries, keys and values, D head_dim.

Everything that the host knows of a batch goes to the device in one packed copy, for which nobody waits; after that a
layer costs its launches and nothing else. A token that the host does not know yet, because the pass before is still
under way, is taken from where that pass leaves its tokens on the device.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exeplan.core.batch import BLOCK_SIZE, num_blocks_for
from exeplan.kernels.online_softmax import PagedKV
from exeplan.kernels.select import Kernels
from exeplan.kernels.sending import sent
from exeplan.kernels.spans import Span, Spans
from exeplan.runner.compute.layers import AttentionShape
from exeplan.runner.compute.step import Row

_ALIGNED = 4
"""Integers of 16 bytes: kernels are compiled anew for pointers and strides that are not aligned to so much."""
TABLE_WIDTH = 16
"""Block tables are a multiple of this wide, for the same reason."""
NOWHERE = -1
"""The slot of a token that is padding, and the source of one that the host knows."""


class PagedCache(Protocol):
    """Where keys and values are kept: a KV cache, or what takes its place where they are only handed over."""

    @property
    def device(self) -> torch.device: ...

    def blocks(self, request_id: str) -> NDArray[np.int32]: ...

    def both_tables(self, layer: int) -> Tensor: ...

    def store(self, layer: int, slot_N: Tensor, kv_NMD: Tensor) -> None: ...


class Singles(NamedTuple):
    """Rows that compute one token, on the host: an int32 array `[B]` for each."""

    token: NDArray[np.int32]
    source: NDArray[np.int32]
    """Where the pass before leaves the token, among its rows; NOWHERE for one that is known."""
    position: NDArray[np.int32]
    """Counted behind what an encoder saw."""
    slot: NDArray[np.int32]
    end: NDArray[np.int32]
    """Cached tokens, its own included, that it attends to; 0 for padding."""
    first: NDArray[np.int32]
    """The first of them, behind what an encoder saw."""


def singles_of(
    rows: Sequence[Row],
    table_BT: NDArray[np.int32],
    token_ids: Mapping[str, Sequence[int]],
    sources: Mapping[str, int],
) -> Singles:
    """`sources` names the rows whose token is on the device still."""
    source = np.array([sources.get(row.request_id, NOWHERE) for row in rows], dtype=np.int32)
    known = [
        0 if row.request_id in sources else token_ids[row.request_id][row.start] for row in rows
    ]  # What is under way is not in the list yet.
    position = np.array([row.start for row in rows], dtype=np.int32)
    first = np.array([row.num_encoded for row in rows], dtype=np.int32)
    slot = _slots(table_BT, np.arange(len(rows)), position)
    return Singles(np.array(known, dtype=np.int32), source, position - first, slot, position + 1, first)


def block_table(cache: PagedCache, rows: Sequence[Row]) -> NDArray[np.int32]:
    """The blocks of some rows, `[B, T]`; what stands behind the last of a row is never read."""
    blocks = [cache.blocks(row.request_id) for row in rows]
    longest = max((max(len(ids), num_blocks_for(row.end)) for ids, row in zip(blocks, rows, strict=True)), default=1)
    table_BT = np.zeros((len(rows), -(-longest // TABLE_WIDTH) * TABLE_WIDTH), dtype=np.int32)
    for line, ids in zip(table_BT, blocks, strict=True):
        line[: len(ids)] = ids
    return table_BT


class PagedAttention:
    """Attention of a batch whose tensors are on the device; `first` is None where no row was encoded."""

    def __init__(
        self,
        cache: PagedCache,
        kernels: Kernels,
        *,
        slot_N: Tensor,
        table_BT: Tensor,
        end_B: Tensor,
        first_B: Tensor | None,
        spans: Sequence[Row] = (),
        padded: Sequence[int] = (),
    ) -> None:
        """`slot_N` are of all tokens, `table_BT` of all rows, `end_B` and `first_B` of those that compute one token."""
        self._cache, self._kernels = cache, kernels
        self._slot_N, self._end_B, self._first_B = slot_N, end_B, first_B
        self._span_table, self._single_table = table_BT[: len(spans)], table_BT[len(spans) :]
        self._rows, self._padded = spans, padded
        self._spans = self._make_spans(cross=False)
        self._cross_spans: Spans | None = None

    def __call__(self, shape: AttentionShape, qkv_NMD: Tensor) -> Tensor:
        """Stores the keys and values of one layer and attends: `[N, H * D]`. A cross attention brings queries only."""
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
        """Over what an encoder left of each row's prompt."""
        assert self._first_B is not None
        q_BHD = q_NHD[self._spans.num_tokens :]
        single = self._paged(shape, self._single_table)
        out_BHD = self._kernels.paged_attention(q_BHD, single, self._first_B, scale=shape.scale)
        if not self._rows:
            return out_BHD.flatten(1)
        self._cross_spans = self._cross_spans or self._make_spans(cross=True)
        q_NHD = q_NHD[: self._spans.num_tokens]
        nothing = q_NHD[:, : shape.num_kv_heads]  # There are no keys but the cached ones.
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
                0 if cross else row.end - row.start,
                (0, row.num_encoded) if cross else (row.num_encoded, row.start),
            )
            for row, padded in zip(self._rows, self._padded, strict=True)
        ]
        return Spans(made, self._slot_N.device)


class PagedStep:
    """Built once for a batch and passed through all layers."""

    def __init__(
        self,
        cache: PagedCache,
        spans: Sequence[Row],
        singles: Sequence[Row],
        *,
        token_ids: Mapping[str, Sequence[int]],
        kernels: Kernels,
        wanted: Sequence[int] | None = None,
        pad_to: int = 0,
        sources: Mapping[str, int] | None = None,
        recent_B: Tensor | None = None,
    ) -> None:
        """As for `Step`; `sources` name the rows whose token is in `recent_B`, and where."""
        padded = [max(row.end - row.start, pad_to) for row in spans]
        starts = np.cumsum([0, *padded], dtype=np.int32)
        table_BT = block_table(cache, [*spans, *singles])
        single = singles_of(singles, table_BT[len(spans) :], token_ids, sources or {})
        tokens, positions, lengths, slots = _spans_of(spans, padded, table_BT, token_ids)
        counts = np.array([row.end - row.start for row in spans], dtype=np.int32)
        last_R = np.concatenate([starts[:-1] + counts - 1, starts[-1] + np.arange(len(singles), dtype=np.int32)])

        self.num_span_tokens = int(starts[-1])
        self.num_tokens = self.num_span_tokens + len(singles)
        on_device = _packed(
            cache.device,
            np.concatenate([tokens, single.token]),
            np.concatenate([positions, single.position]),
            np.concatenate([lengths, single.end]),
            last_R if wanted is None else last_R[list(wanted)],
            np.concatenate([slots, single.slot]),
            table_BT,
            single.end,
            single.first,
            single.source,
        )
        self.token_N, self.position_N, self.length_N, self.logit_R = (field.long() for field in on_device[:4])
        """`length_N` is how long each token's sequence was when the token was first computed."""
        slot_N, table, end_B, first_B, source_B = on_device[4:]
        if sources:
            assert recent_B is not None
            token_B = self.token_N[self.num_span_tokens :]
            token_B.copy_(torch.where(source_B < 0, token_B, recent_B[source_B.clamp(min=0).long()]))
        self.attend = PagedAttention(
            cache,
            kernels,
            slot_N=slot_N,
            table_BT=table,
            end_B=end_B,
            first_B=first_B if any(row.num_encoded for row in (*spans, *singles)) else None,
            spans=spans,
            padded=padded,
        )


def _spans_of(
    rows: Sequence[Row], padded: Sequence[int], table_BT: NDArray[np.int32], token_ids: Mapping[str, Sequence[int]]
) -> tuple[NDArray[np.int32], ...]:
    """Tokens, positions, lengths and slots of rows that compute several tokens."""
    tokens, positions, lengths, slots = ([_NO_INTEGERS] for _ in range(4))
    for number, (row, width) in enumerate(zip(rows, padded, strict=True)):
        position = np.arange(row.start, row.start + width, dtype=np.int32)
        real = row.end - row.start
        ids, slot = np.zeros(width, dtype=np.int32), np.full(width, NOWHERE, dtype=np.int32)
        ids[:real] = token_ids[row.request_id][row.start : row.end]
        slot[:real] = _slots(table_BT, number, position[:real])
        tokens.append(ids)
        positions.append(position - row.num_encoded)
        lengths.append(np.maximum(position + 1, row.num_prompt_tokens))
        slots.append(slot)
    return tuple(np.concatenate(parts) for parts in (tokens, positions, lengths, slots))


def _slots(table_BT: NDArray[np.int32], line: Any, position: NDArray[np.int32]) -> NDArray[np.int32]:
    return table_BT[line, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def _packed(device: torch.device, *fields: NDArray[np.int32]) -> list[Tensor]:
    """The arrays on the device, in their shapes, from one copy."""
    starts = np.cumsum([0, *(-(-field.size // _ALIGNED) * _ALIGNED for field in fields)]).tolist()
    packed = np.zeros(starts[-1], dtype=np.int32)
    for start, field in zip(starts, fields, strict=False):
        packed[start : start + field.size] = field.ravel()
    whole = sent(packed, device)
    return [whole[start : start + field.size].view(field.shape) for start, field in zip(starts, fields, strict=False)]


_NO_INTEGERS = np.zeros(0, dtype=np.int32)
