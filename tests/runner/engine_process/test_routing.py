"""The server sends each request of a stream to the replica that the replay says."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import ROUTERS, Schedule, single_stage
from exeplan.runner.engine_process.build import engine_setup
from exeplan.runner.engine_process.replicas import ReplicaSet
from exeplan.simulator.cost import CostModel
from exeplan.simulator.routed import Replica, RoutedRun, routed_replay


async def served(run: RoutedRun, router: str, replicas: int) -> list[int]:
    """Where a ReplicaSet puts requests that come and end at the times of a replay. Its engine processes never start:
    places are reserved and given back, and nothing is sent."""
    spec = load_model_spec("demo")
    plan = Plan(model="demo", schedule=Schedule("orca", {"max_num_seqs": 3}), placement=single_stage(spec))
    setup = engine_setup(plan, spec)
    every = ReplicaSet([setup] * replicas, router)
    clients = every._clients
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
