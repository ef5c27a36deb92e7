"""Division of a cluster into replicas: against all divisions of small clusters; more GPUs are never worse, and no
division has more residents than may be."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.core.bounds import Bound
from exeplan.core.cluster import Cluster, Link, load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import Profile
from exeplan.core.schedule import num_devices
from exeplan.planner.choice.candidates import Known
from exeplan.planner.choice.optimize import optimize, with_frontier
from exeplan.planner.choice.pipelines import _SURE_GAIN, Effort, Pipelines
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.problems.replicas import (
    best_division,
    division_throughput,
    first_devices,
    num_replicas,
    pipeline_sizes,
)
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.progress import SILENT, Told
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.files import load_workload

A40 = load_cluster("a40")
LINK = Link(bytes_per_second=1e9, latency=1e-6)


def cluster(nodes: int, per_node: int) -> Cluster:
    return Cluster(
        name="c", device="d", num_nodes=nodes, gpus_per_node=per_node, memory_bytes=1, intra=LINK, inter=LINK
    )


def fits(counts: dict[int, int], nodes: int, per_node: int) -> bool:
    """Whether the pipelines can be packed: whole nodes first, the others by trying all ways to fill a node."""
    nodes -= sum(size // per_node * count for size, count in counts.items() if size > per_node)
    small = tuple(sorted(size for size, count in counts.items() if size <= per_node for _ in range(count)))

    def packs(left: tuple[int, ...], nodes: int) -> bool:
        if not left:
            return True
        if nodes < 1:
            return False
        for number in range(len(left), 0, -1):
            for taken in set(itertools.combinations(left, number)):
                if sum(taken) <= per_node:
                    rest = list(left)
                    for size in taken:
                        rest.remove(size)
                    if packs(tuple(rest), nodes - 1):
                        return True
        return False

    return nodes >= 0 and packs(small, nodes)


@given(
    nodes=st.integers(1, 3),
    per_node=st.integers(1, 3),
    values=st.lists(st.floats(0.1, 10), min_size=9, max_size=9),
    missing=st.sets(st.integers(0, 8)),
)
def test_no_other_division_has_more_throughput(nodes, per_node, values, missing):
    whole = cluster(nodes, per_node)
    known = {s: v for n, (s, v) in enumerate(zip(pipeline_sizes(whole), values, strict=False)) if n not in missing}
    found = best_division(known, whole)
    assert fits(dict(found), nodes, per_node)
    most = 0.0
    for counts in itertools.product(*(range(num_replicas(whole, size) + 1) for size in known)):
        division = dict(zip(known, counts, strict=True))
        if fits(division, nodes, per_node):
            most = max(most, division_throughput(known, division))
    assert abs(division_throughput(known, found) - most) < 1e-9


@given(
    nodes=st.integers(1, 4), per_node=st.integers(1, 8), values=st.lists(st.floats(0.1, 10), min_size=12, max_size=12)
)
def test_each_device_belongs_to_one_replica_and_small_ones_stay_in_a_node(nodes, per_node, values):
    whole = cluster(nodes, per_node)
    found = best_division(dict(zip(pipeline_sizes(whole), values, strict=False)), whole)
    seen: list[int] = []
    for size, devices in first_devices(found, whole).items():
        assert len(devices) == found[size]
        for first in devices:
            replica = tuple(range(first, first + size))
            assert size > per_node or whole.same_node(replica)
            assert size <= per_node or first % per_node == 0
            seen += replica
    assert len(seen) == len(set(seen))
    assert set(seen) <= set(range(whole.num_gpus))


def test_an_idle_gpu_is_better_than_a_slow_pipeline():
    assert best_division({1: 1.0, 2: 2.5, 3: 2.4}, cluster(1, 3)) == {2: 1, 1: 1}
    assert best_division({2: 2.5, 3: 2.4}, cluster(1, 3)) == {2: 1}


def test_equal_throughput_goes_to_fewer_replicas():
    assert best_division({1: 1.0, 2: 2.0, 4: 4.0}, cluster(1, 4)) == {4: 1}


def on_a40s(model: str, gpus: int, *, bound: float, max_seqs: int | None = None, rate: float | None = None) -> Problem:
    sheet = with_links(load_datasheet("a40-48gb"), A40)
    profile = profile_from_datasheet(load_model_spec(model), sheet, dtype="float16")
    problem = make_problem(profile, load_workload("S"), Bound(seconds=bound), cluster=A40.part(gpus), max_seqs=max_seqs)
    return replace(problem, arrivals=Arrivals(rate=rate) if rate else None)


def searched(problem: Problem, *, known: Known | None = None, told: Told = SILENT) -> Pipelines:
    return Pipelines(
        problem,
        ("orca",),
        method="branch-and-bound",
        seed=0,
        risk=None,
        known=known,
        effort=Effort(report=False),
        told=told,
    )


@pytest.mark.parametrize("rate", [None, 0.001])
@pytest.mark.parametrize("bound", [6.0, math.inf])
@pytest.mark.parametrize("max_seqs", [1, 3, 8, 96])
def test_more_gpus_are_never_worse_with_as_many_residents(max_seqs: int, bound: float, rate: float | None) -> None:
    """A model that needs two GPUs, by the closed form; at a rate that is far below what full batches serve. To within
    the gain from which the places of idle GPUs are worth that all replicas are equal."""
    before = 0.0
    for gpus in (2, 3, 4, 5):
        pipelines = searched(on_a40s("qwen3-32b", gpus, bound=bound, max_seqs=max_seqs, rate=rate))
        division = pipelines.best()
        assert sum(count * pipelines.parts[size].max_seqs for size, (_, count) in division.items()) <= max_seqs
        assert (1 + _SURE_GAIN) * pipelines.throughput(division) >= (1 - 1e-9) * before
        before = pipelines.throughput(division)


class Recorded(Told):
    """Keeps the shares that it is told."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def __call__(self, title: str, share: float) -> None:
        self.shares.append(share)


