"""Division of a cluster into replicas: against all divisions of small clusters."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.core.bounds import Bound
from exeplan.core.cluster import Cluster, Link, load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.planner.choice.optimize import optimize, with_frontier
from exeplan.planner.problems.problem import make_problem
from exeplan.planner.problems.replicas import (
    best_division,
    division_throughput,
    first_devices,
    num_replicas,
    pipeline_sizes,
)
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.workload.files import load_workload

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


def test_the_frontier_of_replicas_has_the_throughput_of_all_and_holds_the_plan():
    a40 = load_cluster("a40")
    sheet = with_links(load_datasheet("a40-48gb"), a40)
    profile = profile_from_datasheet(load_model_spec("opt-13b"), sheet, dtype="float16")
    problem = make_problem(profile, load_workload("S"), Bound(seconds=11.5), cluster=a40.part(4))
    found = optimize(problem, policies=("orca",))
    assert found.plan.num_replicas > 1
    (candidate,) = found.candidates
    frontier = with_frontier(problem, candidate, num_bounds=4)
    assert frontier.best is not None
    assert frontier.best.outcome.throughput == pytest.approx(found.plan.estimate.throughput)
    assert any(trial.outcome == frontier.best.outcome for trial in frontier.frontier)
