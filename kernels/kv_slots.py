"""Copies of keys and values from flat batches into the cache's tables: of one layer, and of several at once.

Letters: L layers, N tokens, K key/value heads, M = 2 * K (keys before values), S slots, R = K * S rows, D head_dim.

A layer's tables are `[2, R, D]`, keys before values, so key or value m of slot s is row m * S + s of both together.
Tables of 8-bit floats take any dtype, saturated. Bytes: 2 * L * N * M * D elements, read once and written once; no
operations. A token's M heads are adjacent in the batch and M * S rows apart in the tables, D contiguous elements each.

The scatter of several layers serves KV transfer (ExeGPT's WAA): from what was received into a stage's cache.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import torch
from torch import Tensor

from exeplan.kernels.kernel import MODEL_DTYPES, Kernel
from exeplan.kernels.language import heads_are_adjacent, jit, next_power_of_2, tl
from exeplan.kernels.products.fp8 import saturated


def store_slots(kv_NMD: Tensor, slot_N: Tensor, table_2RD: Tensor) -> None:
    """Writes the keys and values of N tokens into their slots (int32 or int64) of one layer's tables.

    A token with a negative slot is padding and not written. No slot may occur twice. The heads of a token must be
    adjacent; tokens may be strided, as in a view of the product.
    """
    _copy(kv_NMD[None], slot_N, table_2RD[None])


def store_slots_reference(kv_NMD: Tensor, slot_N: Tensor, table_2RD: Tensor) -> None:
    scatter_slots_reference(kv_NMD[None], slot_N, table_2RD[None])


def scatter_slots(kv_LNMD: Tensor, slot_N: Tensor, tables_L2RD: Tensor) -> None:
    """`store_slots` of all layers."""
    _copy(kv_LNMD, slot_N, tables_L2RD)


def scatter_slots_reference(kv_LNMD: Tensor, slot_N: Tensor, tables_L2RD: Tensor) -> None:
    kept_N = slot_N >= 0
    rows_LMSD = _by_slot(tables_L2RD, kv_LNMD.shape[2])
    rows_LMSD[:, :, slot_N[kept_N].long()] = saturated(kv_LNMD[:, kept_N].transpose(1, 2), tables_L2RD.dtype)


def _by_slot(tables_L2RD: Tensor, heads: int) -> Tensor:
    """The tables as `[L, M, S, D]`."""
    return tables_L2RD.view(len(tables_L2RD), heads, -1, tables_L2RD.shape[-1])


def _copy(kv_LNMD: Tensor, slot_N: Tensor, tables_L2RD: Tensor) -> None:
    layers, tokens, heads, head_dim = kv_LNMD.shape
    if not layers * tokens:
        return
    assert heads_are_adjacent(kv_LNMD[0])
    assert tables_L2RD.is_contiguous()
    num_slots = 2 * tables_L2RD.shape[2] // heads
    block = next_power_of_2(heads * head_dim)
    _copy_slots[(tokens, layers)](
        kv_LNMD,
        *kv_LNMD.stride()[:2],
        slot_N,
        tables_L2RD,
        num_slots,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK=block,
        SATURATE=tables_L2RD.dtype == torch.float8_e4m3fn,
        num_warps=min(8, max(1, block // 512)),
    )


@jit
def _copy_slots(
    kv,
    layer_stride,
    token_stride,
    slots,
    tables,
    num_slots,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SATURATE: tl.constexpr,
):
    token, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    i = tl.arange(0, BLOCK)
    cached = (i < HEADS * HEAD_DIM) & (slot >= 0)
    row = (layer * HEADS + i // HEAD_DIM) * num_slots + slot
    cached_ptr = tables + row * HEAD_DIM + i % HEAD_DIM
    flat_ptr = kv + layer * layer_stride + token * token_stride + i
    value = tl.load(flat_ptr, mask=cached)
    if SATURATE:
        value = tl.minimum(tl.maximum(value.to(tl.float32), -448.0), 448.0)
    tl.store(cached_ptr, value.to(tables.dtype.element_ty), mask=cached)


KERNELS = (
    Kernel("store_slots", store_slots, "cuda", MODEL_DTYPES),
    Kernel("store_slots", store_slots_reference),
    Kernel("scatter_slots", scatter_slots, "cuda", MODEL_DTYPES),
    Kernel("scatter_slots", scatter_slots_reference),
)
