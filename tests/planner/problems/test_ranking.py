"""The order of plans is decided by replays: intervals cover, what may be better is replayed, and noise is called so.
At a rate, bounds are proved by as many replays as chance demands."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import Profile
from exeplan.core.schedule import Estimate, Schedule
from exeplan.errors import Infeasible
from exeplan.planner.choice import pipelines, seeded_replays
from exeplan.planner.choice.optimize import as_json, optimize
from exeplan.planner.choice.seeded_replays import Replays
from exeplan.planner.problems import replays
from exeplan.planner.problems.headroom import drift_headroom
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.problems.ranking import (
    FAR,
    MOST_SEEDS,
    Order,
    behind,
    certain,
    certainly_broken,
    decided,
    known_well,
    mean_estimate,
)
from exeplan.planner.problems.replays import replay_estimate, too_short
from exeplan.planner.reports.report import optimum_report, proof_line
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.run import Run
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.files import load_workload

Replay = Callable[..., tuple[Run, Estimate]]


@pytest.fixture
def problem(profile: Profile) -> Problem:
    return make_problem(profile, load_workload("normal:in=40,10,80;out=12,5,24"), Bound(seconds=0.1), max_seqs=32)


@pytest.fixture(scope="module")
def on_cluster() -> Problem:
    cluster = load_cluster("a40")
    profile = profile_from_datasheet(
        load_model_spec("opt-13b"), with_links(load_datasheet(cluster.device), cluster), dtype="float16"
    )
    return make_problem(profile, load_workload("S"), Bound(seconds=9.7), cluster=cluster.part(2))


def scaled(factors: dict[str, float]) -> Replay:
    """Replays whose throughput is that many times as large, by policy."""

    def replayed(problem: Problem, schedule: Schedule, **options: object) -> tuple[Run, Estimate]:
        run, found = replay_estimate(problem, schedule, **options)  # type: ignore[arg-type]
        return run, replace(found, throughput=found.throughput * factors.get(schedule.policy, 1.0))

    return replayed


@pytest.mark.parametrize("num_seeds", range(2, MOST_SEEDS + 1))
def test_the_interval_of_the_difference_covers_the_true_one(num_seeds: int) -> None:
    rng, covered = np.random.default_rng(num_seeds), 0
    for _ in range(1000):
        alike = rng.normal(0, 0.05, num_seeds)  # The same requests for both.
        best = 100 * (1 + alike + rng.normal(0, 0.01, num_seeds))
        other = 98 * (1 + alike + rng.normal(0, 0.01, num_seeds))
        less, interval = behind(best, other)
        covered += abs(less - 0.02) <= interval
    assert 920 <= covered <= 980


def test_two_that_are_alike_are_seldom_told_apart_by_looking_after_every_seed() -> None:
    """At 95 % confidence at most one in twenty, by whichever look: by intervals for a single look it is one in six."""
    rng, told, by_single_looks, trials = np.random.default_rng(0), 0, 0, 5000
    for _ in range(trials):
        best, other = 100 * (1 + rng.normal(0, 0.01, (2, MOST_SEEDS)))
        looks = range(2, MOST_SEEDS + 1)
        told += any(abs(less) > half for n in looks for less, half in [behind(best[:n], other[:n], look_by_look=True)])
        by_single_looks += any(abs(less) > half for n in looks for less, half in [behind(best[:n], other[:n])])
    assert 0.04 < told / trials <= 0.05 + 2 * math.sqrt(0.05 / trials)
    assert by_single_looks / trials > 0.15


def test_a_difference_that_one_look_of_several_shows_by_chance_is_not_certain(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 % +- 1.99 % after three seeds, were it the only look; certain after four."""
    less = (0.02, 0.012, 0.028, 0.02, 0.02, 0.02, 0.02, 0.02)

    def replayed(problem: Problem, schedule: Schedule, **options: object) -> tuple[Run, Estimate]:
        run, found = replay_estimate(problem, schedule, **options)  # type: ignore[arg-type]
        slower = less[int(str(options["seed"]))] if schedule.policy == "chunked" else 0.0
        return run, replace(found, throughput=100.0 * (1 - slower))

    monkeypatch.setattr(seeded_replays, "replay_estimate", replayed)
    order = optimize(problem, policies=("orca", "chunked")).order
    assert order is not None
    assert (order.num_seeds, order.certain, round(order.behind, 9)) == (4, True, 0.02)


