"""With a rate of arrivals, waiting counts: the closed form predicts the replay, and promises hold."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from exeplan.api import datasheet_profile
from exeplan.arrays import Floats
from exeplan.cli import main
from exeplan.core.bounds import Bound
from exeplan.core.profile import Profile
from exeplan.core.runs.metrics import RequestRecord, summarize
from exeplan.core.schedule import Schedule
from exeplan.errors import Infeasible, InputError
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.choice.pipelines import Effort
from exeplan.planner.load_problem import load_plan
from exeplan.planner.problems.headroom import drift_headroom, rate_headroom, with_headroom
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.problems.replays import replay_estimate
from exeplan.workload.arrivals import Arrivals, residents, trace_arrivals
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Trace, Workload

LAW = "normal:in=40,10,80;out=12,5,24"
SKEWED = "quantiles:in=p50:30,p99:200;out=p50:8,p99:30,p100:40;rank_correlation=0.4"
WITHOUT_REPORT = Effort(report=False)
"""Its headroom is not looked for, which takes as long as the plan."""
SCHEDULES = [
    Schedule("orca", {"max_num_seqs": 24}),
    Schedule("rra", {"prefill_batch": 8, "decode_steps": 6}),
    Schedule("static", {"batch_size": 24}),
]


def asked(profile: Profile, law: str, *, rate: float | None = None, bound: float = math.inf, **more: float) -> Problem:
    problem = make_problem(profile, load_workload(law), Bound(seconds=bound), max_seqs=64)
    several = tuple(Bound(seconds=value, metric=about) for about, value in more.items())
    return replace(problem, more_bounds=several, arrivals=None if rate is None else Arrivals(rate=rate))


def capacity(problem: Problem, schedule: Schedule) -> float:
    return problem.evaluate(schedule).throughput


def mean(chance: Floats) -> float:
    return float(np.arange(len(chance)) @ chance)


@pytest.mark.parametrize("load", [0.2, 0.6, 0.9, 0.99])
def test_one_server_holds_what_mm1_says(load: float) -> None:
    chance = residents(load, np.array([1.0]), np.array([1.0]))
    assert mean(chance) == pytest.approx(load / (1 - load), rel=1e-3)
    assert chance[0] == pytest.approx(1 - load, rel=1e-3)


def test_servers_without_end_hold_a_poisson_number() -> None:
    sizes = np.array([1.0, 1000.0])
    chance = residents(20.0, sizes, sizes)
    assert mean(chance) == pytest.approx(20.0)
    assert float(np.arange(len(chance)) ** 2 @ chance) - 400.0 == pytest.approx(20.0)


def test_more_places_than_the_longest_queue_that_is_looked_at_are_all_counted() -> None:
    sizes = np.array([1.0, 131_072.0])
    assert mean(residents(0.9 * 131_072, sizes, sizes)) == pytest.approx(0.9 * 131_072, rel=1e-3)


def test_a_spread_is_that_of_the_number_in_the_system() -> None:
    sizes = np.array([1.0, 1000.0])
    for spread in (0.1, 0.5):
        chance = residents(20.0, sizes, sizes, spread=spread)
        assert mean(chance) == pytest.approx(20.0, rel=0.03)
        assert float(np.arange(len(chance)) ** 2 @ chance) - mean(chance) ** 2 == pytest.approx(20.0 * spread, rel=0.03)


def test_a_few_servers_queue_as_erlang_says() -> None:
    # Erlang C for 2 servers at 1.5 Erlang: 9/14 wait; mean queue 9/14 * 0.75 / 0.25 = 27/14.
    chance = residents(1.5, np.array([1.0, 2.0]), np.array([1.0, 2.0]))
    assert chance[2:].sum() == pytest.approx(9 / 14)
    assert mean(chance) == pytest.approx(1.5 + 27 / 14)


def test_poisson_arrivals_come_at_their_rate() -> None:
    workload = load_workload(LAW)
    inputs, outputs, times = Arrivals(rate=5.0).draw(workload, 20_000, seed=1)
    gaps = np.diff(times)
    assert len(inputs) == len(outputs) == len(times) == 20_000
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.03)
    assert (gaps >= 0).all()


def test_every_fourth_request_of_a_stream_comes_as_evenly_as_the_law_has_it() -> None:
    share = Arrivals(rate=20.0).split(4, "round-robin")
    _, _, times = share.draw(load_workload(LAW), 20_000, seed=1)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert share.variability == 0.25
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(0.25, rel=0.05)


def traced(times: Floats | None) -> Workload:
    inputs, outputs = np.full(4, 10), np.array([3, 4, 5, 6])
    return Workload.of_trace("trace", Trace(inputs, outputs, times))


def test_a_trace_keeps_its_requests_and_times() -> None:
    workload = traced(np.array([2.0, 3.0, 3.0, 5.0]))
    arrivals = trace_arrivals(workload)
    assert arrivals.rate == pytest.approx(1.0)
    inputs, outputs, times = arrivals.draw(workload, 3, seed=7)
    assert inputs.tolist() == [10, 10, 10]
    assert outputs.tolist() == [3, 4, 5]
    assert times.tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("times", [None, np.zeros(4)])
def test_a_trace_without_times_has_no_arrivals(times: Floats | None) -> None:
    with pytest.raises(InputError, match="give an arrival rate instead"):
        trace_arrivals(traced(times))


def test_a_wait_counts_from_the_arrival() -> None:
    records = [
        RequestRecord(input_tokens=1, arrival=float(i), start=i + 0.5, token_times=(i + 1.0, i + 2.0))
        for i in range(20)
    ]
    estimate = summarize(records, p99_output=2, backlog=False, waiting=True)
    assert (estimate.ttft, estimate.tpot, estimate.latency, estimate.latency_p50) == (1.0, 1.0, 2.0, 2.0)
    assert summarize(records, p99_output=2, backlog=False).ttft == 0.5
    assert estimate.token_throughput == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("law", [LAW, SKEWED])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_closed_form_at_a_rate_predicts_the_replay(schedule: Schedule, law: str, profile: Profile) -> None:
    most = capacity(asked(profile, law), schedule)
    ratios = []
    for load in (0.3, 0.6, 0.8):
        problem = asked(profile, law, rate=load * most)
        predicted = problem.estimate(schedule)
        _, replayed = replay_estimate(problem, schedule, seed=0, num_requests=4000)
        assert predicted.throughput == pytest.approx(replayed.throughput, rel=0.05)
        assert replayed.latency is not None
        assert predicted.latency is not None
        ratios += [predicted.latency / replayed.latency, predicted.ttft / replayed.ttft]
    # The replay decides; the closed form before it must have the right magnitude. At the lowest rate it gives every
    # cycle of `rra` a prompt, and most have none: half too much.
    assert 0.6 < np.median(ratios) < 1.3
    assert min(ratios) > 0.4
    assert max(ratios) < 1.6


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_latency_rises_with_the_rate(schedule: Schedule, profile: Profile) -> None:
    most = capacity(asked(profile, LAW), schedule)
    latencies = [asked(profile, LAW, rate=share * most).estimate(schedule).ttft for share in (0.2, 0.5, 0.8, 0.99)]
    assert (np.diff(latencies) > 0).all()


def test_a_rate_beyond_the_capacity_is_refused(profile: Profile) -> None:
    schedule = SCHEDULES[0]
    most = capacity(asked(profile, LAW), schedule)
    with pytest.raises(Infeasible, match=r"orca\(max_num_seqs=24\) sustains .* requests/s"):
        asked(profile, LAW, rate=1.01 * most).estimate(schedule)


@pytest.mark.parametrize(("policy", "law"), [("orca", LAW), ("orca", SKEWED), ("rra", SKEWED), ("static", LAW)])
def test_a_plan_for_a_rate_keeps_its_bounds_in_the_replay_with_arrivals(
    policy: str, law: str, profile: Profile
) -> None:
    most = optimize(asked(profile, law, bound=0.3), policies=(policy,)).plan.estimate
    assert most is not None
    problem = asked(profile, law, rate=0.6 * most.throughput, bound=0.3, ttft=0.15)
    plan = optimize(problem, policies=(policy,), effort=WITHOUT_REPORT).plan
    assert plan.arrival_rate == problem.arrivals.rate if problem.arrivals else False
    assert plan.replay is not None
    assert plan.replay.latency is not None
    assert plan.replay.latency <= 0.3
    assert plan.replay.ttft <= 0.15
    assert plan.replay.throughput == pytest.approx(problem.required, rel=0.1)


def test_the_bounds_hold_up_to_the_rate_headroom_and_break_above(profile: Profile) -> None:
    problem = asked(profile, LAW, rate=60.0, bound=0.15)
    schedule = optimize(problem, policies=("orca",)).plan.schedule
    headroom = rate_headroom(problem, schedule)
    assert headroom is not None
    assert 0 < headroom < 4

    def keeps(rise: float) -> bool:
        return replace(problem, arrivals=Arrivals(rate=60.0 * (1 + rise))).keeps(schedule)

    assert keeps(headroom)
    assert not keeps(headroom + 4 / 1024)
    assert rate_headroom(asked(profile, LAW, bound=0.15), schedule) is None


def test_with_a_margin_the_headroom_is_that_of_bounds_tighter_by_it(profile: Profile) -> None:
    """A plan of one group, whose replay is the closed form itself."""
    problem = asked(profile, LAW, rate=40.0, bound=0.15)
    plan = optimize(problem, policies=("orca",), effort=WITHOUT_REPORT).plan
    plan = replace(plan, replay=problem.estimate(plan.schedule))
    tighter = replace(problem, bound=replace(problem.bound, seconds=problem.bound.seconds / 1.2))
    promised = with_headroom(replace(plan, promise={"margin": {problem.bound.metric: 0.2}}), [problem])
    assert promised.rate_headroom == rate_headroom(tighter, plan.schedule)
    assert promised.drift_headroom == drift_headroom(tighter, plan.schedule)
    without = with_headroom(plan, [problem])
    assert without.rate_headroom is not None
    assert promised.rate_headroom is not None
    assert promised.rate_headroom < without.rate_headroom


def test_at_a_rate_the_schedule_with_the_most_headroom_is_taken(profile: Profile) -> None:
    slow, fast = (optimize(asked(profile, LAW, rate=r, bound=0.15), policies=("rra",)).plan for r in (20.0, 60.0))
    assert slow.schedule == fast.schedule
    assert slow.rate_headroom is not None
    assert fast.rate_headroom is not None
    assert 20 * (1 + min(slow.rate_headroom, 4)) >= 60


def test_a_rate_that_nothing_sustains_is_answered_with_the_most_and_the_bounds_that_would_do(profile: Profile) -> None:
    most = optimize(asked(profile, LAW, bound=0.1), policies=("orca",)).plan.estimate
    assert most is not None
    with pytest.raises(Infeasible) as refusal:
        optimize(asked(profile, LAW, rate=1.1 * most.throughput, bound=0.1), policies=("orca",))
    message = str(refusal.value)
    assert "requests/s (Poisson) arrive, but within the bounds the most is " in message
    assert "the binding limit is bound 100 ms on p99-length; it is sustained under bound " in message
    with pytest.raises(Infeasible, match="wider bounds do not help: without any the most is "):
        optimize(asked(profile, LAW, rate=1e5, bound=0.1), policies=("orca",))


def test_a_wanted_throughput_is_refused_where_it_cannot_be_had(profile: Profile) -> None:
    problem = asked(profile, LAW, bound=0.1)
    plan = optimize(replace(problem, min_throughput=10.0), policies=("orca",)).plan
    assert plan.schedule == optimize(problem, policies=("orca",)).plan.schedule
    with pytest.raises(Infeasible, match=r"10000 requests/s are required, but within|1e\+04 requests/s are required"):
        optimize(replace(problem, min_throughput=1e4), policies=("orca",))


@pytest.fixture
def folder(folder: Path) -> Path:
    times = np.cumsum(np.random.default_rng(0).exponential(0.05, 200))
    rows = [f"{t:.4f},40,{4 + i % 9}" for i, t in enumerate(times)]
    (folder / "t.csv").write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
    (folder / "untimed.csv").write_text("input_tokens,output_tokens\n10,5\n12,6\n")
    return folder


def command(*options: str, workload: str = LAW) -> list[str]:
    return ["optimize", "--profile", "p.json", "--workload", workload, "--policy", "orca", *options]


def test_a_plan_for_a_rate_says_so_and_simulates_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("--latency-bound", "200ms", "--arrival-rate", "30", "-o", "plan.yaml")) == 0
    text = capsys.readouterr().out
    assert "arrivals: 30 requests/s (Poisson); times count from the arrival" in text
    assert "rate headroom: the bounds hold until" in text
    plan = load_plan(folder / "plan.yaml")
    assert plan.arrival_rate == 30.0
    assert main(["simulate", "plan.yaml", "--json"]) == 0
    assert plan.replay is not None
    assert json.loads(capsys.readouterr().out)["replay"]["ttft"] == plan.replay.ttft


def test_the_arrivals_of_a_trace_are_replayed_as_they_were(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--latency-bound", "200ms", "--arrivals", "trace", "-o", "plan.yaml"]
    assert main(command(*options, workload="t.csv")) == 0
    text = capsys.readouterr().out
    assert "requests/s (as in the trace)" in text
    assert "all figures are of replays" in text
    assert "  closed form" not in text
    plan = load_plan(folder / "plan.yaml")
    assert plan.trace_arrivals
    assert plan.arrival_rate is None
    assert main(["simulate", "plan.yaml"]) == 0
    assert "200 requests" in capsys.readouterr().out


def burst_trace(size: int, *, gap: float, count: int = 600) -> Workload:
    """Requests that come `size` at once, every `size * gap` seconds, so that the mean rate is 1 / gap."""
    inputs, outputs = load_workload(LAW).sample(count, seed=3)
    times = np.repeat(np.arange(count // size) * size * gap, size)
    return Workload.of_trace("bursts", Trace(inputs, outputs, times))


def asked_of(profile: Profile, workload: Workload, *, bound: float) -> Problem:
    problem = make_problem(profile, workload, Bound(seconds=bound, metric="p99-requests"), max_seqs=64)
    return replace(problem, arrivals=trace_arrivals(workload))


@pytest.mark.parametrize("size", [1, 30])
def test_the_figures_of_a_plan_for_a_trace_are_those_of_its_replay(size: int, profile: Profile) -> None:
    """By a law of single gaps a burst of 30 has the queue of a Poisson stream, and even arrivals have one at all."""
    problem = asked_of(profile, burst_trace(size, gap=1 / 60), bound=1.0)
    found = optimize(problem, policies=("orca", "static"))
    plan = found.plan
    _, replayed = replay_estimate(problem, plan.schedule, seed=0)
    assert plan.estimate == plan.replay
    assert plan.replay is not None
    assert plan.replay.to_dict() == pytest.approx(replayed.to_dict())
    for one in found.candidates:
        assert one.schedule is not None
        assert one.estimate is not None
        _, own = replay_estimate(problem, one.schedule, seed=0)
        assert one.estimate.latency == pytest.approx(own.latency)
    by_law = problem.estimate(plan.schedule)
    assert by_law.latency is not None
    assert plan.replay.latency is not None
    assert (by_law.latency > plan.replay.latency) == (size == 1)


def test_a_trace_that_keeps_its_bound_only_in_the_replay_has_a_plan(profile: Profile) -> None:
    """Even arrivals wait less than those of the law that the search has: a bound between both is kept."""
    problem = asked_of(profile, burst_trace(1, gap=1 / 60), bound=1.0)
    plan = optimize(problem, policies=("static",)).plan
    by_law, replayed = problem.estimate(plan.schedule).latency, plan.replay and plan.replay.latency
    assert by_law is not None
    assert replayed is not None
    between = (by_law + replayed) / 2
    assert replayed < between < by_law
    again = optimize(replace(problem, bound=Bound(seconds=between, metric="p99-requests")), policies=("static",)).plan
    assert again.replay is not None
    assert again.replay.latency is not None
    assert again.replay.latency <= between


def test_bursts_that_break_a_bound_in_the_replay_are_refused(profile: Profile) -> None:
    """Those of 30 take longer than the bound; by a law of single gaps they would not."""
    with pytest.raises(Infeasible, match="the wait included; the bound is 50 ms"):
        optimize(asked_of(profile, burst_trace(30, gap=1 / 60), bound=0.05), policies=("orca",))


def test_the_headroom_of_a_trace_is_that_of_a_stream_scaled_to_the_replay(profile: Profile) -> None:
    workload = burst_trace(30, gap=1 / 60)
    schedule = Schedule("orca", {"max_num_seqs": 24})
    problem = asked_of(profile, workload, bound=1.0)
    _, replayed = replay_estimate(problem, schedule, seed=0)
    assert replayed.latency is not None
    rises = []
    for share in (1.001, 1.5):
        tight = replace(problem, bound=Bound(seconds=share * replayed.latency, metric="p99-requests"))
        plan = replace(optimize(tight, policies=("orca",)).plan, schedule=schedule, replay=replayed)
        rises.append(with_headroom(plan, [tight]).rate_headroom)
    assert rises[0] is not None
    assert rises[1] is not None
    assert 0 <= rises[0] < 0.03
    assert rises[1] > 0.05


@pytest.mark.parametrize(
    ("options", "workload", "message"),
    [
        (["--arrival-rate", "-3"], LAW, "--arrival-rate must be a positive number of requests a second, found '-3'"),
        (["--arrival-rate", "nan"], LAW, "--arrival-rate must be a positive number of requests a second, found 'nan'"),
        (["--arrival-rate", "inf"], LAW, "--arrival-rate must be a positive number of requests a second, found 'inf'"),
        (["--arrival-rate", "20/min"], LAW, "--arrival-rate must be a number of requests a second such as 20, found"),
        (["--min-throughput", "0"], LAW, "--min-throughput must be a positive number of requests a second, found '0'"),
        (["--arrivals", "trace"], LAW, f"workload '{LAW}' has no arrival times; give an arrival rate instead"),
        (["--arrivals", "trace"], "untimed.csv", "workload 'untimed.csv' has no arrival times"),
        (["--arrivals", "bursts"], LAW, "argument --arrivals: invalid choice: 'bursts'"),
        (["--arrivals", "trace", "--arrival-rate", "3"], "t.csv", "argument --arrival-rate: not allowed with"),
        (["--arrival-rate", "100000"], LAW, "1e+05 requests/s (Poisson) arrive, but within the bounds the most is "),
        (["--gpus", "auto"], LAW, "--gpus auto needs a --cluster"),
    ],
)
def test_wrong_arrivals_are_answered_with_one_sentence(
    options: list[str], workload: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: int | str | None = main(command("--latency-bound", "200ms", *options, workload=workload))
    except SystemExit as end:  # argparse ends by itself.
        status = end.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.err.startswith(f"exeplan optimize: {message}")
    assert captured.err.count("\n") == 1


def test_replicas_share_the_requests_of_a_trace_evenly() -> None:
    lengths = {"inputs": np.arange(10, 20), "outputs": np.arange(1, 11)}
    trace = Workload.of("trace", **lengths, weights=np.ones(10))
    times = np.arange(10) / 4
    arrivals = trace_arrivals(replace(trace, trace=Trace(**lengths, arrival_s=times)))
    whole = replace(trace, trace=Trace(**lengths, arrival_s=times))
    inputs, _, found = arrivals.split(5, "shortest-queue").draw(whole, 100, seed=0)
    assert inputs.tolist() == [14, 19]
    assert found.tolist() == [1.0, 2.25]
    assert arrivals.draw(whole, 3, seed=0)[0].tolist() == [10, 11, 12]


def test_spare_places_at_a_rate_keep_the_bound_on_single_gaps() -> None:
    """More prompts a prefill stall the streams for longer."""
    gap = Bound(seconds=0.12, metric="max-itl")
    asked = make_problem(
        datasheet_profile("opt-13b", "a40-48gb"), load_workload("uniform:in=20-60;out=10-30"), Bound(seconds=1e9)
    )
    asked = replace(asked, more_bounds=(gap,), arrivals=Arrivals(rate=1.2), max_seqs=64)
    assert not asked.keeps(Schedule("rra", {"prefill_batch": 7, "decode_steps": 2}))
    plan = optimize(asked, policies=("rra",)).plan
    assert plan.longest_stall["seconds"] <= gap.seconds
    assert plan.replay.percentiles["max-itl"] <= gap.seconds
