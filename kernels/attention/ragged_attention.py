"""Ragged prefill attention: several sequences with many new tokens each, concatenated in one flat batch.

Letters: N tokens of the flat batch, B sequences, T new tokens of one, C cached ones before them, H query heads, K
key/value heads, G = H / K, D head_dim.

A sequence's queries attend to its cached tokens, through its block table, and then to its new ones in the flat batch.
So one kernel serves whole prompts (C = 0), later chunks of a prompt, an encoder (not causal, C = 0), and cross
attention to the prompt (not causal, no new keys). The new keys may or may not be in the cache already.

Operations: 4 * D * H for each pair of a query and a key, T * (C + T / 2) pairs for a causal sequence.
Bytes: at least (2 * H + 2 * K) * T * D + 2 * K * C * D elements; a program reads the keys and values of one head once
for its tile of queries, G * T / tile times in all, mostly from the device's cache. Prompts of a few hundred tokens are
compute-bound.

For long spans with a plain causal mask, torch's FlashAttention is one more configuration: the faster one on this GPU is
used (`tuning.py`). It takes one launch a span, so short spans stay with the kernel.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from exeplan.core.batch import BLOCK_SIZE
from exeplan.kernels.attention.online_softmax import (
    BiasArguments,
    CacheArguments,
    DistanceBias,
    PagedKV,
    attend,
    cache_offsets,
    distance_bias,
)
from exeplan.kernels.attention.spans import Spans
from exeplan.kernels.kernel import MODEL_DTYPES, Kernel
from exeplan.kernels.language import heads_are_adjacent, jit, next_power_of_2, tl, upcast
from exeplan.kernels.tuning import AttentionConfigs, Config, best_config

_LONG = 512
"""Tokens of a span above which a launch of its own pays."""
CONFIGS = AttentionConfigs(
    usual=(
        Config(rows=128, columns=64, num_warps=8, num_stages=3),
        Config(rows=64, columns=64, num_warps=4, num_stages=3),
        Config(rows=128, columns=128, num_warps=8, num_stages=2),
        Config(rows=64, columns=32, num_warps=4, num_stages=2),
    ),
    wide=(
        Config(rows=64, columns=64, num_warps=8, num_stages=2),
        Config(rows=64, columns=32, num_warps=4, num_stages=2),
        Config(rows=128, columns=32, num_warps=8, num_stages=2),
    ),
    exact=(
        Config(rows=32, columns=32, num_warps=4, num_stages=2),
        Config(rows=64, columns=32, num_warps=8, num_stages=2),
        Config(rows=32, columns=16, num_warps=4, num_stages=2),
    ),
)


def ragged_attention(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    spans: Spans,
    *,
    scale: float,
    causal: bool = True,
    cache: PagedKV | None = None,
    window: int | None = None,
    bias: DistanceBias | None = None,
    config: Config | None = None,
) -> Tensor:
    """The attention of the tokens of all spans, `[N, H, D]`; zeros for a query without keys.

    Query i of a span with `cached` tokens up to C is at position C + i, its new key j at C + j. With `causal` it
    attends to no later position, and with `window` to that many, including its own; else to all. `cache` has the blocks
    of the spans in their order. The heads of a token must be adjacent; tokens may be strided, as in views of one
    product.
    """
    out_NHD = torch.empty(q_NHD.shape, dtype=q_NHD.dtype, device=q_NHD.device)
    if spans.num_tokens == 0:
        return out_NHD
    arguments = prefill_arguments(q_NHD, k_NKD, v_NKD, spans, cache, bias, scale, out_NHD)
    constants = prefill_constants(q_NHD, k_NKD.shape[1], causal, window)

    def launch(config: Config) -> None:
        if config.library:
            return _by_library(q_NHD, k_NKD, v_NKD, spans, scale, out_NHD)
        tiles = spans.tiles(config.rows)
        _prefill[(len(tiles), q_NHD.shape[1])](
            arguments,
            tiles,
            C=constants,
            ROWS=config.rows,
            COLUMNS=config.columns,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    key: tuple[object, ...] = (q_NHD.dtype, q_NHD.shape[2], causal, spans.is_cached, bias is not None)
    configs = CONFIGS.of(q_NHD.dtype, q_NHD.shape[2])
    if q_NHD.element_size() == 2 and causal and bias is None and window is None and _long_and_whole(spans):
        key, configs = (*key, "long"), (*configs, Config(library=True))
    launch(config or best_config("ragged_attention", key, configs, launch, q_NHD.device))
    return out_NHD


def _long_and_whole(spans: Spans) -> bool:
    """Whether all spans attend to exactly their own tokens, and are long in the mean."""
    whole = all(span.new_keys == span.num_queries for span in spans.spans)
    return whole and not spans.is_cached and spans.num_tokens >= _LONG * len(spans.spans)


def _by_library(q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, spans: Spans, scale: float, out_NHD: Tensor) -> None:
    """Each span with torch's FlashAttention; cuDNN's would build a new plan for every length."""
    start, grouped = 0, q_NHD.shape[1] > k_NKD.shape[1]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        for span in spans.spans:
            part = slice(start, start + span.num_queries)
            start = part.stop
            q, k, v = (x[part].transpose(0, 1)[None] for x in (q_NHD, k_NKD, v_NKD))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
            out_NHD[part] = out[0].transpose(0, 1)


def ragged_attention_reference(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    spans: Spans,
    *,
    scale: float,
    causal: bool = True,
    cache: PagedKV | None = None,
    window: int | None = None,
    bias: DistanceBias | None = None,
) -> Tensor:
    """The same in plain PyTorch, sequence by sequence, in float32."""
    out_NHD = torch.zeros(q_NHD.shape, dtype=q_NHD.dtype, device=q_NHD.device)
    group, start = q_NHD.shape[1] // k_NKD.shape[1], 0
    for b, span in enumerate(spans.spans):
        stop, cached_C = start + span.num_queries, torch.arange(*span.cached, device=q_NHD.device)
        k_CKD, v_CKD = k_NKD[start : start + span.new_keys], v_NKD[start : start + span.new_keys]
        if cache is not None and len(cached_C):
            rows_CK = cache.rows(b, cached_C).T
            k_CKD = torch.cat([cache.keys[rows_CK].to(k_CKD.dtype), k_CKD])
            v_CKD = torch.cat([cache.values[rows_CK].to(v_CKD.dtype), v_CKD])
        new_C = span.cached[1] + torch.arange(span.new_keys, device=q_NHD.device)
        query_T = span.cached[1] + torch.arange(span.num_queries, device=q_NHD.device)
        distance_TC = torch.cat([cached_C, new_C]) - query_T[:, None]
        seen_TC = (distance_TC <= 0) if causal else torch.ones_like(distance_TC, dtype=torch.bool)
        if window is not None:
            seen_TC &= distance_TC > -window
        k_HCD, v_HCD = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (k_CKD, v_CKD))
        score_HTC = torch.einsum("thd,hcd->htc", q_NHD[start:stop].float(), k_HCD) * scale
        if bias is not None:
            score_HTC += bias.at(distance_TC)
        weight_HTC = score_HTC.masked_fill(~seen_TC, -torch.inf).softmax(-1).nan_to_num()
        out_NHD[start:stop] = torch.einsum("htc,hcd->thd", weight_HTC, v_HCD)
        start = stop
    return out_NHD


class PrefillArguments(NamedTuple):
    """Arguments of the prefilling programs; None for an absent tensor."""

    q: Tensor
    q_stride: int
    k: Tensor
    k_stride: int
    v: Tensor
    v_stride: int
    spans: Tensor
    key_rows: Tensor | None
    value_rows: Tensor | None
    table: Tensor | None
    table_stride: int | None
    num_slots: int | None
    bias: Tensor | None
    bias_width: int | None
    bias_zero: int | None
    scale: float
    out: Tensor


class PrefillConstants(NamedTuple):
    """Compile-time constants of the prefilling programs."""

    HEADS: int
    GROUP: int
    HEAD_DIM: int
    BLOCK_D: int
    BLOCK_SIZE: int
    CAUSAL: bool
    WINDOW: int | None
    UPCAST: bool


def prefill_arguments(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    spans: Spans,
    cache: PagedKV | None,
    bias: DistanceBias | None,
    scale: float,
    out_NHD: Tensor,
) -> PrefillArguments:
    assert all(heads_are_adjacent(x) for x in (q_NHD, k_NKD, v_NKD))
    assert cache is not None or not spans.is_cached, "cached tokens without a cache"
    return PrefillArguments(
        q_NHD,
        q_NHD.stride(0),
        k_NKD,
        k_NKD.stride(0),
        v_NKD,
        v_NKD.stride(0),
        spans.fields_B5,
        *(cache.arguments() if cache and spans.is_cached else CacheArguments()),
        *(bias.arguments() if bias else BiasArguments()),
        scale,
        out_NHD,
    )


def prefill_constants(q_NHD: Tensor, num_kv_heads: int, causal: bool, window: int | None) -> PrefillConstants:
    assert causal or window is None, "a window looks backwards"
    heads, head_dim = q_NHD.shape[1:]
    block_d = max(16, next_power_of_2(head_dim))
    group = heads // num_kv_heads
    return PrefillConstants(heads, group, head_dim, block_d, BLOCK_SIZE, causal, window, upcast(q_NHD.dtype))


@jit
def _prefill(arguments, tiles, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    prefill_tile(tl.program_id(0), tl.program_id(1), arguments, tiles, C, ROWS, COLUMNS)


@jit
def prefill_tile(tile, head, a, tiles, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One tile of the queries of one sequence, for one query head."""
    sequence = tl.load(tiles + tile * 2)
    first_query = tl.load(tiles + tile * 2 + 1)
    span = a.spans + sequence * 5
    row, num_queries, num_keys = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    cached_first, cached_end = tl.load(span + 3), tl.load(span + 4)
    kv_head = head // C.GROUP

    BLOCK_D: tl.constexpr = C.BLOCK_D
    m, d = first_query + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    ours = (m < num_queries)[:, None] & (d < C.HEAD_DIM)[None, :]
    query_row = (row + m).to(tl.int64)[:, None]
    q = tl.load(a.q + query_row * a.q_stride + head * C.HEAD_DIM + d[None, :], mask=ours, other=0.0)
    acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)

    if a.table is not None:
        if C.WINDOW is not None:
            cached_first = tl.maximum(cached_first, cached_end + first_query - C.WINDOW + 1)
        for start in range(cached_first, cached_end, COLUMNS):
            position = start + tl.arange(0, COLUMNS)
            there = position < cached_end
            distance = position[None, :] - cached_end - m[:, None]
            seen = there[None, :] & (m < num_queries)[:, None]
            if C.WINDOW is not None:
                seen = seen & (distance > -C.WINDOW)
            offset = cache_offsets(a, sequence, kv_head, position, there, d, C)
            wanted = there[:, None] & (d < C.HEAD_DIM)[None, :]
            k = tl.load(a.key_rows + offset, mask=wanted, other=0.0).to(q.dtype)
            v = tl.load(a.value_rows + offset, mask=wanted, other=0.0).to(q.dtype)
            bias = 0.0
            if a.bias is not None:
                bias = distance_bias(a, head, distance, seen)
            acc, top, total = attend(acc, top, total, q, k, v, bias, seen, a.scale, C.UPCAST)

    low = 0
    if C.CAUSAL:
        num_keys = tl.minimum(num_keys, first_query + ROWS)
        if C.WINDOW is not None:
            low = tl.maximum(first_query - C.WINDOW + 1, 0)
    for start in range(low, num_keys, COLUMNS):
        n = start + tl.arange(0, COLUMNS)
        there = n < num_keys
        distance = n[None, :] - m[:, None]
        seen = there[None, :] & (m < num_queries)[:, None]
        if C.CAUSAL:
            seen = seen & (distance <= 0)
            if C.WINDOW is not None:
                seen = seen & (distance > -C.WINDOW)
        wanted = there[:, None] & (d < C.HEAD_DIM)[None, :]
        key_row = (row + n).to(tl.int64)[:, None]
        offset = kv_head * C.HEAD_DIM + d[None, :]
        k = tl.load(a.k + key_row * a.k_stride + offset, mask=wanted, other=0.0)
        v = tl.load(a.v + key_row * a.v_stride + offset, mask=wanted, other=0.0)
        bias = 0.0
        if a.bias is not None:
            bias = distance_bias(a, head, distance, seen)
        acc, top, total = attend(acc, top, total, q, k, v, bias, seen, a.scale, C.UPCAST)

    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(a.out + (query_row * C.HEADS + head) * C.HEAD_DIM + d[None, :], out, mask=ours)


KERNELS = (
    Kernel("ragged_attention", ragged_attention, "cuda", MODEL_DTYPES),
    Kernel("ragged_attention", ragged_attention_reference),
)
