"""Closed form: a schedule's steady state and the Estimate that follows from it."""

from dataclasses import dataclass

import numpy as np

from exeplan.plan import Estimate, Schedule
from exeplan.policies import Cycle, Floats, Steady, load_policy
from exeplan.scheduling import BLOCK_SIZE
from exeplan.simulator.cost import CostModel
from exeplan.simulator.memory import memory_bytes
from exeplan.workload import Workload

KV_SIGMAS = 3.0
"""Standard deviations of the KV cache's occupancy that a plan leaves room for."""


@dataclass(frozen=True, slots=True)
class SteadyState:
    """A schedule's steady state on a placement."""

    schedule: Schedule
    workload: Workload
    steady: Steady

    @property
    def cycle(self) -> Cycle:
        return self.steady.cycle

    @property
    def throughput(self) -> float:
        """Requests a second."""
        return self.steady.throughput

    @property
    def kv_tokens(self) -> float:
        """Tokens of KV cache to provide: the mean, its spread, and half a block lost in each resident's last block."""
        return self.cycle.kv_tokens + KV_SIGMAS * self.cycle.kv_tokens_std + self.cycle.num_seqs * BLOCK_SIZE / 2

    def latency(self, output_tokens: Floats) -> Floats:
        """Seconds from the start of its prefill until a request has so many tokens, elementwise."""
        return self.steady.latency(output_tokens)

    def bound_latency(self, bound_about: str) -> float:
        """The latency that a bound about `bound_about`."""
        if bound_about == "p99-length":
            return float(self.latency(np.array([float(self.workload.output_quantile(0.99))]))[0])
        law = self.workload.output_law
        return _quantile(self.latency(law.tokens.astype(float)), law.weights, 0.99)


def steady_state(schedule: Schedule, workload: Workload, cost: CostModel) -> SteadyState:
    """The steady state of a schedule under a backlog of this workload."""
    return SteadyState(schedule, workload, load_policy(schedule.policy).steady_state(schedule, workload, cost))


def estimate(steady: SteadyState, cost: CostModel, bound_about: str = "p99-length") -> Estimate:
    """Throughput, latencies and memory of a steady state on a placement."""
    law = steady.workload.output_law
    lengths, weights = law.tokens.astype(float), law.weights
    latencies = steady.latency(lengths)
    ttft = float(steady.latency(np.ones(1))[0])
    return Estimate(
        throughput=steady.throughput,
        token_throughput=steady.throughput * steady.workload.mean_output,
        ttft=ttft,
        tpot=_tpot(lengths, weights, latencies - ttft),
        latency=steady.bound_latency(bound_about),
        latency_p50=_quantile(latencies, weights, 0.5),
        latency_p99=_quantile(latencies, weights, 0.99),
        kv_tokens=steady.kv_tokens,
        memory_bytes_per_gpu=memory_bytes(
            cost.profile, cost.placement, steady.kv_tokens, steady.cycle.prefill_kv_tokens
        ),
    )


def _tpot(lengths: Floats, weights: Floats, decode_seconds: Floats) -> float:
    many = lengths > 1
    if not many.any():
        return 0.0
    return float(np.average(decode_seconds[many] / (lengths[many] - 1.0), weights=weights[many]))


def _quantile(values: Floats, weights: Floats, q: float) -> float:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, q * reached[-1]).clip(max=len(values) - 1)])
