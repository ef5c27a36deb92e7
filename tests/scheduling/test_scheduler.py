"""The scheduler admits what fits with its next token, preempts the youngest, and admits it again before all others."""

import pytest

from exeplan.core.batch import BLOCK_SIZE, Batch, SequenceState
from exeplan.core.schedule import Schedule
from exeplan.policies import reserves
from exeplan.scheduling.scheduler import Scheduler

ORDERS = ("fcfs", "sjf", "edf", "das")


def sequence(name: str, prompt: int, output: int, deadline: float | None = None) -> SequenceState:
    return SequenceState(request_id=name, num_prompt_tokens=prompt, max_output_tokens=output, deadline=deadline)


def scheduler_of(schedule: Schedule, *sequences: SequenceState, num_blocks: int) -> Scheduler:
    scheduler = Scheduler(schedule, num_blocks)
    for one in sequences:
        scheduler.add(one)
    return scheduler


def run(scheduler: Scheduler) -> Batch:
    """One pass: each row has its token."""
    batch = scheduler.next_batch()
    assert batch is not None
    for row in (*batch.whole_prefills, *batch.decode):
        row.num_output_tokens += 1
        row.finished = row.num_output_tokens >= row.max_output_tokens
    scheduler.complete(batch)
    return batch


def names(rows: tuple[SequenceState, ...]) -> str:
    return "".join(row.request_id for row in rows)


def rra(prefill_batch: int) -> Schedule:
    return Schedule("rra", {"prefill_batch": prefill_batch, "decode_steps": 100})


def test_a_request_needs_a_block_for_the_token_that_it_is_about_to_produce() -> None:
    """Two prompts fill a block each; with three blocks the second's next token has no place."""
    full = [sequence(name, BLOCK_SIZE, 2) for name in "ab"]
    assert names(scheduler_of(rra(2), *full, num_blocks=3).admissible(2)) == "a"
    assert names(scheduler_of(rra(2), *full, num_blocks=4).admissible(2)) == "ab"
    short = [sequence(name, BLOCK_SIZE - 1, 2) for name in "ab"]
    assert names(scheduler_of(rra(2), *short, num_blocks=2).admissible(2)) == "ab"


@pytest.mark.parametrize("order", ORDERS)
def test_the_youngest_is_preempted_and_comes_before_those_that_wait(order: str) -> None:
    """a and b grow out of their blocks; b, the younger, gives its own up, and c and d, though first by any other
    order, wait until it is back."""
    schedule = Schedule("rra", rra(2).variables, order)
    running = [sequence("a", 15, 40, deadline=1.0), sequence("b", 15, 40, deadline=2.0)]
    scheduler = scheduler_of(schedule, *running, num_blocks=5)
    assert names(run(scheduler).prefill) == "ab"
    for one in (sequence("c", 2, 2, deadline=0.5), sequence("d", 2, 2, deadline=0.6)):
        scheduler.add(one)
    while not scheduler.num_preemptions:
        run(scheduler)
    assert names(tuple(scheduler.running)) == "a"
    assert (running[1].num_blocks, running[1].preemptions) == (0, 1)
    assert running[1].num_output_tokens > 0
    assert names(scheduler.first_waiting(3))[0] == "b"
    assert scheduler.waiting[0] is running[1]


def test_a_request_may_begin_at_its_very_deadline() -> None:
    scheduler = scheduler_of(rra(2), sequence("a", 4, 2, deadline=1.0), sequence("b", 4, 2, deadline=2.0), num_blocks=9)
    assert names(tuple(scheduler.expire(1.0))) == ""
    assert names(tuple(scheduler.expire(2.0))) == "a"
    assert names(tuple(scheduler.waiting)) == "b"
    assert names(tuple(scheduler.expire(2.0 + 1e-9))) == "b"


@pytest.mark.parametrize(
    ("schedule", "reserved"),
    [
        (Schedule("orca", {"max_num_seqs": 4}), True),
        (Schedule("static", {"batch_size": 4}), True),
        (Schedule("turbo", {"batch_size": 4}), True),
        (Schedule("concat", {"rows": 2, "row_tokens": 80}), True),
        (rra(2), False),
        (Schedule("chunked", {"max_num_seqs": 4, "max_num_batched_tokens": 64}), False),
    ],
    ids=lambda value: getattr(value, "policy", None),
)
def test_a_policy_that_reserves_starts_no_more_than_the_cache_holds_to_their_ends(
    schedule: Schedule, reserved: bool
) -> None:
    """Two of 8 blocks each at their full length, of which there are 10, and of one block in the beginning."""
    scheduler = scheduler_of(schedule, *(sequence(name, 10, 110) for name in "ab"), num_blocks=10)
    assert names(run(scheduler).prefill) == ("a" if reserved else "ab")
    assert reserves(schedule) == reserved
