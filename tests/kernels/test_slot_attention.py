"""Slot attention equals an explicit softmax for each prompt of each slot, and reads no padding or other prompt."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.kernels.attention.online_softmax import DistanceBias
from exeplan.kernels.attention.plain import full_attention, prefill_attention
from exeplan.kernels.attention.slot_attention import Slots, slot_attention, slot_attention_reference
from exeplan.kernels.tuning import Config

from .conftest import DEVICE, needs_triton
from .paged_cache import TOLERANCES

SMALL = Config(rows=16, columns=16)


def batch_of(slots, heads, kv_heads, head_dim, device, dtype=torch.float32):
    """Queries, keys and values as views of one product, NaN wherever there is padding."""
    qkv_NMD = torch.randn(slots.num_tokens, heads + 2 * kv_heads, head_dim, device=device)
    first_N, end_N = slots.seen_N2.unbind(1)
    qkv_NMD[first_N == end_N] = torch.nan
    return qkv_NMD.to(dtype).split((heads, kv_heads, kv_heads), 1)


def packed(slot_tokens, lengths_by_slot, device):
    """Slots filled from their beginnings with prompts of some lengths."""
    prompts = []
    for number, lengths in enumerate(lengths_by_slot):
        start = number * slot_tokens
        for length in lengths:
            prompts.append((start, start + length))
            start += length
    return Slots(len(lengths_by_slot) * slot_tokens, slot_tokens, prompts, device)


def check(slots, heads, kv_heads, head_dim, device, *, dtype=torch.float32, config=SMALL, **options):
    q, k, v = batch_of(slots, heads, kv_heads, head_dim, device, dtype)
    found = slot_attention(q, k, v, slots, config=config, **options)
    expected = slot_attention_reference(q, k, v, slots, **options)
    assert not expected.isnan().any(), "the reference read padding"
    torch.testing.assert_close(found, expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(16, 2, 2), (24, 3, 1), (80, 2, 1), (128, 4, 2)])
def test_equals_the_reference(head_dim, heads, kv_heads, dtype, device):
    slots = packed(20, [[7, 13], [], [1, 1, 5]], device)
    check(slots, heads, kv_heads, head_dim, device, dtype=dtype, scale=head_dim**-0.5)


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (32, 16), (16, 32)])
@pytest.mark.parametrize("causal", [True, False])
def test_one_slot_a_row_is_pure_concatenation(rows, columns, causal, device):
    slots = packed(50, [[33, 17], [50]], device)
    check(slots, 2, 1, 16, device, causal=causal, scale=1.0, config=Config(rows=rows, columns=columns))


@pytest.mark.parametrize("window", [1, 5, 100])
def test_a_window_hides_what_is_too_far_back(window, device):
    check(packed(40, [[25, 10], [40]], device), 1, 1, 16, device, causal=True, window=window, scale=1.0)


@pytest.mark.parametrize("causal", [True, False])
def test_a_bias_depends_on_the_distance_of_key_and_query(causal, device):
    bias = DistanceBias(torch.randn(4, 15, device=device) * 3, 9)
    check(packed(36, [[20, 3], [36]], device), 4, 2, 16, device, causal=causal, bias=bias, scale=1.0)


def test_padding_gets_zeros_and_no_slots_nothing(device):
    slots = packed(20, [[5], []], device)
    q, k, v = batch_of(slots, 1, 1, 16, device)
    found = slot_attention(q, k, v, slots, scale=1.0, config=SMALL)
    assert found[5:].eq(0).all()
    assert slot_attention(q[:0], k[:0], v[:0], Slots(0, 20, [], device), scale=1.0, config=SMALL).shape == (0, 1, 16)


@needs_triton
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    slot_tokens=st.integers(1, 40),
    cuts=st.lists(st.lists(st.integers(1, 20), max_size=4), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    causal=st.booleans(),
    biased=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_equals_the_reference_on_any_packing(slot_tokens, cuts, heads, causal, biased, dtype):
    fitting = [[n for i, n in enumerate(lengths) if sum(lengths[: i + 1]) <= slot_tokens] for lengths in cuts]
    bias = DistanceBias(torch.randn(heads[0], 12, device=DEVICE), 5) if biased else None
    check(packed(slot_tokens, fitting, DEVICE), *heads, 24, DEVICE, dtype=dtype, causal=causal, bias=bias, scale=0.5)


def test_the_reference_is_the_attention_of_each_prompt_alone():
    torch.manual_seed(0)
    slots = packed(30, [[12, 18], [7]], torch.device("cpu"))
    q, k, v = batch_of(slots, 4, 2, 16, torch.device("cpu"))
    bias_HX = torch.randn(4, 59)
    bias = DistanceBias(bias_HX, 29)
    found = slot_attention_reference(q, k, v, slots, scale=0.3, bias=bias)
    causal = slot_attention_reference(q, k, v, slots, scale=0.3, causal=True, window=4)
    for start, end in ((0, 12), (12, 30), (30, 37)):
        one, length = slice(start, end), end - start
        own_HX = bias_HX[:, 30 - length : 29 + length]
        expected = full_attention(q[None, one], k[None, one], v[None, one], scale=0.3, bias_HX=own_HX)[0]
        torch.testing.assert_close(found[one], expected)
        expected = prefill_attention(q[None, one], k[None, one], v[None, one], scale=0.3, window=4)[0]
        torch.testing.assert_close(causal[one], expected)
