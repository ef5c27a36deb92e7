"""Several replicas behind a router: each runs as if it were alone with its requests, and the router's law holds."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.core.profile import Profile
from exeplan.core.runs.metrics import RequestRecord, summarize
from exeplan.core.schedule import ROUTERS, Schedule
from exeplan.errors import InputError
from exeplan.progress import Told
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.simulator.routed import Replica, RoutedRun, routed_replay
from exeplan.simulator.run import Run

from .test_replay_against_stepwise import control_variables, machine

ONE_AT_A_TIME = Schedule("orca", {"max_num_seqs": 1})
POLICIES = ("orca", "chunked", "rra", "static", "waa-c")


def alone(schedule: Schedule, cost: CostModel, given: int, output: int) -> float:
    """Seconds that a request takes without any other."""
    run = replay(schedule, cost, input_tokens=np.array([given]), output_tokens=np.array([output]), num_blocks=10**6)
    return float(run.requests.last_tokens[0])


def served_in_turn(router: str, arrivals: list[float], seconds: list[float], replicas: int) -> list[tuple[int, float]]:
    """Oracle for replicas that run one request at a time: the replica of each request, and when it is over."""
    dice, ends = random.Random(0), [[0.0] for _ in range(replicas)]
    found = []
    for number, (now, length) in enumerate(zip(arrivals, seconds, strict=True)):
        if router == "round-robin":
            chosen = number % replicas
        elif router == "random":
            chosen = dice.choice(range(replicas))
        else:
            present = [sum(end > now for end in own) for own in ends]
            fewest = [k for k in range(replicas) if present[k] == min(present)]
            chosen = min(fewest, key=lambda k, first=number % replicas: (k - first) % replicas)
        ends[chosen].append(max(now, ends[chosen][-1]) + length)
        found.append((chosen, ends[chosen][-1]))
    return found


@pytest.mark.parametrize("router", ROUTERS)
@given(data=st.data())
def test_replicas_that_run_one_request_at_a_time_are_queues_in_the_head(
    router: str, data: st.DataObject, cost: CostModel
) -> None:
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=40))
    gaps = data.draw(st.lists(st.floats(1e-6, 0.02), min_size=len(lengths), max_size=len(lengths)))
    arrivals = np.cumsum(gaps)
    count = data.draw(st.integers(1, 5))
    run = routed_replay(
        [Replica(schedule=ONE_AT_A_TIME, cost=cost, num_blocks=100)] * count,
        router,
        input_tokens=np.array([given for given, _ in lengths]),
        output_tokens=np.array([output for _, output in lengths]),
        arrivals=arrivals,
    )
    seconds = [alone(ONE_AT_A_TIME, cost, *length) for length in lengths]
    expected = served_in_turn(router, arrivals.tolist(), seconds, count)
    assert run.chosen.tolist() == [chosen for chosen, _ in expected]
    assert run.requests.last_tokens == pytest.approx([end for _, end in expected], rel=1e-9)


def test_three_requests_on_two_replicas_by_hand(cost: CostModel) -> None:
    """The second goes to the empty one, the third behind the shorter answer, the fourth where nothing is any more."""
    short, long = (alone(ONE_AT_A_TIME, cost, 10, output) for output in (2, 20))
    run = routed_replay(
        [Replica(schedule=ONE_AT_A_TIME, cost=cost, num_blocks=100)] * 2,
        "shortest-queue",
        input_tokens=np.full(4, 10),
        output_tokens=np.array([20, 2, 2, 2]),
        arrivals=np.array([0.0, 0.0, 1.5 * short, 3 * short]),
    )
    assert run.chosen.tolist() == [0, 1, 1, 1]
    assert run.requests.last_tokens == pytest.approx([long, short, 2.5 * short, 4 * short])


class Heard(Told):
    """Keeps the shares that it is told."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def __call__(self, title: str, share: float) -> None:
        self.shares.append(share)


@pytest.mark.parametrize("router", ROUTERS)
def test_the_share_of_all_requests_that_is_over_is_told(router: str, cost: CostModel) -> None:
    heard = Heard()
    routed_replay(
        [Replica(schedule=ONE_AT_A_TIME, cost=cost, num_blocks=100)] * 2,
        router,
        input_tokens=np.full(8, 10),
        output_tokens=np.full(8, 3),
        arrivals=np.arange(8.0),
        told=heard,
    )
    assert heard.shares == [number / 8 for number in range(1, 9)]


