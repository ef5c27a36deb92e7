"""All bounds hold together, the search uses the binding one, and every wrong bound is refused with one sentence."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.cli import main
from exeplan.core.bounds import Bound, binding, check_together, limit, parse_bounds, scaled, utilizations, worst
from exeplan.core.plan import as_json as plan_json
from exeplan.core.plan import save_plan
from exeplan.core.profile import Profile
from exeplan.core.schedule import Estimate
from exeplan.errors import Infeasible, InputError
from exeplan.planner.choice.optimize import optimize, with_frontier
from exeplan.planner.load_problem import load_plan
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.policies import policy_names
from exeplan.simulator.closed_form import steady_state
from exeplan.workload.files import load_workload

LAW = "normal:in=40,10,80;out=12,5,24"
SKEWED = "quantiles:in=p50:30,p99:200;out=p50:8,p99:30,p100:40;rank_correlation=0.4"
ESTIMATE = Estimate(
    throughput=2.0,
    token_throughput=20.0,
    ttft=0.2,
    tpot=0.03,
    latency=1.0,
    latency_p50=0.5,
    latency_p99=1.1,
    kv_tokens=100.0,
    memory_bytes_per_gpu=1e9,
)


def bounds(latency: float = math.inf, **more: float) -> tuple[Bound, ...]:
    return (Bound(seconds=latency), *(Bound(seconds=value, metric=about) for about, value in more.items()))


def asked(profile: Profile, *given: Bound, law: str = SKEWED) -> Problem:
    problem = make_problem(profile, load_workload(law), given[0], max_seqs=32)
    return replace(problem, more_bounds=given[1:])


def test_the_binding_bound_has_the_largest_utilization() -> None:
    assert utilizations(bounds(2.0, ttft=0.25, tpot=0.06), ESTIMATE) == pytest.approx([0.5, 0.8, 0.5])
    assert binding(bounds(2.0, ttft=0.25, tpot=0.06), ESTIMATE) == (Bound(seconds=0.25, metric="ttft"), 0.8)
    assert binding(bounds(), ESTIMATE) is None


def test_the_percentiles_of_an_estimate_can_be_bounded_in_addition() -> None:
    several = bounds(2.0, **{"p50-requests": 1.0, "p99-requests": 2.2})
    assert utilizations(several, ESTIMATE) == pytest.approx([0.5, 0.5, 0.5])


def test_an_unknown_latency_breaks_no_bound() -> None:
    assert utilizations(bounds(2.0), replace(ESTIMATE, latency=None)) == [0.0]


@given(
    seconds=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=3),
    values=st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3),
)
@settings(max_examples=100, derandomize=True)
def test_the_worst_value_exceeds_the_limit_exactly_when_a_bound_is_broken(
    seconds: list[float], values: list[float]
) -> None:
    several = tuple(Bound(seconds=s) for s in seconds)
    broken = [value > s for s, value in zip(seconds, values, strict=False)]
    load = worst(several, values[: len(seconds)])
    if not any(abs(value / s - 1) < 1e-9 for s, value in zip(seconds, values, strict=False)):
        assert (load > limit(several)) == any(broken)
    assert worst(several[:1], values[:1]) == values[0]


def test_infinite_bounds_are_no_limit() -> None:
    assert limit(bounds(ttft=0.5)) == 0.5
    assert worst(bounds(ttft=0.5), [1e9, 0.25]) == 0.25
    assert worst(bounds(), [7.0]) == 7.0


def test_bounds_are_scaled_one_by_one() -> None:
    assert scaled(bounds(2.0, ttft=0.5), [0.5, 1.0]) == bounds(1.0, ttft=0.5)


@pytest.mark.parametrize("policy", ["orca", "rra", "static"])
@pytest.mark.parametrize("about", ["ttft", "tpot", "p50-requests", "p99-requests", "p99.9-requests", "p99-length"])
def test_what_a_bound_is_compared_with_is_what_the_estimate_says(policy: str, about: str, profile: Profile) -> None:
    first = about if about.startswith("p") else "p99-length"
    problem = asked(profile, Bound(seconds=math.inf, metric=first))
    schedule = optimize(problem, policies=(policy,)).plan.schedule
    estimate = problem.estimate(schedule)
    steady = steady_state(schedule, problem.workload, problem.cost)
    expected = {"ttft": estimate.ttft, "tpot": estimate.tpot, "p50-requests": estimate.latency_p50}
    assert steady.bound_latency(about) == expected.get(about, estimate.latency)


def test_percentiles_over_requests_rise_with_the_percentage(profile: Profile) -> None:
    problem = asked(profile, Bound(seconds=math.inf))
    schedule = optimize(problem, policies=("rra",)).plan.schedule
    steady = steady_state(schedule, problem.workload, problem.cost)
    values = [steady.bound_latency(f"p{share}-requests") for share in (1, 50, 90, 99, 99.9)]
    assert (np.diff(values) >= 0).all()
    assert values[0] < values[-1]


@pytest.mark.parametrize("policy", ["orca", "rra", "static"])
def test_every_bound_holds_in_closed_form_and_replay(policy: str, profile: Profile) -> None:
    alone = optimize(asked(profile, *bounds(0.3), law=LAW), policies=(policy,)).plan
    assert alone.estimate is not None
    several = bounds(0.3, ttft=0.7 * alone.estimate.ttft, tpot=0.8 * alone.estimate.tpot)
    plan = optimize(asked(profile, *several, law=LAW), policies=(policy,)).plan
    for estimate in (plan.estimate, plan.replay):
        assert estimate is not None
        assert max(utilizations(several, estimate)) <= 1
    assert plan.more_bounds == several[1:]
    assert plan.estimate is not None
    assert plan.estimate.throughput < alone.estimate.throughput


@pytest.mark.parametrize("policy", ["orca", "rra", "static"])
def test_branch_and_bound_finds_the_exhaustive_optimum_under_several_bounds(policy: str, profile: Profile) -> None:
    several = bounds(0.15, ttft=0.03, tpot=0.004)
    problem = replace(asked(profile, *several, law=LAW), max_seqs=8)
    quick, sure = (optimize(problem, policies=(policy,), method=m).plan for m in ("branch-and-bound", "exhaustive"))
    assert quick.schedule == sure.schedule


def test_the_refusal_names_the_bound_that_binds(profile: Profile) -> None:
    message = r"^ttft bound 100 us, but the lowest-latency schedule, .* for the first token: .* found to work is (.*)"
    with pytest.raises(Infeasible, match=message) as refusal:
        optimize(asked(profile, *bounds(1.0, ttft=1e-4, tpot=0.5)), policies=("orca",))
    assert "the tightest ttft bound found to work is " in refusal.value.nearest


def test_only_the_tightened_bound_is_tightened(profile: Profile) -> None:
    # The winner under a tight ttft is the same with and without another, loose bound.
    one = optimize(asked(profile, *bounds(ttft=0.02)), policies=("rra",)).plan
    two = optimize(asked(profile, *bounds(ttft=0.02, tpot=10.0)), policies=("rra",)).plan
    assert one.schedule == two.schedule


def test_a_bound_that_replays_tighten_below_another_one_is_still_searched(profile: Profile) -> None:
    """What is asked for goes together; the replay of the closed form's choice takes longer than the bound."""
    few_tokens = "quantiles:in=p50:30,p99:200;out=p50:2,p99:4,p100:5"
    free = asked(profile, *bounds(), law=few_tokens)
    latency = free.estimate(free.schedule("orca", {"max_num_seqs": 6})).latency
    assert latency is not None
    several = bounds(1.001 * latency, **{"p99-ttft": latency})
    plan = optimize(asked(profile, *several, law=few_tokens), policies=("orca",)).plan
    assert plan.schedule["max_num_seqs"] <= 6
    assert plan.replay is not None
    assert max(utilizations(several, plan.replay)) <= 1