@pytest.mark.parametrize(("max_seqs", "again"), [(8, True), (30_000, False)])
def test_places_of_idle_gpus_are_tried_where_there_are_too_few(max_seqs: int, again: bool) -> None:
    """On one of two pipelines that fit three GPUs; of the work, the first search is told as two of three parts."""
    known: Known = {}
    told = Recorded()
    problem = on_a40s("qwen3-32b", 3, bound=math.inf, max_seqs=max_seqs)
    pipelines = searched(problem, known=known, told=told)
    assert pipelines.alike is again
    assert len(known) == 2 + again
    assert told.shares == sorted(told.shares)
    assert told.shares[-1] == pytest.approx(1.0 if again else 2 / 3)


@pytest.mark.parametrize("rate", [None, 0.001])
def test_fewer_residents_than_gpus_are_as_many_replicas(rate: float | None, profile: Profile) -> None:
    """In proportion no GPU of four has one of three residents, so that one is idle."""
    nodes = replace(cluster(1, 4), memory_bytes=8 << 30)
    problem = make_problem(profile, load_workload("S"), Bound(seconds=math.inf), cluster=nodes, max_seqs=3)
    pipelines = searched(replace(problem, arrivals=Arrivals(rate=rate) if rate else None))
    assert pipelines.best() == {1: ("orca", 3)}
    assert pipelines.parts[1].max_seqs == 1


def test_one_replica_has_the_places_of_idle_gpus_wherever_it_is_looked_at() -> None:
    """But not where as many residents may be as were measured on each GPU."""
    problem = on_a40s("qwen3-32b", 3, bound=math.inf, max_seqs=8)
    found = optimize(problem, policies=("orca",))
    (candidate,) = found.candidates
    assert candidate.placement is not None
    assert (found.plan.num_replicas, num_devices(found.plan.placement)) == (1, 2)
    assert found.plan.schedule["max_num_seqs"] == problem.replica(candidate.placement, 1, alike=True).max_seqs == 8
    assert max(trial.point["max_num_seqs"] for trial in with_frontier(problem, candidate, num_bounds=4).frontier) == 8
    measured = on_a40s("qwen3-32b", 3, bound=6.0)
    assert measured.max_seqs == 3 * measured.replica(candidate.placement, 1, alike=True).max_seqs // 2
    plan = optimize(measured, policies=("orca",)).plan
    assert (plan.num_replicas, num_devices(plan.placement), plan.gpus) == (1, 2, 3)
    assert plan.max_seqs == measured.max_seqs * 2 // 3


def test_the_frontier_of_replicas_has_the_throughput_of_all_and_holds_the_plan():
    problem = on_a40s("opt-13b", 4, bound=11.5)
    found = optimize(problem, policies=("orca",))
    assert found.plan.num_replicas > 1
    (candidate,) = found.candidates
    frontier = with_frontier(problem, candidate, num_bounds=4)
    assert frontier.best is not None
    assert frontier.best.outcome.throughput == pytest.approx(found.plan.estimate.throughput)
    assert any(trial.outcome == frontier.best.outcome for trial in frontier.frontier)
