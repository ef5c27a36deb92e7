"""Blocks move with all their layers, heads, keys and values, and nothing else changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.batch import BLOCK_SIZE
from exeplan.kernels.kv_blocks import move_blocks, move_blocks_reference
from exeplan.kernels.kv_slots import gather_slots

from .conftest import DEVICE, needs_triton


def block_slots(block):
    return torch.arange(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96])
def test_a_moved_block_keeps_its_contents(head_dim, dtype, device):
    tables = torch.randn(2, 2, 2 * 6 * BLOCK_SIZE, head_dim, device=device).to(dtype)
    before = gather_slots(tables, block_slots(5), num_kv_heads=2)
    move_blocks(tables, torch.tensor([5], device=device), torch.tensor([1], device=device), num_kv_heads=2)
    assert torch.equal(gather_slots(tables, block_slots(1), num_kv_heads=2), before)


@needs_triton
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    layers=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    blocks=st.permutations(range(7)),
    moves=st.integers(0, 3),
    head_dim=st.sampled_from([8, 24]),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_equals_the_reference(layers, kv_heads, blocks, moves, head_dim, index):
    tables = torch.randn(layers, 2, kv_heads * 7 * BLOCK_SIZE, head_dim, device=DEVICE)
    expected = tables.clone()
    pairs = torch.tensor(blocks, dtype=index, device=DEVICE)[: 2 * moves].view(2, moves)
    move_blocks(tables, *pairs, num_kv_heads=kv_heads)
    move_blocks_reference(expected, *pairs, num_kv_heads=kv_heads)
    assert torch.equal(tables, expected)