def test_one_seed_makes_nothing_certain() -> None:
    less, interval = behind([10.0], [9.0])
    assert (round(less, 9), interval) == (0.1, math.inf)
    assert not Order(runner_up="orca", behind=less, interval=interval, num_seeds=1).certain


def test_noise_is_called_noise() -> None:
    close = Order(runner_up="orca(max_num_seqs=4)", behind=0.002, interval=0.005, num_seeds=8)
    assert "orca(max_num_seqs=4), is within noise: 0.2 % less throughput by replay (+- 0.5 % at 95 %" in str(close)
    assert "within noise" not in str(replace(close, behind=0.02))


def test_two_that_run_alike_are_not_replayed_with_more_seeds(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one schedule under two names does."""

    def alike(problem: Problem, schedule: Schedule, **options: object) -> tuple[Run, Estimate]:
        run, found = replay_estimate(problem, schedule, **options)  # type: ignore[arg-type]
        return run, replace(found, throughput=100.0)

    monkeypatch.setattr(seeded_replays, "replay_estimate", alike)
    optimum = optimize(problem, policies=("orca", "chunked"))
    assert optimum.order
    assert (optimum.order.alike, optimum.order.num_seeds, len(optimum.seeds)) == (True, 2, 2)
    assert str(optimum.order).endswith(", has the same throughput by replay")


def test_the_replay_ranks_and_not_the_closed_form(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = optimize(problem, policies=("orca", "chunked"))
    loser = next(name for name in ("orca", "chunked") if name != usual.plan.schedule.policy)
    # The closed form is the same; the replays of what it ranks first are far worse.
    monkeypatch.setattr(seeded_replays, "replay_estimate", scaled({usual.plan.schedule.policy: 0.5}))
    assert optimize(problem, policies=("orca", "chunked")).plan.schedule.policy == loser


def test_what_the_closed_form_may_misjudge_is_replayed(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = optimize(problem, policies=("orca", "rra"))
    first, second = sorted(usual.candidates, key=lambda c: -c.estimate.throughput)
    gap = first.estimate.throughput / second.estimate.throughput
    # The second one's replay is better than its closed form by just what the search allows for; the first one's is no
    # worse than its closed form, which would have the second one replayed anyhow.
    monkeypatch.setattr(pipelines, "_DOUBT", 1.1 * gap - 1)
    replays = scaled({first.policy: 1.05, second.policy: 1.2 * gap})
    monkeypatch.setattr(seeded_replays, "replay_estimate", replays)
    assert optimize(problem, policies=("orca", "rra")).plan.schedule.policy == second.policy
    monkeypatch.setattr(pipelines, "_DOUBT", 0.0)
    assert optimize(problem, policies=("orca", "rra")).plan.schedule.policy == first.policy


def test_seeds_are_added_until_the_order_is_certain(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "_DOUBT", 1.0)
    found = optimize(problem, policies=("orca", "chunked"))
    assert found.order is not None
    enough = found.order.certain or found.order.alike or found.order.behind > 1.0
    assert enough or found.order.num_seeds == MOST_SEEDS
    monkeypatch.setattr(pipelines, "MOST_ADDED", 0)
    hasty = optimize(problem, policies=("orca", "chunked"))
    assert hasty.order is not None
    assert hasty.order.num_seeds == 1


def test_a_variant_that_replays_far_below_its_closed_form_gives_way(
    on_cluster: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = optimize(on_cluster, policies=("chunked",)).plan

    def replayed(problem: Problem, schedule: Schedule, **options: object) -> tuple[Run, Estimate]:
        run, found = replay_estimate(problem, schedule, **options)  # type: ignore[arg-type]
        starved = schedule.variables == usual.schedule.variables and problem.cost.placement == usual.placement
        return run, replace(found, throughput=found.throughput / 2) if starved else found

    monkeypatch.setattr(seeded_replays, "replay_estimate", replayed)
    other = optimize(on_cluster, policies=("chunked",)).plan
    assert (other.schedule, other.placement) != (usual.schedule, usual.placement)
    assert other.replay.throughput > 0.6 * usual.replay.throughput


def test_a_replay_that_is_too_short_proves_nothing(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = optimize(problem, policies=("orca",))
    assert plan.unproven == ()
    assert too_short(problem, plan.plan.schedule) == ""
    monkeypatch.setattr(replays, "_REPLAY_REQUESTS", (10, 20))
    (sentence,) = optimize(problem, policies=("orca",)).unproven
    assert sentence.startswith("unproven: ")
    assert "a replay has 20" in sentence


def test_a_replay_at_a_rate_that_ends_before_batches_are_full_proves_nothing(on_cluster: Problem) -> None:
    """Ten times the requests that come until a long one is done would do, of all replicas together."""
    schedule = Schedule("orca", {"max_num_seqs": 64})
    alone = replace(on_cluster.part(1), bound=Bound(seconds=60.0))
    held = steady_state(schedule, alone.workload, alone.cost).bound_latency("p99-length")
    enough = replace(alone, arrivals=Arrivals(rate=7900 / 48 / held, sharing=48))
    assert too_short(enough, schedule, replicas=48) == ""
    sentence = too_short(replace(enough, arrivals=Arrivals(rate=8100 / 48 / held)), schedule, replicas=48)
    assert sentence.startswith(
        "unproven: 81000 requests would show orca(max_num_seqs=64) with as many requests held as"
    )
    assert "a replay has 40000; give `exeplan simulate` more" in sentence
    assert too_short(replace(enough, arrivals=Arrivals(rate=8100 / 48 / held)), schedule) == ""


def test_a_replay_that_is_too_short_calls_no_bound_proved(at_rate: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the bounds" in "".join(proof_line(optimize(at_rate, policies=("orca",)), at_rate))
    monkeypatch.setattr(replays, "_MOST_ROUTED", 2500)
    monkeypatch.setattr(replays, "_FILLS", 100_000)
    found = optimize(at_rate, policies=("orca",))
    (sentence,) = found.unproven
    assert sentence in optimum_report(found, at_rate)
    assert proof_line(found, at_rate) == []


def test_the_best_of_three_misjudged_variants_is_kept(on_cluster: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Schedule, object]] = []

    def replayed(problem: Problem, schedule: Schedule, **options: object) -> tuple[Run, Estimate]:
        run, found = replay_estimate(problem, schedule, **options)  # type: ignore[arg-type]
        variant = schedule, problem.cost.placement
        if variant not in seen:
            seen.append(variant)
        return run, replace(found, throughput=(0.5, 0.4, 0.8)[min(seen.index(variant), 2)] * found.throughput)

    monkeypatch.setattr(seeded_replays, "replay_estimate", replayed)
    unbounded = replace(on_cluster, one_pipeline=True, bound=Bound(seconds=math.inf))
    found = optimize(unbounded, policies=("chunked",)).plan
    assert len(seen) == 3
    assert (found.schedule, found.placement) == seen[2]


def test_the_headroom_is_that_of_the_group_with_the_least() -> None:
    cluster = load_cluster("a40")
    profile = profile_from_datasheet(
        load_model_spec("opt-13b"), with_links(load_datasheet(cluster.device), cluster), dtype="float16"
    )
    whole = make_problem(profile, load_workload("S"), Bound(seconds=6.0), cluster=cluster.part(8))
    plan = optimize(whole, policies=("chunked", "waa-c")).plan
    each = []
    for group in plan.groups:
        size = sum(len(stage.devices) for stage in group.placement)
        each.append(drift_headroom(whole.part(size).at(group.placement), group.schedule))
    assert len(each) > 1
    assert plan.drift_headroom == min(each) < max(each)


@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_a_bound_that_is_just_reached_in_truth_is_seldom_called_certain(spread: float) -> None:
    rng, called, trials = np.random.default_rng(0), 0, 2000
    for _ in range(trials):
        shares: list[list[float]] = []
        while len(shares) < MOST_SEEDS and not (shares and decided(shares)):
            shares.append([float(rng.normal(1.0, spread))])
        called += len(shares) > 1 and certain(list(zip(*shares, strict=True)))
    assert called / trials <= 0.05 + 2 * math.sqrt(0.05 / trials)


@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_a_bound_that_is_just_reached_in_truth_is_seldom_refused_as_certain(spread: float) -> None:
    rng, refused, trials = np.random.default_rng(0), 0, 2000
    for _ in range(trials):
        shares: list[list[float]] = []
        while len(shares) < MOST_SEEDS and not (shares and decided(shares)):
            shares.append([float(rng.normal(1.0, spread))])
        refused += len(shares) > 1 and certainly_broken(list(zip(*shares, strict=True)))
    assert 0 < refused / trials <= 0.05 + 2 * math.sqrt(0.05 / trials)


def test_one_replay_decides_only_what_is_far_from_the_bound() -> None:
    assert decided([[FAR]])
    assert decided([[0.1, 1 / FAR]])
    assert not decided([[0.1, 1 / FAR - 0.01]])
    assert not decided([[FAR + 0.01]])
    assert not decided([[0.7], [0.7]])
    assert decided([[0.7], [0.71], [0.69]])
    assert not decided([[0.7], [0.99], [0.6]])
    assert not decided([[0.7], [1.4]])  # The mean is above, by chance perhaps.
    assert decided([[1.3], [1.4], [1.35]])
    assert not decided([[1.01], [1.4], [0.8]])
    assert decided([[0.7, 1.3], [0.7, 1.4], [0.9, 1.35]])


def seeded(factors: dict[int, float], counted: list[int]) -> Replay:
    """Replays whose latency is that many times as long, by seed."""

    def replayed(problem: Problem, schedule: Schedule, **options: object) -> tuple[Run, Estimate]:
        run, found = replay_estimate(problem, schedule, **options)  # type: ignore[arg-type]
        seed = int(str(options["seed"]))
        counted.append(seed)
        return run, replace(found, latency=found.latency * factors.get(seed, 1.0))

    return replayed


@pytest.fixture
def at_rate(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> Problem:
    monkeypatch.setattr(replays, "_MOST_ARRIVING", 2500)  # What several replays prove holds for short ones, too.
    return replace(problem, arrivals=Arrivals(rate=100.0))


def test_one_lucky_draw_of_arrivals_proves_no_rate(at_rate: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exeplan.forked.num_processes", lambda: 1)
    usual = optimize(at_rate, policies=("orca",))
    to_the_bound = 0.1 / usual.plan.replay.latency
    counted: list[int] = []
    lucky = seeded({0: 0.9 * to_the_bound} | dict.fromkeys(range(1, MOST_SEEDS), 1.15 * to_the_bound), counted)
    monkeypatch.setattr(seeded_replays, "replay_estimate", lucky)
    found = optimize(at_rate, policies=("orca",))
    assert {0, 1} <= set(counted)
    assert found.plan.schedule != usual.plan.schedule
    assert len(found.seeds) > 1
    assert np.mean([one.latency for one in found.seeds]) <= 0.1


def test_one_unlucky_draw_of_arrivals_refuses_no_plan(at_rate: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replay is a third above the bound, the others keep it: the mean of eight does."""
    usual = optimize(at_rate, policies=("orca",))
    to_the_bound = 0.1 / usual.plan.replay.latency
    unlucky = {0: 1.33 * to_the_bound} | dict.fromkeys(range(1, MOST_SEEDS), 0.8 * to_the_bound)
    monkeypatch.setattr(seeded_replays, "replay_estimate", seeded(unlucky, []))
    found = optimize(at_rate, policies=("orca",))
    assert found.plan.schedule == usual.plan.schedule
    assert found.seeds[0].latency > 0.1
    assert found.plan.replay.latency <= 0.1


def test_the_plan_at_a_rate_is_the_mean_of_its_replays(at_rate: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = optimize(at_rate, policies=("orca",)).plan
    tight = replace(at_rate, bound=Bound(seconds=usual.replay.latency / 0.8))
    found = optimize(tight, policies=("orca",))
    assert len(found.seeds) == found.plan.search["replays"] == as_json(found)["replays"]["seeds"] >= 3
    for name in ("latency", "ttft", "throughput"):
        assert getattr(found.plan.replay, name) == pytest.approx(np.mean([getattr(one, name) for one in found.seeds]))
    assert len({one.latency for one in found.seeds}) == len(found.seeds)
    text = optimum_report(found, tight)
    assert f"mean of {len(found.seeds)} replays" in text
    assert "replays of other requests: the bounds hold at 95 % confidence; p99-length" in text


@pytest.mark.parametrize("rate", [None, 100.0])
def test_what_ranks_a_plan_is_what_it_shows_and_saves(rate: float | None, problem: Problem) -> None:
    asked = replace(problem, arrivals=Arrivals(rate=rate) if rate else None)
    found = optimize(asked, policies=("orca", "chunked"))
    winner = next(c for c in found.candidates if c.policy == found.plan.schedule.policy)
    assert winner.replayed == found.plan.replay.throughput
    assert found.plan.replay.throughput == pytest.approx(np.mean([one.throughput for one in found.seeds]))
    if found.order is not None:
        assert found.order.num_seeds == len(found.seeds) > 1


def test_a_backlog_whose_further_replays_break_the_bound_is_searched_again(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines, "_DOUBT", 1.0)
    usual = optimize(problem, policies=("orca", "chunked"))
    assert len(usual.seeds) > 1
    late = dict.fromkeys(range(1, MOST_SEEDS), 1.3 * 0.1 / usual.plan.replay.latency)
    monkeypatch.setattr(seeded_replays, "replay_estimate", seeded(late, []))
    again = optimize(problem, policies=("orca", "chunked"))
    assert again.plan.schedule != usual.plan.schedule
    assert again.plan.replay.latency <= 0.1


def test_far_below_its_bounds_a_rate_takes_one_replay(at_rate: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(seeded_replays, "replay_estimate", seeded({}, counted))
    wide = replace(at_rate, bound=Bound(seconds=10.0))
    found = optimize(wide, policies=("orca",))
    assert counted == [0]
    assert "one replay proves the bounds: it uses at most 50 % of each" in optimum_report(found, wide)


def test_waits_that_chance_hides_are_replayed_with_more_seeds(at_rate: Problem) -> None:
    """Batches of requests near the capacity, far below the bound: one replay would do for the bound alone."""
    static = Schedule("static", {"batch_size": 8, "micro_batches": 1, "prefill_micro_batches": 1})
    capacity = steady_state(static, at_rate.workload, at_rate.cost).throughput
    near = replace(at_rate, bound=Bound(seconds=100.0), arrivals=Arrivals(rate=0.95 * capacity))
    _, found = Replays(near, seed=0, num_requests=None, further=True, one_replica=False).of(near, static, replicas=1)
    _, alone = Replays(near, seed=0, num_requests=None, further=False, one_replica=False).of(near, static, replicas=1)
    assert len(found) > 1
    assert len(alone) == 1
    assert not known_well(alone)
    ttft = mean_estimate(found).evidence["ttft"]
    assert ttft.low is not None
    assert ttft.value - ttft.low < 0.2 * ttft.value


def test_replays_at_the_same_time_are_those_of_one_after_the_other(
    at_rate: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = (Schedule("orca", {"max_num_seqs": number, "micro_batches": 1}) for number in (8, 4))
    apart, together = (Replays(at_rate, seed=0, num_requests=500, further=False, one_replica=False) for _ in range(2))
    _, expected = apart.of(at_rate, first, replicas=1)
    told = apart.told(at_rate, other, replicas=1)
    together.begin((at_rate, first, 1), [(at_rate, other, 1)])
    monkeypatch.setattr(seeded_replays, "replay_estimate", None)  # All is known.
    run, found = together.of(at_rate, first, replicas=1)
    assert len(run.requests) == 500
    assert found == expected
    assert together.told(at_rate, other, replicas=1) == told


def test_a_schedule_that_is_found_again_is_not_replayed_again(
    at_rate: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(seeded_replays, "replay_estimate", seeded(dict.fromkeys(range(MOST_SEEDS), 1e3), counted))
    with pytest.raises(Infeasible, match="needs"):
        optimize(at_rate, policies=("orca",))
    assert len(counted) < 8


def test_means_of_replays_have_no_figure_that_one_of_them_lacks(problem: Problem) -> None:
    _, one = replay_estimate(problem, Schedule("orca", {"max_num_seqs": 4}), seed=0)
    other = replace(one, throughput=3 * one.throughput, latency=None, percentiles={"p99-ttft": 3.0})
    found = mean_estimate([replace(one, percentiles={"p99-ttft": 1.0}), other])
    assert found.throughput == pytest.approx(2 * one.throughput)
    assert found.latency is None
    assert found.percentiles == {"p99-ttft": 2.0}
    assert mean_estimate([one]) is one
