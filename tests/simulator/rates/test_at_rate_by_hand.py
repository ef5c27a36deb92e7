"""With one slot and a rate of arrivals, the wait is that of a single-server queue, computed by hand."""

from math import inf

import numpy as np
import pytest

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.schedule import Estimate, Schedule
from exeplan.errors import Infeasible
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.rates.at_rate import _spread_out, estimate_at_rate
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.workload import Workload

PROMPT, OUTPUT = 64, 200
ALIKE = Workload.of("alike", inputs=[PROMPT], outputs=[OUTPUT], weights=[1.0])
UNEQUAL = Workload.of("unequal", inputs=[PROMPT] * 2, outputs=[20, 1500], weights=[0.95, 0.05])
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


@pytest.mark.parametrize("variability", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
def test_the_wait_is_the_single_servers(load: float, variability: float, cost: CostModel) -> None:
    """Pollaczek and Khinchine: load / (1 - load) times half the service for Poisson arrivals of alike requests, in
    proportion to the variability of their gaps; and half an iteration until the running pass ends, where there is
    one."""
    prefill, service = served(cost)
    queue = load / (1 - load) * service * variability / 2
    turn = load * service / OUTPUT / 2
    found = estimated(cost, load, variability)
    assert found.ttft == pytest.approx(queue + turn + prefill, rel=0.015)
    assert found.latency == pytest.approx(queue + turn + service, rel=0.015)
    assert found.tpot == pytest.approx((service - prefill) / (OUTPUT - 1), rel=0.01)
    assert found.throughput == pytest.approx(load / service)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_quantiles_of_the_wait_are_those_of_a_single_server(load: float, cost: CostModel) -> None:
    """All are of one length; Lindley's recursion draws their waits. The chain's tail is geometric, theirs thinner."""
    _, service = served(cost)
    gaps = np.random.default_rng(0).exponential(service / load, 200_000)
    steps = np.concatenate([[0.0], np.cumsum(service - gaps)])
    waits = steps - np.minimum.accumulate(steps)
    found = estimated(cost, load, 1.0)
    p50, p99 = np.quantile(waits, (0.5, 0.99))
    assert found.latency_p50 == pytest.approx(p50 + service, rel=0.12)
    assert found.latency_p99 == pytest.approx(p99 + service, rel=0.15)


@pytest.mark.parametrize("load", [0.5, 0.6, 0.7, 0.9, 0.98])
def test_behind_a_gate_for_one_it_is_that_of_unequal_lengths(load: float, cost: CostModel) -> None:
    steady = steady_state(Schedule("static", {"batch_size": 1}), UNEQUAL, cost)
    seconds, weights = steady.latency(UNEQUAL.output_law.tokens.astype(float)), UNEQUAL.output_law.weights
    queue = load / float(weights @ seconds) * float(weights @ seconds**2) / (2 * (1 - load))
    found = estimate_at_rate([steady], Arrivals(rate=load * steady.throughput), cost, "p99-length")
    assert found.ttft == pytest.approx(queue + steady.ttft, rel=0.01)


def test_a_rate_that_a_gate_does_not_sustain_is_refused_and_no_wait_is_told(cost: CostModel) -> None:
    steady = steady_state(Schedule("static", {"batch_size": 4}), UNEQUAL, cost)
    assert estimate_at_rate([steady], Arrivals(rate=0.99 * steady.throughput), cost, "p99-length").ttft < 10_000
    with pytest.raises(Infeasible, match=r"static\(batch_size=4\): .* requests/s are sustained, .* come"):
        estimate_at_rate([steady], Arrivals(rate=1.01 * steady.throughput), cost, "p99-length")


def test_a_gate_for_a_number_that_is_not_whole_sustains_what_its_batches_do(cost: CostModel) -> None:
    law = Workload.of("uneven", inputs=[64, 100], outputs=[OUTPUT] * 2, weights=[0.5, 0.5])
    packed = {"rows": 2, "row_tokens": 130}
    schedules = [Schedule("concat", {"max_num_seqs": most, **packed}) for most in (1, 2)] + [Schedule("concat", packed)]
    points = [steady_state(schedule, law, cost) for schedule in schedules]
    together = points[-1].throughput * points[-1].admission_interval
    assert 0.1 < together % 1 < 0.5, "or the test shows nothing"
    rate = 0.99 * points[-1].throughput
    assert estimate_at_rate(points, Arrivals(rate=rate), cost, "p99-length").ttft < inf


@pytest.mark.parametrize("variance", [1e-4, 0.3, 2.0, 11.0])
@pytest.mark.parametrize("long", [0.0, 0.05, 0.3])
def test_times_at_a_gate_have_the_mean_and_variance_of_their_law(long: float, variance: float) -> None:
    values = _spread_out(np.array([20.0, 1500.0]), np.array([1 - long, long]), variance, 26)
    assert values.min() > 0.0
    assert values.mean() == pytest.approx(1.0)
    assert values.var() == pytest.approx(variance, rel=1e-3)
