"""Requests are spread over the groups of a pipeline: none of its stages waits while another has two requests."""

import numpy as np
import pytest

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.schedule import Schedule
from exeplan.policies.shared.spread import groups_for
from exeplan.scheduling.scheduler import Scheduler

ORCA = Schedule("orca", {"max_num_seqs": 32, "micro_batches": 2})
CHUNKED = Schedule("chunked", {"max_num_seqs": 32, "max_num_batched_tokens": 512, "micro_batches": 2})


def scheduler(schedule: Schedule, *, stages: int = 2, num_blocks: int = 1000) -> Scheduler:
    return Scheduler(schedule, num_blocks, num_prefill_stages=stages, num_decode_stages=stages)


def add(found: Scheduler, count: int, *, output: int = 50) -> None:
    for _ in range(count):
        number = str(found.num_admissions + len(found.waiting))
        found.add(SequenceState(request_id=number, num_prompt_tokens=8, max_output_tokens=output))


def ran(found: Scheduler, batch: Batch) -> None:
    for row in (*batch.whole_prefills, *batch.decode):
        row.num_output_tokens += 1
        row.finished = row.num_output_tokens >= row.max_output_tokens
    found.complete(batch)


def started(found: Scheduler) -> list[Batch]:
    """All batches that can be in flight together."""
    return list(iter(found.next_batch, None))


def sizes(found: Scheduler) -> list[int]:
    return [len(group) for group in found.groups]


@pytest.mark.parametrize("schedule", [ORCA, CHUNKED], ids=str)
@pytest.mark.parametrize("count", [2, 3, 4, 8, 32])
def test_requests_that_come_together_are_shared_out(schedule: Schedule, count: int) -> None:
    found = scheduler(schedule)
    add(found, count)
    assert [len(batch.prefill) for batch in started(found)] == [-(-count // 2), count // 2]


def test_a_backlog_fills_every_slot() -> None:
    found = scheduler(ORCA)
    add(found, 100)
    assert [len(batch.prefill) for batch in started(found)] == [16, 16]


def test_a_small_cache_is_shared_out() -> None:
    found = scheduler(ORCA, num_blocks=40)  # Ten requests of 8 + 50 tokens.
    add(found, 32)
    assert [len(batch.prefill) for batch in started(found)] == [5, 5]


def test_there_are_no_more_groups_than_stages_until_they_are_full() -> None:
    found = scheduler(Schedule("orca", {"max_num_seqs": 8, "micro_batches": 4}))
    add(found, 4)
    assert [len(batch.prefill) for batch in started(found)] == [2, 2]
    add(found, 1)
    assert [len(batch.prefill) for batch in started(found)] == [1]
    assert sizes(found) == [2, 2, 1, 0]


def test_a_request_waits_for_no_group_in_flight_that_is_a_little_smaller() -> None:
    found = scheduler(ORCA)
    add(found, 8)
    first, _ = started(found)
    ran(found, first)
    add(found, 1)
    assert [len(batch.prefill) for batch in started(found)] == [1]
    assert sizes(found) == [5, 4]


def test_many_wait_for_a_group_in_flight_that_is_much_smaller() -> None:
    found = scheduler(ORCA)
    add(found, 2)
    first, _ = started(found)
    ran(found, first)
    add(found, 12)
    assert [len(batch.prefill) for batch in started(found)] == [6]


@pytest.mark.parametrize("schedule", [ORCA, CHUNKED], ids=str)
def test_a_group_that_has_run_empty_takes_rows_of_the_other(schedule: Schedule) -> None:
    found = scheduler(schedule)
    add(found, 1, output=1)
    add(found, 1)
    add(found, 1, output=1)
    add(found, 1)
    for batch in started(found):
        ran(found, batch)
    assert sorted(sizes(found)) in ([0, 2], [1, 1])
    assert [len(batch.decode) for batch in started(found)] == [1, 1]


def test_groups_that_are_not_needed_give_their_rows_away() -> None:
    found = scheduler(Schedule("orca", {"max_num_seqs": 8, "micro_batches": 4}))
    add(found, 4, output=2)
    add(found, 4)
    for batch in started(found):
        ran(found, batch)
    for batch in started(found):
        ran(found, batch)
    assert [len(batch.decode) for batch in started(found)] == [2, 2]
    assert sizes(found) == [2, 2, 0, 0]


def test_a_prompt_that_has_been_cut_stays_where_it_is() -> None:
    found = scheduler(Schedule("chunked", {"max_num_seqs": 8, "max_num_batched_tokens": 6, "micro_batches": 2}))
    add(found, 1)
    for _ in range(2):
        (batch,) = started(found)
        ran(found, batch)
    assert batch.chunks[0].last
    assert np.sum(sizes(found)) == 1


@pytest.mark.parametrize(("total", "used"), [(1, 2), (16, 2), (17, 3), (25, 4), (32, 4)])
def test_the_fewest_groups_that_hold_all_are_used_and_one_a_stage(total: int, used: int) -> None:
    assert groups_for(total, slots=32, groups=4, stages=2) == used


def test_stages_that_only_decode_keep_all_groups_alike() -> None:
    found = Scheduler(
        Schedule("waa-c", {"prefill_batch": 8, "decode_batch": 32, "micro_batches": 4}), 1000, num_decode_stages=2
    )
    add(found, 5)
    handed_over(found)
    assert [len(batch.decode) for batch in decoding(found)] == [2, 1, 1, 1]
    add(found, 4)
    handed_over(found)
    ran(found, Batch(decode=tuple(found.groups[0]), group=0, phase="decode"))
    assert decoding(found)[0].group == 0
    assert sizes(found) == [3, 1, 1, 1]  # The three that are left make the others 2 each.


def handed_over(found: Scheduler) -> None:
    """The next prefill, with its token, and its keys and values."""
    batch = found.next_batch("prefill")
    assert batch is not None
    ran(found, batch)
    found.kv_arrived(batch)


def decoding(found: Scheduler) -> list[Batch]:
    return list(iter(lambda: found.next_batch("decode"), None))


def test_prefills_wait_only_for_slots_and_transfers() -> None:
    found = Scheduler(Schedule("waa-c", {"prefill_batch": 2, "decode_batch": 6}), 1000)
    add(found, 20)
    for _ in range(3):  # Three batches have a free slot each request: none of them is ahead of the decodes.
        handed_over(found)
    assert len(found.ready) == 6
    for _ in range(2):
        handed_over(found)
    assert len(found.ready) == 10
    assert found.next_batch("prefill") is None
