"""Policy rra: a cycle ends with its last request; its mean is computed by hand over the remaining requests."""

import numpy as np
import pytest

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.profile import Profile
from exeplan.core.schedule import Schedule, Stage
from exeplan.scheduling.scheduler import Scheduler
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Workload

from ..simulator.machine import CLUSTER

PROMPT, SHORT, LONG = 64, 2, 30
COIN = Workload.of("coin", inputs=[PROMPT, PROMPT], outputs=[SHORT, LONG], weights=[1, 1])
"""Every other request ends after its first decode iteration, the others after 29."""
PAIRS = Schedule("rra", {"prefill_batch": 2, "decode_steps": LONG - 1})
"""No request outlives its cycle."""


def rows(count: int, generated: int) -> tuple[SequenceState, ...]:
    return tuple(
        SequenceState(request_id=str(i), num_prompt_tokens=PROMPT, max_output_tokens=99, num_output_tokens=generated)
        for i in range(count)
    )


def cycle_seconds(cost: CostModel, num_long: int) -> float:
    """A prefill of two; one decode iteration of both; then the long ones alone, if there are any."""
    seconds = cost.batch_seconds(Batch(prefill=rows(2, 0))) + cost.batch_seconds(Batch(decode=rows(2, 1)))
    later = range(2, LONG) if num_long else ()
    return seconds + sum(cost.batch_seconds(Batch(decode=rows(num_long, generated))) for generated in later)


def test_iterations_in_which_no_request_is_left_take_no_time(cost: CostModel) -> None:
    mean = sum(chance * cycle_seconds(cost, longs) for longs, chance in ((0, 0.25), (1, 0.5), (2, 0.25)))
    assert steady_state(PAIRS, COIN, cost).throughput == pytest.approx(2 / mean, rel=1e-9)


def test_the_replay_takes_the_cycles_that_its_requests_make(cost: CostModel) -> None:
    outputs = np.array([SHORT, SHORT, SHORT, LONG, LONG, LONG, LONG, SHORT])
    run = replay(PAIRS, cost, input_tokens=np.full(8, PROMPT), output_tokens=outputs, num_blocks=100)
    lengths = [cycle_seconds(cost, longs) for longs in (0, 1, 2, 1)]
    assert [run.requests[number].start for number in (0, 2, 4, 6)] == pytest.approx(np.cumsum([0.0, *lengths[:3]]))
    assert run.passes[-1].end == pytest.approx(sum(lengths))


def test_a_group_decodes_before_the_prefills_of_the_others_are_through(profile: Profile) -> None:
    stages = tuple(Stage(devices=(i,), layers=(3 * i, 3 * i + 3)) for i in range(2))
    schedule = Schedule("rra", {"prefill_batch": 4, "decode_steps": 3, "micro_batches": 2})
    run = replay(
        schedule,
        CostModel(profile, stages, CLUSTER),
        input_tokens=np.full(4, PROMPT),
        output_tokens=np.full(4, LONG),
        num_blocks=100,
    )
    first, second, decode = run.passes[:3]
    assert (first.num_prefill, second.num_prefill, decode.num_decode) == (2, 2, 2)
    assert first.end <= decode.start < second.end


def on_device(waiting: int, **variables: int) -> Scheduler:
    """A device that can prefill three prompts of 30 tokens at once, with so many that wait."""
    schedule = Schedule("rra", {"prefill_batch": 8, "decode_steps": 100, **variables})
    scheduler = Scheduler(schedule, 1000, pass_tokens=100)
    add(scheduler, waiting)
    return scheduler


def add(scheduler: Scheduler, count: int) -> None:
    for _ in range(count):
        scheduler.add(SequenceState(request_id="", num_prompt_tokens=30, max_output_tokens=50))


def run(scheduler: Scheduler) -> tuple[int, int]:
    """The rows that the next pass prefills and decodes."""
    batch = scheduler.next_batch()
    assert batch is not None
    for row in batch.prefill + batch.decode:
        row.num_output_tokens += 1
    scheduler.complete(batch)
    return len(batch.prefill), len(batch.decode)


@pytest.mark.parametrize("adjusted", [{}, {"adjust_percent": 20, "prefill_tokens": 240, "decode_batch": 8}])
def test_a_device_that_cannot_prefill_all_at_once_does_it_in_several_passes_before_it_decodes(
    adjusted: dict[str, int],
) -> None:
    scheduler = on_device(20, **adjusted)
    assert [run(scheduler) for _ in range(4)] == [(3, 0), (3, 0), (2, 0), (0, 8)]


def test_on_a_pipeline_the_passes_of_a_phase_are_as_many_as_that_takes() -> None:
    scheduler = on_device(20, micro_batches=2)
    prefilled = 0
    while not (passed := run(scheduler))[1]:
        assert passed[0] <= 3
        prefilled += passed[0]
    assert prefilled == 8


def test_what_comes_during_a_prefill_waits_for_the_next_one_as_in_the_replay() -> None:
    scheduler = on_device(5)
    assert run(scheduler) == (3, 0)
    add(scheduler, 3)
    assert [run(scheduler) for _ in range(2)] == [(2, 0), (0, 5)]


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("lengths", ["fixed:in=600;out=20", "fixed:in=300;out=20", "uniform:in=16-900;out=16-60"])
@pytest.mark.parametrize("limit", [500, 1000, 2000])
def test_the_closed_form_counts_the_passes_of_whole_prompts(
    num_stages: int, lengths: str, limit: int, profile: Profile
) -> None:
    """A limit of 1000 tokens lets one prompt of 600 in, not ten sixths of one."""
    layers = 6 // num_stages
    stages = tuple(Stage(devices=(i,), layers=(layers * i, layers * (i + 1))) for i in range(num_stages))
    cost, workload = CostModel(profile, stages, CLUSTER), load_workload(lengths)
    variables = {"prefill_batch": 10, "decode_steps": 19, "max_num_batched_tokens": limit, "micro_batches": num_stages}
    schedule = Schedule("rra", variables)
    inputs, outputs = workload.sample(600, seed=0)
    run = replay(schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=10**5)
    steady = steady_state(schedule, workload, cost)
    prefills, cycles = sum(one.num_prefill > 0 for one in run.passes), 600 / 10
    assert 10 / steady.cycle.num_prefill[0] == pytest.approx(prefills / cycles, rel=0.03)
    assert steady.throughput == pytest.approx(600 / run.passes[-1].end, rel=0.012)
