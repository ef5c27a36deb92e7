"""Why a policy has no schedule: the binding bound with its own value, the residents, or the memory."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import Profile
from exeplan.core.schedule import Stage
from exeplan.planner.choice.infeasible import burst, policy_refusal, too_tight
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.units import seconds, show_seconds
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.files import load_workload

LAW = "normal:in=40,10,80;out=12,5,24"


def refused(problem: Problem, seqs: int, binds: str) -> str:
    point = {"max_num_seqs": seqs}
    outcome = problem.evaluate(problem.schedule("orca", point))
    lowest = SimpleNamespace(point=point, outcome=outcome)
    result: Any = SimpleNamespace(best=None, what_binds=(binds,), lowest_latency=lowest)
    return policy_refusal(problem, "orca", result)


@pytest.mark.parametrize("metric", ["ttft", "p99-ttft"])
def test_the_bound_that_binds_is_named_with_its_own_value(metric: str, profile: Profile) -> None:
    bounds = [Bound(seconds=10.0), Bound(seconds=0.001, metric=metric)]
    problem = make_problem(profile, load_workload(LAW), bounds[0], max_seqs=64).held_to(bounds)
    found = problem.estimate(problem.schedule("orca", {"max_num_seqs": 4}))
    value = found.ttft if metric == "ttft" else found.percentiles[metric]
    assert value is not None
    assert refused(problem, 4, "latency") == f"orca needs at least {show_seconds(value)} {bounds[1].name}"


def test_a_bound_that_is_hardly_broken_and_what_is_needed_look_unequal(profile: Profile) -> None:
    problem = make_problem(profile, load_workload(LAW), Bound(seconds=2.0), max_seqs=8)
    lowest = problem.schedule("orca", {"max_num_seqs": 1})
    message = str(too_tight(problem, lowest, [1.002]))
    assert message.startswith("latency bound 2 s, but the lowest-latency schedule, orca(max_num_seqs=1), needs 2.004 s")
    arriving = replace(problem, arrivals=Arrivals(rate=5.0))
    assert "needs 2.004 s for p99-length, the wait included; the bound is 2 s" in str(
        burst(arriving, lowest, problem.bound, 2.004)
    )


def test_residents_bind_before_the_memory(profile: Profile) -> None:
    problem = make_problem(profile, load_workload(LAW), Bound(seconds=10.0), max_seqs=10)
    assert refused(problem, 12, "memory") == "orca needs at least 12 resident requests, 10 are allowed"


def test_the_floor_is_of_the_stages_that_the_schedule_runs_on() -> None:
    """Less than what is needed, also where stages differ in their tensor-parallel size."""
    sheet = with_links(load_datasheet("a40-48gb"), load_cluster("a40"))
    profile = profile_from_datasheet(load_model_spec("opt-13b"), sheet, dtype="float16")
    stages = (Stage(devices=(0, 1, 2, 3), layers=(0, 34)), Stage(devices=(4,), layers=(34, 40)))
    problem = make_problem(profile, load_workload(LAW), Bound(seconds=0.01), cluster=load_cluster("a40").part(5))
    lowest = problem.schedule("orca", {"max_num_seqs": 1})
    latency = problem.at(stages).estimate(lowest).latency
    assert latency is not None
    message = str(too_tight(problem.at(stages), lowest, [latency / 0.01]))
    found = re.search(r"needs (.*?) for .*, 40 layers at (.*?) and (.*?) around them, 23 times", message)
    assert found, message
    needed, layer, around = (seconds(text.replace(" ", "")) for text in found.groups())
    assert 0.8 * needed < 23 * (40 * layer + around) <= 1.01 * needed
