"""Waits in the long run: the queue has those of Erlang, of Pollaczek and of Khinchine, and replays that know them agree
with each other and with long ones."""

from dataclasses import replace
from math import factorial

import numpy as np
import pytest

from exeplan.core.bounds import Bound
from exeplan.core.profile import Profile
from exeplan.core.runs.metrics import summarize
from exeplan.core.schedule import Estimate, Schedule
from exeplan.planner.problems import replays
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.problems.replays import replay_estimate
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.rates import long_run
from exeplan.simulator.rates.long_run import SlotQueue, in_the_long_run
from exeplan.simulator.replay import replay
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.deadlines import parse_deadlines
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Workload

ORCA = Schedule("orca", {"max_num_seqs": 4, "micro_batches": 1})
BOUNDS = (Bound(seconds=1e9), Bound(seconds=1e8, metric="p95-ttft"))


@pytest.fixture(scope="module")
def geometric() -> Workload:
    """Outputs that end after every token by the same chance: in long answers nearly the exponential law."""
    lengths = np.arange(1, 1500)
    ones = np.ones_like(lengths)
    return Workload.of("geometric", inputs=ones, outputs=lengths, weights=0.99**lengths)


def at_rate(profile: Profile, lengths: str, schedule: Schedule, load: float) -> Problem:
    problem = make_problem(profile, load_workload(lengths), BOUNDS[0], max_seqs=32)
    capacity = steady_state(schedule, problem.workload, problem.cost).throughput
    return replace(problem, more_bounds=BOUNDS[1:], arrivals=Arrivals(rate=load * capacity))


def long_replay(problem: Problem, schedule: Schedule, *, count: int) -> Estimate:
    inputs, outputs = problem.workload.sample(count, seed=77, stratified=False)
    assert problem.arrivals is not None
    times = np.cumsum(np.random.default_rng(77).exponential(1 / problem.arrivals.rate, count))
    run = replay(
        schedule,
        problem.cost,
        input_tokens=inputs,
        output_tokens=outputs,
        num_blocks=10**6,
        arrivals=times,
        record_passes=False,
    )
    p99 = problem.workload.output_quantile(0.99)
    return summarize(run.requests, p99_output=p99, bounds=BOUNDS, backlog=False, waiting=True)


@pytest.mark.parametrize(("slots", "load"), [(1, 0.8), (4, 0.7), (4, 0.9), (20, 0.9)])
def test_the_mean_wait_for_a_slot_is_erlangs(geometric: Workload, slots: int, load: float) -> None:
    queue = SlotQueue(rate=load * slots, capacity=float(slots), slots=slots)  # A mean answer holds a slot for 1 s.
    offered = load * slots
    full = offered**slots / factorial(slots) / (1 - load)
    waiting = full / (sum(offered**n / factorial(n) for n in range(slots)) + full)
    expected = waiting / (slots - offered)
    assert long_run._long_run(queue, geometric).mean() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("load", [0.5, 0.9])
def test_with_one_slot_it_is_that_of_pollaczek_and_khinchine_to_the_digit(load: float) -> None:
    lengths = load_workload("normal:in=40,10,80;out=120,80,400")
    seconds = lengths.outputs / lengths.mean_output
    expected = load * float(lengths.weights @ seconds**2) / lengths.weights.sum() / 2 / (1 - load)
    queue = SlotQueue(rate=load, capacity=1.0, slots=1)
    assert long_run._long_run(queue, lengths).mean() == pytest.approx(expected, rel=1e-6)


def test_replays_agree_with_each_other_and_with_a_long_one(profile: Profile) -> None:
    problem = at_rate(profile, "normal:in=40,10,80;out=120,100,500", ORCA, 0.9)
    runs = [replay_estimate(problem, ORCA, seed=seed, length=0.2, record_passes=False) for seed in range(6)]
    plain = [replays.arrived_estimate(problem, run.requests, [run], [(problem, ORCA)]) for run, _ in runs]
    known = [found for _, found in runs]
    truth = long_replay(problem, ORCA, count=50_000)
    assert all("waits for a slot: those of a long run" in str(one.notes) for one in known)
    assert not any("waits" in str(one.notes) for one in plain)
    assert agree([one.ttft for one in plain], [one.ttft for one in known], truth.ttft)
    p95 = "p95-ttft"
    assert agree([p.percentiles[p95] for p in plain], [k.percentiles[p95] for k in known], truth.percentiles[p95])
    sides, before = (np.array([limits(one) for one in some]) for some in (known, plain))
    assert np.ptp(sides[0]) < 0.5 * np.ptp(before[0])
    mean = np.mean([one.ttft for one in known])
    assert np.count_nonzero((sides[:, 0] <= mean) & (mean <= sides[:, 1])) >= 4
    assert spread([one.latency or 0.0 for one in known]) < spread([one.latency or 0.0 for one in plain])


