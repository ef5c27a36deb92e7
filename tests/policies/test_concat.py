"""Policy concat packs the requests that the order chooses, refuses none for its length, and frees finished slots."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.policies import load_policy
from exeplan.scheduling.scheduler import Scheduler
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Workload

PURE = Schedule("concat", {"rows": 2, "row_tokens": 12})
SLOTTED = Schedule("concat", {"rows": 2, "row_tokens": 12, "slot_tokens": 4})


def sequence(name: str, tokens: int, *, outputs: int = 2, deadline: float | None = None) -> SequenceState:
    return SequenceState(request_id=name, num_prompt_tokens=tokens, max_output_tokens=outputs, deadline=deadline)


def waiting(schedule: Schedule, *tokens: int, num_blocks: int = 1000) -> Scheduler:
    scheduler = Scheduler(schedule, num_blocks)
    for name, count in zip("abcdefghijklmnopqrstuvwxyz", tokens, strict=False):
        scheduler.add(sequence(name, count))
    return scheduler


def run(scheduler: Scheduler, batch: Batch) -> list[SequenceState]:
    """The batch yields its tokens. Returns the sequences that left."""
    for row in (*batch.prefill, *batch.decode):
        if not row.finished:
            row.num_output_tokens += 1
            row.finished = row.num_output_tokens >= row.max_output_tokens
    return scheduler.complete(batch)


def next_of(scheduler: Scheduler) -> Batch:
    batch = scheduler.next_batch()
    assert batch is not None
    return batch


def names(batch: Batch) -> str:
    return "".join(row.request_id for row in batch.prefill)


def batches(scheduler: Scheduler) -> list[Batch]:
    """Those with prefills, until no request is left."""
    found = []
    while (batch := scheduler.next_batch()) is not None:
        found += [batch] if batch.prefill else []
        run(scheduler, batch)
    assert not scheduler.has_work
    assert scheduler.free_blocks == scheduler.num_blocks
    return found


def test_requests_share_rows_and_the_next_batch_waits_for_the_end_of_this_one() -> None:
    scheduler = waiting(PURE, 6, 6, 6, 6, 6)
    first = next_of(scheduler)
    assert (names(first), first.packing.num_rows, first.packing.row_tokens) == ("abcd", 2, 12)
    assert (first.num_new_tokens, first.spans) == (24, [(0, 12), (0, 12)])
    run(scheduler, first)
    assert [len(next_of(scheduler).decode)] == [4]


def test_pure_rows_keep_finished_requests_until_the_batch_is_done() -> None:
    scheduler = Scheduler(PURE, 1000)
    for name, outputs in (("a", 2), ("b", 3), ("c", 4)):
        scheduler.add(sequence(name, 6, outputs=outputs))
    left = ["".join(row.request_id for row in run(scheduler, next_of(scheduler))) for _ in range(4)]
    assert left == ["", "", "", "abc"]


def test_a_slot_leaves_as_soon_as_its_own_requests_are_done() -> None:
    """a and b share a slot, c and d have one each."""
    scheduler = Scheduler(SLOTTED, 1000)
    for name, tokens, outputs in (("a", 2, 2), ("b", 2, 3), ("c", 4, 4), ("d", 4, 1)):
        scheduler.add(sequence(name, tokens, outputs=outputs))
    left = ["".join(row.request_id for row in run(scheduler, next_of(scheduler))) for _ in range(4)]
    assert left == ["d", "", "ab", "c"]


def test_a_request_longer_than_a_slot_gets_a_longer_one_when_it_is_its_turn() -> None:
    scheduler = waiting(SLOTTED, 4, 9, 4, 4)
    found = batches(scheduler)
    assert [names(batch) for batch in found] == ["acd", "b"]
    assert [batch.packing.slot_tokens for batch in found] == [4, 9]


def test_a_request_longer_than_a_row_gets_a_row_of_its_own_when_it_is_its_turn() -> None:
    found = batches(waiting(PURE, 30, 6, 6))
    assert [(names(batch), batch.packing.row_tokens) for batch in found] == [("a", 30), ("bc", 12)]


@pytest.mark.parametrize("order", ["fcfs", "sjf", "edf", "das", "slotted-das"])
def test_a_request_that_fits_nowhere_is_served_though_short_ones_keep_coming(order: str) -> None:
    """Those that come later have later deadlines, so that in the end nothing is more urgent than the long one."""
    scheduler = Scheduler(Schedule("concat", {"rows": 1, "row_tokens": 8}, order), 1000)
    scheduler.add(sequence("long", 20, outputs=1, deadline=9.0))
    for step in itertools.count():
        for number in range(4):
            scheduler.add(sequence(f"{step}-{number}", 4, outputs=1, deadline=10.0 + step))
        batch = next_of(scheduler)
        run(scheduler, batch)
        if names(batch) == "long":
            break
        assert step < 20


def test_memory_cuts_a_batch_short() -> None:
    found = batches(waiting(PURE, 6, 6, 6, 6, num_blocks=3))
    assert [names(batch) for batch in found] == ["abc", "d"]


def test_a_pass_computes_no_more_tokens_than_the_device_has_memory_for() -> None:
    """Rows of 11 and 9 tokens would compute 22; there is room for 20."""
    scheduler = Scheduler(PURE, 1000, pass_tokens=20)
    for name, tokens in (("a", 11), ("b", 4), ("c", 5)):
        scheduler.add(sequence(name, tokens))
    assert [(names(batch), batch.num_new_tokens <= 20) for batch in batches(scheduler)] == [("a", True), ("bc", True)]


def test_a_batch_holds_no_more_than_it_may() -> None:
    schedule = Schedule("concat", {"max_num_seqs": 3, "rows": 2, "row_tokens": 12})
    assert [names(batch) for batch in batches(waiting(schedule, *[3] * 7))] == ["abc", "def", "g"]


def test_an_expired_request_is_in_no_batch() -> None:
    scheduler = Scheduler(PURE, 1000)
    for name, deadline in (("a", 1.0), ("b", None), ("c", 3.0)):
        scheduler.add(sequence(name, 6, deadline=deadline))
    assert [row.request_id for row in scheduler.expire(2.0)] == ["a"]
    assert scheduler.expire(2.5) == []
    assert names(next_of(scheduler)) == "bc"
    assert scheduler.expire(9.0) == []


def test_when_all_have_expired_there_is_nothing_to_do() -> None:
    scheduler = Scheduler(SLOTTED, 1000)
    for name in "abc":
        scheduler.add(sequence(name, 3, deadline=1.0))
    assert len(scheduler.expire(1.5)) == 3
    assert scheduler.next_batch() is None
    assert not scheduler.has_work


def test_a_deadline_can_be_missed_before_it_is_there() -> None:
    """With a lead of half a second a request has to start that much earlier."""
    scheduler = Scheduler(Schedule("concat", {"rows": 1, "row_tokens": 8, "lead_ms": 500}), 100)
    scheduler.add(sequence("a", 4, deadline=1.0))
    assert scheduler.expire(0.5) == []
    assert [row.request_id for row in scheduler.expire(0.6)] == ["a"]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=25),
    order=st.sampled_from(["fcfs", "sjf", "edf", "das", "slotted-das"]),
    rows=st.integers(1, 3),
    slots=st.integers(1, 4),
    slot=st.integers(1, 20),
)
@settings(max_examples=120, deadline=None)
def test_every_request_is_served_whole_whatever_its_length(lengths, order, rows, slots, slot) -> None:
    cut = {"slot_tokens": slot} if slots > 1 and order != "slotted-das" else {}
    schedule = Schedule("concat", {"rows": rows, "row_tokens": slots * slot, **cut}, order)
    load_policy("concat").check(schedule)
    scheduler = Scheduler(schedule, 40)
    for number, (prompt, output) in enumerate(lengths):
        scheduler.add(sequence(str(number), prompt, outputs=output, deadline=float(number % 5)))
    found = batches(scheduler)
    served = [row.request_id for batch in found for row in batch.prefill]
    assert sorted(served, key=int) == [str(number) for number in range(len(lengths))]
    for batch in found:
        packing = batch.packing
        assert packing.row_tokens % packing.slot_tokens == 0
        ends = [
            (place.row, place.start, place.start + row.num_prompt_tokens)
            for place, row in zip(packing.places, batch.prefill, strict=True)
        ]
        for (row, _, end), (other, start, _) in itertools.pairwise(sorted(ends)):
            assert row != other or end <= start
        assert all(end <= packing.row_tokens for _, _, end in ends)
        assert all(start // packing.slot_tokens == (end - 1) // packing.slot_tokens for _, start, end in ends)


def test_the_search_gives_a_batch_the_rows_that_it_needs() -> None:
    law = Workload.of("three lengths", inputs=[10, 20, 30], outputs=[4, 4, 4], weights=[1, 1, 1])
    found = load_policy("concat").schedule({"max_num_seqs": 24, "slots": 4, "slot_prompts": 2}, law)
    assert (found["row_tokens"], found["slot_tokens"]) == (240, 60)
    assert found["rows"] in (2, 3)


def test_wrong_schedules_are_named() -> None:
    check = load_policy("concat").check
    with pytest.raises(InputError, match="slot_tokens=20 is more than row_tokens=12"):
        check(Schedule("concat", {"rows": 2, "row_tokens": 12, "slot_tokens": 20}))
    with pytest.raises(InputError, match="slotted-das chooses slot_tokens itself"):
        check(Schedule("concat", {"rows": 2, "row_tokens": 12, "slot_tokens": 4}, "slotted-das"))
    with pytest.raises(InputError, match="order must be one of fcfs, sjf, edf, das, found 'slotted-das'"):
        load_policy("orca").check(Schedule("orca", {"max_num_seqs": 4}, "slotted-das"))
    with pytest.raises(InputError, match="eta_percent is about the order das, found order edf"):
        load_policy("orca").check(Schedule("orca", {"max_num_seqs": 4, "eta_percent": 50}, "edf"))
    with pytest.raises(InputError, match="q_percent must lie between 1 and 99, found 100"):
        load_policy("orca").check(Schedule("orca", {"max_num_seqs": 4, "q_percent": 100}, "das"))


def test_the_search_tries_all_small_batches_and_large_ones_a_64th_apart() -> None:
    (knob,) = load_policy("concat").knobs(load_workload("S"), 1000)
    small, gaps = np.asarray(knob.values[:-1]), np.diff(knob.values)
    assert knob.values[:128] == tuple(range(1, 129))
    assert knob.values[-1] == 1000
    assert (gaps <= np.maximum(small / 64, 1)).all()
    assert len(knob.values) < 128 + 3 * 64


def test_requests_of_one_token_are_done_with_their_prefill(cost: CostModel) -> None:
    workload = load_workload("fixed:in=16;out=1")
    for slots in ({}, {"slot_tokens": 16}):
        schedule = Schedule("concat", {"rows": 2, "row_tokens": 64, **slots})
        steady = steady_state(schedule, workload, cost)
        inputs, outputs = np.full(80, 16), np.full(80, 1)
        passes = replay(schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=1000).passes
        assert [one.num_prefill for one in passes] == [8] * 10
        assert steady.throughput == pytest.approx(80 / (passes[-1].end))
