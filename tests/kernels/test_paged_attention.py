"""Decode attention over blocks equals an explicit softmax for all lengths, and reads only the tokens' memory."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.models.model import load_model_spec
from exeplan.kernels.attention.online_softmax import DistanceBias, PagedKV
from exeplan.kernels.attention.paged_attention import num_parts_for, paged_attention, paged_attention_reference
from exeplan.kernels.attention.plain import CachedRows, decode_attention
from exeplan.kernels.tuning import Config
from exeplan.runner.compute.passes.kv_cache import KVCache

from .conftest import DEVICE, needs_triton
from .paged_cache import TOLERANCES, lengths, poisoned_cache

SMALL = Config(columns=16)
AROUND_A_BLOCK = [0, 1, 16, 17]


def check(q_BHD, cache, end_B, *, num_parts=None, config=SMALL, **options):
    found = paged_attention(q_BHD, cache, end_B, num_parts=num_parts, config=config, **options)
    expected = paged_attention_reference(q_BHD, cache, end_B, **options)
    assert not expected.isnan().any(), "the reference read what no sequence holds"
    torch.testing.assert_close(found, expected, **TOLERANCES[q_BHD.dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("head_dim", "group"), [(64, 1), (80, 2), (96, 3), (128, 4), (256, 8), (64, 5), (80, 6), (96, 7)]
)
def test_equals_the_reference(head_dim, group, dtype, device):
    cache = poisoned_cache(AROUND_A_BLOCK, 2, head_dim, dtype, device)
    q_BHD = torch.randn(4, 2 * group, head_dim, device=device).to(dtype)
    check(q_BHD, cache, lengths(AROUND_A_BLOCK, device), scale=head_dim**-0.5)


@pytest.mark.parametrize("columns", [16, 32])
@pytest.mark.parametrize("num_parts", [2, 3, 5])
def test_the_parts_of_a_context_join_to_the_whole(num_parts, columns, device):
    contexts = [0, 1, 70]
    cache = poisoned_cache(contexts, 2, 16, torch.float32, device)
    q_BHD = torch.randn(3, 4, 16, device=device)
    check(q_BHD, cache, lengths(contexts, device), scale=0.3, num_parts=num_parts, config=Config(columns=columns))


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("window", [1, 7, 16, 1000])
def test_a_window_hides_what_is_too_far_back(window, num_parts, device):
    contexts = [0, 5, 40]
    cache = poisoned_cache(contexts, 1, 16, torch.float32, device)
    # Keys beyond the window would take all the weight.
    q_BHD = torch.randn(3, 2, 16, device=device) * 5
    check(q_BHD, cache, lengths(contexts, device), scale=1.0, window=window, num_parts=num_parts)


def test_a_decoder_may_begin_after_its_encoded_prompt_and_attend_to_that_alone(device):
    contexts, encoded = [20, 33, 18], [3, 16, 18]
    cache = poisoned_cache(contexts, 2, 16, torch.float32, device)
    q_BHD = torch.randn(3, 2, 16, device=device)
    check(q_BHD, cache, lengths(contexts, device), first_B=lengths(encoded, device), scale=1.0)
    check(q_BHD, cache, lengths(contexts, device), first_B=lengths(encoded, device), scale=1.0, window=4)
    check(q_BHD, cache, lengths(encoded, device), scale=1.0)


@pytest.mark.parametrize(("width", "zero"), [(1, 0), (9, 8), (60, 50)])
def test_a_bias_depends_on_the_distance_to_the_query_and_is_constant_beyond_its_ends(width, zero, device):
    contexts = [1, 16, 37]
    cache = poisoned_cache(contexts, 2, 16, torch.float32, device)
    bias = DistanceBias(torch.randn(6, width, device=device) * 3, zero)
    q_BHD = torch.randn(3, 6, 16, device=device)
    check(q_BHD, cache, lengths(contexts, device), scale=1.0, bias=bias)


def test_queries_may_be_strided_and_the_cache_may_have_another_dtype(device):
    contexts = [17, 4]
    cache = poisoned_cache(contexts, 2, 64, torch.float16, device)
    qkv_NMD = torch.randn(5, 8, 64, device=device)
    check(qkv_NMD[3:, :4], cache, lengths(contexts, device), scale=0.1)


def test_a_batch_without_sequences_is_empty(device):
    cache = poisoned_cache([3], 1, 16, torch.float32, device)
    found = paged_attention(torch.empty(0, 2, 16, device=device), cache, lengths([], device), scale=1.0)
    assert found.shape == (0, 2, 16)


@needs_triton
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    contexts=st.lists(st.integers(0, 50), min_size=1, max_size=3),
    group=st.integers(1, 8),
    head_dim=st.sampled_from([8, 24, 32]),
    num_parts=st.integers(1, 4),
    window=st.none() | st.integers(1, 30),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_equals_the_reference_on_any_lengths(contexts, group, head_dim, num_parts, window, dtype):
    cache = poisoned_cache(contexts, 1, head_dim, dtype, DEVICE)
    q_BHD = torch.randn(len(contexts), group, head_dim, device=DEVICE).to(dtype)
    check(q_BHD, cache, lengths(contexts, DEVICE), scale=0.5, num_parts=num_parts, window=window)


def test_the_layout_is_that_of_the_runners_cache():
    """The reference over block tables is the CPU's decode attention over the rows that the cache names."""
    torch.manual_seed(0)
    spec, contexts = load_model_spec("demo"), [1, 16, 45]
    runner_cache = KVCache(spec, 12, torch.float32, torch.device("cpu"))
    for name, grown in (("0", 1), ("1", 1), ("2", 1), ("2", 3)):
        runner_cache.resize(name, grown, grown)
    slots = [runner_cache.slots(str(b), 0, context) for b, context in enumerate(contexts)]
    kv_NMD = torch.randn(sum(contexts), 2 * spec.num_kv_heads, spec.head_dim)
    runner_cache.store(1, runner_cache.store_rows(np.concatenate(slots)), kv_NMD)
    table_BT = torch.zeros(3, 3, dtype=torch.int32)
    for b, slot_C in enumerate(slots):
        first_T = torch.from_numpy(slot_C[::BLOCK_SIZE])
        table_BT[b, : len(first_T)] = first_T // BLOCK_SIZE
    keys_RD, values_RD = runner_cache.table(1)
    q_BHD = torch.randn(3, spec.num_heads, spec.head_dim)
    heads = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads}
    rows = CachedRows(np.concatenate(slots), contexts, **heads, num_slots=runner_cache.num_slots, like=keys_RD)
    found = paged_attention_reference(
        q_BHD, PagedKV(keys_RD, values_RD, table_BT, spec.num_kv_heads), lengths(contexts, q_BHD.device), scale=0.2
    )
    torch.testing.assert_close(found, decode_attention(q_BHD, keys_RD, values_RD, rows, scale=0.2))


def test_contexts_are_split_only_where_they_are_long_and_programs_few(monkeypatch):
    monkeypatch.setattr("exeplan.kernels.attention.paged_attention._num_multiprocessors", lambda _: 132)
    short, long = torch.empty(1, 16, device="meta"), torch.empty(1, 256, device="meta")
    cpu = torch.device("cpu")
    assert [num_parts_for(count, long, cpu) for count in (8, 64, 264, 2048)] == [16, 4, 1, 1]
    assert num_parts_for(8, short, cpu) == 1
