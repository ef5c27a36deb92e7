"""Mixed attention: prefilled spans and decoded sequences of one batch in one launch.

Source: selective batching of ORCA (OSDI 2022, section 4.2): a whole layer except attention runs over the flat batch;
here attention does as well. Tiles of queries come first in the grid, because they run longest, then the parts of the
decoded contexts, which fill the idle multiprocessors: the former are compute-bound, the latter memory-bound.

Letters, bytes and operations: those of `ragged_attention.py` and `paged_attention.py`, added up.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
from torch import Tensor

from exeplan.kernels.attention.online_softmax import DistanceBias, PagedKV
from exeplan.kernels.attention.paged_attention import (
    decode_arguments,
    decode_constants,
    decode_part,
    join_parts,
    num_parts_for,
    paged_attention,
    paged_attention_reference,
)
from exeplan.kernels.attention.ragged_attention import (
    prefill_arguments,
    prefill_constants,
    prefill_tile,
    ragged_attention,
    ragged_attention_reference,
)
from exeplan.kernels.attention.spans import Spans
from exeplan.kernels.kernel import MODEL_DTYPES, Kernel
from exeplan.kernels.language import jit, tl
from exeplan.kernels.tuning import AttentionConfigs, Config, best_config

CONFIGS = AttentionConfigs(
    usual=(
        Config(rows=64, columns=64, num_warps=4, num_stages=3),
        Config(rows=64, columns=64, num_warps=4, num_stages=2),
        Config(rows=128, columns=64, num_warps=8, num_stages=2),
        Config(rows=64, columns=32, num_warps=4, num_stages=3),
    ),
    wide=(
        Config(rows=64, columns=64, num_warps=8, num_stages=2),
        Config(rows=64, columns=32, num_warps=4, num_stages=2),
    ),
    exact=(Config(rows=32, columns=32, num_warps=8, num_stages=2),),
)


def mixed_attention(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    spans: Spans,
    span_cache: PagedKV | None,
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
    """The attention `[N, H, D]` of causal spans, which come first, and of B decoded tokens after them.

    Equals `ragged_attention` of the spans over `span_cache`, then `paged_attention` of the tokens over `cache`.
    """
    tokens, heads, kv_heads = spans.num_tokens, q_NHD.shape[1], cache.num_kv_heads
    batch = len(end_B)
    if not tokens:
        return paged_attention(
            q_NHD, cache, end_B, scale=scale, first_B=first_B, window=window, bias=bias, num_parts=num_parts
        )
    if not batch:
        return ragged_attention(q_NHD, k_NKD, v_NKD, spans, scale=scale, cache=span_cache, window=window, bias=bias)
    out_NHD = torch.empty(q_NHD.shape, dtype=q_NHD.dtype, device=q_NHD.device)
    parts = num_parts or num_parts_for(batch * kv_heads, cache.block_table, q_NHD.device)
    prefill = prefill_arguments(q_NHD, k_NKD, v_NKD, spans, span_cache, bias, scale, out_NHD)
    decode = decode_arguments(q_NHD[tokens:], cache, end_B, first_B, bias, scale, out_NHD[tokens:], parts)
    constants = {
        "PREFILL": prefill_constants(q_NHD, kv_heads, True, window),
        "DECODE": decode_constants(q_NHD, kv_heads, window),
        "KV_HEADS": kv_heads,
    }

    def launch(config: Config) -> None:
        tiles = spans.tiles(config.rows)
        num_tile_programs = len(tiles) * heads
        _mixed[(num_tile_programs + batch * kv_heads * parts,)](
            prefill,
            tiles,
            num_tile_programs,
            decode,
            parts,
            **constants,
            ROWS=config.rows,
            COLUMNS=config.columns,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    key = (q_NHD.dtype, cache.keys.dtype, q_NHD.shape[2], heads // kv_heads, bias is not None)
    configs = CONFIGS.of(q_NHD.dtype, q_NHD.shape[2])
    launch(config or best_config("mixed_attention", key, configs, launch, q_NHD.device))
    join_parts(decode, out_NHD[tokens:])
    return out_NHD


def mixed_attention_reference(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    spans: Spans,
    span_cache: PagedKV | None,
    cache: PagedKV,
    end_B: Tensor,
    *,
    scale: float,
    first_B: Tensor | None = None,
    window: int | None = None,
    bias: DistanceBias | None = None,
) -> Tensor:
    """The same in plain PyTorch."""
    q, k, v = (x[: spans.num_tokens] for x in (q_NHD, k_NKD, v_NKD))
    prefilled = ragged_attention_reference(q, k, v, spans, scale=scale, cache=span_cache, window=window, bias=bias)
    q_BHD = q_NHD[spans.num_tokens :]
    decoded = paged_attention_reference(q_BHD, cache, end_B, scale=scale, first_B=first_B, window=window, bias=bias)
    return torch.cat([prefilled, decoded])


@jit(do_not_specialize=["num_tile_programs", "num_parts"])
def _mixed(
    prefill,
    tiles,
    num_tile_programs,
    decode,
    num_parts,
    PREFILL: tl.constexpr,
    DECODE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < num_tile_programs:
        prefill_tile(program // PREFILL.HEADS, program % PREFILL.HEADS, prefill, tiles, PREFILL, ROWS, COLUMNS)
    else:
        number = program - num_tile_programs
        part, pair = number % num_parts, number // num_parts
        decode_part(pair // KV_HEADS, pair % KV_HEADS, part, num_parts, decode, DECODE, COLUMNS)


KERNELS = (
    Kernel("mixed_attention", mixed_attention, "cuda", MODEL_DTYPES),
    Kernel("mixed_attention", mixed_attention_reference),
)
