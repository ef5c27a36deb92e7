"""Policy rra: a cycle ends with its last request; its mean is computed by hand over the remaining requests."""

import numpy as np
import pytest

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.profile import Profile
from exeplan.core.schedule import Schedule, Stage
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
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
