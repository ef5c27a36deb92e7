"""The order of plans is decided by replays: intervals cover, what may be better is replayed, and noise is called so."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.model import load_model_spec
from exeplan.core.profile import Profile
from exeplan.core.schedule import Estimate, Schedule
from exeplan.planner import pipelines, replays
from exeplan.planner.optimize import optimize
from exeplan.planner.problem import Problem, drift_headroom, make_problem
from exeplan.planner.ranking import MOST_SEEDS, Order, behind
from exeplan.planner.replays import replay_estimate, too_short
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.simulator.run import Run
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


def test_one_seed_makes_nothing_certain() -> None:
    less, interval = behind([10.0], [9.0])
    assert (round(less, 9), interval) == (0.1, math.inf)
    assert not Order(runner_up="orca", behind=less, interval=interval, num_seeds=1).certain


def test_noise_is_called_noise() -> None:
    close = Order(runner_up="orca(max_num_seqs=4)", behind=0.002, interval=0.005, num_seeds=8)
    assert "orca(max_num_seqs=4), is within noise: 0.2 % less throughput by replay (+- 0.5 % at 95 %" in str(close)
    assert "within noise" not in str(replace(close, behind=0.02))


def test_the_replay_ranks_and_not_the_closed_form(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = optimize(problem, policies=("orca", "chunked"))
    loser = next(name for name in ("orca", "chunked") if name != usual.plan.schedule.policy)
    # The closed form is the same; the replays of what it ranks first are far worse.
    monkeypatch.setattr(pipelines, "replay_estimate", scaled({usual.plan.schedule.policy: 0.5}))
    assert optimize(problem, policies=("orca", "chunked")).plan.schedule.policy == loser


def test_what_the_closed_form_may_misjudge_is_replayed(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = optimize(problem, policies=("orca", "rra"))
    first, second = sorted(usual.candidates, key=lambda c: -c.estimate.throughput)
    gap = first.estimate.throughput / second.estimate.throughput
    # The second one's replay is better than its closed form by just what the search allows for; the first one's is no
    # worse than its closed form, which would have the second one replayed anyhow.
    monkeypatch.setattr(pipelines, "_DOUBT", 1.1 * gap - 1)
    replays = scaled({first.policy: 1.05, second.policy: 1.2 * gap})
    monkeypatch.setattr(pipelines, "replay_estimate", replays)
    assert optimize(problem, policies=("orca", "rra")).plan.schedule.policy == second.policy
    monkeypatch.setattr(pipelines, "_DOUBT", 0.0)
    assert optimize(problem, policies=("orca", "rra")).plan.schedule.policy == first.policy


def test_seeds_are_added_until_the_order_is_certain(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "_DOUBT", 1.0)
    found = optimize(problem, policies=("orca", "chunked"))
    assert found.order is not None
    assert found.order.certain or found.order.num_seeds == MOST_SEEDS or found.order.behind > 1.0
    monkeypatch.setattr(pipelines, "_MOST_ADDED", 0)
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

    monkeypatch.setattr(pipelines, "replay_estimate", replayed)
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


def test_the_best_of_three_misjudged_variants_is_kept(on_cluster: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Schedule, object]] = []

    def replayed(problem: Problem, schedule: Schedule, **options: object) -> tuple[Run, Estimate]:
        run, found = replay_estimate(problem, schedule, **options)  # type: ignore[arg-type]
        variant = schedule, problem.cost.placement
        if variant not in seen:
            seen.append(variant)
        return run, replace(found, throughput=(0.5, 0.4, 0.8)[min(seen.index(variant), 2)] * found.throughput)

    monkeypatch.setattr(pipelines, "replay_estimate", replayed)
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
