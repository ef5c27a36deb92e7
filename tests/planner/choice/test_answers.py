"""What is answered where no schedule that was found keeps the bounds: the lowest-latency one, or what it lacks; and why
a rate is refused."""

import re
from dataclasses import replace

import pytest

from exeplan.core.bounds import Bound
from exeplan.core.cluster import Cluster, Link
from exeplan.core.profile import Profile
from exeplan.errors import Infeasible
from exeplan.planner.choice.answers import last_resort, refuse_rate, solved
from exeplan.planner.choice.candidates import reached
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.choice.pipelines import _RETRIES, Effort, Pipelines, Proof
from exeplan.planner.margins.margins import Risk
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.progress import SILENT
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Trace, Workload

LAW = "normal:in=40,10,80;out=12,5,24"
NOT_IN_ALL = r"sustains the rate for the 100 requests of the trace, but not in \d+ of 40 samples"


def searched(problem: Problem, *policies: str, risk: Risk | None = None) -> Pipelines:
    return Pipelines(
        problem,
        policies,
        method="branch-and-bound",
        seed=0,
        risk=risk,
        known=None,
        effort=Effort(report=False),
        told=SILENT,
    )


def at_share_of_capacity(profile: Profile, share: float, policy: str) -> Problem:
    """A trace of a hundred requests at this share of what full batches of the policy serve."""
    lengths = load_workload("lognormal:in=60,30,300;out=40,30,300").sample(100, seed=3, stratified=False)
    problem = make_problem(profile, Workload.of_trace("drawn", Trace(*lengths)), Bound(seconds=100.0), max_seqs=16)
    (found,) = searched(problem, policy).found.values()
    return replace(problem, arrivals=Arrivals(rate=share * reached(found)))


def given_up(profile: Profile, required: float) -> Pipelines:
    """Replays broke a bound at every try, as after the last search under tighter bounds."""
    problem = make_problem(profile, load_workload(LAW), Bound(seconds=0.1), max_seqs=16)
    asked = replace(problem, min_throughput=required)
    pipelines = searched(asked, "orca")
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


def test_a_rate_that_other_samples_of_the_trace_would_not_sustain_is_refused_for_that(profile: Profile) -> None:
    busy = at_share_of_capacity(profile, 0.97, "orca")
    with pytest.raises(Infeasible, match=rf"^orca\(.*\) {NOT_IN_ALL}") as refusal:
        optimize(busy, policies=("orca",), risk=Risk(share=0.01))
    assert re.fullmatch(r"\d+ of 40 samples of the trace would not sustain the rate", refusal.value.nearest)


def test_a_policy_that_other_samples_of_the_trace_overload_says_so_next_to_the_plan(profile: Profile) -> None:
    pipelines = searched(at_share_of_capacity(profile, 0.97, "static"), "orca", "static", risk=Risk(share=0.01))
    for key in pipelines.found:
        pipelines.replay(key)
    refusals = {one.policy: one.refusal for one in solved(pipelines, pipelines.best()).candidates}
    assert refusals["orca"] == ""
    assert re.match(rf"static\(.*\) {NOT_IN_ALL}", refusals["static"])


def test_a_rate_of_the_whole_capacity_is_refused_as_a_queue_without_end(profile: Profile) -> None:
    message = r"^orca\(.*\) sustains (.*) requests/s, \1 requests/s .* come: its queue would grow without end$"
    with pytest.raises(Infeasible, match=message):
        optimize(at_share_of_capacity(profile, 1.0, "orca"), policies=("orca",))


def test_a_rate_of_the_whole_capacity_of_replicas_is_told_as_it_was_given(profile: Profile) -> None:
    link = Link(bytes_per_second=1e9, latency=1e-5)
    four = Cluster(
        name="c", device="affine", num_nodes=1, gpus_per_node=4, memory_bytes=8 << 30, intra=link, inter=link
    )
    problem = make_problem(profile, load_workload(LAW), Bound(seconds=100.0), cluster=four, max_seqs=64)
    # Of replicas that share the places alone, as at a rate.
    pipelines = searched(replace(problem, arrivals=Arrivals(rate=1.0)), "orca")
    (size, _), best = max(pipelines.found.items(), key=lambda pair: pipelines.count(pair[0][0]) * reached(pair[1]))
    count = pipelines.count(size)
    assert count > 1
    rate = count * reached(best)
    each, of_all = (re.escape(f"{value:.3g}") for value in (reached(best), rate))
    message = (
        rf"^orca\(.*\) sustains {each} requests/s, a replica with it gets {each} of {of_all} requests/s \(Poisson\): "
    )
    with pytest.raises(Infeasible, match=message):
        optimize(replace(problem, arrivals=Arrivals(rate=rate)), policies=("orca",))


@pytest.mark.parametrize(
    ("margin", "seconds", "why"),
    [
        (1e6, 100.0, "keeps the bounds, but not with the margin of --risk, in its replays"),
        (0.0, 1e-6, "breaks a bound in its replays"),
    ],
)
def test_a_policy_that_is_given_up_for_its_margin_alone_is_said_to_keep_the_bounds(
    margin: float, seconds: float, why: str, profile: Profile
) -> None:
    pipelines = searched(at_share_of_capacity(profile, 0.5, "orca"), "orca", risk=Risk(share=0.01))
    ((key, found),) = pipelines.found.items()
    assert found.schedule is not None
    assert pipelines.margin is not None
    run, replays = pipelines.replays.of(pipelines.parts[1], found.schedule, replicas=1)
    pipelines.problem = pipelines.problem.held_to([Bound(seconds=seconds)])
    pipelines.tries[key] = _RETRIES - 1
    pipelines._disprove(key, Proof(run=run, replays=replays, margin=replace(pipelines.margin, values=(margin,))))
    assert pipelines.found[key].refusal == f"orca {why}"
