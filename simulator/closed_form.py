"""Closed form: a schedule's steady state and the Estimate that follows from it.

Not here: the steady state of a policy (`exeplan/policies`), and arrivals at a rate (`at_rate.py`).
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.bounds import is_deadline, share_of_requests
from exeplan.core.schedule import Estimate, Schedule
from exeplan.policies import load_policy
from exeplan.policies.interface import Cycle, Steady
from exeplan.simulator.cost import CostModel
from exeplan.workload.arrivals import Wait
from exeplan.workload.workload import Workload

KV_SIGMAS = 3.0
"""Standard deviations of the KV cache's occupancy that a plan leaves room for."""
NO_WAIT = Wait()
_ALIKE = np.ones(1)
_WAIT_POINTS = 9
"""Points at which the wait for an admission is spread."""


@dataclass(frozen=True, slots=True, eq=False)
class SteadyState:
    """A schedule's steady state on a placement."""

    schedule: Schedule
    workload: Workload
    steady: Steady
    num_caches: int = 1
    """KV caches of ranks or servers, among which the requests are divided."""

    @property
    def cycle(self) -> Cycle:
        return self.steady.cycle

    @property
    def throughput(self) -> float:
        """Requests a second."""
        return self.steady.throughput

    @property
    def kv_tokens(self) -> float:
        """Tokens of KV cache to provide: the mean, its spread, and half a block lost in each resident's last block.

        Of several caches each needs room for the spread of its own requests.
        """
        spread = KV_SIGMAS * self.cycle.kv_tokens_std * math.sqrt(self.num_caches)
        return self.cycle.kv_tokens + spread + self.cycle.num_seqs * BLOCK_SIZE / 2

    def latency(self, output_tokens: Floats) -> Floats:
        """Seconds from the start of its prefill until a request has `output_tokens` tokens, elementwise."""
        return self.steady.latency(output_tokens)

    @property
    def admission_interval(self) -> float:
        """Seconds between two admissions: what the policy says, or the cycle of the requests that start together."""
        if self.steady.admission_interval is not None:
            return self.steady.admission_interval
        return load_policy(self.schedule.policy).starts_together(self.schedule) / self.throughput

    @property
    def ttft(self) -> float:
        return float(self.latency(np.ones(1))[0])

    @property
    def tpot(self) -> float:
        """Mean over requests with at least two tokens."""
        law = self.workload.output_law
        many = law.tokens > 1
        if not many.any():
            return 0.0
        paces = (self.latency(law.tokens[many].astype(float)) - self.ttft) / (law.tokens[many] - 1.0)
        return float(np.average(paces, weights=law.weights[many]))

    def bound_latency(self, metric: str, wait: Wait = NO_WAIT) -> float:
        """The value that a bound on `metric` (`exeplan/core/bounds.py`) limits, the wait included."""
        if metric == "tpot":
            return self.tpot
        if metric == "ttft":
            return self.ttft + wait.mean
        if metric == "p99-length":
            length = float(self.workload.output_quantile(0.99))
            return float(self.latency(np.array([length]))[0]) + wait.mean
        share = share_of_requests(metric)
        assert share is not None
        return self.quantile(share, wait, factors=deadline_factors(self.workload, metric))

    def quantile(self, share: float, wait: Wait = NO_WAIT, *, factors: Floats = _ALIKE) -> float:
        """The quantile `share` of the requests' times, over the length law and the wait.

        Times are scaled by `factors`, each equally likely.
        """
        law = self.workload.output_law
        times, points = self.latency(law.tokens.astype(float)), _WAIT_POINTS if wait.admission_interval else 1
        waits = wait.queue + wait.admission_interval * (np.arange(points) + 0.5) / points
        scaled = np.multiply.outer(np.add.outer(times, waits), factors)
        return weighted_quantile(scaled.ravel(), np.repeat(law.weights, points * len(factors)), share)


def deadline_factors(workload: Workload, metric: str) -> Floats:
    """Factors that scale the times of requests where a bound is on their deadlines."""
    return workload.deadlines.factors if workload.deadlines and is_deadline(metric) else _ALIKE


def steady_state(schedule: Schedule, workload: Workload, cost: CostModel) -> SteadyState:
    """The steady state of a schedule under a backlog of this workload."""
    return _steady_state(schedule.policy, tuple(schedule.variables.items()), schedule.order, workload, cost)


@lru_cache(maxsize=64)  # What a rate does to a schedule is asked of the same dozen batches for every rate.
def _steady_state(
    policy_name: str, variables: tuple[tuple[str, int], ...], order: str, workload: Workload, cost: CostModel
) -> SteadyState:
    policy, schedule = load_policy(policy_name), Schedule(policy_name, dict(variables), order=order)
    steady = policy.steady_state(schedule, workload, cost.for_policy(policy))
    return SteadyState(schedule, workload, steady, cost.num_caches)


def estimate(
    steady: SteadyState,
    cost: CostModel,
    bound_metric: str = "p99-length",
    *,
    wait: Wait = NO_WAIT,
    memory: float = math.inf,
) -> Estimate:
    """Throughput, latencies and memory of a steady state on a placement, the wait included; `memory` bytes of each GPU
    may be taken."""
    return Estimate(
        throughput=float(steady.throughput),
        token_throughput=float(steady.throughput * steady.workload.mean_output),
        ttft=steady.bound_latency("ttft", wait),
        tpot=steady.tpot,
        latency=steady.bound_latency(bound_metric, wait),
        latency_p50=steady.quantile(0.5, wait),
        latency_p99=steady.quantile(0.99, wait),
        kv_tokens=float(steady.kv_tokens),
        memory_bytes_per_gpu=cost.memory.bytes_held(
            steady.schedule, memory, steady.kv_tokens, steady.cycle.prefill_kv_tokens
        ),
    )


def weighted_quantile(values: Floats, weights: Floats, q: float) -> float:
    """The value that a share of at least `q` of the weight does not exceed."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, q * reached[-1]).clip(max=len(values) - 1)])
