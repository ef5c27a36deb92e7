"""Plans with replicas under arrivals are replayed whole: the same replay in optimize, simulate and bench."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

import exeplan
from exeplan.core.bounds import MAX_ITL, Bound, utilizations
from exeplan.core.plan import Plan
from exeplan.core.profile import Profile
from exeplan.core.schedule import ROUTERS, Estimate, ReplicaGroup, Schedule, Stage
from exeplan.planner.choice.optimize import as_json
from exeplan.planner.load_problem import load_plan, plan_problems
from exeplan.planner.reports.report import optimum_report
from exeplan.units import show_bytes
from exeplan.workload.workload import Trace, Workload

LAW = "quantiles:in=p50:30,p99:200;out=p50:8,p99:30,p100:40;rank_correlation=0.4"
SCHEDULE = Schedule("orca", {"max_num_seqs": 2})


def plan_of(profile: Profile, *, replicas: int, router: str, rate: float | None) -> Plan:
    return Plan(
        model="demo",
        schedule=SCHEDULE,
        placement=(Stage(layers=(0, profile.model.num_layers)),),
        replicas=tuple(range(replicas)),
        router=router if replicas > 1 else None,
        workload=LAW,
        arrival_rate=rate,
        kv_cache_tokens=4096,
    )


@pytest.fixture(scope="module")
def capacity(profile: Profile) -> float:
    """Requests/s of one replica."""
    backlog = plan_of(profile, replicas=1, router=ROUTERS[0], rate=None)
    return exeplan.simulate(backlog, profile=profile).replay.throughput


def test_the_router_decides_how_long_requests_wait(profile: Profile, capacity: float) -> None:
    """At 85 % of the capacity of four replicas."""

    def replayed(router: str) -> Estimate:
        plan = plan_of(profile, replicas=4, router=router, rate=0.85 * 4 * capacity)
        return exeplan.simulate(plan, profile=profile, requests=8000).replay

    shortest, in_turn, by_chance = (replayed(router) for router in ROUTERS)
    assert shortest.ttft < 0.8 * in_turn.ttft
    assert in_turn.ttft < 0.8 * by_chance.ttft
    assert shortest.throughput == pytest.approx(0.85 * 4 * capacity, rel=0.05)
    assert by_chance.throughput == pytest.approx(shortest.throughput, rel=0.03)


def test_all_requests_of_the_plan_are_replayed_on_all_replicas(profile: Profile, capacity: float) -> None:
    plan = plan_of(profile, replicas=3, router="round-robin", rate=2 * capacity)
    found = exeplan.simulate(plan, profile=profile)
    assert found.routed is not None
    assert len(found.routed.replicas) == 3
    assert found.run is found.routed.replicas[0]
    assert len(found.whole.requests) == sum(len(run.requests) for run in found.routed.replicas) >= 8_000
    assert np.ptp(np.bincount(found.routed.chosen)) <= 1
    assert found.replay.kv_tokens == found.routed.peak_kv_tokens
    assert f"{len(found.whole.requests)} requests" in repr(found)


def test_under_a_backlog_and_without_replicas_one_is_replayed(profile: Profile) -> None:
    for replicas, rate in ((1, 20.0), (3, None)):
        found = exeplan.simulate(
            plan_of(profile, replicas=replicas, router="random", rate=rate), profile=profile, requests=50
        )
        assert found.routed is None
        assert found.whole is found.run


def test_unequal_groups_share_one_stream(profile: Profile, capacity: float) -> None:
    plan = plan_of(profile, replicas=2, router="shortest-queue", rate=2.2 * capacity)
    small = ReplicaGroup(
        schedule=Schedule("orca", {"max_num_seqs": 1}),
        placement=plan.placement,
        first_devices=(2,),
        kv_cache_tokens=1024,
    )
    found = exeplan.simulate(replace(plan, more_replicas=(small,)), profile=profile, requests=3000)
    assert found.routed is not None
    counts = np.bincount(found.routed.chosen)
    assert counts.sum() == 3000
    assert counts[2] < 0.95 * counts[:2].min()
    assert found.routed.replicas[2].peak_kv_tokens <= 1024


def test_the_longest_gap_is_that_of_the_group_whose_passes_take_longest(profile: Profile, capacity: float) -> None:
    """Also where the requests of the replay met no such pass: a bound on gaps is on the passes that the plan allows."""
    plan = plan_of(profile, replicas=1, router=ROUTERS[0], rate=0.3 * capacity)
    large = ReplicaGroup(
        schedule=Schedule("orca", {"max_num_seqs": 8}),
        placement=plan.placement,
        first_devices=(1,),
        kv_cache_tokens=4096,
    )
    plan = replace(plan, router=ROUTERS[0], more_replicas=(large,))

    def simulated(seconds: float) -> exeplan.Simulation:
        bounded = replace(plan, more_bounds=(Bound(seconds=seconds, metric=MAX_ITL),))
        return exeplan.simulate(bounded, profile=profile, requests=200)

    loose = simulated(100.0)
    short, long = (group.estimate.percentiles[MAX_ITL] for group in loose.groups)
    assert short < long
    assert loose.estimate.percentiles[MAX_ITL] == loose.plan.longest_stall["seconds"] == long
    assert loose.broken_bound is None
    seen = loose.replay.percentiles[MAX_ITL]
    assert seen < 0.9 * long
    between = simulated(0.95 * long)
    assert between.broken_bound == Bound(seconds=0.95 * long, metric=MAX_ITL)
    assert repr(between).endswith(f"a pass that the plan allows breaks the {between.broken_bound}")
    assert repr(simulated(0.5 * seen)).endswith(f"the replay breaks the {Bound(seconds=0.5 * seen, metric=MAX_ITL)}")


@pytest.mark.parametrize("unequal", [False, True])
def test_a_plan_without_a_limit_keeps_the_places_of_its_replicas(
    unequal: bool, profile: Profile, tmp_path: Path
) -> None:
    """The limit that is written is that of all GPUs together, as one that is given."""
    plan = plan_of(profile, replicas=4, router=ROUTERS[0], rate=None)
    other = replace(plan.groups[0], schedule=Schedule("orca", {"max_num_seqs": 1}), first_devices=(4, 5))
    plan = replace(plan, more_replicas=(other,) if unequal else ())
    before = [one.max_seqs for one in plan_problems(plan, profile=profile)]
    path = tmp_path / "plan.yaml"
    for _ in range(2):
        plan = exeplan.simulate(plan, profile=profile, requests=20).save(path)
        assert [one.max_seqs for one in plan_problems(load_plan(path), profile=profile)] == before
    assert plan.max_seqs == 64


def test_a_trace_comes_to_all_replicas_at_its_own_times(profile: Profile) -> None:
    """Bursts of eight: a router that counts gives two to each of four replicas."""
    times = np.repeat(np.arange(50.0), 8)
    workload = Workload.of_trace("bursts", Trace(np.full(400, 40), np.full(400, 10), times))
    plan = plan_of(profile, replicas=4, router="shortest-queue", rate=None)
    found = exeplan.simulate(replace(plan, trace_arrivals=True, workload=None), profile=profile, workload=workload)
    assert found.routed is not None
    assert found.whole.requests.arrivals.tolist() == times.tolist()
    assert (np.sort(found.routed.chosen.reshape(50, 8)) == np.repeat(np.arange(4), 2)).all()


def test_a_plan_at_a_rate_promises_what_all_its_replicas_do_together(tmp_path: Path) -> None:
    profile = exeplan.datasheet_profile("opt-13b", "a40-48gb", cluster="a40")
    solution = exeplan.optimize(
        profile, "S", cluster="a40", gpus=2, latency_bound="12s", arrival_rate=12.0, policy="orca"
    )
    plan = solution.save(tmp_path / "plan.yaml")
    assert plan.num_replicas == 2
    assert plan.replay is not None
    assert max(utilizations(solution.problem.bounds, plan.replay)) <= 1
    assert plan.replay.throughput == pytest.approx(12.0, rel=0.05)
    again = exeplan.simulate(plan, profile=profile)
    assert again.replay.to_dict() == pytest.approx(plan.replay.to_dict())
    assert "all 2 replicas are replayed behind the router" in optimum_report(solution.optimum, solution.problem)


def test_memory_is_that_of_the_rate_and_full_batches_are_named_apart() -> None:
    profile = exeplan.datasheet_profile("opt-13b", "a40-48gb", cluster="a40")
    solution = exeplan.optimize(
        profile, "S", cluster="a40", gpus=2, latency_bound="12s", arrival_rate=6.0, policy="orca"
    )
    optimum, full = solution.optimum, solution.optimum.full
    assert full is not None
    assert optimum.plan.estimate is not None
    assert optimum.plan.replay is not None
    assert optimum.plan.estimate.kv_tokens == pytest.approx(optimum.plan.replay.kv_tokens, rel=0.3)
    assert optimum.plan.estimate.kv_tokens < 0.7 * full.kv_tokens
    assert full.residents == pytest.approx(2 * optimum.plan.schedule["max_num_seqs"])
    assert as_json(optimum)["full_batches"] == asdict(full)
    text = optimum_report(optimum, solution.problem)
    at_rate, most = (show_bytes(x.memory_bytes_per_gpu) for x in (optimum.plan.estimate, full))
    assert f"memory per GPU: at most {at_rate} at this rate, {most} with full batches, of" in text
    assert f"full batches: {full.residents:.0f} residents hold {full.kv_tokens:.0f} tokens" in text
    again = exeplan.simulate(optimum.plan, profile=profile, workload="S", cluster="a40", requests=500)
    assert again.full == full
    # What limits on a queue, and waits in it, are told by: not by the rate.
    assert optimum.plan.capacity == again.plan.capacity == pytest.approx(full.throughput / 2, rel=1e-3)
    assert optimum.plan.full_throughput == pytest.approx(full.throughput, rel=1e-3)
    assert optimum.plan.full_throughput > 1.5 * optimum.plan.replay.throughput
    backlog = exeplan.optimize(profile, "S", cluster="a40", gpus=2, latency_bound="12s", policy="orca")
    assert backlog.optimum.full is None
    assert backlog.plan.capacity is None
    assert backlog.plan.full_throughput == backlog.plan.replay.throughput
    assert "full batches" not in optimum_report(backlog.optimum, backlog.problem)
