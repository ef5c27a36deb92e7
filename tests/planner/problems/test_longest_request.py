"""No schedule or placement is taken whose KV caches could not hold the longest request of the workload."""

import math

import numpy as np
import pytest

import exeplan
from exeplan.core.batch import BLOCK_SIZE, num_blocks_for
from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.schedule import Schedule, Stage
from exeplan.errors import Infeasible
from exeplan.planner.choice.candidates import candidate
from exeplan.planner.problems.problem import Problem, check_placement_memory, make_problem
from exeplan.planner.problems.replays import kv_cache_tokens
from exeplan.simulator.closed_form import steady_state
from exeplan.workload.workload import Workload

NUM_GPUS = 8


def few_long() -> Workload:
    """1000 requests of 500 input and 100 output tokens, three of them of 30,000 input tokens."""
    return Workload("few-long", np.array([500, 30_000]), np.array([100, 100]), np.array([0.997, 0.003]))


@pytest.fixture(scope="module")
def one_gpu() -> Problem:
    """Qwen3-32B on one H100, which has room for one of the long requests next to small passes alone."""
    profile = exeplan.datasheet_profile("qwen3-32b", "h100-80gb")
    return make_problem(profile, few_long(), Bound(seconds=math.inf))


def test_what_leaves_no_room_for_the_longest_request_is_not_feasible(one_gpu: Problem) -> None:
    longest = one_gpu.workload.longest
    for schedule in (
        Schedule("orca", {"max_num_seqs": 8}),
        Schedule("chunked", {"max_num_seqs": 8, "max_num_batched_tokens": 2048}),
    ):
        fits = kv_cache_tokens(one_gpu, schedule) >= num_blocks_for(longest) * BLOCK_SIZE
        assert (one_gpu.evaluate(schedule).memory <= 1) == fits == (schedule.policy == "chunked")


def test_every_schedule_that_a_search_finds_holds_the_longest_request(one_gpu: Problem) -> None:
    found = [candidate(one_gpu, policy, "branch-and-bound") for policy in ("orca", "static", "chunked")]
    assert [one.schedule is not None for one in found] == [False, False, True]
    assert found[-1].schedule is not None
    assert kv_cache_tokens(one_gpu, found[-1].schedule) >= one_gpu.workload.longest


def test_stages_that_decode_hold_the_longest_request() -> None:
    profile, cluster = exeplan.datasheet_profile("qwen3-32b", "h100-80gb"), load_cluster("h100").part(2)
    layers = (0, profile.model.num_layers)
    stages = (Stage(devices=(0,), layers=layers, phase="prefill"), Stage(devices=(1,), layers=layers, phase="decode"))
    problem = make_problem(profile, few_long(), Bound(seconds=math.inf), cluster=cluster).at(stages)
    schedule = Schedule("waa-c", {"prefill_batch": 1, "decode_batch": 8})
    assert problem.kv_capacity_tokens(schedule) < problem.workload.longest
    assert problem.evaluate(schedule).memory > 1


def ranks(longest_input: int) -> Problem:
    """Qwen3-235B-A22B on 8 H100s, four ranks of attention on two GPUs each, 86 % of the memory."""
    cluster = load_cluster("h100").part(NUM_GPUS)
    profile = exeplan.datasheet_profile("qwen3-235b-a22b", "h100-80gb", cluster=cluster, engine="vllm")
    workload = Workload("long", np.array([1000, longest_input]), np.array([200, 200]), np.array([0.999, 0.001]))
    problem = make_problem(profile, workload, Bound(seconds=math.inf), cluster=cluster, utilization=0.86)
    stage = Stage(
        devices=tuple(range(NUM_GPUS)),
        layers=(0, load_model_spec("qwen3-235b-a22b").num_layers),
        data_parallel_size=4,
        expert_parallel_size=NUM_GPUS,
    )
    return problem.at((stage,))


@pytest.mark.parametrize(("longest_input", "fits"), [(20_000, True), (39_000, False)])
def test_every_rank_holds_the_longest_request(longest_input: int, fits: bool) -> None:
    problem, schedule = ranks(longest_input), Schedule("orca", {"max_num_seqs": 8})
    room = problem.kv_capacity_tokens(schedule) / 4
    assert (room >= problem.workload.longest) == fits
    assert (problem.evaluate(schedule).memory <= 1) == fits
    if fits:
        check_placement_memory(problem)
    else:
        with pytest.raises(Infeasible, match="one request of 39200 tokens"):
            check_placement_memory(problem)


def test_where_schedules_hold_more_they_need_no_more() -> None:
    """The memory of full batches that hold more than the longest request is that of their tokens."""
    profile = exeplan.datasheet_profile("opt-13b", "a40-48gb")
    workload = Workload("even", np.array([100]), np.array([100]), np.array([1.0]))
    problem = make_problem(profile, workload, Bound(seconds=math.inf))
    for size in (1, 4, 64):
        schedule = Schedule("orca", {"max_num_seqs": size})
        tokens = steady_state(schedule, workload, problem.cost).kv_tokens
        assert tokens > workload.longest
        assert problem.evaluate(schedule).memory == problem.bytes_held(schedule, tokens) / problem.memory
