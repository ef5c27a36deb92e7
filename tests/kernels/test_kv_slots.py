"""Keys and values go into their slots, bit for bit, and nothing else changes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.models.model import load_model_spec
from exeplan.kernels.kv_slots import (
    scatter_slots,
    scatter_slots_reference,
    store_slots,
    store_slots_reference,
)
from exeplan.runner.compute.passes.kv_cache import KVCache

from .conftest import DEVICE, needs_triton


def tables_of(layers, kv_heads, slots, head_dim, dtype=torch.float32):
    return torch.randn(layers, 2, kv_heads * slots, head_dim, device=DEVICE).to(dtype)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 64), (2, 80), (3, 96), (2, 128), (1, 256)])
def test_store_equals_the_reference(kv_heads, head_dim, dtype, index, device):
    table_2RD = tables_of(1, kv_heads, 48, head_dim, dtype)[0]
    expected = table_2RD.clone()
    qkv_NMD = torch.randn(5, 2 + 2 * kv_heads, head_dim, device=device).to(dtype)
    slot_N = torch.tensor([47, 0, -1, 13, 5], dtype=index, device=device)  # The third is padding.
    store_slots(qkv_NMD[:, 2:], slot_N, table_2RD)
    store_slots_reference(qkv_NMD[:, 2:], slot_N, expected)
    assert torch.equal(table_2RD, expected)


def test_the_reference_is_the_store_of_the_runners_cache():
    spec, slot_N = load_model_spec("demo"), np.array([3, 40, 0, 17])
    cache = KVCache(spec, 3, torch.float32, torch.device("cpu"))
    kv_NMD = torch.randn(4, 2 * spec.num_kv_heads, spec.head_dim)
    cache.store(1, cache.store_rows(slot_N), kv_NMD)
    stored_2RD = torch.zeros_like(cache.both_tables(1))
    store_slots_reference(kv_NMD, torch.from_numpy(slot_N), stored_2RD)
    assert torch.equal(stored_2RD, cache.both_tables(1))


@needs_triton
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 24]),
    slots=st.lists(st.integers(0, 31), unique=True, max_size=6),
    num_padding=st.integers(0, 2),
)
def test_a_sequence_is_transferred_completely(layers, kv_heads, head_dim, slots, num_padding):
    slot_N = torch.tensor([*slots, *[-1] * num_padding], dtype=torch.int64, device=DEVICE)
    kv_LNMD = torch.randn(layers, len(slot_N), 2 * kv_heads, head_dim, device=DEVICE)
    tables = tables_of(layers, kv_heads, 32, head_dim)
    expected = tables.clone()
    scatter_slots(kv_LNMD, slot_N, tables)
    scatter_slots_reference(kv_LNMD, slot_N, expected)
    assert torch.equal(tables, expected)
    for kv_NMD, table_2RD in zip(kv_LNMD, expected, strict=True):
        rows_SMD = table_2RD.view(2 * kv_heads, 32, head_dim).transpose(0, 1)
        assert torch.equal(rows_SMD[slots], kv_NMD[: len(slots)])
