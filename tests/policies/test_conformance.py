"""Every policy in the folder keeps the interface: it needs nothing but the Queue, and keeps to the limits it states."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.policies import check_schedule, load_policy, pass_limits, policy_names
from exeplan.policies.interface import Queue, missing_members
from exeplan.scheduling.scheduler import Scheduler
from exeplan.scheduling.takeover import can_keep_blocks, take_over
from exeplan.workload.workload import Workload

LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=16)
every_policy = pytest.mark.parametrize("name", policy_names())


class OnlyQueue:
    """A scheduler of which only the Queue protocol can be reached, and nothing set."""

    def __init__(self, scheduler: Scheduler) -> None:
        object.__setattr__(self, "_scheduler", scheduler)

    def __getattr__(self, name: str) -> Any:
        if name not in vars(Queue):
            raise AttributeError(f"Queue has no {name}")
        return getattr(self._scheduler, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a policy cannot set {name}")


def guarded(schedule: Schedule, num_blocks: int) -> Scheduler:
    """A scheduler whose policy reaches it through the Queue protocol alone."""
    scheduler = Scheduler(schedule, num_blocks)
    policy = scheduler.policy

    def next_batch(schedule: Schedule, queue: Scheduler, state: object, phase: str) -> Batch | None:
        return policy.next_batch(schedule, OnlyQueue(queue), state, phase)  # type: ignore[arg-type]

    scheduler.policy = SimpleNamespace(**{**vars(policy), "next_batch": next_batch})  # type: ignore[assignment]
    return scheduler


def drawn_schedule(data: st.DataObject, name: str, lengths: list[tuple[int, int]]) -> Schedule:
    inputs, outputs = zip(*lengths, strict=True)
    workload = Workload.of("drawn", inputs=inputs, outputs=outputs, weights=[1.0] * len(lengths))
    policy = load_policy(name)
    values = {knob.name: data.draw(st.sampled_from(knob.values)) for knob in policy.knobs(workload, 8)}
    return policy.schedule({**values, **data.draw(st.sampled_from(policy.enumerated(2)))}, workload)


def passes(scheduler: Scheduler) -> Iterator[Batch]:
    """Passes until none can run; each row that produces gets a token."""
    phases = ("decode", "prefill") if scheduler.policy.SEPARATE_STAGES else ("",)
    ran = True
    while ran:
        ran = False
        for phase in phases:
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
            yield batch


def filled(
    schedule: Schedule, lengths: list[tuple[int, int]], num_blocks: int
) -> tuple[Scheduler, list[SequenceState]]:
    scheduler = guarded(schedule, num_blocks)
    sequences = [
        SequenceState(request_id=str(number), num_prompt_tokens=prompt, max_output_tokens=output)
        for number, (prompt, output) in enumerate(lengths)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    return scheduler, sequences


@every_policy
def test_a_policy_defines_what_the_interface_lists(name: str) -> None:
    assert missing_members(load_policy(name)) == ()  # type: ignore[arg-type]


@every_policy
@given(data=st.data(), lengths=LENGTHS)
@settings(max_examples=15, deadline=None)
def test_its_schedules_are_its_own_and_pass_its_check(name: str, data: st.DataObject, lengths: list) -> None:
    schedule = drawn_schedule(data, name, lengths)
    assert schedule.policy == name
    check_schedule(schedule)
    with pytest.raises(InputError, match=f"{name} takes the control variables"):
        check_schedule(Schedule(name, {**schedule.variables, "unheard_of": 1}))


@every_policy
@given(data=st.data(), lengths=LENGTHS)
@settings(max_examples=15, deadline=None)
def test_every_token_comes_and_no_pass_is_larger_than_stated(name: str, data: st.DataObject, lengths: list) -> None:
    schedule = drawn_schedule(data, name, lengths)
    limits = pass_limits(schedule)
    blocks = max(-(-sum(both) // 16) for both in lengths) + data.draw(st.integers(0, 12))
    scheduler, sequences = filled(schedule, lengths, blocks)
    for batch in passes(scheduler):
        assert limits.decode_rows is None or len(batch.decode) <= limits.decode_rows
        assert limits.prompts is None or len(batch.prefill) <= limits.prompts
        assert limits.tokens is None or batch.num_new_tokens <= limits.tokens
    assert [sequence.num_output_tokens for sequence in sequences] == [output for _, output in lengths]
    assert scheduler.free_blocks == blocks


@every_policy
@pytest.mark.parametrize("other", policy_names())
@given(data=st.data(), lengths=LENGTHS)
@settings(max_examples=3, deadline=None)
def test_its_running_requests_are_taken_over(name: str, other: str, data: st.DataObject, lengths: list) -> None:
    blocks = max(-(-sum(both) // 16) for both in lengths) + data.draw(st.integers(0, 12))
    before, sequences = filled(drawn_schedule(data, name, lengths), lengths, blocks)
    for _ in zip(range(data.draw(st.integers(0, 9))), passes(before), strict=False):
        pass
    after = guarded(drawn_schedule(data, other, lengths), blocks)
    take_over(after, before, keep=can_keep_blocks(after, before))
    assert sum(1 for _ in passes(after)) or all(sequence.finished for sequence in sequences)
    assert [sequence.num_output_tokens for sequence in sequences] == [output for _, output in lengths]
    assert after.free_blocks == blocks