def test_a_frontier_under_several_bounds_rises(profile: Profile) -> None:
    problem = asked(profile, *bounds(ttft=0.02, tpot=0.01), law=LAW)
    (candidate,) = optimize(problem, policies=("orca",)).candidates
    frontier = with_frontier(problem, candidate).frontier
    assert (np.diff([t.outcome.throughput for t in frontier]) > 0).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (bounds(1.0, ttft=1.0), "ttft of 1 s contradicts the latency bound of 1 s"),
        (bounds(1.0, tpot=2.0), "tpot of 2 s contradicts the latency bound of 1 s"),
        ((Bound(seconds=1.0, metric="ttft"),), "the first bound must be on p99-length or pNN-requests"),
        ((Bound(seconds=1.0), Bound(seconds=1.0, metric="p90-requests")), "a further bound can be on ttft, tpot"),
        ((Bound(seconds=1.0), *2 * (Bound(seconds=0.5, metric="ttft"),)), "two bounds on ttft; give the tighter one"),
    ],
)
def test_bounds_that_do_not_go_together_are_refused(given: tuple[Bound, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_together(given)


@pytest.mark.parametrize(
    ("latency", "other"),
    [
        ("p50-requests", "p99-ttft"),
        ("p90-requests", "p99-tpot"),
        ("p99-requests", "ttft"),
        ("p90-requests", "max-itl"),
        ("p99-deadline", "p50-ttft"),
    ],
)
def test_requests_that_need_not_be_done_by_the_latency_bound_may_take_longer(latency: str, other: str) -> None:
    check_together((Bound(seconds=2.0, metric=latency), Bound(seconds=3.0, metric=other)))


@pytest.mark.parametrize("other", ["p50-ttft", "p99-tpot"])
def test_requests_that_are_done_by_the_latency_bound_have_no_later_first_token(other: str) -> None:
    with pytest.raises(InputError, match=f"^{other} of 3 s contradicts the latency bound of 2 s"):
        check_together((Bound(seconds=2.0, metric="p99-requests"), Bound(seconds=3.0, metric=other)))


@pytest.mark.parametrize(
    "about", ["p0-requests", "p100-requests", "p-1-requests", "p50", "requests", "P50-requests", ""]
)
def test_what_is_no_percentile_is_refused(about: str) -> None:
    with pytest.raises(InputError, match="a bound can be on p99-length or pNN-requests"):
        Bound(seconds=1.0, metric=about)


def test_a_ttft_alone_is_a_bound() -> None:
    assert parse_bounds(None, "p99-length", ttft="500ms") == bounds(ttft=0.5)
    assert parse_bounds("2s", "p50-requests", tpot="inf") == (Bound(seconds=2.0, metric="p50-requests"),)


def test_percentiles_are_bounds_and_a_bare_time_is_the_mean() -> None:
    assert parse_bounds(None, "p99-length", ttft="p99:500ms, 200ms", tpot="p95:50ms") == (
        Bound(seconds=math.inf),
        Bound(seconds=0.5, metric="p99-ttft"),
        Bound(seconds=0.2, metric="ttft"),
        Bound(seconds=0.05, metric="p95-tpot"),
    )
    assert [str(bound) for bound in parse_bounds(None, "p99-length", ttft="p99:500ms,200ms")[1:]] == [
        "500 ms p99-ttft",
        "200 ms mean ttft",
    ]


def test_attainment_holds_the_times_of_each_request_together() -> None:
    none, together = parse_bounds("10s", "p99-length", ttft="500ms", tpot="50ms", attainment="99%")
    assert none == Bound(seconds=math.inf)
    targets = (("ttft", 0.5), ("tpot", 0.05), ("latency", 10.0))
    assert together == Bound(seconds=0.5, metric="p99-all", targets=targets)
    assert parse_bounds(None, "p99-length", tpot="50ms", attainment="0.999")[1].metric == "p99.9-all"
    assert str(together) == "99 % of requests with ttft 500 ms, tpot 50 ms, latency 10 s"
    (tighter,) = scaled([together], [0.5])
    assert tighter.scaled_targets == (("ttft", 0.25), ("tpot", 0.025), ("latency", 5.0))


PERCENTILES = (
    Bound(seconds=math.inf),
    Bound(seconds=0.03, metric="p99-ttft"),
    Bound(seconds=0.006, metric="p95-tpot"),
    Bound(seconds=0.04, metric="p90-all", targets=(("ttft", 0.04), ("tpot", 0.007), ("latency", 0.3))),
)


@pytest.mark.parametrize("policy", ["orca", "rra", "chunked"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_bound_on_a_percentile_holds_in_the_replay_and_costs_throughput(
    policy: str, number: int, profile: Profile
) -> None:
    bound = PERCENTILES[number]
    problem = asked(profile, PERCENTILES[0], bound)
    plan = optimize(problem, policies=(policy,)).plan
    assert plan.replay is not None
    assert 0 < plan.replay.percentiles[bound.metric] <= bound.seconds
    assert plan.replay.attainment is not None
    assert plan.replay.attainment >= (0.9 if number == 3 else 0.95 if number == 2 else 0.99)
    free = optimize(asked(profile, PERCENTILES[0]), policies=(policy,)).plan
    assert free.replay is not None
    assert plan.replay.throughput < free.replay.throughput


def test_an_impossible_percentile_is_refused_with_the_tightest_that_is_possible(profile: Profile) -> None:
    short = (Bound(seconds=math.inf), Bound(seconds=1e-5, metric="p99-ttft"))
    with pytest.raises(Infeasible, match=r"^p99-ttft bound 10 us, but .* for the first token of 99 % of requests: "):
        optimize(asked(profile, *short), policies=("orca",))


def test_a_plan_with_percentiles_and_joint_attainment_is_read_back_as_it_was(profile: Profile, tmp_path: Path) -> None:
    plan = optimize(asked(profile, *PERCENTILES), policies=("orca",)).plan
    save_plan(plan, tmp_path / "plan.yaml")
    again = load_plan(tmp_path / "plan.yaml")
    assert again.more_bounds == PERCENTILES[1:]
    assert (again.estimate, again.replay) == (plan.estimate, plan.replay)
    body = plan_json(plan)
    assert body["more_bounds"][2]["targets"] == {"ttft": 0.04, "tpot": 0.007, "latency": 0.3}
    assert {"attainment", "goodput", "p99-ttft", "p95-tpot", "p90-all"} <= set(body["replay"])


def command(*options: str) -> list[str]:
    return ["optimize", "--profile", "p.json", "--workload", LAW, "--policy", "orca", "--max-num-seqs", "16", *options]


def test_a_plan_keeps_all_its_bounds_in_its_file_and_simulate_checks_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command("--latency-bound", "200ms", "--ttft", "20ms", "--tpot", "10ms", "-o", "plan.yaml")) == 0
    text = capsys.readouterr().out
    assert "bound 200 ms on p99-length, 20 ms mean ttft, 10 ms mean tpot: orca(" in text
    assert "binding bound: " in text
    plan = load_plan(folder / "plan.yaml")
    assert plan.more_bounds == bounds(0.2, ttft=0.02, tpot=0.01)[1:]
    assert main(["simulate", "plan.yaml", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["more_bounds"] == [{"seconds": 0.02, "about": "ttft"}, {"seconds": 0.01, "about": "tpot"}]
    tight = (folder / "plan.yaml").read_text().replace("seconds: 0.02,", "seconds: 0.0001,")
    (folder / "tight.yaml").write_text(tight)
    assert main(["simulate", "tight.yaml"]) == 2
    assert "the replay breaks the" in capsys.readouterr().out


@pytest.mark.parametrize("policy", [name for name in policy_names() if name in ("orca", "rra", "static")])
def test_any_percentile_of_requests_can_be_bounded(
    policy: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--latency-bound", "100ms", "--bound-on", "p90-requests", "--policy", policy, "--json"]
    assert main(command(*options)) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["bound"] == {"seconds": 0.1, "about": "p90-requests"}
    assert body["estimate"]["latency_p50"] <= body["estimate"]["latency"] <= body["estimate"]["latency_p99"]
    assert body["replay"]["latency"] <= 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --latency-bound (inf for none), --deadline, --ttft, --tpot or --itl"),
        (["--ttft", "p100:1s"], "--ttft takes a percentile above p0 and below p100, such as p99:500ms, or a time for"),
        (["--ttft", "p0:1s"], "--ttft takes a percentile above p0 and below p100"),
        (["--tpot", "99:1s"], "--tpot takes a percentile above p0 and below p100"),
        (["--ttft", "p99:0s"], "--ttft must be above zero, found '0s'"),
        (["--ttft", "p99:"], "--ttft must be a duration such as 2s, 500ms or 1m, found ''"),
        (["--ttft", "p99:1s,p99:2s"], "two bounds on p99-ttft; give the tighter one"),
        (["--latency-bound", "1s", "--ttft", "p99:2s"], "p99-ttft of 2 s contradicts the latency bound of 1 s"),
        (["--ttft", "1s", "--attainment", "100%"], "--attainment must be a share between 0 % and 100 %, such as 99%"),
        (["--ttft", "p99:1s", "--attainment", "99%"], "with --attainment --ttft is the time of each request"),
        (["--latency-bound", "inf", "--attainment", "99%"], "--attainment needs a time to keep"),
        (
            ["--latency-bound", "1s", "--bound-on", "p99-requests", "--attainment", "99%"],
            "--attainment counts requests that keep --ttft, --tpot and --latency-bound",
        ),
        (
            ["--latency-bound", "1s", "--ttft", "1s", "--attainment", "99%"],
            "ttft of 1 s contradicts the latency bound of 1 s",
        ),
        (["--ttft", "soon"], "--ttft must be a duration such as 2s, 500ms or 1m, found 'soon'"),
        (["--ttft", "5 parsec"], "--ttft must be a duration such as 2s, 500ms or 1m, found '5 parsec'"),
        (["--tpot", "nan"], "--tpot must be above zero, found 'nan'"),
        (["--tpot", "-50ms"], "--tpot must be above zero, found '-50ms'"),
        (["--itl", "0ms"], "--itl must be above zero, found '0ms'"),
        (["--itl", "1us"], "max-itl bound 1 us, but the lowest-latency schedule,"),
        (["--latency-bound", "1s", "--ttft", "2s"], "ttft of 2 s contradicts the latency bound of 1 s"),
        (["--latency-bound", "1s", "--tpot", "1s"], "tpot of 1 s contradicts the latency bound of 1 s"),
        (["--latency-bound", "1s", "--bound-on", "p0-requests"], "--bound-on must be p99-length or pNN-requests"),
        (["--latency-bound", "1s", "--bound-on", "ttft"], "--bound-on must be p99-length or pNN-requests"),
        (["--tpot", "1us"], "tpot bound 1 us, but the lowest-latency schedule, orca(max_num_seqs=1), needs"),
    ],
)
def test_a_wrong_bound_is_answered_with_one_sentence(
    options: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(*options)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"exeplan optimize: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("more_bounds: 5", "more_bounds must list bounds such as {seconds: 0.5, about: ttft}, found 5"),
        ("more_bounds: [{seconds: 2, about: ttft}]", "ttft of 2 s contradicts the latency bound of 1 s"),
        ("more_bounds: [{seconds: 0.5}]", "a further bound can be on ttft, tpot, p50-requests, p99-requests"),
        ("more_bounds: [5]", "a bound has seconds and about, found 5"),
        ("more_bounds: [{seconds: 1, about: p99-all}]", "a bound on p99-all needs targets such as {ttft: 0.5"),
        (
            "more_bounds: [{seconds: 1, about: ttft, targets: {ttft: 1}}]",
            "a bound on ttft has no targets; those are for pNN-all",
        ),
        ("more_bounds: [{seconds: 1, about: p99-all, targets: {itl: 1}}]", "a target can be ttft, tpot, latency"),
        (
            "more_bounds: [{seconds: 1, about: p99-all, targets: {ttft: .inf}}]",
            "the target on ttft must be a positive number of seconds, found inf",
        ),
        (
            "more_bounds: [{seconds: 1, about: p99-all, targets: {ttft: 2}}]",
            "the seconds of a bound on p99-all are those of its first target, 2, found 1",
        ),
        ("more_bounds: [{seconds: 1, about: p99-all, targets: 5}]", "the targets of a bound are seconds by name"),
        ("arrival_rate: -3", "an arrival rate must be a positive number of requests a second, found -3"),
        ("arrival_rate: .nan", "an arrival rate must be a positive number of requests a second, found nan"),
        ("trace_arrivals: 3", "trace_arrivals must be true or false, found 3"),
        ("rate_headroom: wide", "rate_headroom must be a number, found 'wide'"),
        ("promise: 5", "promise must be a mapping, found 5"),
    ],
)
def test_a_wrong_promise_in_a_plan_is_named(line: str, message: str, tmp_path: Path) -> None:
    head = "model: demo\nschedule: {policy: orca, max_num_seqs: 4}\nplacement: [{devices: [0], layers: [0, 6]}]\n"
    (tmp_path / "plan.yaml").write_text(f"{head}bound: {{seconds: 1}}\n{line}\n")
    with pytest.raises(InputError) as error:
        load_plan(tmp_path / "plan.yaml")
    assert str(error.value).removeprefix(f"{tmp_path / 'plan.yaml'}: ").startswith(message)
