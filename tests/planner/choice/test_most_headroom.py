"""At a rate the policy that keeps the bounds furthest is planned, and whatever is told is a replay."""

from dataclasses import replace

import pytest

from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.planner.choice.answers import Optimum
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.choice.pipelines import Effort
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.problems.replays import replay_estimate
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.files import load_workload

POLICIES = ("chunked", "orca")
SHORT = Effort(num_requests=3000)


@pytest.fixture(scope="module")
def problem() -> Problem:
    """Full batches of `chunked` sustain more within the bounds; its waits exceed the second one sooner."""
    cluster = load_cluster("a40").part(1)
    sheet = with_links(load_datasheet("a40-48gb"), load_cluster("a40"))
    profile = profile_from_datasheet(load_model_spec("opt-13b"), sheet, dtype="bfloat16")
    asked = make_problem(profile, load_workload("S"), Bound(seconds=6.0), cluster=cluster)
    bounds = (Bound(seconds=0.8, metric="p95-ttft"),)
    return replace(asked, more_bounds=bounds, arrivals=Arrivals(rate=5.5))


@pytest.fixture(scope="module")
def alone(problem: Problem) -> dict[str, Optimum]:
    return {policy: optimize(problem, policies=(policy,), effort=SHORT) for policy in POLICIES}


def test_the_policy_with_the_most_headroom_is_planned(problem: Problem, alone: dict[str, Optimum]) -> None:
    found = optimize(problem, policies=POLICIES, effort=SHORT).plan
    headrooms = {policy: one.plan.rate_headroom or 0.0 for policy, one in alone.items()}
    assert headrooms["orca"] > headrooms["chunked"] + 0.02
    assert found.schedule == alone["orca"].plan.schedule
    assert found.rate_headroom == pytest.approx(headrooms["orca"])


def test_what_is_told_of_a_plan_is_its_replay(problem: Problem, alone: dict[str, Optimum]) -> None:
    """Also of other requests, to within what chance makes of them."""
    for one in alone.values():
        assert one.plan.estimate == one.plan.replay
        (row,) = one.candidates
        assert row.estimate == one.plan.replay
        _, fresh = replay_estimate(problem, one.plan.schedule, seed=99)
        assert one.plan.estimate is not None
        assert fresh.ttft == pytest.approx(one.plan.estimate.ttft, rel=0.1)
        assert fresh.latency_p50 == pytest.approx(one.plan.estimate.latency_p50, rel=0.03)
        figure = one.plan.replay.evidence["ttft"] if one.plan.replay else None
        assert figure is not None
        assert figure.low is not None
        assert figure.high is not None
        assert figure.low < one.plan.estimate.ttft < figure.high
