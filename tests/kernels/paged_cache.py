"""Caches in which every element is NaN except those of the sequences' tokens."""

from collections.abc import Sequence

import torch

from exeplan.core.batch import BLOCK_SIZE
from exeplan.kernels.attention.online_softmax import PagedKV

TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.float16: {"rtol": 2e-3, "atol": 2e-3}}


def poisoned_cache(
    contexts: Sequence[int], num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> PagedKV:
    """Scattered blocks for sequences of these lengths, and two columns of the table that point to a block of NaN."""
    counts = [-(-context // BLOCK_SIZE) for context in contexts]
    blocks = torch.randperm(sum(counts) + 1)
    poison, held = int(blocks[0]), iter(blocks[1:].tolist())
    table_BT = torch.full((len(contexts), max(counts, default=0) + 2), poison, dtype=torch.int32)
    tables_2KSD = torch.full((2, num_kv_heads, len(blocks) * BLOCK_SIZE, head_dim), torch.nan)
    for b, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        table_BT[b, :count] = torch.tensor([next(held) for _ in range(count)], dtype=torch.int32)
        position_C = torch.arange(context)
        slot_C = table_BT[b, position_C // BLOCK_SIZE].long() * BLOCK_SIZE + position_C % BLOCK_SIZE
        tables_2KSD[:, :, slot_C] = torch.randn(2, num_kv_heads, context, head_dim)
    keys_RD, values_RD = tables_2KSD.flatten(1, 2).to(dtype).to(device)
    return PagedKV(keys_RD, values_RD, table_BT.to(device), num_kv_heads)


def lengths(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
