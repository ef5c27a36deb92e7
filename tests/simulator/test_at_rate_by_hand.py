"""With one slot and a rate of arrivals, the wait is that of a single-server queue, computed by hand."""

import numpy as np
import pytest

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.schedule import Estimate, Schedule
from exeplan.simulator.at_rate import estimate_at_rate
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.workload import Workload

PROMPT, OUTPUT = 64, 200
ALIKE = Workload.of("alike", inputs=[PROMPT], outputs=[OUTPUT], weights=[1.0])
ONE_PLACE = Schedule("orca", {"max_num_seqs": 1})


def row(generated: int) -> SequenceState:
    return SequenceState(request_id="", num_prompt_tokens=PROMPT, max_output_tokens=OUTPUT, num_output_tokens=generated)


def served(cost: CostModel) -> tuple[float, float]:
    """Seconds of a request's prefill, and of all of it."""
    prefill = cost.batch_seconds(Batch(prefill=(row(0),)))
    decodes = [cost.batch_seconds(Batch(decode=(row(generated),))) for generated in range(1, OUTPUT)]
    return prefill, prefill + sum(decodes)


def estimated(cost: CostModel, load: float, variability: float) -> Estimate:
    rate = load / served(cost)[1]
    steady = steady_state(ONE_PLACE, ALIKE, cost)
    return estimate_at_rate([steady], Arrivals(rate=rate, variability=variability), cost, "p99-length")


@pytest.mark.parametrize("variability", [1.0, 3.0])
@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
def test_the_wait_is_the_single_servers(load: float, variability: float, cost: CostModel) -> None:
    """load / (1 - load) times the service for Poisson arrivals, twice that for gaps with three times the variance; and
    half an iteration until the running pass ends, where there is one."""
    prefill, service = served(cost)
    queue = load / (1 - load) * service * (1 + variability) / 2
    turn = load * service / OUTPUT / 2
    found = estimated(cost, load, variability)
    assert found.ttft == pytest.approx(queue + turn + prefill, rel=0.015)
    assert found.latency == pytest.approx(queue + turn + service, rel=0.015)
    assert found.tpot == pytest.approx((service - prefill) / (OUTPUT - 1), rel=0.01)
    assert found.throughput == pytest.approx(load / service)


@pytest.mark.parametrize("variability", [0.25, 0.5])
@pytest.mark.parametrize("load", [0.6, 0.9])
def test_even_gaps_make_the_queue_of_equal_lengths_shorter_by_their_variability(
    load: float, variability: float, cost: CostModel
) -> None:
    """With n requests there P(n) ~ ratio^n, all but one of them waiting."""
    prefill, service = served(cost)
    ratio = load ** (1 / variability)
    queue = ratio**2 / (1 - ratio) * service / load
    found = estimated(cost, load, variability)
    assert found.ttft == pytest.approx(queue + ratio * service / OUTPUT / 2 + prefill, rel=0.015)
    assert found.latency == pytest.approx(queue + service, rel=0.015)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_half_and_most_of_the_requests_wait_no_longer_than_the_mean_and_the_service_say(
    load: float, cost: CostModel
) -> None:
    """All are of one length, so percentiles differ by where in an iteration a request comes, and by nothing else."""
    _, service = served(cost)
    found = estimated(cost, load, 1.0)
    queue = load / (1 - load) * service
    assert found.latency_p50 == pytest.approx(queue + service, rel=0.02)
    assert found.latency_p99 == pytest.approx(queue + service, rel=0.02)
    assert np.diff([found.latency_p50, found.latency_p99]) >= 0
