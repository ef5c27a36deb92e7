"""Requests that wait in order of their tokens or deadlines: the order of sorting them all, at no cost of those that
wait."""

import math
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import exeplan
from exeplan.core.batch import SequenceState
from exeplan.core.queue_order import ORDERS, das_of, queue_of, ranking
from exeplan.core.schedule import Schedule
from exeplan.scheduling.fair_queue import ClientSequence, VirtualTokenCounters
from exeplan.scheduling.fair_scheduler import FairScheduler
from exeplan.scheduling.scheduler import Scheduler
from exeplan.scheduling.sorted_queue import SortedQueue
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay

SCHEDULES = [
    Schedule("orca", {"max_num_seqs": 4}),
    Schedule("chunked", {"max_num_seqs": 5, "max_num_batched_tokens": 16}),
    Schedule("rra", {"prefill_batch": 3, "decode_steps": 4, "micro_batches": 2}),
    Schedule("sglang", {"max_num_seqs": 4, "max_num_batched_tokens": 32}),
    Schedule("static", {"batch_size": 3}),
]
EVERYTHING = 10**6

sorted_orders = pytest.mark.parametrize("order", ["sjf", "edf"])
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: one.policy)


def by_sorting_all(order: str, waiting: Iterable[SequenceState]) -> list[SequenceState]:
    """The waiting sequences ranked anew."""
    rows = list(waiting)
    begun, fresh = [s for s in rows if s.begun], [s for s in rows if not s.begun]
    das = das_of(Schedule("orca", {"max_num_seqs": 1}))
    return begun + [fresh[n] for n in ranking(order, queue_of(fresh), room=EVERYTHING, limit=EVERYTHING, das=das)]


def drawn(number: int, chance: random.Random) -> SequenceState:
    """With few lengths and deadlines, so that many are equal."""
    return SequenceState(
        request_id=str(number),
        num_prompt_tokens=chance.randint(1, 6) * 4,
        max_output_tokens=chance.randint(1, 30),
        deadline=chance.choice([None, 5.0, 40.0, 60.0, 90.0]),
    )


@sorted_orders
@every_schedule
@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_the_order_is_that_of_sorting_all(order: str, schedule: Schedule, seed: int) -> None:
    """With arrivals, cancelled, expired and preempted requests between the passes, on a small cache."""
    chance = random.Random(seed)
    scheduler = Scheduler(Schedule(schedule.policy, schedule.variables, order), 8)
    left = number = 0
    while left < 60:
        for _ in range(min(chance.choice([0, 0, 1, 2, 20]), 60 - number)):
            scheduler.add(drawn(number, chance))
            number += 1
        if scheduler.waiting and chance.random() < 0.1:
            scheduler.remove(chance.choice(list(scheduler.waiting)))
            left += 1
        left += len(scheduler.expire(float(left)))
        waiting = by_sorting_all(order, scheduler.waiting)
        assert list(scheduler.first_waiting(EVERYTHING)) == waiting
        assert list(scheduler.first_waiting(3)) == waiting[:3]
        batch = scheduler.next_batch()
        if batch is None:
            continue
        for row in (*batch.whole_prefills, *batch.decode):
            if not row.finished:
                row.num_output_tokens += 1
                row.finished = row.num_output_tokens >= row.max_output_tokens
        left += len(scheduler.complete(batch))
    assert not scheduler.waiting
    assert not scheduler.running


@sorted_orders
def test_a_queue_that_changed_otherwise_is_sorted_anew(order: str) -> None:
    chance = random.Random(0)
    scheduler = Scheduler(Schedule("orca", {"max_num_seqs": 4}, order), 100)
    for number in range(40):
        scheduler.add(drawn(number, chance))
    assert list(scheduler.first_waiting(EVERYTHING)) == by_sorting_all(order, scheduler.waiting)
    del scheduler.waiting[7]
    scheduler.waiting.popleft()
    assert list(scheduler.first_waiting(EVERYTHING)) == by_sorting_all(order, scheduler.waiting)
    scheduler.waiting = type(scheduler.waiting)(reversed(scheduler.waiting))
    assert list(scheduler.first_waiting(EVERYTHING)) == by_sorting_all(order, scheduler.waiting)


