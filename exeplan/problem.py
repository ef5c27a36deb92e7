"""Problem: one model on one profiled device under one workload and bound, and what a schedule does in it."""

import math
from dataclasses import dataclass, replace

import numpy as np

from exeplan.cluster import Cluster
from exeplan.errors import Infeasible, InputError
from exeplan.metrics import summarize
from exeplan.plan import Bound, Estimate, Placement, Schedule, single_stage
from exeplan.profile import Profile
from exeplan.scheduling import BLOCK_SIZE, num_blocks_for
from exeplan.search import Outcome
from exeplan.simulator.closed_form import estimate, steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.memory import kv_room_tokens, memory_bytes
from exeplan.simulator.replay import Run, replay
from exeplan.units import show_bytes
from exeplan.workload import Workload

MEMORY_UTILIZATION = 0.9
"""Share of the device's memory that weights, KV cache and workspace may take."""
KV_SLACK = 1.5
"""The engine's KV cache over what the steady state needs, where memory allows: room for the start-up and for drift."""
_REPLAY_REQUESTS = (300, 2000)
_HEADROOM_LIMIT = 4.0
_LONG_REQUESTS = 4
"""Requests of the 99th-percentile length that a replay should hold at least: it is their latency that is promised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is optimized: one model on one profiled device, or on a cluster of it, under one workload and bound.

    On a cluster the cost model stands for one of many placements (`at`, and `variants.py` for which).
    """

    profile: Profile
    workload: Workload
    bound: Bound
    cost: CostModel
    cluster: Cluster | None = None
    memory: float
    """Bytes that weights, KV cache and workspace may take together on one device."""
    max_seqs: int
    """Residents that the engine may hold at once."""

    def at(self, placement: Placement) -> "Problem":
        """The same on another placement."""
        return replace(self, cost=CostModel(self.cost.timings, placement, self.cluster))

    def evaluate(self, schedule: Schedule) -> Outcome:
        """One point of the search; `memory` is the share of the tighter of the two capacities, bytes and residents."""
        steady = steady_state(schedule, self.workload, self.cost)
        share = max(
            self.cost.memory.fullest(steady.kv_tokens, steady.cycle.prefill_kv_tokens) / self.memory,
            steady.cycle.num_seqs / (self.max_seqs + 1e-9),
        )
        return Outcome(throughput=steady.throughput, latency=steady.bound_latency(self.bound.about), memory=share)

    def estimate(self, schedule: Schedule) -> Estimate:
        """The closed form's Estimate of a schedule."""
        return estimate(steady_state(schedule, self.workload, self.cost), self.cost, self.bound.about)


def make_problem(
    profile: Profile,
    workload: Workload,
    bound: Bound,
    *,
    cluster: Cluster | None = None,
    memory: float | None = None,
    max_seqs: int | None = None,
) -> Problem:
    """Checks that the model fits the device, or the cluster, and the workload the model's context."""
    device_memory = cluster.memory_bytes if cluster else profile.device.memory_bytes
    available = memory if memory is not None else device_memory * MEMORY_UTILIZATION
    longest = int((workload.inputs + workload.outputs).max())
    if longest > profile.model.max_context:
        raise InputError(
            f"workload '{workload.name}' has requests of {longest} tokens, the context of "
            f"{profile.model.name} is {profile.model.max_context}; scale it down with --fit-context"
        )
    cost = CostModel(profile, cluster=cluster)
    measured = int(cost.timings.shard(min(profile.tensor_parallel_sizes)).decode_attention.num_seqs[-1])
    if cluster is not None:
        check_room(profile, cluster, available, longest)
        return Problem(
            profile=profile,
            workload=workload,
            bound=bound,
            cost=cost,
            cluster=cluster,
            memory=available,
            max_seqs=max_seqs or measured * cluster.num_gpus,
        )
    one_request = memory_bytes(profile, single_stage(profile.model), float(num_blocks_for(longest) * BLOCK_SIZE))
    if one_request > available:
        raise Infeasible(
            f"{profile.model.name} needs {show_bytes(one_request)} for weights, workspace and one request of "
            f"{longest} tokens; {profile.device.name} has {show_bytes(available)} for it"
        )
    return Problem(
        profile=profile,
        workload=workload,
        bound=bound,
        cost=cost,
        memory=available,
        max_seqs=max_seqs or measured,
    )


