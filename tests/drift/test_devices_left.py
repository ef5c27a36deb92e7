"""The plan for the devices left keeps the bounds where one of them can, and else the tightest, which it says."""

from dataclasses import replace
from pathlib import Path

import pytest

from exeplan.core.bounds import Bound
from exeplan.core.plan import Plan, as_json, single_plans
from exeplan.core.profile import Profile, save_profile
from exeplan.core.schedule import Schedule, Stage
from exeplan.drift.devices_left import _request, largest_part, plan_for_left, service_plan
from exeplan.errors import Infeasible, InputError
from exeplan.planner.choice.optimize import optimize, resolve_policies
from exeplan.planner.load_problem import plan_from, plan_request
from exeplan.policies import load_policy

PIPELINE = (Stage(devices=(0,), layers=(0, 2)), Stage(devices=(1,), layers=(2, 6)))


@pytest.fixture
def plan(profile: Profile, tmp_path: Path) -> Plan:
    """A pipeline of two devices, under a bound that is wide for one of them."""
    save_profile(profile, tmp_path / "p.json")
    return Plan(
        model="demo",
        schedule=Schedule("orca", {"max_num_seqs": 8, "micro_batches": 2}),
        placement=PIPELINE,
        workload="fixed:in=40;out=90",
        profile=str(tmp_path / "p.json"),
        bound=Bound(seconds=20.0),
    )


def alone(plan: Plan) -> Plan:
    """What `exeplan optimize` finds for one device."""
    policies = resolve_policies("auto")
    return optimize(plan_request(plan).problem(None), policies=policies).plan


def test_one_device_left_serves_what_optimize_promises_for_one_device_under_the_same_bound(plan):
    left = plan_for_left(plan, 0, [[1]])
    assert left.missed == 1.0
    assert left.plan.estimate.throughput == pytest.approx(alone(plan).estimate.throughput, rel=0.03)
    assert left.plan.placement == (Stage(devices=(1,), layers=(0, 6)),)
    assert left.plan.estimate.latency <= 20.0
    assert left.verdict.startswith(f"1 of 2 devices are left to replica 0: {left.plan.schedule} keeps ")


def test_where_no_plan_keeps_the_bound_it_keeps_the_tightest_and_says_it(plan):
    tight = replace(plan, bound=Bound(seconds=0.02))
    with pytest.raises(Infeasible) as refusal:
        alone(tight)
    left = plan_for_left(tight, 0, [[0]])
    assert left.missed == pytest.approx(refusal.value.wider, rel=0.03)
    assert left.plan.estimate.latency <= 0.02 * left.missed * (1 + 1e-9)
    assert "the tightest that a plan keeps there, instead of" in left.verdict


def test_a_rate_that_one_device_does_not_sustain_is_given_up_and_said(plan):
    most = alone(plan).estimate.throughput
    left = plan_for_left(replace(plan, arrival_rate=1.5 * most), 0, [[0]])
    assert left.missed == 1.0
    assert left.plan.estimate.throughput == pytest.approx(most, rel=0.1)
    assert "more than any plan sustains there" in left.verdict
    assert "more than any" not in plan_for_left(replace(plan, arrival_rate=0.3 * most), 0, [[0]]).verdict


def test_at_a_rate_a_replica_shares_the_stream_with_the_others(plan):
    four = replace(plan, replicas=(0, 2, 4, 6), router="shortest-queue", arrival_rate=8.0)
    asked = _request(four, single_plans(four)[1], [[2]]).arrivals
    assert (asked.rate, asked.sharing) == (2.0, 4)


@pytest.mark.parametrize("by_node", [[], [[], []]])
def test_without_a_device_there_is_no_plan(plan, by_node):
    with pytest.raises(Infeasible, match="no devices are left"):
        plan_for_left(plan, 0, by_node)


def test_a_plan_without_a_profile_cannot_be_planned_anew(plan):
    with pytest.raises(InputError, match="the plan names no profile"):
        plan_for_left(replace(plan, profile=None), 0, [[0]])


@pytest.mark.parametrize(
    ("by_node", "part"),
    [
        ([], ()),
        ([[3]], ((3,),)),
        ([[0, 1, 2], [3]], ((0, 1, 2),)),
        ([[0], [1, 2]], ((1, 2),)),
        ([[0, 1, 2], [3, 4], []], ((0, 1), (3, 4))),
        ([[0], [1], [2]], ((0,), (1,), (2,))),
    ],
)
def test_the_largest_part_has_as_many_devices_on_each_node(by_node, part):
    assert largest_part(by_node) == part


def test_one_replica_changes_and_the_others_keep_their_places_and_devices(plan):
    figures = replace(alone(plan).estimate, throughput=300.0, kv_tokens=900.0)
    three = replace(plan, replicas=(0, 2, 4), router="round-robin", estimate=figures)
    left = plan_for_left(three, 1, [[3]])
    assert left.plan.placement == (Stage(devices=(3,), layers=(0, 6)),)
    whole = service_plan(three, {1: left.plan})
    before, after = single_plans(three), single_plans(whole)
    assert [one.placement for one in after] == [before[0].placement, left.plan.placement, before[2].placement]
    assert [first for group in whole.groups for first in group.first_devices] == [0, 2, 4]
    assert [one.capacity for one in after] == [100.0, left.plan.estimate.throughput, 100.0]
    now = left.plan.replay or left.plan.estimate
    assert whole.estimate.throughput == pytest.approx(200.0 + now.throughput)
    assert whole.estimate.kv_tokens == pytest.approx(600.0 + now.kv_tokens)
    assert plan_from(as_json(whole)) == whole
    assert service_plan(three, {}) is three


@pytest.mark.parametrize("share", [0.3, 1.5])
def test_at_a_rate_capacities_stay_those_of_full_batches(plan: Plan, share: float) -> None:
    """Also where the rate is given up on the devices left."""
    most = alone(plan).estimate.throughput
    at_rate = replace(plan, arrival_rate=share * most, capacity=3 * most, estimate=alone(plan).estimate)
    left = plan_for_left(at_rate, 0, [[0]]).plan
    assert service_plan(at_rate, {0: left}).full_throughput == pytest.approx(most, rel=0.2)
    two = replace(at_rate, replicas=(0, 2), router="shortest-queue", arrival_rate=2 * share * most)
    whole = service_plan(two, {1: plan_for_left(two, 1, [[3]]).plan})
    assert [one.capacity for one in single_plans(whole)] == [3 * most, pytest.approx(most, rel=0.2)]


def test_fewer_devices_hold_as_many_fewer_requests(plan):
    for most, rows in ((8, 4), (3, 1)):
        schedule = plan_for_left(replace(plan, max_seqs=most), 0, [[0]]).plan.schedule
        assert load_policy(schedule.policy).starts_together(schedule) <= rows


def test_idle_devices_held_no_requests(plan):
    limited = replace(plan, max_seqs=8)
    assert _request(replace(limited, gpus=3), limited, [[0]]).max_num_seqs == 4
