"""What a pass takes of a GPU is what its tokens hold, counted here by hand; more of anything takes no less."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.core.models.model import load_model_spec
from exeplan.core.pass_memory import LargestPasses, passes_bytes
from exeplan.core.schedule import Sharding

OPT, LLAMA, MIXTRAL = map(load_model_spec, ("opt-13b", "llama-3.1-8b", "mixtral-8x7b"))
AROUND = 40 + 4 * 128
"""Indices of a token and its angles."""


def of_tokens(tokens: int) -> LargestPasses:
    return LargestPasses(tokens=tokens, rows=1, captured_rows=0)


def test_a_plain_block_holds_its_inner_width_twice():
    assert passes_bytes(OPT, "bfloat16", of_tokens(1000), Sharding(1)) == 1000 * (2 * (4 * 5120 + 2 * 20_480) + AROUND)
    assert passes_bytes(OPT, "bfloat16", of_tokens(1000), Sharding(2)) == 1000 * (2 * (4 * 5120 + 2 * 10_240) + AROUND)


def test_a_gated_block_holds_it_three_times_and_on_one_gpu_adds_to_the_residual():
    assert passes_bytes(LLAMA, "bfloat16", of_tokens(100), Sharding(1)) == 100 * (2 * (3 * 4096 + 3 * 14_336) + AROUND)
    assert passes_bytes(LLAMA, "bfloat16", of_tokens(100), Sharding(2)) == 100 * (2 * (4 * 4096 + 3 * 7168) + AROUND)


def test_on_many_gpus_what_is_left_is_the_sum_of_the_block():
    assert passes_bytes(OPT, "bfloat16", of_tokens(1000), Sharding(8)) == 1000 * (2 * (5 * 5120 + 2560) + AROUND)


def test_experts_hold_padded_rows_and_float32_outputs_of_two_tokens_each():
    """100 tokens are 200 pairs, in blocks of 64 rows for each of 8 experts: up to 63 are padding."""
    rows = 200 + 8 * 63
    experts = 3 * 2 * 14_336 * rows + 4 * (200 + 100) * 4096
    expected = 5 * 2 * 4096 * 100 + experts + AROUND * 100
    assert passes_bytes(MIXTRAL, "bfloat16", of_tokens(100), Sharding(1)) == expected


def test_logits_are_held_twice_and_once_more_by_captured_iterations():
    passes = LargestPasses(tokens=512, rows=1024, captured_rows=256)
    expected = 4 * 128_256 * (2 * 1024 + 256)
    assert passes_bytes(LLAMA, "bfloat16", passes, Sharding(1)) == expected
    assert passes_bytes(LLAMA, "bfloat16", passes, Sharding(1), last=False) < expected / 4


@given(
    spec=st.sampled_from([OPT, LLAMA, MIXTRAL]),
    tokens=st.integers(1, 100_000),
    rows=st.integers(1, 4096),
    size=st.sampled_from([1, 2, 4]),
)
def test_more_tokens_and_rows_take_no_less_and_more_gpus_no_more(spec, tokens, rows, size):
    passes = LargestPasses(tokens=tokens, rows=rows, captured_rows=rows)
    taken = passes_bytes(spec, "bfloat16", passes, Sharding(size))
    assert taken <= passes_bytes(
        spec, "bfloat16", replace(passes, rows=rows + 1, captured_rows=rows + 1), Sharding(size)
    )
    assert passes_bytes(spec, "bfloat16", passes, Sharding(2 * size)) <= taken
    if spec.experts is None:
        assert taken <= passes_bytes(spec, "bfloat16", replace(passes, tokens=tokens + 1), Sharding(size))


@pytest.mark.parametrize("size", [1, 4])
def test_float32_takes_twice_of_hidden_states(size):
    half = passes_bytes(LLAMA, "bfloat16", of_tokens(1000), Sharding(size)) - 1000 * AROUND
    assert passes_bytes(LLAMA, "float32", of_tokens(1000), Sharding(size)) - 1000 * AROUND == 2 * half
