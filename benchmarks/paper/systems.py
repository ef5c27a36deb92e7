"""The systems that ExeGPT is compared with, as section 7.1 runs them, and the latency bounds that follow from one.

All take tensor parallelism over a whole machine and pipeline stages across machines. FasterTransformer decodes in as
many micro-batches as there are stages and prefills in as many; DeepSpeed's hybrid prefills in up to four times as many.
Neither ends a request early nor grows its KV cache: each row has room for the longest prompt and output, and the bound
holds for an output of the maximum length. ORCA's bound holds for the 99th-percentile length.

Two FasterTransformers: one that packs the prompts of a batch, and one that pads them to the longest. Which one the
paper ran it does not say. The source of FasterTransformer 5.0 (commit 6fddeac of NVIDIA/FasterTransformer, 2022-04)
pads them in the context phase of GPT; 5.1 (bc21406, 2022-08) and 5.2 (b672f49, 2022-12) pack them unless told
otherwise (`invokeRemovePadding` in ParallelGptContextDecoder.cc), and so does the encoder of T5. OPT, which the paper
runs, came between the two (README, June 2022), so that the packing one is the likely one: it sets the bounds. Both
decode the whole batch until its longest output is done.

Not here: their kernels and their host's time. All systems run on the same profile, so that only schedules differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.bounds import Bound
from exeplan.core.schedule import Schedule
from exeplan.planner.problems.balance_stages import Balance
from exeplan.planner.problems.layouts import Layout
from exeplan.planner.problems.problem import Problem
from exeplan.policies import load_policy
from exeplan.policies.interface import Clock, Cycle
from exeplan.search.search import Outcome, search
from exeplan.simulator.cost import CostModel
from exeplan.simulator.memory import kv_capacity_tokens
from exeplan.workload.length_law import LengthLaw
from exeplan.workload.workload import Workload

BOTTOM = (0.1, 0.3, 0.7)
"""Shares of FasterTransformer's latencies that lie at or below the three finite bounds."""


@dataclass(frozen=True, slots=True)
class Point:
    """A schedule with its throughput (requests/s) and the latency that is bounded."""

    schedule: Schedule
    throughput: float
    latency: float


def on_whole_machines(problem: Problem) -> Problem:
    """The problem on the placement of FasterTransformer, DeepSpeed and ORCA, with no other to choose from."""
    cluster = problem.cluster
    assert cluster is not None
    layout = Layout(size=cluster.gpus_per_node, num_parallel=cluster.num_gpus)
    placement = Balance(problem.cost.timings, cluster, problem.workload, problem.memory).placement(layout)
    assert placement is not None, "each of the paper's models fits its cluster"
    return replace(problem.at(placement), cluster=None)


class Packing:
    """The clock of a pipeline that computes each prompt of a batch at its own length."""

    def __init__(self, clock: Clock, prompt_law: LengthLaw) -> None:
        self._clock, self._prompt_law = clock, prompt_law
        self.first_token_from_prefill = clock.first_token_from_prefill
        self.prefill_stages, self.decode_stages = clock.prefill_stages, clock.decode_stages
        self.num_prefill_servers = clock.num_prefill_servers

    def seconds(self, cycle: Cycle) -> Floats:
        """[stages, passes]."""
        return self._clock.seconds(replace(cycle, prompt_law=self._prompt_law, padded=False))

    def kv_transfer_seconds(self, num_tokens: float) -> float:
        return self._clock.kv_transfer_seconds(num_tokens)


def static_points(placed: Problem, *, pads: bool = False, prefills: tuple[int, ...] = (1,)) -> list[Point]:
    """Batch sizes 4, 8, 12, ... while memory lasts; `prefills` micro-batches to prefill for one that decodes."""
    workload, stages = placed.workload, len(placed.cost.placement)
    most = kv_capacity_tokens(placed.profile, placed.cost.placement, placed.memory)
    rows = int(most / (workload.max_input + workload.max_output))
    points = []
    for batch in range(4, rows + 1, 4):
        for prefill in prefills:
            variables = {"batch_size": batch, "micro_batches": stages, "prefill_micro_batches": prefill * stages}
            points.append(static_point(Schedule("static", variables), workload, placed.cost, pads=pads))
    return points


def static_point(schedule: Schedule, workload: Workload, cost: CostModel, *, pads: bool = False) -> Point:
    """A static schedule under a backlog; the latency is that of the longest output."""
    clock = cost if pads else Packing(cost, workload.input_law)
    steady = load_policy("static").steady_state(schedule, workload, clock)
    return Point(schedule, steady.throughput, float(steady.latency(np.array([float(workload.max_output)]))[0]))


def bounds(points: list[Point]) -> tuple[float, ...]:
    """The bottom 10, 30 and 70 % of the latencies, and infinity."""
    latencies = sorted(point.latency for point in points)
    return (*(latencies[max(0, ceil(share * len(latencies)) - 1)] for share in BOTTOM), inf)


def fastest(points: list[Point], bound: float) -> Point | None:
    """The point of the highest throughput within the bound."""
    return max((p for p in points if p.latency <= bound), key=lambda p: p.throughput, default=None)


def searched(placed: Problem, policy: str, bound: float) -> Point | None:
    """The best schedule of a policy on this placement; None when none keeps the bound."""
    module, best = load_policy(policy), None
    problem = replace(placed, bound=Bound(seconds=bound))
    for values in module.enumerated(len(problem.cost.decode_stages)):

        def evaluate(point: Mapping[str, int], values: Mapping[str, int] = values) -> Outcome:
            return problem.evaluate(module.schedule({**point, **values}, problem.workload))

        knobs = module.knobs(problem.workload, problem.max_seqs)
        found = search(knobs, evaluate, bound=bound, capacity=1.0).best
        if found and (best is None or found.outcome.throughput > best.throughput):
            schedule = module.schedule({**found.point, **values}, problem.workload)
            best = Point(schedule, found.outcome.throughput, found.outcome.latency)
    return best
