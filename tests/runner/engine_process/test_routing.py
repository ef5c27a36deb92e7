"""The server sends each request of a stream to the replica that the replay says."""

import asyncio
import itertools
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.core.schedule import ROUTERS, Schedule
from exeplan.runner.engine_process.client import EngineClient
from exeplan.runner.engine_process.replicas import ReplicaSet, _Replica
from exeplan.simulator.cost import CostModel
from exeplan.simulator.routed import Replica, RoutedRun, routed_replay


async def served(run: RoutedRun, router: str, replicas: int) -> list[int]:
    """Where a ReplicaSet puts requests that come and end at the times of a replay. Its engine processes never start:
    places are reserved and given back, and nothing is sent."""
    nothing = cast(Any, None)
    numbers = itertools.count(1)
    clients = [EngineClient(nothing, (nothing, nothing), numbers) for _ in range(replicas)]
    every = ReplicaSet([_Replica(client, nothing, number) for number, client in enumerate(clients)], router)
    arrivals, ends = run.requests.arrivals, run.requests.last_tokens
    events = sorted([*((t, 1, i) for i, t in enumerate(arrivals)), *((t, 0, i) for i, t in enumerate(ends))])
    jobs, chosen = {}, []
    for _, comes, number in events:
        if comes:
            jobs[number] = every.reserve(1)
            chosen.append(next(k for k, client in enumerate(clients) if jobs[number].job_id in client._jobs))
        else:
            jobs[number].open.clear()
            every.release(jobs[number])
    assert every.num_jobs == 0
    for task in every._watching:
        task.cancel()
    await asyncio.gather(*every._watching, return_exceptions=True)
    return chosen


@pytest.mark.parametrize("router", ROUTERS)
@given(
    replicas=st.integers(1, 5),
    outputs=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    gap=st.sampled_from([0.0005, 0.002, 0.01]),
    seed=st.integers(0, 9),
)
def test_the_server_routes_as_the_replay_does(
    router: str, replicas: int, outputs: list[int], gap: float, seed: int, cost: CostModel
) -> None:
    run = routed_replay(
        [Replica(schedule=Schedule("orca", {"max_num_seqs": 3}), cost=cost, num_blocks=100)] * replicas,
        router,
        input_tokens=np.full(len(outputs), 20),
        output_tokens=np.array(outputs),
        arrivals=np.cumsum(np.random.default_rng(seed).exponential(gap, len(outputs))),
    )
    assert asyncio.run(served(run, router, replicas)) == run.chosen.tolist()