@sorted_orders
@every_schedule
def test_a_replay_is_the_same_as_by_sorting_all(
    order: str, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost, chance = CostModel(exeplan.datasheet_profile("opt-13b", "a40-48gb")), np.random.default_rng(0)
    arguments: dict[str, Any] = {
        "input_tokens": chance.integers(10, 20, 150),
        "output_tokens": chance.integers(1, 40, 150),
        "num_blocks": 10,
        "arrivals": np.sort(chance.uniform(0, 2, 150)),
        "deadlines": np.round(chance.uniform(5, 300, 150)),
    }
    one = Schedule(schedule.policy, schedule.variables, order)
    fast = replay(one, cost, **arguments)
    monkeypatch.setattr(SortedQueue, "of", lambda self, queue: by_sorting_all(order, queue))
    slow = replay(one, cost, **arguments)
    assert len(fast.passes) == len(slow.passes)
    for name in ("starts", "first_tokens", "last_tokens"):
        assert np.array_equal(getattr(fast.requests, name), getattr(slow.requests, name), equal_nan=True)


class Counted(SequenceState):
    """A sequence that counts how often its length or its deadline is looked at."""

    looks = 0

    @property
    def begun(self) -> bool:
        type(self).looks += 1
        return super().begun


@sorted_orders
def test_an_admission_does_not_look_at_all_that_wait(order: str) -> None:
    number, chance = 500, random.Random(0)
    scheduler = Scheduler(Schedule("orca", {"max_num_seqs": 1}, order), 100)
    Counted.looks = 0
    for n in range(number):
        tokens, deadline = chance.randint(1, 9), chance.choice([math.inf, 1.0, 2.0])
        one = Counted(request_id=str(n), num_prompt_tokens=tokens, max_output_tokens=1, deadline=deadline)
        scheduler.add(one)
    while (batch := scheduler.next_batch()) is not None:
        for row in batch.prefill:
            row.num_output_tokens, row.finished = 1, True
        scheduler.complete(batch)
    assert not scheduler.has_work
    assert Counted.looks <= 5 * number


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_clients", [0, 3])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_what_expires_is_what_looking_at_all_finds(num_clients: int, order: str, seed: int) -> None:
    """In order of arrival, with arrivals, cancelled and preempted requests; of one scheduler or a fair one."""
    chance, schedule = random.Random(seed), Schedule("orca", {"max_num_seqs": 4}, order)
    scheduler = Scheduler(schedule, 8)
    if num_clients:
        scheduler = FairScheduler(schedule, 8, counters=VirtualTokenCounters(), clock=lambda: 0.0)
    number = 0
    for now in range(100):
        for _ in range(chance.choice([0, 0, 1, 4])):
            one = drawn(number, chance)
            scheduler.add(
                ClientSequence(
                    request_id=one.request_id,
                    num_prompt_tokens=one.num_prompt_tokens,
                    max_output_tokens=one.max_output_tokens,
                    deadline=one.deadline,
                    client=str(chance.randrange(num_clients or 1)),
                )
            )
            number += 1
        if scheduler.waiting and chance.random() < 0.1:
            scheduler.remove(chance.choice(list(scheduler.waiting)))
        due = [s for s in scheduler.waiting if not s.begun and s.deadline is not None and s.deadline < now]
        kept = [s for s in scheduler.waiting if s not in due]
        assert scheduler.expire(float(now)) == due
        assert list(scheduler.waiting) == kept
        if batch := scheduler.next_batch():
            for row in (*batch.prefill, *batch.decode):
                row.num_output_tokens += 1
                row.finished = row.num_output_tokens >= row.max_output_tokens
            scheduler.complete(batch)


def test_a_deadline_that_passes_does_not_look_at_all_that_wait() -> None:
    number = 500
    scheduler = Scheduler(Schedule("orca", {"max_num_seqs": 1}), 100)
    for n in range(number):
        scheduler.add(Counted(request_id=str(n), num_prompt_tokens=8, max_output_tokens=1, deadline=float(-n % 7 + n)))
    Counted.looks = 0
    expired = [one for now in range(number + 7) for one in scheduler.expire(now + 0.5)]
    assert len(expired) == number
    assert Counted.looks <= 5 * number