def check_room(profile: Profile, cluster: Cluster, available: float, longest: int) -> None:
    """Raises Infeasible when the model and one request cannot be shared out, naming the shortfall and what would do."""
    weights = float(profile.weight_bytes) + longest * profile.model.kv_bytes_per_token(profile.dtype)
    room = available - profile.workspace_bytes
    if room * cluster.num_gpus >= weights:
        return
    short = weights / cluster.num_gpus + profile.workspace_bytes - available
    enough = "no number of such GPUs would do"
    if room > 0:
        number, per_node = math.ceil(weights / room), cluster.gpus_per_node
        number = number if number <= per_node else math.ceil(number / per_node) * per_node
        enough = f"{number} such GPUs would do"
    raise Infeasible(
        f"{profile.model.name} does not fit cluster {cluster.name}: each of its {cluster.num_gpus} GPUs lacks "
        f"{show_bytes(short)} beside the {show_bytes(available)} it has for weights, workspace and one request of "
        f"{longest} tokens; {enough}"
    )


def replay_estimate(
    problem: Problem, schedule: Schedule, *, seed: int, num_requests: int | None = None, kv_tokens: int | None = None
) -> tuple[Run, Estimate]:
    """A replay of a stratified sample of the workload, and its Estimate; `kv_tokens` is the KV cache, if it is set."""
    steady = steady_state(schedule, problem.workload, problem.cost)
    low, high = _REPLAY_REQUESTS
    # Long enough that the longest of the planned requests live through it whole, several generations of them.
    generations = 4 * steady.throughput * steady.bound_latency("p99-length") + 4 * steady.cycle.num_seqs
    n = num_requests or int(min(max(low, generations), high))
    p99 = problem.workload.output_quantile(0.99)
    inputs, outputs = problem.workload.sample(n, seed=seed)
    while num_requests is None and n < high and np.count_nonzero(outputs >= p99) < _LONG_REQUESTS:
        n = min(2 * n, high)
        inputs, outputs = problem.workload.sample(n, seed=seed)
    num_blocks = (kv_tokens or kv_cache_tokens(problem, schedule)) // BLOCK_SIZE
    run = replay(schedule, problem.cost, input_tokens=inputs, output_tokens=outputs, num_blocks=num_blocks)
    return run, summarize(
        run.requests,
        p99_output=p99,
        bound_about=problem.bound.about,
        kv_tokens=float(run.peak_kv_tokens),
        memory_bytes=memory_bytes(problem.profile, problem.cost.placement, float(run.peak_kv_tokens)),
    )


def kv_cache_tokens(problem: Problem, schedule: Schedule) -> int:
    """Tokens of KV cache that the engine gets: what the plan needs with slack, within the memory there is."""
    needed = (
        steady_state(schedule, problem.workload, problem.cost).kv_tokens * KV_SLACK + problem.profile.model.max_context
    )
    room = kv_room_tokens(problem.profile, problem.cost.placement, problem.memory)
    return int(min(needed, room)) // BLOCK_SIZE * BLOCK_SIZE


def drift_headroom(problem: Problem, schedule: Schedule) -> float | None:
    """The share by which the mean output may rise, all lengths in proportion, before the bound breaks.

    None without a finite bound; never more than 400 %.
    """
    if math.isinf(problem.bound.seconds):
        return None

    def keeps(rise: float) -> bool:
        drifted = replace(problem, workload=problem.workload.scale(1.0 + rise))
        return drifted.evaluate(schedule).latency <= problem.bound.seconds

    low, high = 0.0, _HEADROOM_LIMIT
    if keeps(high):
        return high
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low
