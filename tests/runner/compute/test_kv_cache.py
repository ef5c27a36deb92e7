"""KVCache gives every token its own slot, keeps sequences in few runs, and gets every block back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.models.model import model_spec
from exeplan.errors import InputError
from exeplan.runner.compute.passes.kv_cache import KVCache

SPEC = model_spec(
    {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
    name="tiny",
)


def cache_of(num_blocks: int) -> KVCache:
    return KVCache(SPEC, num_blocks, torch.float32, torch.device("cpu"))


def test_a_cache_beyond_the_hosts_memory_is_refused_with_its_size():
    with pytest.raises(InputError, match=r"of 160,000,000,000,000 tokens takes .* lower kv_cache_tokens"):
        cache_of(10**13)


def test_what_is_allocated_is_logged_before_it_is(caplog):
    with caplog.at_level("INFO"):
        cache_of(2**10)
    assert caplog.messages == ["allocating a KV cache of 16,384 tokens, 1.0 MiB"]
    with caplog.at_level("INFO"), pytest.raises(InputError):
        cache_of(10**13)
    assert caplog.messages[1].startswith("allocating a KV cache of 160,000,000,000,000 tokens")


def num_runs(cache: KVCache, request_id: str, num_blocks: int) -> int:
    slots = cache.slots(request_id, 0, num_blocks * BLOCK_SIZE)
    return 1 + int((np.diff(slots) != 1).sum())


def test_a_token_is_read_back_from_the_rows_of_its_slot():
    cache = cache_of(4)
    cache.resize("a", 2, 2)
    slots = cache.slots("a", 5, 20)
    kv_NMD = torch.randn(15, 4, 2)
    cache.store(1, cache.store_rows(slots), kv_NMD)
    keys_RD, values_RD = cache.table(1)
    rows = torch.from_numpy(cache.rows(slots))
    assert torch.equal(keys_RD[rows], kv_NMD[:, :2].transpose(0, 1))
    assert torch.equal(values_RD[rows], kv_NMD[:, 2:].transpose(0, 1))
    assert not cache.table(0)[0].any()


class _Copies(TorchDispatchMode):
    """The bytes of each copy."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def test_keys_and_values_leave_and_come_layer_by_layer():
    """A copy from a GPU takes as many bytes again there."""
    cache = cache_of(4)
    cache.resize("a", 2, 2)
    held_L2KNB = torch.randint(256, (2, 2, 2, 20, 8), dtype=torch.uint8)
    found_L2KNB = torch.zeros_like(held_L2KNB)
    with _Copies() as copies:
        cache.write("a", held_L2KNB)
        cache.read("a", found_L2KNB)
    assert copies.sizes == [held_L2KNB[0].nbytes] * 4
    assert torch.equal(found_L2KNB, held_L2KNB)


@pytest.mark.parametrize("runs", [1, 2])
def test_the_slots_of_some_sequences_are_those_of_each(runs):
    cache = cache_of(8)
    cache.resize("a", 1, 1)
    cache.resize("b", 2, 2)
    if runs > 1:
        cache.resize("a", 2, 2)
    spans = {"b": (5, 20), "a": (2, 16 * runs)}
    each = [cache.slots(name, *span) for name, span in spans.items()]
    assert cache.slots_of_all([*spans], [*spans.values()]).tolist() == np.concatenate(each).tolist()
    assert cache.slots_of_all([], []).tolist() == []


def test_sequences_that_grow_alternately_stay_one_run_each():
    cache = cache_of(40)
    for blocks in range(1, 11):
        for name in "abcd":
            cache.resize(name, blocks, 10)
    assert [num_runs(cache, name, 10) for name in "abcd"] == [1, 1, 1, 1]
    assert cache.free_blocks == 0


def test_blocks_reserved_for_one_sequence_are_used_by_another_when_all_else_is_full():
    cache = cache_of(10)
    cache.resize("a", 1, 10)
    cache.resize("b", 9, 9)
    assert cache.free_blocks == 0
    assert len({*cache.slots("a", 0, 16), *cache.slots("b", 0, 144)}) == 160


def test_a_freed_run_is_used_again():
    cache = cache_of(6)
    for name in "abc":
        cache.resize(name, 2, 2)
    cache.free("b")
    cache.free("b")
    cache.resize("d", 2, 2)
    assert num_runs(cache, "d", 2) == 1


def test_growing_past_the_cache_is_an_internal_error():
    with pytest.raises(RuntimeError, match="more KV blocks were granted"):
        cache_of(2).resize("a", 3, 3)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 7), st.integers(0, 12))))
def test_no_two_tokens_share_a_slot_and_no_block_is_lost(steps):
    cache = cache_of(16)
    held: dict[str, int] = {}
    for name, blocks, hint in steps:
        if blocks == 0:
            cache.free(name)
            held.pop(name, None)
        elif blocks > held.get(name, 0) and sum(held.values()) - held.get(name, 0) + blocks <= 16:
            before = cache.slots(name, 0, held[name] * BLOCK_SIZE) if name in held else np.zeros(0, dtype=int)
            cache.resize(name, blocks, hint)
            held[name] = blocks
            assert np.array_equal(cache.slots(name, 0, blocks * BLOCK_SIZE)[: len(before)], before)
        slots = [slot for owner, count in held.items() for slot in cache.slots(owner, 0, count * BLOCK_SIZE)]
        assert len(slots) == len(set(slots)) == sum(held.values()) * BLOCK_SIZE
        assert cache.free_blocks == 16 - sum(held.values())
