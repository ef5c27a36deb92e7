"""take_over(): whatever the two policies, every request gets each token once, and no block is lost."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.batch import SequenceState
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.scheduling.scheduler import Scheduler
from exeplan.scheduling.takeover import can_keep_blocks, take_over

TOGETHER = [
    Schedule("static", {"batch_size": 4}),
    Schedule("orca", {"max_num_seqs": 5}),
    Schedule("orca", {"max_num_seqs": 4, "micro_batches": 2}),
    Schedule("rra", {"prefill_batch": 3, "decode_steps": 4}),
    Schedule("rra", {"prefill_batch": 6, "decode_steps": 2, "micro_batches": 2}),
    Schedule("chunked", {"max_num_seqs": 5, "max_num_batched_tokens": 8}),
    Schedule("concat", {"rows": 2, "row_tokens": 80}),
    Schedule("turbo", {"batch_size": 4}),
    Schedule("concat", {"rows": 3, "row_tokens": 80, "slot_tokens": 80}, order="das"),
]
APART = [
    Schedule("waa-c", {"decode_batch": 4, "prefill_batch": 2, "micro_batches": 2}),
    Schedule("waa-m", {"decode_batch": 2, "prefill_batch": 3}),
]


def sequence(number: int, prompt: int, output: int) -> SequenceState:
    return SequenceState(request_id=str(number), num_prompt_tokens=prompt, max_output_tokens=output)


def step(scheduler: Scheduler) -> bool:
    """One pass of each phase, if it can run; each row that produces gets a token."""
    ran = False
    for phase in ("decode", "prefill") if scheduler.policy.SEPARATE_STAGES else ("",):
        if (batch := scheduler.next_batch(phase)) is None:
            continue
        ran = True
        for row in batch.whole_prefills + batch.decode:
            if not row.finished:
                row.num_output_tokens += 1
                row.finished = row.num_output_tokens == row.max_output_tokens
        scheduler.complete(batch)
        if phase == "prefill":
            scheduler.kv_arrived(batch)
    return ran


requests = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=14)


@pytest.mark.parametrize("schedules", [TOGETHER, APART, TOGETHER + APART], ids=["together", "apart", "both"])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), requests=requests, num_blocks=st.integers(5, 40))
def test_every_request_gets_all_tokens_across_any_switches(schedules, data, requests, num_blocks):
    sequences = [sequence(number, *lengths) for number, lengths in enumerate(requests)]
    scheduler = Scheduler(data.draw(st.sampled_from(schedules)), num_blocks)
    for one in sequences:
        scheduler.add(one)
    while scheduler.has_work:
        for _ in range(data.draw(st.integers(1, 12))):
            if not step(scheduler):
                break
        held = sum(one.num_blocks for one in sequences)
        assert scheduler.free_blocks == num_blocks - held
        after = Scheduler(data.draw(st.sampled_from(schedules)), num_blocks)
        before = [one.num_output_tokens for one in sequences]
        able = can_keep_blocks(after, scheduler)
        kept = data.draw(st.sampled_from([able, able[::2], []]))
        left = take_over(after, scheduler, keep=kept)
        assert [one for one in after.running if one.num_blocks] == kept
        assert [one.num_output_tokens for one in sequences] == before
        assert all(one.num_blocks == 0 for one in left)
        scheduler = after
    assert [one.num_output_tokens for one in sequences] == [output for _, output in requests]
    assert scheduler.free_blocks == num_blocks
    assert not scheduler.waiting


@pytest.mark.parametrize(("old", "new"), [*itertools.permutations(TOGETHER[1:5] + APART, 2)])
def test_a_prefilled_sequence_keeps_its_blocks(old, new):
    scheduler = Scheduler(old, 40)
    for number in range(6):
        scheduler.add(sequence(number, 10, 20))
    for _ in range(3):
        step(scheduler)
    running = list(scheduler.running)
    assert running
    after = Scheduler(new, 40)
    assert take_over(after, scheduler, keep=can_keep_blocks(after, scheduler)) == []
    assert after.running == running
    assert len(after.running) + len(after.waiting) == 6


def test_a_smaller_cache_takes_the_oldest_and_computes_the_others_again():
    scheduler = Scheduler(TOGETHER[1], 20)
    rows = [sequence(number, 31, 1 + 20 * (number < 4)) for number in range(5)]
    for row in rows:
        scheduler.add(row)
    step(scheduler)
    after = Scheduler(TOGETHER[1], 5)
    assert take_over(after, scheduler, keep=can_keep_blocks(after, scheduler)) == rows[2:4]
    assert (after.running, list(after.waiting)) == (rows[:2], rows[2:4])


def test_a_request_that_the_new_cache_cannot_hold_is_refused_and_nothing_changes():
    scheduler = Scheduler(TOGETHER[1], 20)
    scheduler.add(sequence(0, 100, 10))
    step(scheduler)
    with pytest.raises(InputError, match="100 prompt and 10 output tokens need 7 KV blocks, the cache has 4"):
        take_over(Scheduler(TOGETHER[1], 4), scheduler, keep=[])
    assert scheduler.running[0].num_blocks == 7
