"""Policy rra: a cycle ends with its last request; its mean is worked out by hand over the requests that are left."""

import numpy as np
import pytest

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.schedule import Schedule
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.workload.workload import Workload

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
