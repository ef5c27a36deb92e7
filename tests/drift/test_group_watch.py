"""A plan whose replicas are not equal is planned anew group by group, on the lengths that all of them see."""

from dataclasses import replace

import numpy as np
import pytest

from exeplan.core.bounds import Bound
from exeplan.core.plan import as_json, parse_plan
from exeplan.core.schedule import ROUTERS, ReplicaGroup, Schedule
from exeplan.drift.group_watch import GroupWatch
from exeplan.drift.state import RequestLengths, Rules
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.problems.problem import make_problem
from exeplan.workload.workload import Workload

POLICIES, BOUND = ("rra", "orca"), 0.45
RULES = Rules(every=4.0, dwell=0.0)


@pytest.fixture(scope="module")
def problem(profile):
    rng = np.random.default_rng(0)
    outputs = np.minimum(rng.gamma(2.0, 30.0, 20_000).astype(int) + 1, 400)
    workload = Workload.of("planned", inputs=np.full(20_000, 30), outputs=outputs, weights=np.ones(20_000))
    return make_problem(profile, workload, Bound(seconds=BOUND))


@pytest.fixture(scope="module")
def plan(problem):
    """One replica with the best schedule, and two with a slower one."""
    best = optimize(problem, policies=POLICIES).plan
    slower = ReplicaGroup(
        schedule=Schedule("orca", {"max_num_seqs": 3}), placement=best.placement, first_devices=(1, 2)
    )
    return replace(best, more_replicas=(slower,), router=ROUTERS[0])


def proposals(watch: GroupWatch, *, scale: float, number: int, first: int = 1, adopt: bool = True) -> list:
    """Of `number` looks, each after 200 requests with lengths times `scale`; all are adopted, or none."""
    rng, found = np.random.default_rng(1), []
    for look in range(first, first + number):
        outputs = np.minimum((rng.gamma(2.0, 30.0, 200) * scale).astype(int) + 1, 400)
        start = RULES.every * look
        watch.note([RequestLengths(start + i / 200, 30, n, True) for i, n in enumerate(outputs.tolist())], [])
        state, proposal = watch.look(start)
        if proposal:
            if adopt:
                watch.adopted(proposal, now=start)
            found.append((state, proposal))
    return found


def test_each_group_is_mended_on_its_own(plan, problem):
    watch = GroupWatch(plan, [problem, problem], rules=RULES, policies=POLICIES)
    found = proposals(watch, scale=1.6, number=12)
    changed = [
        tuple(new.schedule != old.schedule for new, old in zip(one.plan.groups, before.groups, strict=True))
        for (_, one), before in zip(found, [plan, *(one.plan for _, one in found)], strict=False)
    ]
    assert {*changed[:2]} == {(True, False), (False, True)}
    assert all(sum(one) == 1 for one in changed)
    for (_, one), before in zip(found[:2], [plan, found[0][1].plan], strict=True):
        assert [group.first_devices for group in one.plan.groups] == [(0,), (1, 2)]
        assert one.plan.router == before.router
        assert parse_plan(as_json(one.plan)).groups == one.plan.groups
        assert "of 3 replicas)" in one.reason
    for (state, one), before in zip(found[:2], [plan, found[0][1].plan], strict=True):
        number = 0 if one.plan.groups[0].schedule != before.schedule else 1
        law = replace(problem, workload=one.workload)
        changed_group = one.plan.groups[number]
        assert changed_group.capacity == pytest.approx(law.estimate(changed_group.schedule).throughput)
        assert state.predicted == one.old
    assert found[1][1].new.latency <= BOUND < found[0][1].old.latency
    assert found[1][1].new.throughput > found[0][1].new.throughput / 3


def changes(plan, before) -> list[bool]:
    """Which groups have another schedule."""
    return [new.schedule != old.schedule for new, old in zip(plan.groups, before.groups, strict=True)]


def test_what_is_proposed_for_one_group_stays_in_what_is_proposed_for_another_until_it_is_decided_on(plan, problem):
    watch = GroupWatch(plan, [problem, problem], rules=RULES, policies=POLICIES)
    (_, first), (_, second), *_ = proposals(watch, scale=1.6, number=12, adopt=False)
    assert sum(changes(first.plan, plan)) == 1
    assert changes(second.plan, plan) == [True, True]
    assert second.new.throughput == second.plan.estimate.throughput > first.new.throughput
    assert second.reason.count("of 3 replicas)") == 2
    watch.adopted(second, now=60.0)
    assert watch.plan == second.plan
    assert [one.plan.schedule for one in watch._watches] == [group.schedule for group in second.plan.groups]
    vetoed = GroupWatch(plan, [problem, problem], rules=RULES, policies=POLICIES)
    assert len(proposals(vetoed, scale=1.6, number=2, adopt=False)) == 1
    vetoed.vetoed(now=8.0)
    [(_, next_one), *_] = proposals(vetoed, scale=1.6, number=12, adopt=False)
    assert sum(changes(next_one.plan, plan)) == 1


def test_what_one_group_does_without_again_leaves_the_proposal_of_another_until_none_is_left(plan, problem):
    watch = GroupWatch(plan, [problem, problem], rules=RULES, policies=POLICIES)
    proposals(watch, scale=1.6, number=8, adopt=False)
    for one in watch._watches:
        one.rules = replace(RULES, gain=5.0)
    *_, (_, last) = proposals(watch, scale=1.0, number=20, first=20, adopt=False)
    assert sum(changes(last.plan, plan)) == len(last.own) == 1
    assert watch._pending == {}


def test_a_replan_of_one_group_begins_a_dwell_time_of_all(plan, problem):
    rules = Rules(every=4.0, dwell=24.0, looks=1)
    found = proposals(GroupWatch(plan, [problem, problem], rules=rules, policies=POLICIES), scale=1.6, number=16)
    times = np.array([state.seconds for state, _ in found])
    assert len(times) >= 2
    assert np.diff(times).min() >= rules.dwell


def test_nothing_is_proposed_while_the_lengths_are_those_planned(plan, problem):
    watch = GroupWatch(plan, [problem, problem], rules=RULES, policies=POLICIES)
    assert proposals(watch, scale=1.0, number=8) == []
    assert watch.observed is not None


def test_a_plan_by_hand_begins_anew(plan, problem):
    watch = GroupWatch(plan, [problem, problem], rules=RULES, policies=POLICIES)
    (first, *_) = proposals(watch, scale=1.6, number=6)
    watch.adopted(plan, now=30.0, problems=[problem, problem])
    assert watch.plan is plan
    assert first[1].plan != plan
    watch.vetoed(now=31.0)
    assert watch.planned is problem.workload


def test_what_was_proposed_before_is_the_same_whatever_its_figures_are_now(plan, problem):
    watch = GroupWatch(plan, [problem, problem], rules=RULES, policies=POLICIES)
    [(_, proposal), *_] = proposals(watch, scale=1.6, number=12)
    second = proposal.plan.groups[1]
    again = replace(proposal, plan=replace(proposal.plan, more_replicas=(replace(second, capacity=1.0),)))
    other = replace(second, schedule=Schedule("orca", {"max_num_seqs": 2}))
    assert watch.is_no_better(again, proposal.plan)
    assert not watch.is_no_better(replace(again, plan=replace(plan, more_replicas=(other,))), proposal.plan)
