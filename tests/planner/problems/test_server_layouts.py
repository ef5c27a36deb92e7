"""Servers are placed on GPUs of their own, and the search finds the numbers and shapes that trying all finds."""

from dataclasses import replace

import pytest

import exeplan
from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.schedule import Placement, Schedule, Sharding, Stage
from exeplan.errors import InputError
from exeplan.planner.choice.search_space import search_variants
from exeplan.planner.problems.check_placement import check_placement
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.problems.server_layouts import (
    ServerLayout,
    layout_of,
    server_layouts,
    server_placement,
    server_shardings,
)
from exeplan.workload.files import load_workload

SIZES = [Sharding(1), Sharding(2), Sharding(4)]


@pytest.fixture(scope="module")
def problem() -> Problem:
    """Llama-3.1-8B on 5 H100s with vLLM's times, 10 s for long prompts."""
    cluster = load_cluster("h100").part(5)
    profile = exeplan.datasheet_profile("llama-3.1-8b", "h100-80gb", cluster=cluster, engine="vllm")
    found = make_problem(profile, load_workload("azure-2023-code"), Bound(seconds=10.0), cluster=cluster)
    return replace(found, whole_servers=True, max_seqs=300)


@pytest.mark.parametrize("num_gpus", [2, 3, 8, 16, 64])
def test_servers_have_gpus_of_their_own_within_a_node(num_gpus: int) -> None:
    cluster, spec = replace(load_cluster("h100"), num_nodes=8).part(num_gpus), load_model_spec("llama-3.1-8b")
    layouts = server_layouts(cluster, SIZES, prefill_gpus=(8, 20, 40), one_pipeline=True)
    assert layouts
    for layout in layouts:
        placement = server_placement(cluster, spec, layout)
        assert placement is not None
        assert layout_of(placement) == layout
        devices = [device for stage in placement for device in stage.devices]
        assert len(set(devices)) == len(devices)
        assert max(devices) < num_gpus
        assert all(cluster.same_node(stage.devices) for stage in placement)
        left = num_gpus - len(devices)
        assert left < min(layout.prefill.num_devices, layout.decode.num_devices)


def test_what_is_several_replicas_is_listed_for_one_pipeline_alone() -> None:
    cluster = load_cluster("h100").part(4)
    pair = ServerLayout(prefill=Sharding(1), decode=Sharding(1), num_prefill=2, num_decode=2)
    assert pair in server_layouts(cluster, SIZES, prefill_gpus=(), one_pipeline=True)
    assert pair not in server_layouts(cluster, SIZES, prefill_gpus=(), one_pipeline=False)


def test_sizes_that_no_engine_hands_over_between_are_left_out() -> None:
    cluster = load_cluster("h100").part(8)
    layouts = server_layouts(cluster, [Sharding(2), Sharding(5)], prefill_gpus=(), one_pipeline=True)
    assert {(one.prefill, one.decode) for one in layouts} == {(Sharding(2), Sharding(2))}


def test_the_search_finds_what_trying_every_layout_finds(problem: Problem) -> None:
    assert problem.cluster
    found = search_variants(problem, "waa-c", method="branch-and-bound", bound=problem.limit)
    every = search_variants(problem, "waa-c", method="exhaustive", bound=problem.limit)
    assert found is not None
    assert every is not None
    assert found[0].best
    assert every[0].best
    assert found[1] == every[1]
    assert found[0].best.outcome.throughput == pytest.approx(every[0].best.outcome.throughput, rel=1e-3)
    layout = layout_of(found[1])
    assert layout
    assert (layout.num_prefill, layout.num_decode) != (1, 1)


def test_a_server_that_does_not_hold_the_weights_is_none(problem: Problem) -> None:
    assert problem.cluster
    shardings = server_shardings(problem.profile, problem.cluster, 12e9, across_nodes=False)
    assert Sharding(1) not in shardings
    assert Sharding(4) in server_shardings(problem.profile, problem.cluster, 30e9, across_nodes=False)


def test_servers_of_a_phase_are_alike_and_each_has_all_layers() -> None:
    spec, schedule = load_model_spec("llama-3.1-8b"), Schedule("waa-c", {"decode_batch": 8, "prefill_batch": 1})

    def stages(*widths: int, last: int = 32) -> Placement:
        prefills = tuple(Stage(devices=tuple(range(width)), layers=(0, 32), phase="prefill") for width in widths)
        return (*prefills, Stage(devices=(9,), layers=(0, last), phase="decode"))

    check_placement(stages(1, 1), spec, schedule)
    with pytest.raises(InputError, match="the 2 servers that prefill have different shapes"):
        check_placement(stages(1, 2), spec, schedule)
    with pytest.raises(InputError, match="layers on stages that decode"):
        check_placement(stages(1, 1, last=31), spec, schedule)
