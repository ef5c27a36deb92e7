"""The passes that a GPU keeps memory free for are the largest of the schedule, at full length where it does not say."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.core.batch import SequenceState
from exeplan.core.models.model import load_model_spec
from exeplan.core.schedule import Schedule
from exeplan.policies import pass_limits
from exeplan.scheduling.largest_passes import captured_rows, most_rows, pass_sizes, with_finite_context
from exeplan.scheduling.scheduler import Scheduler

SPEC = replace(load_model_spec("demo"), max_context=64)
ORCA = Schedule("orca", {"max_num_seqs": 4})
CHUNKED = Schedule("chunked", {"max_num_seqs": 4, "max_num_batched_tokens": 96})


def orca(prompts: int) -> Schedule:
    return Schedule("orca", {"max_num_seqs": prompts})


def test_a_schedule_that_limits_its_passes_has_one_size():
    assert pass_sizes(SPEC, CHUNKED) == (96,)


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        ("t5-11b", Schedule("chunked", {"max_num_seqs": 8, "max_num_batched_tokens": 128})),
        ("t5-11b", Schedule("sglang", {"max_num_seqs": 8, "max_num_batched_tokens": 128})),
        ("opt-13b", Schedule("rra", {"prefill_batch": 4, "decode_steps": 8, "max_num_batched_tokens": 128})),
    ],
)
def test_where_prompts_are_not_cut_the_largest_pass_holds_a_long_one(model, schedule):
    """A prompt of full length makes a pass of that many tokens, far above the schedule's limit."""
    spec, length = with_finite_context(load_model_spec(model)), 1000
    scheduler = Scheduler(schedule, 1000, whole_prompts=spec.is_encoder_decoder)
    scheduler.add(SequenceState(request_id="long", num_prompt_tokens=length, max_output_tokens=20))
    batch = scheduler.next_batch()
    assert batch is not None
    assert batch.num_new_tokens == length
    assert pass_sizes(spec, schedule)[0] >= spec.max_context


def test_a_schedule_of_a_model_with_an_encoder_may_have_a_larger_limit():
    spec = replace(load_model_spec("t5-11b"), max_context=64)
    assert pass_sizes(spec, CHUNKED) == (96,)
    assert pass_sizes(replace(spec, max_context=100), CHUNKED) == (100,)


def test_the_largest_pass_holds_a_request_of_full_length():
    assert pass_sizes(SPEC, ORCA) == (4 * 64,)
    assert pass_sizes(replace(SPEC, max_context=3000), ORCA) == (16_384, 8192, 4096, 3000, 2048, 1024, 512)
    assert pass_sizes(replace(SPEC, max_context=30_000), ORCA)[:3] == (65_536, 32_768, 30_000)
    assert pass_sizes(replace(SPEC, max_context=100_000), ORCA)[:2] == (100_000, 65_536)
    assert with_finite_context(load_model_spec("t5-11b")).max_context == 16_384
    assert with_finite_context(SPEC) is SPEC


@given(context=st.integers(1, 200_000), prompts=st.integers(1, 300))
def test_more_prompts_try_the_same_sizes_and_larger_ones(context, prompts):
    """So that the first that fits never takes less memory."""
    spec = replace(SPEC, max_context=context)
    fewer, more = pass_sizes(spec, orca(prompts)), pass_sizes(spec, orca(prompts + 1))
    assert list(more) == sorted(set(more), reverse=True)
    assert more[-len(fewer) :] == fewer or max(fewer) <= 512
    assert more[0] >= max(fewer[0], context)


def test_a_schedule_without_a_limit_on_its_decode_rows_gets_a_stated_number():
    assert most_rows(ORCA) == most_rows(CHUNKED) == 4
    waa = Schedule("waa-c", {"decode_batch": 7, "prefill_batch": 2, "micro_batches": 3})
    assert (most_rows(waa), captured_rows(waa)) == (7, 3)
    unlimited = Schedule("rra", {"prefill_batch": 4, "decode_steps": 2})
    assert (pass_limits(unlimited).decode_rows, most_rows(unlimited)) == (None, 256)


@pytest.mark.parametrize("prompts", [1, 3, 40])
def test_no_prefill_of_full_length_is_cut(prompts):
    assert pass_sizes(replace(SPEC, max_context=2048), orca(prompts))[0] >= min(prompts * 2048, 65_536)
