"""Replays of a planned schedule, or of all replicas of a plan: how many requests, which KV cache, and the Estimate of
what happened."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.bounds import MAX_ITL
from exeplan.core.runs.estimators import narrowed
from exeplan.core.runs.metrics import RequestRecord, Requests, summarize
from exeplan.core.schedule import ROUTERS, Estimate, ReplicaGroup, Schedule
from exeplan.planner.problems.problem import Problem, check_sustained
from exeplan.policies import load_policy, sampled_evenly
from exeplan.progress import SILENT, Told
from exeplan.scheduling.largest_passes import with_finite_context
from exeplan.simulator.closed_form import SteadyState, steady_state
from exeplan.simulator.rates.long_run import SlotQueue, in_the_long_run
from exeplan.simulator.replay import replay
from exeplan.simulator.routed import Replica, RoutedRun, routed_replay
from exeplan.simulator.run import Run
from exeplan.workload.arrivals import Arrivals

KV_SLACK = 1.5
"""The engine's KV cache over what the steady state needs, where memory allows: room for the start-up and for drift."""
_REPLAY_REQUESTS = (300, 30_000)
_ARRIVING = 2500
"""Requests of a replay with arrivals far from the capacity: where they do not tell enough, more seeds do
(`ranking.py`)."""
_FEWEST_ARRIVING = 2000
"""Of what is told of policies that lose."""
_LEAST_GENERATIONS = 2
"""How many times too short a replay may be that still proves a schedule."""
_MOST_ARRIVING = 10_000
"""Most requests of a replay with arrivals; of a trace replayed at its own times the first ones."""
_MOST_ROUTED = 40_000
"""The same of all replicas together, and where many are held."""
_UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))
"""In which a long time is told, each from twice as many seconds on."""
_FILLS = 10
"""Requests of a replay over those that come until the batches are filled: its first tenth does not count."""
_LONG_RUN = (
    "waits for a slot: those of a long run, by a queue of as many servers with the same requests and without end"
)
_BATCHES_ALIKE = 192
"""Batches of a replay of a policy that takes together what is alike: a sample that covers the lengths evenly makes
those of a short queue too even, and throughput too low (LOG.md)."""
_LONG_REQUESTS = 4
"""Fewest requests of the 99th-percentile length in a replay: the bound is on their latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullBatches:
    """What a plan for a rate of arrivals takes and serves once all its batches are full, of all replicas together."""

    throughput: float
    """Requests/s: beyond these its queues grow without end."""
    residents: float
    kv_tokens: float
    memory_bytes_per_gpu: float
    """Of the fullest GPU."""

    def of_each(self, num_replicas: int) -> float:
        """Requests/s of each of these, which are alike, to four digits."""
        return float(f"{self.throughput / num_replicas:.4g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePart:
    """The first requests of a trace, which were replayed, and all that it has."""

    num_requests: int
    of_requests: int
    seconds: float
    """From the first arrival to the last one that was replayed."""
    of_seconds: float

    def __str__(self) -> str:
        name, unit = next(((name, unit) for name, unit in _UNITS if self.of_seconds >= 2 * unit), _UNITS[-1])
        return (
            f"the first {self.num_requests:,} of {self.of_requests:,} requests of the trace, "
            f"{self.seconds / unit:.3g} of {self.of_seconds / unit:.3g} {name}, were replayed"
        )


def trace_part(problem: Problem, num_requests: int) -> TracePart | None:
    """The part of its trace that so many requests are; None where that is all of it, or requests come otherwise."""
    if problem.arrivals is None or not problem.arrivals.of_trace:
        return None
    trace = problem.workload.trace
    assert trace is not None
    assert trace.arrival_s is not None
    times = trace.arrival_s
    if num_requests >= len(times):
        return None
    return TracePart(
        num_requests=num_requests,
        of_requests=len(times),
        seconds=float(times[num_requests - 1] - times[0]),
        of_seconds=float(times[-1] - times[0]),
    )


def most_of_trace(num_replicas: int) -> int:
    """Requests of a trace that a replay of so many replicas takes, unless their number is given."""
    return min(_MOST_ARRIVING * num_replicas, _MOST_ROUTED)


def full_batches(groups: Sequence[tuple[Problem, ReplicaGroup]]) -> FullBatches:
    """By the closed form; each group comes with the problem of one of its replicas."""
    found = [(_steady(one, group), one, group.num_replicas) for one, group in groups]
    return FullBatches(
        throughput=sum(count * steady.throughput for steady, _, count in found),
        residents=sum(count * steady.cycle.num_seqs for steady, _, count in found),
        kv_tokens=sum(count * steady.kv_tokens for steady, _, count in found),
        memory_bytes_per_gpu=max(
            one.bytes_held(steady.schedule, steady.kv_tokens, steady.cycle.prefill_kv_tokens)
            for steady, one, _ in found
        ),
    )


def replay_estimate(
    problem: Problem,
    schedule: Schedule,
    *,
    seed: int,
    num_requests: int | None = None,
    kv_tokens: int | None = None,
    length: float = 1.0,
    record_passes: bool = True,
    told: Told = SILENT,
) -> tuple[Run, Estimate]:
    """A replay of a stratified sample of the workload, and its Estimate; `kv_tokens` sets the size of the KV cache,
    and without `record_passes` the run has no passes. `length` is the share of the usual requests where they arrive.
    `told` hears how far it is.

    With an arrival rate, requests arrive at it and their waiting counts, as in a long run unless their number is given;
    a trace is replayed at its own times.
    """
    steady = steady_state(schedule, problem.workload, problem.cost)
    low, high = _REPLAY_REQUESTS
    n = num_requests or int(min(max(low, _generations(problem, steady)), high))
    p99 = problem.workload.output_quantile(0.99)
    inputs, outputs = problem.workload.sample(n, seed=seed)
    while num_requests is None and n < high and np.count_nonzero(outputs >= p99) < _LONG_REQUESTS:
        n = min(2 * n, high)
        inputs, outputs = problem.workload.sample(n, seed=seed)
    arrivals = None
    if problem.arrivals:
        n = num_requests or _lone_requests(problem.arrivals, steady, length)
        inputs, outputs, arrivals = problem.arrivals.draw(problem.workload, n, seed=seed)
    due = problem.workload.deadlines
    num_blocks = (kv_tokens or kv_cache_tokens(problem, schedule)) // BLOCK_SIZE
    run = replay(
        schedule,
        problem.cost,
        input_tokens=inputs,
        output_tokens=outputs,
        num_blocks=num_blocks,
        arrivals=arrivals,
        deadlines=due.draw(len(inputs), seed=seed) if due and arrivals is not None else None,
        record_passes=record_passes,
        told=told,
    )
    peak = float(run.peak_kv_tokens)
    if problem.arrivals:
        requests, left = run.requests, 1.0
        if num_requests is None:
            requests, left = _in_the_long_run(problem, requests, [(steady, 1)])
        return run, arrived_estimate(problem, requests, [run], [(problem, schedule)], left=left)
    return run, summarize(
        run.requests,
        p99_output=p99,
        bounds=problem.bounds,
        kv_tokens=peak,
        memory_bytes=problem.bytes_held(schedule, peak),
    )


def _in_the_long_run(
    problem: Problem, requests: Requests, replicas: Sequence[tuple[SteadyState, int]]
) -> tuple[Requests, float]:
    """As `simulator/rates/long_run.py` has it, behind a router that looks at so many replicas of each kind; a trace and
    requests with deadlines stay as they are."""
    arrivals = problem.arrivals
    assert arrivals is not None
    if arrivals.of_trace or problem.workload.deadlines:
        return requests, 1.0
    capacity = sum(count * steady.throughput for steady, count in replicas)
    slots = round(sum(count * steady.cycle.num_seqs for steady, count in replicas))
    queue = SlotQueue(rate=arrivals.rate, capacity=capacity, slots=max(slots, 1))
    return in_the_long_run(requests, queue, problem.workload)


def promised(replayed: Estimate, closed_form: Estimate) -> Estimate:
    """What is promised where requests arrive: the replay, but of gaps the most that the plan's passes can take."""
    if MAX_ITL not in closed_form.percentiles:
        return replayed
    longest = {MAX_ITL: closed_form.percentiles[MAX_ITL]}
    return replace(replayed, percentiles={**replayed.percentiles, **longest})


