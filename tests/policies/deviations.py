"""How far the closed form is from a replay of the same schedule: relative differences over drawn cases."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from exeplan.core.metrics import summarize, window
from exeplan.core.schedule import Schedule
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.workload.workload import Workload

_PASSES = 30_000
"""Passes of one replay, at most."""


class Deviation(NamedTuple):
    """Predicted over replayed, less 1."""

    throughput: float
    latency: float
    ttft: float
    e2e: float
    """Mean over all requests at their own output lengths: far less chance in it than in the longest ones' latency."""


def deviation(schedule: Schedule, workload: Workload, cost: CostModel, *, seed: int) -> Deviation:
    """Of one schedule under a backlog; the replay holds many generations of residents, so that chance stays small."""
    steady = steady_state(schedule, workload, cost)
    generation = steady.throughput * steady.bound_latency("p99-length") + steady.cycle.num_seqs
    n = int(max(600, min(40 * generation, _PASSES * steady.cycle.num_seqs / workload.mean_output, 4000)))
    inputs, outputs = workload.sample(n, seed=seed)
    run = replay(schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=10**6)
    replayed = summarize(run.requests, p99_output=workload.output_quantile(0.99))
    assert replayed.latency is not None
    opens, closes = window(run.requests, backlog=True)
    inside = [request for request in run.requests if opens <= request.start < closes]
    e2e = np.mean([request.token_times[-1] - request.start for request in inside])
    return Deviation(
        throughput=steady.throughput / replayed.throughput - 1,
        latency=steady.bound_latency("p99-length") / replayed.latency - 1,
        ttft=float(steady.latency(np.ones(1))[0]) / replayed.ttft - 1,
        e2e=float(steady.latency(np.array([request.output_tokens for request in inside])).mean() / e2e) - 1,
    )


def drawn_workload(rng: np.random.Generator, mean_output: float, *, most_uneven: float = 0.9) -> Workload:
    """2,000 requests of log-normal lengths: prompts of some 55 tokens in the median, outputs of this many."""
    outputs = rng.lognormal(np.log(mean_output), rng.uniform(0.1, most_uneven), 2000)
    inputs = rng.lognormal(4.0, rng.uniform(0.1, 0.5), 2000)
    inputs, outputs = (np.clip(np.rint(values), 1, 500).astype(int) for values in (inputs, outputs))
    return Workload.of("drawn", inputs=inputs, outputs=outputs, weights=np.ones(2000))


def check_deviations(found: Sequence[Deviation], *, tail: float = 0.95) -> None:
    """Asserts what is promised of the closed form: by its distribution, since one replay has chance in it."""
    off = {name: np.abs(values) for name, values in zip(Deviation._fields, np.transpose(found), strict=True)}
    middle = {name: float(np.median(values)) for name, values in off.items()}
    high = {name: float(np.quantile(values, tail)) for name, values in off.items()}
    assert middle["throughput"] <= 0.015, off
    assert high["throughput"] <= 0.05, off
    assert middle["e2e"] <= 0.01, off
    assert high["e2e"] <= 0.04, off
    assert middle["latency"] <= 0.03, off
    assert high["ttft"] <= 0.1, off
