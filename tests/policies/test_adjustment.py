"""With `adjust_percent`, prefill batches carry like work and the decode batch returns to the planned one."""

import numpy as np
import pytest

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.policies import load_policy, pass_limits
from exeplan.scheduling.scheduler import Scheduler
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.replay import replay
from exeplan.simulator.stalls import longest_stall
from exeplan.workload.files import load_workload

from .test_waa import played, row, split_cost

LOADS = {"adjust_percent": 20, "prefill_tokens": 400, "decode_batch": 12}
RRA = Schedule("rra", {"prefill_batch": 4, "decode_steps": 3, **LOADS})
WAA = Schedule("waa-c", {"prefill_batch": 4, **LOADS})


def scheduler(schedule: Schedule, prompts: list[int], *, output: int = 50, decoding: int = 8) -> Scheduler:
    """A scheduler with `decoding` requests of one token each in decode, and these prompts waiting."""
    state = Scheduler(schedule, num_blocks=10_000)
    for number, length in enumerate([1] * decoding + prompts):
        state.add(SequenceState(request_id=str(number), num_prompt_tokens=length, max_output_tokens=output))
    for sequence in [state.waiting.popleft() for _ in range(decoding)]:
        sequence.num_blocks, sequence.num_output_tokens = 1, 1
        state.free_blocks -= 1
        state.running.append(sequence)
        state.add_to_group(sequence, 0)
    if schedule.policy == "rra":
        state.state.iterations_since_prefill[0] = 3
    return state


def prefilled(schedule: Schedule, prompts: list[int], **options: int) -> int:
    phase = "prefill" if load_policy(schedule.policy).SEPARATE_STAGES else ""
    batch = scheduler(schedule, prompts, **options).next_batch(phase)
    return len(batch.prefill) if batch else 0


both = pytest.mark.parametrize("schedule", [RRA, WAA], ids=["rra", "waa-c"])


@both
def test_planned_prompts_are_prefilled_as_planned(schedule):
    assert prefilled(schedule, [100] * 20) == 4


@both
@pytest.mark.parametrize(("length", "count"), [(50, 7), (80, 4), (119, 4), (130, 3), (300, 1), (2000, 1)])
def test_their_tokens_stay_within_the_threshold(schedule, length, count):
    """Of 400 tokens, 20 % up or down: 7 prompts of 50 have 350, 3 of 130 have 390."""
    assert prefilled(schedule, [length] * 20) == count


@both
@pytest.mark.parametrize(("decoding", "count"), [(0, 8), (2, 8), (3, 7), (6, 4), (10, 4), (11, 3), (13, 1), (30, 1)])
def test_the_decode_batch_returns_to_the_planned_one(schedule, decoding, count):
    """12 within 20 %, which is 10 to 14: as many more go in as are missing, up to twice the planned 4, and fewer where
    there are too many."""
    assert prefilled(schedule, [100] * 40, decoding=decoding) == count


def test_the_parts_of_a_prefill_are_decided_together():
    variables = {**RRA.variables, "micro_batches": 2}
    state = scheduler(Schedule("rra", variables), [50] * 20)
    state.groups[1], state.state.iterations_since_prefill[1] = [], 3
    parts = [state.next_batch(), state.next_batch()]
    assert sum(len(part.prefill) for part in parts) == 7
    assert state.next_batch() is None


@both
def test_without_a_threshold_nothing_changes(schedule):
    plain = {name: value for name, value in schedule.variables.items() if name not in ("adjust_percent",)}
    assert prefilled(Schedule(schedule.policy, plain), [2000] * 20) == 4


def test_a_threshold_needs_the_planned_loads():
    with pytest.raises(InputError, match="adjust_percent needs prefill_tokens and decode_batch"):
        load_policy("rra").check(Schedule("rra", {"prefill_batch": 4, "decode_steps": 3, "adjust_percent": 10}))


@both
def test_what_is_promised_of_a_prefill_holds_however_short_the_prompts_and_empty_the_slots(schedule):
    most = pass_limits(schedule).prompts
    assert most == 8
    assert max(prefilled(schedule, [length] * 60, decoding=n) for length in (1, 20, 100) for n in (0, 4, 8)) == most


def test_an_adjusted_prefill_stalls_no_stream_for_longer_than_is_promised(cost):
    """One stream, and a hundred requests that come while it decodes."""
    schedule = Schedule("rra", {"prefill_batch": 4, "decode_steps": 8, **LOADS, "decode_batch": 32})
    most = longest_stall(steady_state(schedule, load_workload("fixed:in=100;out=64"), cost), cost)
    count = 101
    arrivals = np.full(count, cost.batch_seconds(Batch(decode=(row(100),))) * 12)
    arrivals[0] = 0.0
    inputs, outputs = np.full(count, 100), np.full(count, 64)
    run = replay(schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=4000, arrivals=arrivals)
    assert max(one.num_prefill for one in run.passes) == most.num_prompts == 8
    assert run.requests.times.longest_gap() <= most.seconds * 1.001


def test_the_stages_that_prefill_have_room_for_an_adjusted_batch(profile):
    cost = split_cost(profile, [], [2], encoder_decoder=False)
    planned = {"prefill_batch": 4, "decode_batch": 256}
    adjusted = {**planned, "adjust_percent": 10, "prefill_tokens": 240}
    for variables, prompts in ((planned, 2 * 4), (adjusted, 3 * 4)):
        schedule = Schedule("waa-c", variables)
        room = steady_state(schedule, load_workload("fixed:in=60;out=30"), cost).cycle.prefill_kv_tokens
        assert room == prompts * 60
        run = played(schedule, cost, [(60, 30)] * 400)
        assert max(one.num_prefill for one in run.passes) <= pass_limits(schedule).prompts
