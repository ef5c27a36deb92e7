"""A changing number of replicas: without a change it is the replay of all of them; every request is answered once."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.core.schedule import ROUTERS, Schedule
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.simulator.routed import Replica, routed_replay
from exeplan.simulator.scaled import NOTICED_SECONDS, Loss, ScaledRun, Seen, Span, scaled_replay

ONE_AT_A_TIME = Schedule("orca", {"max_num_seqs": 1})


def steps(*changes: tuple[float, int]) -> Callable[[Seen], int]:
    """That many replicas from these times on."""
    return lambda seen: next(count for time, count in reversed(changes) if time <= seen.time)


def alone(cost: CostModel, given: int, output: int) -> float:
    """Seconds that a request takes without any other."""
    run = replay(
        ONE_AT_A_TIME, cost, input_tokens=np.array([given]), output_tokens=np.array([output]), num_blocks=10**6
    )
    return float(run.requests.last_tokens[0])


@pytest.mark.parametrize("router", ROUTERS)
@given(data=st.data())
def test_a_number_that_stays_is_the_replay_of_all_of_them(router: str, data: st.DataObject, cost: CostModel) -> None:
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 300)), min_size=1, max_size=30))
    gaps = data.draw(st.lists(st.sampled_from([0.0, 0.0007, 0.013, 0.8]), min_size=len(lengths), max_size=len(lengths)))
    count = data.draw(st.integers(1, 4))
    policy = data.draw(st.sampled_from([ONE_AT_A_TIME, Schedule("orca", {"max_num_seqs": 3})]))
    one = Replica(schedule=policy, cost=cost, num_blocks=100)
    inputs, outputs = (np.array(side) for side in zip(*lengths, strict=True))
    load = {"input_tokens": inputs, "output_tokens": outputs, "arrivals": np.cumsum(gaps)}
    run = scaled_replay(one, router, wanted=lambda seen: count, first=count, most=9, start_seconds=1.0, **load)
    expected = routed_replay([one] * count, router, **load).requests
    assert run.starts.tolist() == expected.starts.tolist()
    assert run.first_tokens.tolist() == expected.first_tokens.tolist()
    assert run.last_tokens.tolist() == expected.last_tokens.tolist()
    assert run.replica_seconds == pytest.approx(count * float(np.cumsum(gaps)[-1]))


@given(data=st.data())
def test_every_request_is_answered_once_whatever_starts_stops_and_dies(data: st.DataObject, cost: CostModel) -> None:
    """Its tokens on all replicas together take at least as long as on one that does nothing else."""
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 400)), min_size=1, max_size=30))
    gaps = data.draw(st.lists(st.sampled_from([0.0, 0.013, 0.8]), min_size=len(lengths), max_size=len(lengths)))
    counts = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    losses = data.draw(st.lists(st.builds(Loss, time=st.floats(0.0, 6.0), host=st.integers(0, 2)), max_size=2))
    inputs, outputs = (np.array(side) for side in zip(*lengths, strict=True))
    run = scaled_replay(
        Replica(schedule=Schedule("orca", {"max_num_seqs": 3}), cost=cost, num_blocks=200),
        "shortest-queue",
        wanted=lambda seen: counts[int(seen.time) % len(counts)],
        first=counts[0],
        most=8,
        start_seconds=1.5,
        input_tokens=inputs,
        output_tokens=outputs,
        arrivals=np.cumsum(gaps),
        per_host=2,
        losses=losses,
    )
    assert np.all(run.arrivals <= run.starts)
    assert np.all(run.starts < run.first_tokens)
    assert np.all(run.first_tokens <= run.last_tokens)
    own = np.array([alone(cost, *length) for length in lengths])
    assert np.all(run.last_tokens - run.starts >= own * (1 - 1e-9))
    for one in run.spans:
        others = [other for other in run.spans if other.number == one.number and other.begin > one.begin]
        assert all(other.begin >= one.end for other in others)
        assert all(one.number // 2 != loss.host for loss in losses if one.begin > loss.time + NOTICED_SECONDS)


def run_by_hand(cost: CostModel, wanted: Callable[[Seen], int], first: int, outputs: list[int], arrivals: list[float],
                losses: list[Loss] | None = None) -> ScaledRun:  # fmt: skip
    return scaled_replay(
        Replica(schedule=ONE_AT_A_TIME, cost=cost, num_blocks=1000),
        "shortest-queue",
        wanted=wanted,
        first=first,
        most=2,
        start_seconds=1.5,
        input_tokens=np.full(len(outputs), 10),
        output_tokens=np.array(outputs),
        arrivals=np.array(arrivals),
        losses=losses or [],
    )


def test_one_starts_and_one_drains_by_hand(cost: CostModel) -> None:
    """Wanted from second 1 on, it serves from 2.5 on; not wanted from 4 on, it answers what it has."""
    long = alone(cost, 10, 6000)
    assert long > 4.5
    run = run_by_hand(cost, steps((0, 1), (1, 2), (4, 1)), 1, [6000, 6000, 2, 2], [0.0, 2.6, 4.5, 20.0])
    assert run.last_tokens[:2] == pytest.approx([long, 2.6 + long])
    assert run.last_tokens[2] == pytest.approx(long + alone(cost, 10, 2)), "on the first"
    assert run.spans == (
        Span(number=0, begin=0.0, up=0.0, end=20.0),
        Span(number=1, begin=1.0, up=2.5, end=pytest.approx(2.6 + long)),
    )


def test_what_two_replicas_of_a_dead_host_had_moves_once(cost: CostModel) -> None:
    """Twelve requests on four replicas, two on each host: six move, none of them to the other dead replica."""
    run = scaled_replay(
        Replica(schedule=ONE_AT_A_TIME, cost=cost, num_blocks=1000),
        "round-robin",
        wanted=lambda seen: 4,
        first=4,
        most=4,
        start_seconds=1.0,
        input_tokens=np.full(12, 10),
        output_tokens=np.full(12, 3000),
        arrivals=np.zeros(12),
        per_host=2,
        losses=[Loss(time=0.5, host=0)],
    )
    assert run.num_moved == 6
    assert not np.isnan(run.last_tokens).any()


def test_what_a_dead_host_had_goes_on_from_its_tokens(cost: CostModel) -> None:
    """Two replicas with a long answer each; one dies, and the other computes its prompt and tokens and the rest."""
    seconds, output = alone(cost, 10, 4000), 4000
    died = 0.5 * seconds
    run = run_by_hand(cost, lambda seen: 2, 2, [output, output, 1], [0.0, 0.0, 30.0], [Loss(time=died, host=1)])
    assert run.num_moved == 1
    assert run.last_tokens[0] == pytest.approx(seconds)
    moved = max(died + NOTICED_SECONDS, seconds)
    ends = replay(
        ONE_AT_A_TIME, cost, input_tokens=np.array([10]), output_tokens=np.array([output]), num_blocks=1000
    ).requests.times.of(0)
    tokens = int(np.searchsorted(ends, died, side="right"))
    assert 1000 < tokens < 3900
    assert run.last_tokens[1] == pytest.approx(moved + alone(cost, 10 + tokens, output - tokens))
    assert run.first_tokens[1] == pytest.approx(ends[0]), "its first tokens were sent"
    assert math.isclose(run.spans[1].end, died + NOTICED_SECONDS)