def too_short(problem: Problem, schedule: Schedule, *, replicas: int = 1) -> str:
    """Why the longest replay of a schedule is too short to prove it, as a sentence; '' where it is not.

    Under a backlog it misses the steady state. Where requests come, to so many replicas together, it ends before their
    batches have long been full; a trace is as long as it is.
    """
    arrivals, steady = problem.arrivals, steady_state(schedule, problem.workload, problem.cost)
    if arrivals and arrivals.of_trace:
        return ""
    if arrivals:
        needed, most = _FILLS * replicas * _filling(arrivals, steady), _MOST_ROUTED
        shown = f"{schedule} with as many requests held as at any time later"
    else:
        needed, most = _generations(problem, steady), _REPLAY_REQUESTS[1]
        shown = f"the steady state of {schedule}"
    if most * _LEAST_GENERATIONS >= needed:
        return ""
    return (
        f"unproven: {needed:.0f} requests would show {shown}, a replay has {most}; give `exeplan simulate` more with "
        "--requests"
    )


def _generations(problem: Problem, steady: SteadyState) -> float:
    """The number of several generations of the longest planned requests."""
    rate = min(steady.throughput, problem.arrivals.rate) if problem.arrivals else steady.throughput
    needed = 4 * rate * steady.bound_latency("p99-length") + 4 * steady.cycle.num_seqs
    if not sampled_evenly(steady.schedule):
        needed = max(needed, _BATCHES_ALIKE * load_policy(steady.schedule.policy).starts_together(steady.schedule))
    return float(needed)


