"""Problem: one planning problem (model, profiled device, workload, bounds), and what a schedule does in it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exeplan.core.batch import BLOCK_SIZE, num_blocks_for
from exeplan.core.bounds import (
    MAX_ITL,
    Bound,
    limit,
    percentile,
    quantities,
    targets_of,
    utilizations,
    worst,
)
from exeplan.core.cluster import Cluster
from exeplan.core.models.model import quantized_id
from exeplan.core.pass_memory import MEMORY_UTILIZATION
from exeplan.core.profile import Profile
from exeplan.core.queue_order import ORDERS
from exeplan.core.schedule import ROUTERS, Estimate, Placement, Schedule, Sharding, num_devices, single_stage
from exeplan.errors import Infeasible, InputError
from exeplan.planner.problems.replicas import num_replicas
from exeplan.policies import load_policy, reserves
from exeplan.search.search import Outcome
from exeplan.simulator.closed_form import SteadyState, estimate, steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.memory import memory_bytes, workspace_bytes
from exeplan.simulator.rates.at_rate import estimate_at_rate
from exeplan.simulator.rates.request_times import times_under_backlog, with_bounds
from exeplan.simulator.stalls import Stall, longest_stall
from exeplan.units import show_bytes
from exeplan.workload.arrivals import Arrivals, Wait, with_spare_places
from exeplan.workload.workload import Workload

_LIMIT_COSTS = 0.005
"""Share of the throughput that a limit on the tokens of a pass may cost, where it is not what is asked for."""
_BATCH_SIZES = 12
"""Batch sizes at which the closed form evaluates a schedule with partly filled batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One model on one profiled device, or on a cluster of it, under one workload and its bounds.

    On a cluster the cost model is that of one of many placements (see `at`, and `search_space.py` for the others).
    """

    profile: Profile
    workload: Workload
    bound: Bound
    more_bounds: tuple[Bound, ...] = ()
    """Further bounds that hold at the same time (see `exeplan.core.bounds`)."""
    arrivals: Arrivals | None = None
    """When requests arrive; waiting then counts in the bounds. None for a backlog."""
    min_throughput: float = 0.0
    """Requests/s that are required."""
    cost: CostModel
    cluster: Cluster | None = None
    memory: float
    """Bytes that weights, KV cache and workspace may take together on one device."""
    utilization: float | None = None
    """The same as a share of each GPU, where it was given as one."""
    max_seqs: int
    """Requests that may be resident at once, on all GPUs together."""
    seqs_measured: bool = False
    """They are as many as were measured on each GPU: those of an idle one go to no other."""
    order: str = "fcfs"
    """The queue order of planned schedules (see `exeplan.core.queue_order`); the closed form is the same for all."""
    across_nodes: bool = False
    """A tensor-parallel group may span nodes."""
    one_pipeline: bool = False
    """All GPUs are one pipeline; otherwise the cluster may be divided into replicas."""
    whole_servers: bool = False
    """Prefill and decode are divided among servers that each hold the whole model, not among stages of a pipeline."""

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise InputError(f"no order '{self.order}'; there are {', '.join(ORDERS)}")

    def at(self, placement: Placement) -> "Problem":
        """The same on another placement, with the same links."""
        return replace(self, cost=CostModel(self.cost.timings, placement, self.cost.cluster))

    def replicas_of(self, num_gpus: int) -> int:
        """How many equal pipelines of that many GPUs there are: as many as the cluster has room for, and none without
        a resident request."""
        return 1 if self.one_pipeline else min(num_replicas(self.cluster, num_gpus), self.max_seqs)

    def part(self, num_gpus: int, *, replicas: int = 1, alike: bool = False, router: str = ROUTERS[0]) -> "Problem":
        """The problem of one of `replicas` pipelines, on so many GPUs of the cluster.

        The limit on residents is in proportion to the GPUs; replicas that are all `alike`, as they are at a rate, share
        it alone, whatever GPUs are idle. A rate is split. Raises Infeasible where the model does not fit, or no request
        may be resident.
        """
        assert self.cluster is not None
        cluster = self.cluster.part(num_gpus)
        check_cluster_memory(self.profile, cluster, self.memory, self.workload.longest)
        return replace(
            self,
            cluster=cluster,
            cost=CostModel(self.cost.timings, cluster=cluster),
            max_seqs=self._seqs_of(num_gpus, replicas=replicas, alike=alike or self.arrivals is not None),
            min_throughput=0.0,
            arrivals=self.arrivals and self.arrivals.split(replicas, router),
        )

    def _seqs_of(self, num_gpus: int, *, replicas: int, alike: bool) -> int:
        """Of one replica."""
        own = self.seqs_measured or not alike
        share = num_gpus / self.cluster.num_gpus if own and self.cluster else 1 / replicas
        if (number := int(self.max_seqs * share + 1e-9)) < 1:
            raise Infeasible(f"at most {self.max_seqs} requests may be resident, fewer than one for each replica")
        return number

    def replica(
        self,
        placement: Placement,
        num_replicas: int,
        *,
        alike: bool,
        router: str | None = None,
        share: float | None = None,
    ) -> "Problem":
        """The problem of one of several replicas on its placement: its share of the requests and of the limits, as of
        `part` where all are `alike`, and where they are not.

        The share of arrivals may be given; it is equal otherwise.
        """
        seqs = self._seqs_of(num_devices(placement), replicas=num_replicas, alike=alike)
        placed = replace(self.at(placement), max_seqs=seqs)
        if num_replicas == 1:
            return placed
        return replace(
            placed,
            min_throughput=0.0,
            arrivals=self.arrivals and self.arrivals.split(num_replicas, router or ROUTERS[0], share=share),
        )

    @property
    def bounds(self) -> tuple[Bound, ...]:
        return (self.bound, *self.more_bounds)

    @property
    def limit(self) -> float:
        """What the latency of an Outcome may not exceed: seconds of the first finite bound."""
        return limit(self.bounds)

    @property
    def bounds_gaps(self) -> bool:
        """Whether every gap between two tokens is bounded."""
        return any(bound.metric == MAX_ITL for bound in self.bounds)

    @property
    def tpot_bound(self) -> float | None:
        """Seconds of the tightest bound on the pace of requests; None without one."""
        paces = [bound.seconds for bound in self.more_bounds if _is_on_pace(bound)]
        paces += [seconds for bound in self.bounds for name, seconds in bound.scaled_targets if name == "tpot"]
        return min(paces, default=None)

    @property
    def shares_memory(self) -> bool:
        """Whether the devices are processes on the CPUs of the profiled host, which have its memory together."""
        return self.cluster is not None and self.cluster.of_profile and self.profile.device.kind == "cpu"

    @property
    def required(self) -> float:
        """Requests/s that a schedule has to sustain."""
        return max(self.min_throughput, self.arrivals.rate if self.arrivals else 0.0)

    def held_to(self, bounds: Sequence[Bound]) -> "Problem":
        """The same under other bounds, in the same order."""
        return replace(self, bound=bounds[0], more_bounds=tuple(bounds[1:]))

    def limited_to(self, seconds: float) -> "Problem":
        """The same with all bounds scaled so that `limit` is this; without bounds, with one on latency."""
        if math.isinf(self.limit):
            return replace(self, bound=replace(self.bound, seconds=seconds))
        factor = seconds / self.limit
        return self.held_to([replace(b, seconds=b.seconds * factor) for b in self.bounds])

    def schedule(self, policy: str, point: Mapping[str, int]) -> Schedule:
        """The schedule of a point of a policy's search, in the requested queue order."""
        return replace(load_policy(policy).schedule(point, self.workload), order=self.order)

    def evaluate(self, schedule: Schedule) -> Outcome:
        """One point of the search: a schedule with its batches full.

        `latency` stands for all bounds: the binding bound's utilization times `limit`. With an arrival rate it is the
        latency at the highest rate, which fills these batches. `memory` is the utilization of the tighter of two
        capacities, bytes and residents. Every cache holds the longest request at least, which comes to any of them.
        """
        steady = steady_state(schedule, self.workload, self.cost)
        longest = self.cost.num_caches * num_blocks_for(self.workload.longest) * BLOCK_SIZE
        kv_tokens = max(steady.kv_tokens, float(longest))
        share = max(
            self.bytes_held(schedule, kv_tokens, steady.cycle.prefill_kv_tokens) / self.memory,
            steady.cycle.num_seqs / (self.max_seqs + 1e-9),
        )
        # An infinite bound limits nothing, whatever its value; the first one stands for all where none is finite.
        unbounded = math.isinf(self.limit)
        asked = [math.isfinite(b.seconds) or (unbounded and b is self.bound) for b in self.bounds]
        values = self._values(steady, asked)
        return Outcome(throughput=steady.throughput, latency=worst(self.bounds, values), memory=share)

    def bytes_held(self, schedule: Schedule, kv_tokens: float, prefill_kv_tokens: float = 0.0) -> float:
        """Bytes on the fullest GPU while a schedule runs with so many tokens in the KV cache."""
        return self.cost.memory.bytes_held(schedule, self.memory, kv_tokens, prefill_kv_tokens)

    def kv_capacity_tokens(self, schedule: Schedule) -> float:
        """Tokens of KV cache that a schedule leaves memory for."""
        held = self.cost.memory
        return held.kv_capacity_tokens(self.memory, passes=held.passes(schedule, self.memory))

    def estimate(self, schedule: Schedule, *, attainment: bool = True) -> Estimate:
        """The closed form's Estimate of a schedule; its attainment and goodput can be left out, which saves time.

        With an arrival rate it is that of the batch size that reaches the rate. Raises Infeasible when none does. The
        arrivals of a trace have no law: it is that of a Poisson stream then, and what is told of a plan is its replay.
        """
        full = steady_state(schedule, self.workload, self.cost)
        if self.arrivals is not None:
            return self._estimate_at_rate(full, self.arrivals, self.bounds)
        found = estimate(full, self.cost, self.bound.metric, memory=self.memory)
        if targets_of(self.bounds) and (attainment or any(percentile(b.metric) for b in self.bounds)):
            found = with_bounds(found, times_under_backlog(full, self.cost), self.bounds)
        return self._with_longest_gap(found, full)

    def longest_stall(self, schedule: Schedule) -> Stall:
        """The most time that its passes can take between two tokens of a request."""
        return longest_stall(steady_state(schedule, self.workload, self.cost), self.cost)

    def _with_longest_gap(self, found: Estimate, full: SteadyState) -> Estimate:
        """Where single gaps are bounded, the Estimate with the most that one can take."""
        if not self.bounds_gaps:
            return found
        return replace(found, percentiles={**found.percentiles, MAX_ITL: longest_stall(full, self.cost).seconds})

    def _estimate_at_rate(self, full: SteadyState, arrivals: Arrivals, bounds: Sequence[Bound]) -> Estimate:
        """With the percentiles and the attainment of these bounds."""
        check_sustained(full, arrivals)
        points = [full] if full.steady.served else [*self._smaller(full.schedule), full]
        found = estimate_at_rate(points, arrivals, self.cost, self.bound.metric, bounds=bounds, memory=self.memory)
        return self._with_longest_gap(found, full)

    def binding_bound(self, schedule: Schedule) -> Bound:
        """The binding bound of a schedule with its batches full."""
        steady = steady_state(schedule, self.workload, self.cost)
        values = self._values(steady, [True] * len(self.bounds))
        return max(zip(self.bounds, values, strict=True), key=lambda pair: pair[1] / pair[0].seconds)[0]

    def _values(self, steady: SteadyState, asked: Sequence[bool]) -> list[float]:
        """What the bounds limit, with batches full; 0 for those that are not asked for."""
        wait = self._wait(steady)
        further = any(percentile(b.metric) and needed for b, needed in zip(self.bounds, asked, strict=True))
        times = times_under_backlog(steady, self.cost, wait.admission_interval) if further else None
        return [
            0.0
            if not needed
            else times.value(b)
            if times and percentile(b.metric)
            else longest_stall(steady, self.cost).seconds
            if b.metric == MAX_ITL
            else steady.bound_latency(b.metric, wait)
            for b, needed in zip(self.bounds, asked, strict=True)
        ]

    def _wait(self, steady: SteadyState) -> Wait:
        return Wait(admission_interval=steady.admission_interval) if self.arrivals else Wait()

    def keeps(self, schedule: Schedule) -> bool:
        """Whether a schedule keeps all bounds and sustains the arrival rate, if there is one; by the closed form."""
        return self.filled(schedule) <= 1

    def filled(self, schedule: Schedule) -> float:
        """The largest share of a bound that a schedule takes, infinity where it does not sustain the arrival rate; by
        the closed form."""
        if self.arrivals is None:
            return self.evaluate(schedule).latency / self.limit
        full = steady_state(schedule, self.workload, self.cost)
        by_request = self.bounds if any(percentile(b.metric) for b in self.bounds) else ()
        try:
            return max(utilizations(self.bounds, self._estimate_at_rate(full, self.arrivals, by_request)))
        except Infeasible:
            return math.inf

    def with_spare_places(self, schedule: Schedule) -> Schedule:
        """The schedule with room in its batches for bursts of arrivals, within the limits of memory and residents."""
        name = _batch_name(schedule, self.workload)
        batch = self._batch(schedule, name)
        high = with_spare_places(batch)
        low = batch
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.evaluate(_with_batch(schedule, name, middle, self.workload)).memory <= 1
            low, high = (middle, high) if fits else (low, middle - 1)
        return _with_batch(schedule, name, low, self.workload)

    def within_cache(self, schedule: Schedule, kv_tokens: float) -> Schedule | None:
        """The schedule with batches as large as so many tokens of KV cache hold, and at most its own; None where they
        do not hold a batch of one."""
        if self._held_tokens(schedule) <= kv_tokens:
            return schedule
        name = _batch_name(schedule, self.workload)
        low, high = 0, self._batch(schedule, name)
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._held_tokens(_with_batch(schedule, name, middle, self.workload)) <= kv_tokens
            low, high = (middle, high) if fits else (low, middle)
        return _with_batch(schedule, name, low, self.workload) if low else None

    def _held_tokens(self, schedule: Schedule) -> float:
        """Tokens of KV cache that full batches take; where requests reserve it, each at its full length."""
        steady, law = steady_state(schedule, self.workload, self.cost), self.workload
        if not reserves(schedule):
            return steady.kv_tokens
        lengths = np.ceil((law.inputs + law.outputs) / BLOCK_SIZE) * BLOCK_SIZE
        # Of those that leave when they are done the long ones are there for longer.
        stays = 1 if load_policy(schedule.policy).KEEPS_FINISHED_ROWS else law.outputs
        reserved = steady.cycle.num_seqs * float(np.average(lengths, weights=law.weights * stays))
        return max(steady.kv_tokens, reserved)

    def with_shorter_stalls(self, schedule: Schedule) -> Schedule:
        """The schedule with a limit on the tokens of a pass, where single gaps are not bounded and one may exceed the
        bound on the tpot.

        It is the largest of the policy's limits with which no pass takes longer than the bound, or a larger one, with
        which the bounds hold and the throughput stays as it is: a burst then stalls streams no longer than the traffic
        itself does. Without such a limit it is the schedule as it was.
        """
        pace, policy = self.tpot_bound, load_policy(schedule.policy)
        if (
            pace is None
            or self.bounds_gaps
            or not hasattr(policy, "token_limits")
            or "max_num_batched_tokens" in schedule.variables
        ):
            return schedule
        if self.longest_stall(schedule).seconds <= pace:
            return schedule
        limited = [
            replace(schedule, variables={**schedule.variables, "max_num_batched_tokens": tokens})
            for tokens in policy.token_limits()
            if tokens >= schedule["max_num_seqs"] + self.workload.mean_input
        ]
        longer = [one for one in limited if self.longest_stall(one).seconds > pace]
        within, least = limited[: len(limited) - len(longer)], self.evaluate(schedule).throughput * (1 - _LIMIT_COSTS)
        for one in (*within[-1:], *longer):
            outcome = self.evaluate(one)
            if outcome.throughput >= least and outcome.memory <= 1 and self.keeps(one):
                return one
        return schedule

    def _batch(self, schedule: Schedule, name: str) -> int:
        """The size of full batches, also for a plan by hand that leaves it out."""
        return schedule.variables.get(name) or round(steady_state(schedule, self.workload, self.cost).cycle.num_seqs)

    def _smaller(self, schedule: Schedule) -> list[SteadyState]:
        """Steady states of one request alone and of smaller batches."""
        knobs = load_policy(schedule.policy).knobs(self.workload, 1)
        name = knobs[0].name
        sizes = np.unique(np.geomspace(1, self._batch(schedule, name), _BATCH_SIZES).astype(int))[:-1]
        smaller = [_with_batch(self._spread(schedule, size), name, size, self.workload) for size in sizes.tolist()]
        if schedule.variables != (alone := {**schedule.variables, **{knob.name: knob.values[0] for knob in knobs}}):
            smaller.insert(0, load_policy(schedule.policy).schedule(alone, self.workload))
        return [steady_state(one, self.workload, self.cost) for one in smaller]

    def _spread(self, schedule: Schedule, num_requests: int) -> Schedule:
        """The schedule with as many micro-batches as its policy spreads so many requests among."""
        groups_used = getattr(load_policy(schedule.policy), "groups_used", None)
        if groups_used is None or schedule.num_micro_batches == 1:
            return schedule
        groups = groups_used(schedule, num_requests, len(self.cost.decode_stages))
        return replace(schedule, variables={**schedule.variables, "micro_batches": groups})