def agree(before: list[float], after: list[float], true: float) -> bool:
    """Whether a figure hardly depends on the seed any more, and is that of a long replay, which errs by 5 % itself."""
    return spread(after) < 0.4 * spread(before) and abs(np.mean(after) - true) < 0.12 * true


def spread(values: list[float]) -> float:
    return float(np.std(values))


def limits(found: Estimate) -> tuple[float, float]:
    """Of the interval of the mean ttft."""
    ttft = found.evidence["ttft"]
    assert ttft.low is not None
    assert ttft.high is not None
    return ttft.low, ttft.high


def test_requests_that_do_not_wait_for_slots_stay_as_they_are(profile: Profile) -> None:
    static = Schedule("static", {"batch_size": 8, "micro_batches": 1, "prefill_micro_batches": 1})
    problem = at_rate(profile, "normal:in=40,10,80;out=12,5,24", static, 0.8)
    run, _ = replay_estimate(problem, static, seed=0, record_passes=False)
    assert problem.arrivals is not None
    queue = SlotQueue(rate=problem.arrivals.rate, capacity=problem.arrivals.rate / 0.8, slots=8)
    assert in_the_long_run(run.requests, queue, problem.workload) == (run.requests, 1.0)


@pytest.mark.parametrize("load", [0.2, 0.98])
def test_far_from_the_capacity_and_at_it_they_stay_as_they_are(profile: Profile, load: float) -> None:
    problem = at_rate(profile, "normal:in=40,10,80;out=12,5,24", ORCA, load)
    run, found = replay_estimate(problem, ORCA, seed=0, record_passes=False)
    assert found == replays.arrived_estimate(problem, run.requests, [run], [(problem, ORCA)])


def test_a_given_number_of_requests_is_replayed_as_it_is(profile: Profile) -> None:
    problem = at_rate(profile, "normal:in=40,10,80;out=120,100,500", ORCA, 0.9)
    run, found = replay_estimate(problem, ORCA, seed=0, num_requests=1000, record_passes=False)
    assert found == replays.arrived_estimate(problem, run.requests, [run], [(problem, ORCA)])


def test_requests_with_deadlines_stay_as_they_are(profile: Profile) -> None:
    problem = at_rate(profile, "normal:in=40,10,80;out=120,100,500", ORCA, 0.9)
    problem = replace(problem, workload=replace(problem.workload, deadlines=parse_deadlines("1000")))
    run, found = replay_estimate(problem, ORCA, seed=0, length=0.2, record_passes=False)
    assert found == replays.arrived_estimate(problem, run.requests, [run], [(problem, ORCA)])


def test_no_request_comes_after_it_has_begun(profile: Profile) -> None:
    problem = at_rate(profile, "normal:in=40,10,80;out=120,100,500", ORCA, 0.9)
    run, _ = replay_estimate(problem, ORCA, seed=3, length=0.2, record_passes=False)
    assert problem.arrivals is not None
    capacity = steady_state(ORCA, problem.workload, problem.cost).throughput
    moved, left = in_the_long_run(
        run.requests, SlotQueue(rate=problem.arrivals.rate, capacity=capacity, slots=4), problem.workload
    )
    assert left < 0.5
    assert (moved.arrivals <= moved.starts).all()
    assert np.count_nonzero(moved.arrivals != run.requests.arrivals) > 100


def test_prompts_count_where_they_are_much_of_the_work(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = at_rate(profile, "normal:in=400,300,900;out=20,10,60", ORCA, 0.9)
    run, _ = replay_estimate(problem, ORCA, seed=0, length=0.3, record_passes=False)
    assert problem.arrivals is not None
    queue = SlotQueue(rate=problem.arrivals.rate, capacity=problem.arrivals.rate / 0.9, slots=4)
    _, left = in_the_long_run(run.requests, queue, problem.workload)
    monkeypatch.setattr(long_run, "_PROMPTS", (0.0,))
    _, by_answers = in_the_long_run(run.requests, queue, problem.workload)
    assert left < 0.7 * by_answers
