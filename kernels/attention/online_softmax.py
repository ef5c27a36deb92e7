"""Shared by the attention kernels: addresses of cached keys, and one step of the online softmax over a block of keys.

Letters: M rows of queries, N keys of a block, B sequences, T blocks of a sequence, H query heads, K key/value heads, D
head_dim, S slots of the cache, R = K * S rows of its tables (slot s of head k is row k * S + s), X distances.

Source: Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022 (FlashAttention). The sum of the weights of the
keys so far is `total` times exp(`top`), where `top` is their largest score; `acc` is the sum of their values with the
same weights. All three are float32. Products take operands in the model's dtype and accumulate in float32; products of
float32 are exact (no TF32).
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from typing import NamedTuple

import torch
from torch import Tensor

from exeplan.core.batch import BLOCK_SIZE
from exeplan.kernels.language import jit, tl


class PagedKV(NamedTuple):
    """The cached keys and values of sequences: one layer's tables, and the block table."""

    keys: Tensor
    """`[R, D]`, like the values."""
    values: Tensor
    block_table: Tensor
    """`[B, T]`, int32: the block of the tokens from `t * BLOCK_SIZE` on; not read after the end of a sequence."""
    num_kv_heads: int

    @property
    def num_slots(self) -> int:
        return len(self.keys) // self.num_kv_heads

    def rows(self, sequence: int, position_C: Tensor) -> Tensor:
        """The rows `[K, C]` of a sequence's tokens in both tables."""
        block_C = self.block_table[sequence, position_C // BLOCK_SIZE].long()
        head_K = torch.arange(self.num_kv_heads, device=block_C.device)
        return head_K[:, None] * self.num_slots + block_C * BLOCK_SIZE + position_C % BLOCK_SIZE

    def arguments(self) -> "CacheArguments":
        assert self.keys.is_contiguous()
        assert self.values.is_contiguous()
        assert self.block_table.stride(1) == 1
        return CacheArguments(self.keys, self.values, self.block_table, self.block_table.stride(0), self.num_slots)


class CacheArguments(NamedTuple):
    """`PagedKV` as an argument of a kernel. Triton's tuples have a field `values` of their own."""

    key_rows: Tensor | None = None
    value_rows: Tensor | None = None
    table: Tensor | None = None
    table_stride: int | None = None
    num_slots: int | None = None


class DistanceBias(NamedTuple):
    """A bias on scores by the position of the key minus that of the query."""

    by_head: Tensor
    """`[H, X]`; distances beyond the first or the last take that column, as T5's buckets do."""
    zero: int
    """The column of distance 0."""

    def at(self, distance: Tensor) -> Tensor:
        """The biases of these distances, heads first, float32."""
        return self.by_head[:, (distance + self.zero).clamp(0, self.by_head.shape[1] - 1)].float()

    def arguments(self) -> "BiasArguments":
        return BiasArguments(self.by_head.contiguous(), self.by_head.shape[1], self.zero)


class BiasArguments(NamedTuple):
    """`DistanceBias` as an argument of a kernel."""

    bias: Tensor | None = None
    bias_width: int | None = None
    bias_zero: int | None = None


@jit
def attend(acc, top, total, q, k, v, bias, seen, scale, UPCAST: tl.constexpr):
    """`acc [M, D]`, `top [M]` and `total [M]` with a block of keys `k [N, D]` and values `v [N, D]` added."""
    if UPCAST:
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + bias
    score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    # A row that has seen no key yet has no largest score; -inf less -inf would be NaN.
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp(score - shift[:, None])
    decay = tl.exp(top - shift)
    total = total * decay + tl.sum(weight, 1)
    acc = acc * decay[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return acc, higher, total


@jit
def cache_offsets(a, sequence, kv_head, position, there, d, C: tl.constexpr):
    """Where the elements of a sequence's tokens lie in the tables, `[N, D]`; blocks are looked up only where
    `there`."""
    blocks = a.table + sequence.to(tl.int64) * a.table_stride
    block = tl.load(blocks + position // C.BLOCK_SIZE, mask=there, other=0)
    row = kv_head * a.num_slots + block * C.BLOCK_SIZE + position % C.BLOCK_SIZE
    return row.to(tl.int64)[:, None] * C.HEAD_DIM + d[None, :]


@jit
def distance_bias(a, head, distance, mask):
    """Of keys at `distance` from their query; heads and distances broadcast."""
    column = tl.minimum(tl.maximum(distance + a.bias_zero, 0), a.bias_width - 1)
    return tl.load(a.bias + head * a.bias_width + column, mask=mask, other=0.0).to(tl.float32)