def _lone_requests(arrivals: Arrivals, steady: SteadyState, length: float) -> int:
    """Enough to fill a pipeline, and for its queue to reach its steady length."""
    n = int(length * _arriving_requests(arrivals, steady.throughput))
    least = max(_FEWEST_ARRIVING, _FILLS * _filling(arrivals, steady))
    return n if arrivals.of_trace else int(min(max(n, least), _MOST_ROUTED))


def _filling(arrivals: Arrivals, steady: SteadyState) -> float:
    """Requests that come, at most, until the first long one is done: then as many are held as at any time later."""
    return arrivals.rate * steady.bound_latency("p99-length")


def _arriving_requests(arrivals: Arrivals, capacity: float) -> int:
    """Enough for the queue to reach its steady length, which takes longer near the engine's capacity."""
    if arrivals.of_trace:
        return _MOST_ARRIVING
    spare = max(1.0 - arrivals.rate / capacity, 1e-3)
    return int(min(_ARRIVING / spare, _MOST_ARRIVING))


def routed_estimate(
    problem: Problem,
    groups: Sequence[tuple[Problem, ReplicaGroup]],
    router: str,
    *,
    seed: int,
    num_requests: int | None = None,
    length: float = 1.0,
    record_passes: bool = True,
    told: Told = SILENT,
) -> tuple[RoutedRun, Estimate]:
    """A replay of all replicas behind the router, under the arrivals of `problem`, and the Estimate of all requests;
    `length` and `told` as of `replay_estimate`.

    Each group comes with the problem of one of its replicas. KV cache tokens are added, memory is that of the fullest
    GPU.
    """
    assert problem.arrivals is not None
    n = num_requests or _routed_requests(problem.arrivals, groups, router, length)
    inputs, outputs, arrivals = problem.arrivals.draw(problem.workload, n, seed=seed)
    placed = [(one, group.schedule) for one, group in groups for _ in range(group.num_replicas)]
    due = problem.workload.deadlines
    run = routed_replay(
        [replica for one, group in groups for replica in [_replica(one, group)] * group.num_replicas],
        router,
        input_tokens=inputs,
        output_tokens=outputs,
        arrivals=arrivals,
        deadlines=due.draw(len(inputs), seed=seed) if due else None,
        record_passes=record_passes,
        told=told,
    )
    requests, left = run.requests, 1.0
    if num_requests is None:
        replicas = [(_steady(one, group), group.num_replicas) for one, group in groups]
        requests, left = _in_the_long_run(problem, requests, replicas)
    return run, arrived_estimate(problem, requests, run.replicas, placed, left=left)