def check_sustained(full: SteadyState, arrivals: Arrivals) -> None:
    """Raises Infeasible where a schedule serves no more than comes: its queue would grow without end."""
    if full.throughput <= arrivals.rate:
        come = f"{arrivals} come"
        if arrivals.share < 1:
            whole = replace(arrivals, rate=arrivals.rate / arrivals.share)
            come = f"a replica with it gets {arrivals.rate:.3g} of {whole}"
        raise Infeasible(
            f"{full.schedule} sustains {full.throughput:.3g} requests/s, {come}: its queue would grow without end"
        )


def _is_on_pace(bound: Bound) -> bool:
    return quantities(bound) == ("tpot",) and not bound.targets and bound.metric != MAX_ITL


def _batch_name(schedule: Schedule, workload: Workload) -> str:
    """The control variable that limits the batch size: a policy's first knob, by `Policy.knobs`."""
    return load_policy(schedule.policy).knobs(workload, 1)[0].name


def _with_batch(schedule: Schedule, name: str, size: int, workload: Workload) -> Schedule:
    other = load_policy(schedule.policy).schedule({**schedule.variables, name: size}, workload)
    return replace(other, order=schedule.order)


def make_problem(
    profile: Profile,
    workload: Workload,
    bound: Bound,
    *,
    cluster: Cluster | None = None,
    memory: float | None = None,
    utilization: float | None = None,
    max_seqs: int | None = None,
) -> Problem:
    """A Problem whose model fits the device or the cluster, and whose workload fits the model's context.

    The plan may use `memory` bytes of each device, or the share `utilization` of it. Raises InputError, Infeasible.
    """
    device_memory = cluster.memory_bytes if cluster else profile.device.memory_bytes
    available = memory if memory is not None else device_memory * (utilization or MEMORY_UTILIZATION)
    longest = workload.longest
    if longest > profile.model.max_context:
        raise InputError(
            f"workload '{workload.name}' has requests of {longest} tokens, the context of "
            f"{profile.model.name} is {profile.model.max_context}; scale it down with --fit-context"
        )
    cost = CostModel(profile, cluster=cluster)
    measured = int(cost.timings.shard(Sharding(min(profile.tensor_parallel_sizes))).decode_attention.num_seqs[-1])
    if cluster is not None:
        check_cluster_memory(profile, cluster, available, longest)
        return Problem(
            profile=profile,
            workload=workload,
            bound=bound,
            cost=cost,
            cluster=cluster,
            memory=available,
            utilization=utilization,
            max_seqs=max_seqs or measured * cluster.num_gpus,
            seqs_measured=max_seqs is None,
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
        utilization=utilization,
        max_seqs=max_seqs or measured,
        seqs_measured=max_seqs is None,
    )


