"""Servers that only prefill and servers that only decode work side by side: x of one and y of the other serve what they
should, and the closed form knows it."""

from functools import cache

import numpy as np
import pytest

import exeplan
from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.schedule import Placement, Schedule, Sharding, Stage, num_servers, servers
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.problems.replays import replay_estimate
from exeplan.planner.problems.server_layouts import ServerLayout, server_placement
from exeplan.policies import load_policy
from exeplan.policies.shared.circulation import _side_by_side, circulate
from exeplan.simulator.memory import kv_bytes_per_token, weight_bytes
from exeplan.workload.files import load_workload

LAYERS = 32


@cache
def problem(workload: str = "azure-2023-conv") -> Problem:
    """Llama-3.1-8B on 8 H100s with SGLang's times."""
    cluster = load_cluster("h100").part(8)
    profile = exeplan.datasheet_profile("llama-3.1-8b", "h100-80gb", cluster=cluster, engine="sglang")
    return make_problem(profile, load_workload(workload), Bound(seconds=float("inf")), cluster=cluster)


def placed(num_prefill: int, num_decode: int, *, prefill: int = 1, decode: int = 1, workload: str) -> Problem:
    one = problem(workload)
    assert one.cluster
    layout = ServerLayout(
        prefill=Sharding(prefill), decode=Sharding(decode), num_prefill=num_prefill, num_decode=num_decode
    )
    placement = server_placement(one.cluster, one.profile.model, layout)
    assert placement
    return one.at(placement)


def schedule(one: Problem, decode_batch: int) -> Schedule:
    groups = {"micro_batches": stages} if (stages := len(one.cost.decode_stages)) > 1 else {}
    return load_policy("waa-c").schedule({"decode_batch": decode_batch, **groups}, one.workload)


@pytest.mark.parametrize("workload", ["azure-2023-conv", "normal:in=1000,100,1500;out=250,60,500"])
@pytest.mark.parametrize(
    ("counts", "sizes", "rows"),
    [
        ((1, 1), (1, 1), 200),
        ((2, 2), (1, 1), 400),
        ((1, 3), (1, 1), 600),
        ((3, 2), (1, 1), 400),
        ((4, 1), (1, 2), 400),
    ],
)
def test_the_closed_form_is_what_is_replayed(
    counts: tuple[int, int], sizes: tuple[int, int], rows: int, workload: str
) -> None:
    one = placed(*counts, prefill=sizes[0], decode=sizes[1], workload=workload)
    chosen = schedule(one, rows)
    form, (run, replayed) = one.estimate(chosen), replay_estimate(one, chosen, seed=0)
    assert run.num_preemptions == 0
    assert form.throughput == pytest.approx(replayed.throughput, rel=0.06)
    assert form.ttft == pytest.approx(replayed.ttft, rel=0.06)
    assert form.tpot == pytest.approx(replayed.tpot, rel=0.08)
    assert form.latency == pytest.approx(replayed.latency, rel=0.08)


def test_pairs_side_by_side_serve_as_many_times_what_one_pair_does() -> None:
    one, three = (placed(n, n, workload="azure-2023-conv") for n in (1, 3))
    alone, together = one.estimate(schedule(one, 450)), three.estimate(schedule(three, 1350))
    assert together.throughput == pytest.approx(3 * alone.throughput, rel=0.03)
    assert together.tpot == pytest.approx(alone.tpot, rel=0.05)
    _, replayed = replay_estimate(three, schedule(three, 1350), seed=0)
    _, single = replay_estimate(one, schedule(one, 450), seed=0)
    assert replayed.throughput == pytest.approx(3 * single.throughput, rel=0.05)


def test_a_server_runs_one_pass_at_a_time_and_all_of_them_work() -> None:
    one = placed(3, 2, workload="azure-2023-conv")
    run, _ = replay_estimate(one, schedule(one, 800), seed=0, num_requests=600)
    spans: dict[int, list[tuple[float, float]]] = {}
    for each in run.passes:
        [(stage, start, end)] = each.spans
        assert (each.num_prefill > 0) == (one.cost.placement[stage].phase == "prefill")
        spans.setdefault(stage, []).append((start, end))
    assert set(spans) == set(range(5))
    for own in spans.values():
        ends = np.array([end for _, end in sorted(own)])
        starts = np.array([start for start, _ in sorted(own)])
        assert (starts[1:] >= ends[:-1]).all()


def test_every_server_holds_all_weights_and_its_share_of_the_cache() -> None:
    profile = problem().profile
    alone = (Stage(layers=(0, LAYERS)),)
    layout: Placement = tuple(
        Stage(devices=(n,), layers=(0, LAYERS), phase=phase) for n, phase in enumerate(["prefill", *["decode"] * 3])
    )
    assert {weight_bytes(profile, layout, n) for n in range(4)} == {weight_bytes(profile, alone, 0)}
    each = kv_bytes_per_token(profile, alone, 0)
    assert kv_bytes_per_token(profile, layout, 0) == each
    assert kv_bytes_per_token(profile, layout, 2) == pytest.approx(each / 3)


def test_a_server_begins_where_the_layers_begin_again() -> None:
    halves = [
        ((0, 20), "prefill"),
        ((20, 32), "prefill"),
        ((0, 20), "prefill"),
        ((20, 32), "prefill"),
        ((0, 32), "decode"),
    ]
    placement = tuple(Stage(devices=(n,), layers=layers, phase=phase) for n, (layers, phase) in enumerate(halves))
    assert servers(placement, "prefill") == ((0, 1), (2, 3))
    assert num_servers(placement) == (2, 1)
    assert num_servers((Stage(layers=(0, 32)),)) is None


def test_batches_on_two_servers_by_hand() -> None:
    """Places 3, batches of 4, 1, 1, 4 s over and over: the servers take 4 | 1 1 ... and neither is ever idle."""
    batches = [[4.0], [1.0], [1.0], [4.0]] * 32
    both = _side_by_side(batches, 3, 2, 0.0)
    assert both.rate == pytest.approx(2 / 2.5, rel=0.02)
    assert both.inside == pytest.approx(2.5)
    alone = circulate(batches, 1)
    assert _side_by_side(batches, 1, 2, 0.0).rate == pytest.approx(alone.rate)