def routed(data: st.DataObject, profile: Profile, router: str) -> tuple[list[Replica], dict[str, Any], RoutedRun]:
    """Unequal replicas of any policy, layout and cache, under any load."""
    encoder = data.draw(st.booleans())
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=30))
    least = max(-(-(given + output) // 16) for given, output in lengths)
    replicas = []
    for policy in data.draw(st.lists(st.sampled_from(POLICIES), min_size=1, max_size=4)):
        cost = machine(profile, data.draw, separate=policy.startswith("waa"), encoder=encoder)
        several = {"micro_batches": data.draw(st.integers(1, 3))} if len(cost.placement) > 1 else {}
        schedule = Schedule(policy, {**control_variables(policy, data.draw), **several})
        blocks = least + data.draw(st.integers(0, 12) | st.just(1000))
        replicas.append(Replica(schedule=schedule, cost=cost, num_blocks=blocks))
    more: dict[str, Any] = {}
    load = data.draw(st.sampled_from(["backlog", "arrivals", "clients", "deadlines"]))
    if load == "clients":
        more = {"concurrency": data.draw(st.integers(1, 12)), "think_seconds": data.draw(st.sampled_from([0.0, 0.01]))}
    if load in ("arrivals", "deadlines"):
        gaps = st.lists(st.sampled_from([0.0, 0.0007, 0.013]), min_size=len(lengths), max_size=len(lengths))
        more["arrivals"] = np.cumsum(data.draw(gaps))
    if load == "deadlines":
        patience = st.lists(st.sampled_from([0.01, 0.1, 1.0]), min_size=len(lengths), max_size=len(lengths))
        more["deadlines"] = np.array(data.draw(patience))
    inputs, outputs = (np.array(side) for side in zip(*lengths, strict=True))
    more |= {"input_tokens": inputs, "output_tokens": outputs}
    return replicas, more, routed_replay(replicas, router, **more)


def same(one: Run, other: Run) -> None:
    assert one.passes == other.passes
    assert one.requests == other.requests
    assert (one.num_passes, one.peak_kv_tokens, one.num_preemptions) == (
        other.num_passes,
        other.peak_kv_tokens,
        other.num_preemptions,
    )


@pytest.mark.parametrize("router", ROUTERS)
@given(data=st.data())
def test_each_replica_runs_its_requests_as_if_it_were_alone(router: str, data: st.DataObject, profile: Profile) -> None:
    replicas, load, run = routed(data, profile, router)
    for number, (replica, own) in enumerate(zip(replicas, run.replicas, strict=True)):
        here = run.chosen == number
        if not here.any():
            assert not len(own.requests)
            continue
        due = load.get("deadlines")
        expected = replay(
            replica.schedule,
            replica.cost,
            input_tokens=load["input_tokens"][here],
            output_tokens=load["output_tokens"][here],
            num_blocks=replica.num_blocks,
            arrivals=run.requests.arrivals[here],
            deadlines=None if due is None else due[here],
        )
        same(own, expected)
        assert list(own.requests) == [run.requests[int(i)] for i in np.flatnonzero(here)]


@pytest.mark.parametrize("router", ROUTERS)
@given(data=st.data())
def test_each_request_is_served_once_on_the_replica_that_the_law_says(
    router: str, data: st.DataObject, profile: Profile
) -> None:
    replicas, load, run = routed(data, profile, router)
    requests, every, dice = run.requests, range(len(replicas)), random.Random(0)
    assert len(requests) == len(run.chosen) == len(load["input_tokens"]) == sum(len(r.requests) for r in run.replicas)
    assert requests.input_tokens.tolist() == load["input_tokens"].tolist()
    assert all(len(r.token_times) in (0, n) for r, n in zip(requests, load["output_tokens"], strict=True))
    assert load.get("deadlines") is not None or all(len(r.token_times) for r in requests)
    over = np.where(requests.answered, requests.last_tokens, requests.starts)
    for number, (chosen, now) in enumerate(zip(run.chosen.tolist(), requests.arrivals, strict=True)):
        turn = number % len(replicas)
        if router == "round-robin":
            assert chosen == turn
        elif router == "random":
            assert chosen == dice.choice(every)
        else:
            present = Counter(run.chosen[:number][over[:number] > now].tolist())
            order = [*every[turn:], *every[:turn]]
            assert chosen == min(order, key=lambda k, present=present: present[k])


@pytest.mark.parametrize("router", ROUTERS)
@given(data=st.data())
def test_a_single_replica_is_the_replay_without_a_router(router: str, data: st.DataObject, profile: Profile) -> None:
    (replica, *_), load, _ = routed(data, profile, router)
    run = routed_replay([replica], router, **load)
    expected = replay(replica.schedule, replica.cost, num_blocks=replica.num_blocks, **load)
    same(run.replicas[0], expected)
    assert run.requests == expected.requests


def test_a_closed_loop_keeps_its_clients_busy_on_all_replicas(cost: CostModel) -> None:
    run = routed_replay(
        [Replica(schedule=Schedule("orca", {"max_num_seqs": 4}), cost=cost, num_blocks=100)] * 3,
        "shortest-queue",
        input_tokens=np.full(60, 30),
        output_tokens=np.arange(60) % 7 + 1,
        concurrency=6,
    )
    answers = np.sort(run.requests.last_tokens)
    assert run.requests.arrivals == pytest.approx([0.0] * 6 + answers[:-6].tolist())
    assert Counter(run.chosen[:6].tolist()) == {0: 2, 1: 2, 2: 2}


@pytest.mark.parametrize("policy", ["orca", "rra"])
def test_a_burst_is_spread_by_the_shortest_queue_and_waits_where_chance_puts_it(policy: str, cost: CostModel) -> None:
    """Bursts of 12 every two seconds on four replicas of which each takes three at once."""
    variables = {"orca": {"max_num_seqs": 3}, "rra": {"prefill_batch": 3, "decode_steps": 20}}[policy]
    replicas = [Replica(schedule=Schedule(policy, variables), cost=cost, num_blocks=100)] * 4
    arrivals = np.repeat(2.0 * np.arange(20), 12)

    def longest_wait(router: str) -> float:
        run = routed_replay(
            replicas,
            router,
            input_tokens=np.full(240, 30),
            output_tokens=np.full(240, 20),
            arrivals=arrivals,
        )
        assert Counter(run.chosen.tolist()).total() == 240
        return float((run.requests.starts - run.requests.arrivals).max())

    shortest, in_turn, by_chance = (longest_wait(router) for router in ROUTERS)
    assert shortest == in_turn < 1e-9
    assert by_chance > alone(replicas[0].schedule, cost, 30, 20) / 2


def test_capacities_keep_the_slow_replica_from_having_as_many_as_the_fast_one(profile: Profile) -> None:
    """Of which one is four times as fast, at 0.8 of what both together serve."""
    schedule, costs = (
        Schedule("orca", {"max_num_seqs": 8}),
        [CostModel(replace(profile, calibration=f)) for f in (4, 1)],
    )
    lengths = {"input_tokens": np.full(2000, 30), "output_tokens": np.full(2000, 10)}
    backlogs = [replay(schedule, cost, num_blocks=1000, **lengths).requests for cost in costs]
    capacities = [2000 / float(requests.last_tokens.max()) for requests in backlogs]
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / (0.8 * sum(capacities)), 2000))

    def late(of_plan: Sequence[float | None]) -> float:
        replicas = [
            Replica(schedule=schedule, cost=cost, num_blocks=1000, capacity=capacity)
            for cost, capacity in zip(costs, of_plan, strict=True)
        ]
        run = routed_replay(replicas, "shortest-queue", arrivals=arrivals, **lengths)
        return float(np.quantile(run.requests.last_tokens - arrivals, 0.99))

    assert late(capacities) < 0.9 * late((None, None))


