"""A plan has dynamic workload adjustment where it serves more by it within a bound on the ttft, and only there."""

import math
from dataclasses import replace

import numpy as np
import pytest

from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.schedule import Schedule
from exeplan.planner.choice import pipelines
from exeplan.planner.choice.adjusting import adjusted_schedules, may_gain
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.problems.replays import replay_estimate
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.rates.request_times import times_under_backlog
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.files import load_workload

TAIL = Bound(seconds=0.12, metric="p99-ttft")


@pytest.fixture(scope="module")
def on_cluster() -> Problem:
    cluster = load_cluster("a40").part(4)
    sheet = with_links(load_datasheet(cluster.device), cluster)
    profile = profile_from_datasheet(load_model_spec("opt-13b"), sheet, dtype="float16")
    problem = make_problem(profile, load_workload("S"), Bound(seconds=math.inf), cluster=cluster)
    return replace(problem, one_pipeline=True, more_bounds=(TAIL,))


def test_an_adjusted_plan_serves_more_than_the_best_one_without(
    on_cluster: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    adjusted = optimize(on_cluster, policies=("rra",)).plan
    monkeypatch.setattr(pipelines, "may_gain", lambda problem, policy: False)
    plain = optimize(on_cluster, policies=("rra",)).plan
    assert "adjust_percent" in adjusted.schedule.variables
    assert "adjust_percent" not in plain.schedule.variables
    assert adjusted.replay is not None
    assert plain.replay is not None
    assert adjusted.replay.throughput > 1.05 * plain.replay.throughput
    for seed in (11, 12):  # Other requests than those that decided.
        found = replay_estimate(on_cluster.at(adjusted.placement), adjusted.schedule, seed=seed)[1]
        assert found.percentiles["p99-ttft"] is not None
        assert found.percentiles["p99-ttft"] <= 1.05 * TAIL.seconds


def test_elsewhere_plans_have_none(on_cluster: Problem) -> None:
    assert may_gain(on_cluster, "rra")
    assert may_gain(on_cluster, "waa-c")
    assert not may_gain(on_cluster, "orca")
    assert not may_gain(replace(on_cluster, arrivals=Arrivals(rate=1.0)), "rra")
    on_mean = replace(on_cluster, more_bounds=(Bound(seconds=0.12, metric="ttft"),))
    assert not may_gain(on_mean, "rra")
    assert not may_gain(replace(on_cluster, more_bounds=(replace(TAIL, seconds=math.inf),)), "rra")
    assert "adjust_percent" not in optimize(on_mean, policies=("rra",)).plan.schedule.variables


def test_the_schedules_looked_at_keep_the_bounds_by_the_closed_form_and_serve_no_less(on_cluster: Problem) -> None:
    placed = on_cluster.at(optimize(on_cluster, policies=("rra",)).plan.placement)
    schedule = Schedule("rra", {"prefill_batch": 4, "decode_steps": 1, "micro_batches": 4})
    outcomes = [placed.evaluate(one) for one in adjusted_schedules(placed, schedule)]
    throughputs = [outcome.throughput for outcome in outcomes]
    assert throughputs == sorted(throughputs, reverse=True)
    assert throughputs[-1] >= placed.evaluate(schedule).throughput
    assert all(outcome.latency <= placed.limit and outcome.memory <= 1 for outcome in outcomes)


def test_the_closed_form_keeps_adjusted_prefills_within_the_threshold_or_their_own_prompt(on_cluster: Problem) -> None:
    """Eight prompts of 256 tokens in the mean and at most 512: none is as long as 90 % of their mean sum."""
    schedule = Schedule("rra", {"prefill_batch": 8, "decode_steps": 8})
    loads = {"prefill_tokens": 8 * 256, "decode_batch": 30, "adjust_percent": 10}
    adjusted = replace(schedule, variables={**schedule.variables, **loads})
    points = [steady_state(one, on_cluster.workload, on_cluster.cost) for one in (schedule, adjusted)]
    plain, cut = (times_under_backlog(point, on_cluster.cost).ttft for point in points)
    mean = points[0].ttft
    assert np.abs(cut - mean).max() <= 0.1 * mean
    assert np.abs(plain - mean).max() > 0.2 * mean
