"""Paged decode attention: one query token a sequence, over its keys and values in the blocks of the cache.

Letters: B sequences, H query heads, K key/value heads, G = H / K, D head_dim, C context tokens, P parts of a context.

Bytes: 2 * C * K * D elements of keys and values a sequence, each read once, because one program takes the whole group
of G query heads of its key/value head; also 2 * H * D elements of queries and outputs, and with P > 1 parts 8 * P * H *
(D + 1) bytes that are written and read again. Operations: 4 * C * H * D a sequence, 2 * G for each element read: the
kernel is memory-bound.

Where sequences and heads are too few to fill the device, each context is split over P programs, and a second launch
joins the parts (flash decoding, Dao et al. 2023). P depends on the shapes of the tensors, never on lengths, so that a
captured graph stays right as contexts grow.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from exeplan.core.batch import BLOCK_SIZE
from exeplan.kernels.attention.online_softmax import (
    BiasArguments,
    DistanceBias,
    PagedKV,
    attend,
    cache_offsets,
    distance_bias,
)
from exeplan.kernels.kernel import MODEL_DTYPES, Kernel
from exeplan.kernels.language import heads_are_adjacent, jit, next_power_of_2, tl, upcast
from exeplan.kernels.tuning import AttentionConfigs, Config, best_config

CONFIGS = AttentionConfigs(
    usual=(
        Config(columns=64, num_warps=4, num_stages=3),
        Config(columns=128, num_warps=4, num_stages=2),
        Config(columns=32, num_warps=2, num_stages=4),
        Config(columns=128, num_warps=8, num_stages=3),
    ),
    wide=(Config(columns=64, num_warps=4, num_stages=3), Config(columns=32, num_warps=2, num_stages=4)),
    exact=(Config(columns=64, num_warps=8, num_stages=2), Config(columns=32, num_warps=8, num_stages=2)),
)
_PART_TOKENS, _MAX_PARTS = 256, 64
"""Joining a part of fewer tokens costs more than it saves; joining more parts takes longer than computing them."""


def paged_attention(
    q_BHD: Tensor,
    cache: PagedKV,
    end_B: Tensor,
    *,
    scale: float,
    first_B: Tensor | None = None,
    window: int | None = None,
    bias: DistanceBias | None = None,
    num_parts: int | None = None,
    config: Config | None = None,
) -> Tensor:
    """The attention of each sequence's last token, `[B, H, D]`; zeros for a sequence without keys.

    The query is at position `end_B - 1` and attends to the cached tokens from `first_B` (0 where None) to `end_B`,
    exclusive, the last `window` of them. The heads of `q_BHD` must be adjacent; its rows may be strided. Keys and
    values may have another dtype than the queries, such as fp8: they are converted when read.
    """
    batch, _, head_dim = q_BHD.shape
    out_BHD = torch.empty(q_BHD.shape, dtype=q_BHD.dtype, device=q_BHD.device)
    if batch == 0:
        return out_BHD
    parts = num_parts or num_parts_for(batch * cache.num_kv_heads, cache.block_table, q_BHD.device)
    arguments = decode_arguments(q_BHD, cache, end_B, first_B, bias, scale, out_BHD, parts)
    constants = decode_constants(q_BHD, cache.num_kv_heads, window)

    def launch(config: Config) -> None:
        _decode[(batch, cache.num_kv_heads, parts)](
            arguments,
            C=constants,
            COLUMNS=config.columns,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    key = (q_BHD.dtype, cache.keys.dtype, head_dim, constants.GROUP)
    configs = CONFIGS.of(q_BHD.dtype, head_dim)
    launch(config or best_config("paged_attention", key, configs, launch, q_BHD.device))
    join_parts(arguments, out_BHD)
    return out_BHD


def paged_attention_reference(
    q_BHD: Tensor,
    cache: PagedKV,
    end_B: Tensor,
    *,
    scale: float,
    first_B: Tensor | None = None,
    window: int | None = None,
    bias: DistanceBias | None = None,
) -> Tensor:
    """The same in plain PyTorch, sequence by sequence, in float32."""
    out_BHD = torch.zeros(q_BHD.shape, dtype=q_BHD.dtype, device=q_BHD.device)
    group = q_BHD.shape[1] // cache.num_kv_heads
    firsts = [0] * len(q_BHD) if first_B is None else first_B.tolist()
    for b, (first, end) in enumerate(zip(firsts, end_B.tolist(), strict=True)):
        position_C = torch.arange(first if window is None else max(first, end - window), end, device=q_BHD.device)
        if not len(position_C):
            continue
        rows_HC = cache.rows(b, position_C).repeat_interleave(group, 0)
        score_HC = torch.einsum("hd,hcd->hc", q_BHD[b].float(), cache.keys[rows_HC].float()) * scale
        if bias is not None:
            score_HC += bias.at(position_C - (end - 1))
        out_BHD[b] = torch.einsum("hc,hcd->hd", score_HC.softmax(-1), cache.values[rows_HC].float())
    return out_BHD


class DecodeArguments(NamedTuple):
    """Arguments of the decoding programs; None for an absent tensor.

    It contains no nested tuples: triton 3.6 loses ones and Nones in these.
    """

    q: Tensor
    q_stride: int
    key_rows: Tensor | None
    value_rows: Tensor | None
    table: Tensor | None
    table_stride: int | None
    num_slots: int | None
    end: Tensor
    first: Tensor | None
    bias: Tensor | None
    bias_width: int | None
    bias_zero: int | None
    scale: float
    out: Tensor
    part_out: Tensor | None
    """The outputs of parts, `[B, H, P, D]`, and the logarithms of their weights, `[B, H, P]`, float32."""
    part_weight: Tensor | None


class DecodeConstants(NamedTuple):
    """Compile-time constants of the decoding programs."""

    HEADS: int
    GROUP: int
    HEAD_DIM: int
    BLOCK_G: int
    BLOCK_D: int
    BLOCK_SIZE: int
    WINDOW: int | None
    UPCAST: bool


def decode_arguments(
    q_BHD: Tensor,
    cache: PagedKV,
    end_B: Tensor,
    first_B: Tensor | None,
    bias: DistanceBias | None,
    scale: float,
    out_BHD: Tensor,
    parts: int,
) -> DecodeArguments:
    """Allocates the outputs of the parts where there are several."""
    batch, heads, head_dim = q_BHD.shape
    assert heads_are_adjacent(q_BHD)
    part_out = part_weight = None
    if parts > 1:
        part_out = torch.empty(batch, heads, parts, head_dim, dtype=torch.float32, device=q_BHD.device)
        part_weight = torch.empty(batch, heads, parts, dtype=torch.float32, device=q_BHD.device)
    return DecodeArguments(
        q_BHD,
        q_BHD.stride(0),
        *cache.arguments(),
        end_B,
        first_B,
        *(bias.arguments() if bias else BiasArguments()),
        scale,
        out_BHD,
        part_out,
        part_weight,
    )


def decode_constants(q_BHD: Tensor, num_kv_heads: int, window: int | None) -> DecodeConstants:
    heads, head_dim = q_BHD.shape[1:]
    group = heads // num_kv_heads
    # A matrix unit takes no fewer than 16 rows or columns.
    blocks = (max(16, next_power_of_2(group)), max(16, next_power_of_2(head_dim)))
    return DecodeConstants(heads, group, head_dim, *blocks, BLOCK_SIZE, window, upcast(q_BHD.dtype))


def num_parts_for(num_programs: int, block_table_BT: Tensor, device: torch.device) -> int:
    """Number of parts of each context that gives about two programs a multiprocessor."""
    wanted = round(2 * _num_multiprocessors(device) / num_programs)
    return max(1, min(wanted, block_table_BT.shape[1] * BLOCK_SIZE // _PART_TOKENS, _MAX_PARTS))


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def join_parts(arguments: DecodeArguments, out_BHD: Tensor) -> None:
    """The second launch: joins the outputs of all parts by their weights; does nothing for a single part."""
    if arguments.part_out is None:
        return
    batch, heads, parts, head_dim = arguments.part_out.shape
    _join[(batch * heads,)](
        arguments.part_out,
        arguments.part_weight,
        out_BHD,
        parts,
        HEAD_DIM=head_dim,
        BLOCK_P=next_power_of_2(parts),
        BLOCK_D=next_power_of_2(head_dim),
    )


@jit
def _decode(arguments, C: tl.constexpr, COLUMNS: tl.constexpr):
    decode_part(tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2), arguments, C, COLUMNS)


@jit
def decode_part(sequence, kv_head, part, num_parts, a, C: tl.constexpr, COLUMNS: tl.constexpr):
    """One part of `num_parts` of one sequence's context, for the query heads of one key/value head."""
    end = tl.load(a.end + sequence)
    first = 0
    if a.first is not None:
        first = tl.load(a.first + sequence)
    if C.WINDOW is not None:
        first = tl.maximum(first, end - C.WINDOW)
    num_steps = tl.cdiv(tl.maximum(end - first, 0), COLUMNS)
    num_tokens = tl.cdiv(num_steps, num_parts) * COLUMNS
    low = first + part * num_tokens
    high = tl.minimum(low + num_tokens, end)

    BLOCK_G: tl.constexpr = C.BLOCK_G
    BLOCK_D: tl.constexpr = C.BLOCK_D
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    head = kv_head * C.GROUP + g
    ours = (g < C.GROUP)[:, None] & (d < C.HEAD_DIM)[None, :]
    q_row = a.q + sequence.to(tl.int64) * a.q_stride
    q = tl.load(q_row + head[:, None] * C.HEAD_DIM + d[None, :], mask=ours, other=0.0)
    acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    top = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_G], dtype=tl.float32)
    for start in range(low, high, COLUMNS):
        position = start + tl.arange(0, COLUMNS)
        there = position < high
        offset = cache_offsets(a, sequence, kv_head, position, there, d, C)
        wanted = there[:, None] & (d < C.HEAD_DIM)[None, :]
        k = tl.load(a.key_rows + offset, mask=wanted, other=0.0).to(q.dtype)
        v = tl.load(a.value_rows + offset, mask=wanted, other=0.0).to(q.dtype)
        seen = (g < C.GROUP)[:, None] & there[None, :]
        bias = 0.0
        if a.bias is not None:
            bias = distance_bias(a, head[:, None], (position - (end - 1))[None, :], seen)
        acc, top, total = attend(acc, top, total, q, k, v, bias, seen, a.scale, C.UPCAST)

    empty = total == 0.0
    out = acc / tl.where(empty, 1.0, total)[:, None]
    row = sequence.to(tl.int64) * C.HEADS + head
    if a.part_out is None:
        tl.store(a.out + row[:, None] * C.HEAD_DIM + d[None, :], out, mask=ours)
    else:
        place = row * num_parts + part
        weight = tl.where(empty, float("-inf"), top + tl.log(tl.where(empty, 1.0, total)))
        tl.store(a.part_out + place[:, None] * C.HEAD_DIM + d[None, :], out, mask=ours)
        tl.store(a.part_weight + place, weight, mask=g < C.GROUP)


@jit(do_not_specialize=["num_parts"])
def _join(
    part_out,
    part_weight,
    out,
    num_parts,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    weight = tl.load(part_weight + row * num_parts + p, mask=p < num_parts, other=float("-inf"))
    top = tl.max(weight, 0)
    weight = tl.exp(weight - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    there = (p < num_parts)[:, None] & (d < HEAD_DIM)[None, :]
    parts = tl.load(part_out + (row * num_parts + p)[:, None] * HEAD_DIM + d[None, :], mask=there, other=0.0)
    joined = tl.sum(parts * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * HEAD_DIM + d, joined, mask=d < HEAD_DIM)


KERNELS = (
    Kernel("paged_attention", paged_attention, "cuda", MODEL_DTYPES),
    Kernel("paged_attention", paged_attention_reference),
)