def test_only_the_shortest_queue_gives_a_faster_replica_more(cost: CostModel) -> None:
    """One that takes one at a time, one that takes 16, at a rate of which the first cannot serve half."""
    slow, fast = (Replica(schedule=Schedule("orca", {"max_num_seqs": n}), cost=cost, num_blocks=1000) for n in (1, 16))
    arrivals = np.cumsum(np.random.default_rng(0).exponential(0.35 * alone(ONE_AT_A_TIME, cost, 30, 10), 2000))
    load = {"input_tokens": np.full(2000, 30), "output_tokens": np.full(2000, 10), "arrivals": arrivals}
    runs = {router: routed_replay([slow, fast], router, **load) for router in ROUTERS}
    shares = {router: float(np.mean(run.chosen == 1)) for router, run in runs.items()}
    assert shares["shortest-queue"] > 0.6
    assert shares["round-robin"] == 0.5
    assert shares["random"] == pytest.approx(0.5, abs=0.05)
    waits = {router: float(np.mean(run.requests.starts - arrivals)) for router, run in runs.items()}
    assert waits["shortest-queue"] < 0.5 * waits["round-robin"]


def test_the_merged_requests_give_the_figures_of_all_records(profile: Profile, cost: CostModel) -> None:
    """Arrays that were merged against records that were put together one by one."""
    rng = np.random.default_rng(3)
    run = routed_replay(
        [Replica(schedule=Schedule("orca", {"max_num_seqs": n}), cost=cost, num_blocks=60) for n in (2, 5, 3)],
        "random",
        input_tokens=rng.integers(1, 60, 300),
        output_tokens=rng.integers(1, 40, 300),
        arrivals=np.cumsum(rng.exponential(0.01, 300)),
    )
    records: list[RequestRecord] = [run.requests[i] for i in range(300)]
    figures = [
        summarize(each, p99_output=38, backlog=False, waiting=True).to_dict() for each in (run.requests, records)
    ]
    assert figures[0] == pytest.approx(figures[1])


def test_no_requests_and_one_that_the_smallest_cache_cannot_hold_are_refused(cost: CostModel) -> None:
    replicas = [Replica(schedule=ONE_AT_A_TIME, cost=cost, num_blocks=blocks) for blocks in (100, 3)]
    with pytest.raises(InputError, match="at least one request"):
        routed_replay(replicas, "random", input_tokens=np.zeros(0, int), output_tokens=np.zeros(0, int))
    with pytest.raises(InputError, match="need 4 KV blocks, the cache has 3"):
        routed_replay(replicas, "random", input_tokens=np.array([40]), output_tokens=np.array([20]))
