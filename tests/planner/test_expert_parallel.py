"""Expert parallelism and attention data parallelism in plans: what engines state, what the search finds, what runs.

The referee makes plans by hand over the layouts that the engine states, draws their control variables evenly over the
logarithm, then around the best, and times them by the closed form: its best is near the search's, and none within the
bounds has over 1 % more throughput.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from exeplan.api import datasheet_profile, optimize
from exeplan.core.bounds import Bound
from exeplan.core.cluster import Cluster, load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan, save_plan
from exeplan.core.profile import Profile, load_profile, save_profile
from exeplan.core.schedule import Placement, Schedule, Sharding, Stage, needs_other_engine
from exeplan.errors import Infeasible, InputError
from exeplan.planner.choice.optimize import optimize as find
from exeplan.planner.choice.pipelines import Effort
from exeplan.planner.load_problem import read_plan
from exeplan.planner.problems.check_placement import check_placement
from exeplan.planner.problems.layouts import groups, layouts
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.reports.placement_text import show_placement
from exeplan.policies import load_policy
from exeplan.profiler.datasheets.engine_constants import expert_shardings, load_engine
from exeplan.runner.engine_process.build import engine_setup
from exeplan.workload.workload import Workload

MODEL = "deepseek-v2-lite"
BOUND = 0.03
SHORT_REPLAYS = Effort(num_requests=4000, close_ones=False, report=False)
"""It is closed forms that are compared, and replays of these batches take four fifths of a search."""
MEMORY = 24 << 30
"""Of each GPU, of which the engine keeps 13.5 GiB: the weights need several."""


@cache
def profile() -> Profile:
    return datasheet_profile(MODEL, "h100-80gb", engine="vllm")


@cache
def cluster() -> Cluster:
    return load_cluster("h100").part(4)


@cache
def workload() -> Workload:
    """Long answers: what limits the batch is the KV cache, which tensor parallelism does not divide."""
    rng = np.random.default_rng(5)
    inputs, outputs = (np.rint(mean * rng.lognormal(-0.08, 0.4, 500)).astype(int) for mean in (600, 900))
    return Workload.of("drawn", inputs=np.maximum(inputs, 1), outputs=np.maximum(outputs, 1), weights=np.ones(500))


def problem(timed: Profile, most: int = 8000) -> Problem:
    tight = make_problem(timed, workload(), Bound(seconds=math.inf), cluster=cluster(), max_seqs=most, memory=MEMORY)
    return replace(tight, more_bounds=(Bound(seconds=BOUND, metric="tpot"),))


def planned(timed: Profile, policy: str, most: int = 8000) -> Plan:
    return find(problem(timed, most), policies=(policy,), effort=SHORT_REPLAYS).plan


@cache
def planned_with_layouts(policy: str, most: int) -> Plan:
    return planned(profile(), policy, most)


def by_hand(sharding: Sharding, count: int) -> Placement:
    """So many stages with an even share of the layers each."""
    size, layers = sharding.num_devices, profile().model.num_layers
    return tuple(
        Stage(
            devices=tuple(range(size * number, size * (number + 1))),
            layers=(layers * number // count, layers * (number + 1) // count),
            data_parallel_size=sharding.data_parallel_size,
            expert_parallel_size=sharding.expert_parallel_size,
        )
        for number in range(count)
    )


class Drawn(NamedTuple):
    """A plan by hand: its throughput, 0 where it breaks a limit, its placement and variables, and the share of the GPUs
    that one replica takes."""

    throughput: float
    placed: Problem
    values: Mapping[str, int]
    share: float


@pytest.mark.parametrize(("policy", "most"), [("chunked", 8000), ("rra", 2000)])
def test_no_plan_by_hand_beats_the_search(policy: str, most: int) -> None:
    found = planned_with_layouts(policy, most)
    assert found.estimate is not None
    assert found.estimate.tpot <= BOUND
    assert found.estimate.memory_bytes_per_gpu <= MEMORY
    rng, module, drawn = np.random.default_rng(0), load_policy(policy), list[Drawn]()
    whole = problem(profile(), most)

    def tried(placed: Problem, values: Mapping[str, int], share: float) -> Drawn:
        outcome = placed.evaluate(module.schedule(values, workload()))
        kept = outcome.latency <= placed.limit and outcome.memory <= 1
        return Drawn(outcome.throughput / share if kept else 0.0, placed, values, share)

    for sharding in (*profile().expert_shardings, Sharding(1), Sharding(2), Sharding(4)):
        for count in (1, 2, 4):
            size = sharding.num_devices * count
            if size > 4 or 4 % size:
                continue
            try:
                placed = whole.part(size, replicas=4 // size).at(by_hand(sharding, count))
            except Infeasible:
                continue
            for _ in range(16):
                values = dict(module.enumerated(count)[rng.integers(len(module.enumerated(count)))])
                for knob in module.knobs(workload(), placed.max_seqs):
                    values[knob.name] = knob.values[int(len(knob.values) ** rng.random()) - 1]
                drawn.append(tried(placed, values, size / 4))
    assert len(drawn) > 120
    best = max(drawn, key=lambda one: one.throughput)
    for _ in range(100):
        near = dict(best.values)
        for knob in module.knobs(workload(), best.placed.max_seqs):
            wanted = near[knob.name] * rng.uniform(0.7, 1.4)
            near[knob.name] = min(knob.values, key=lambda value: abs(value - wanted))
        best = max(best, tried(best.placed, near, best.share), key=lambda one: one.throughput)
    assert 0.8 * found.estimate.throughput <= best.throughput <= 1.01 * found.estimate.throughput


def test_the_layouts_gain_and_are_in_the_plan(tmp_path: Path) -> None:
    plain = replace(profile(), measurements=_plain(profile()))
    with_layouts, without = planned_with_layouts("chunked", 8000), planned(plain, "chunked")
    assert with_layouts.estimate is not None
    assert without.estimate is not None
    assert with_layouts.estimate.throughput > 1.02 * without.estimate.throughput
    assert needs_other_engine(with_layouts.placement)
    assert not needs_other_engine(without.placement)
    assert "expert parallel" in show_placement(with_layouts.placement)
    save_plan(with_layouts, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml").placement == with_layouts.placement
    with pytest.raises(InputError, match="which the engine here does not run"):
        engine_setup(with_layouts, load_model_spec(MODEL))


def _plain(one: Profile) -> tuple[object, ...]:
    return tuple(m for m in one.measurements if m.op not in ("dense", "experts", "all_to_all") and m.sharding[2] == 1)


def test_an_engine_states_its_layouts() -> None:
    spec, dense, sizes = load_model_spec("deepseek-v3"), load_model_spec("llama-3.1-8b"), (1, 2, 4, 8)
    vllm, trtllm = (expert_shardings(load_engine(name), spec, sizes) for name in ("vllm", "trtllm"))
    assert {one.num_devices for one in vllm} == {2, 4, 8, 16, 32}
    assert Sharding(8, 1, 8) in vllm
    assert Sharding(8, 4, 32) in vllm
    assert {one.tensor_parallel_size for one in trtllm if one.data_parallel_size > 1} == {1}
    assert expert_shardings(load_engine("vllm"), dense, sizes) == ()
    silent = replace(load_engine("vllm"), data_parallel_attention="", expert_parallel="")
    assert expert_shardings(silent, spec, sizes) == ()


def test_times_for_the_engine_here_have_no_such_layouts() -> None:
    assert datasheet_profile(MODEL, "h100-80gb").expert_shardings == ()
    assert profile().expert_shardings != ()


def test_a_profile_with_layouts_is_read_as_it_was_written(tmp_path: Path) -> None:
    save_profile(profile(), tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json").measurements == profile().measurements


def test_ranks_stay_in_nodes_and_experts_may_not() -> None:
    two = replace(load_cluster("h100"), num_nodes=2)
    spec, shardings = load_model_spec("deepseek-v3"), (Sharding(16, 1, 16), Sharding(8, 2, 16), Sharding(1, 8, 8))
    found = layouts(two, spec, (), shardings=shardings)
    assert [(one.size, one.data_parallel_size) for one in found] == [(16, 2), (8, 8)]
    assert groups(two, found[0]) == [tuple(range(16))]
    assert groups(two, found[1]) == [tuple(range(8)), tuple(range(8, 16))]
    assert len(layouts(two, spec, (), shardings=shardings, across_nodes=True)) == 3


@pytest.mark.parametrize(
    ("degrees", "model", "message"),
    [
        ({"data_parallel_size": 2, "expert_parallel_size": 2}, "llama-3.1-8b", "list replicas instead"),
        ({"expert_parallel_size": 3}, MODEL, "does not divide the 64 experts"),
    ],
)
def test_a_plan_by_hand_has_layouts_that_the_model_can_have(degrees: dict[str, int], model: str, message: str) -> None:
    spec = load_model_spec(model)
    stage = Stage(devices=(0, 1, 2, 3, 4, 5), layers=(0, spec.num_layers), **degrees)
    with pytest.raises(InputError, match=message):
        check_placement((stage,), spec, Schedule("orca", {"max_num_seqs": 4}))


def test_uneven_routing_is_planned_reported_and_kept(tmp_path: Path) -> None:
    given = {"model": MODEL, "cluster": cluster(), "engine": "vllm", "tpot": "30ms", "policy": "orca"}
    even, uneven = (
        optimize(None, "normal:in=600,200,1200;out=300,100,600", routing=routing, **given)
        for routing in (None, "power_law_1.2")
    )
    plan = uneven.save(tmp_path / "plan.yaml")
    assert (even.plan.routing, plan.routing, read_plan(tmp_path / "plan.yaml").routing) == (
        None,
        "power_law_1.2",
        "power_law_1.2",
    )
    assert even.plan.profile_fingerprint != plan.profile_fingerprint
    assert "routing power_law_1.2: a decode pass of about" in repr(uneven)
    assert "routing" not in repr(even)


def test_a_profile_keeps_its_routing_and_takes_no_other(tmp_path: Path) -> None:
    made = datasheet_profile(MODEL, "h100-80gb", tensor_parallel_sizes=(1,), routing="power_law_1.2")
    save_profile(made, tmp_path / "uneven.json")
    assert load_profile(tmp_path / "uneven.json").routing == "power_law_1.2"
    law = "normal:in=600,200,1200;out=300,100,600"
    kept = optimize(made, law, latency_bound="inf", routing="power_law_1.2", policy="orca", max_num_seqs=64)
    assert kept.plan.routing == "power_law_1.2"
    with pytest.raises(InputError, match=r"--routing even goes with .* has routing 'power_law_1\.2'; give --routing"):
        optimize(made, law, latency_bound="inf", routing="even")
    with pytest.raises(InputError, match=r"--routing power_law_1\.2 goes with .* has no table of uneven routing"):
        optimize(profile(), law, latency_bound="inf", routing="power_law_1.2")
    (tmp_path / "uneven.json").write_text((tmp_path / "uneven.json").read_text().replace('"power_law_1.2"', '"even"'))
    with pytest.raises(InputError, match="a file keeps an uneven routing only"):
        load_profile(tmp_path / "uneven.json")