def arrived_estimate(
    problem: Problem,
    requests: Sequence[RequestRecord],
    runs: Sequence[Run],
    placed: Sequence[tuple[Problem, Schedule]],
    *,
    left: float = 1.0,
) -> Estimate:
    """The Estimate of requests that came at their own times to replicas that were run so, each on its placement with
    its schedule; `left` is the share of the error of ttft that a long run leaves (`_in_the_long_run`)."""
    peaks = [float(one.peak_kv_tokens) for one in runs]
    found = summarize(
        requests,
        p99_output=problem.workload.output_quantile(0.99),
        bounds=problem.bounds,
        backlog=False,
        waiting=True,
        kv_tokens=sum(peaks),
        memory_bytes=max(one.bytes_held(schedule, peak) for (one, schedule), peak in zip(placed, peaks, strict=True)),
    )
    if left == 1:
        return found
    firsts = {name: narrowed(of, left) for name, of in found.evidence.items() if name.endswith("ttft")}
    return replace(found, evidence={**found.evidence, **firsts}, notes=(*found.notes, _LONG_RUN))


def _steady(problem: Problem, group: ReplicaGroup) -> SteadyState:
    """Of one replica of the group."""
    return steady_state(group.schedule, problem.workload, problem.cost)


def _replica(problem: Problem, group: ReplicaGroup) -> Replica:
    """One of the group, with the KV cache of its plan or the one that it would be planned with."""
    tokens = group.kv_cache_tokens or kv_cache_tokens(problem, group.schedule)
    return Replica(schedule=group.schedule, cost=problem.cost, num_blocks=tokens // BLOCK_SIZE, capacity=group.capacity)


def _routed_requests(
    arrivals: Arrivals, groups: Sequence[tuple[Problem, ReplicaGroup]], router: str, length: float
) -> int:
    """Enough for all replicas to fill up, and for their queues to reach their steady lengths: one queue together where
    the router looks at them, one each otherwise.

    Raises Infeasible where a replica does not sustain its share.
    """
    number = sum(group.num_replicas for _, group in groups)
    if arrivals.of_trace:
        return most_of_trace(number)
    capacity = filling = 0.0
    for problem, group in groups:
        assert problem.arrivals is not None
        steady = _steady(problem, group)
        check_sustained(steady, problem.arrivals)
        capacity += group.num_replicas * steady.throughput
        filling += group.num_replicas * _filling(problem.arrivals, steady)
    queues = 1 if router == ROUTERS[0] else number
    asked = max(length * _arriving_requests(arrivals, capacity), _FEWEST_ARRIVING)
    return int(min(max(queues * asked, _FILLS * filling), _MOST_ROUTED))


def kv_cache_tokens(problem: Problem, schedule: Schedule) -> int:
    """Tokens of KV cache for the engine: what the plan needs with slack and a request of the whole context, within the
    memory. Where positions set no limit (T5) the context is the one that GPUs keep memory for, or the longest request.
    """
    context = max(with_finite_context(problem.profile.model).max_context, problem.workload.longest)
    needed = (
        steady_state(schedule, problem.workload, problem.cost).kv_tokens * KV_SLACK
        + problem.cost.num_caches // problem.cost.num_ranks * context
    )
    return int(min(needed, problem.kv_capacity_tokens(schedule))) // BLOCK_SIZE * BLOCK_SIZE
