"""What is answered where no schedule that was found keeps the bounds: the lowest-latency one, or what it lacks."""

import re
from dataclasses import replace

import pytest

from exeplan.core.bounds import Bound
from exeplan.core.profile import Profile
from exeplan.errors import Infeasible
from exeplan.planner.choice.answers import last_resort, refuse_rate
from exeplan.planner.choice.pipelines import Effort, Pipelines
from exeplan.planner.problems.problem import make_problem
from exeplan.progress import SILENT
from exeplan.workload.files import load_workload

LAW = "normal:in=40,10,80;out=12,5,24"


def given_up(profile: Profile, required: float) -> Pipelines:
    """Replays broke a bound at every try, as after the last search under tighter bounds."""
    problem = make_problem(profile, load_workload(LAW), Bound(seconds=0.1), max_seqs=16)
    asked = replace(problem, min_throughput=required)
    pipelines = Pipelines(
        asked,
        ("orca",),
        method="branch-and-bound",
        seed=0,
        risk=None,
        known=None,
        effort=Effort(report=False),
        told=SILENT,
    )
    (key,) = pipelines.found
    found = pipelines.found[key]
    assert found.search is not None
    assert found.search.best is not None
    pipelines.found[key] = replace(found, schedule=None, refusal="orca breaks a bound in its replays")
    return pipelines


def test_the_lowest_latency_schedule_is_no_answer_below_the_required_throughput(profile: Profile) -> None:
    pipelines = given_up(profile, required=1000.0)
    refuse_rate(pipelines, advise=False)
    with pytest.raises(Infeasible) as refusal:
        last_resort(pipelines, advise=False)
    message = (
        r"1e\+03 requests/s are required, but within the bounds the most is (.*) requests/s, by orca\(max_num_seqs=1\)"
    )
    found, most = re.match(message, str(refusal.value)), refusal.value.reached
    assert found, str(refusal.value)
    assert most == pytest.approx(float(found[1]), rel=0.01)
    assert refusal.value.nearest == f"{found[1]} requests/s would be sustained"
    served = given_up(profile, required=0.9 * most)
    refuse_rate(served, advise=False)
    replay = last_resort(served, advise=False).plan.replay
    assert replay is not None
    assert replay.throughput == pytest.approx(most, rel=0.01)