def check_cluster_memory(profile: Profile, cluster: Cluster, available: float, longest: int) -> None:
    """Raises Infeasible unless the cluster can hold the model and one request; names the number of GPUs that can."""
    weights = float(profile.weight_bytes) + longest * profile.model.kv_bytes_per_token(profile.cache_dtype)
    workspace = workspace_bytes(profile, Sharding(max(profile.tensor_parallel_sizes)))
    room = available - workspace
    if room * cluster.num_gpus >= weights:
        return
    short = weights / cluster.num_gpus + workspace - available
    enough = "no number of these GPUs suffices"
    if room > 0:
        number, per_node = math.ceil(weights / room), cluster.gpus_per_node
        number = number if number <= per_node else math.ceil(number / per_node) * per_node
        enough = f"{number} of these GPUs suffice"
    if (quantized := quantized_id(profile.model.name)) and profile.model.quantization is None:
        enough += f"; {quantized} has smaller weights (--model {quantized})"
    raise Infeasible(
        f"{profile.model.name} does not fit cluster {cluster.name}: each of its {cluster.num_gpus} GPUs lacks "
        f"{show_bytes(short)} in addition to its {show_bytes(available)} for weights, workspace and one request of "
        f"{longest} tokens; {enough}"
    )


def check_placement_memory(problem: Problem) -> None:
    """Raises Infeasible unless every GPU of the placement holds its layers and the longest request."""
    longest = problem.workload.longest
    tokens = float(num_blocks_for(longest) * BLOCK_SIZE)
    # The longest request is in one of the caches.
    decoding, prefilling = problem.cost.num_caches, len(problem.cost.servers.get("prefill", ((),)))
    needed = memory_bytes(problem.profile, problem.cost.placement, decoding * tokens, prefilling * tokens)
    if needed > problem.memory:
        raise Infeasible(
            f"one GPU of the plan needs {show_bytes(needed)} for weights, workspace and one request of {longest} "
            f"tokens, {problem.profile.device.name} has {show_bytes(problem.memory)} for it; "
            "place fewer layers on it"
        )
