"""Closed form of a schedule to which requests come at a rate, instead of waiting in a backlog.

Three laws, by how a policy admits requests.

Slots: a request begins with the next pass that has a free slot. With n requests in the system, in service or waiting
for admission, the schedule works as in its steady state with batches that hold n: it serves X(n) requests/s (Little's
law gives the batch). Arrivals at rate r make n a birth-and-death chain, P(n) ~ prod r / X(k). For processor sharing,
which iteration-level scheduling approximates, that is exact for any law of the lengths (Kelly 1979, section 3.3).
Beyond full batches requests queue for one of many servers (`_longer`).

    in service  a request shares the engine with n - 1 others for a part of its life proportional to n P(n), so its time
                is the harmonic mean of the times at constant n under these weights
    arriving    it meets n others with probability P(n); with n = 0 there is no wait for an admission
    passes      what a request meets of them, by the prompts that came before it, is drawn (`chained_passes.py`)
    sharing     replicas that share a stream by the shortest queue hold alike many: n of them are one chain of n times
                the sizes and throughputs, and a request joins a replica of the fewest

Gate: all that wait begin together, up to a full batch, when the batch before is done, or its cycle over (`gate.py`).
Stages that prefill apart are a gate of their own; what decodes behind them is the policy's (`Steady.arriving`).

Drawn: where the lengths that wait decide the next batch, a policy serves a few queues of random requests itself
(`Steady.served`), and their times are those of the Estimate.

    KV cache    that of a batch which is exceeded as seldom as three standard deviations of a normal law are
    percentiles as `request_times.py` has them, over what an arriving request meets

More even arrivals than a Poisson stream, gaps with a squared coefficient of variation c below 1 as those of every n-th
request of one, spread n (c + s) / (1 + s) times as much, s that of the output lengths: right without a limit on the
batch for lengths all alike or exponential, and for processor sharing close to its capacity. Not here: bursts, as traces
have them: laws of single gaps were 29 % short and 189 % long in mean ttft, so that a trace is replayed. A plan counts
if its replay with arrivals keeps the bounds, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf
from statistics import NormalDist

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.bounds import Bound, is_deadline, share_of_requests, targets_of
from exeplan.core.runs.request_times import RequestTimes, quantile
from exeplan.core.schedule import Estimate
from exeplan.errors import Infeasible
from exeplan.policies import load_policy
from exeplan.policies.interface import Served
from exeplan.simulator.closed_form import KV_SIGMAS, SteadyState, deadline_factors, estimate, weighted_quantile
from exeplan.simulator.cost import CostModel
from exeplan.simulator.rates.gate import Gate, gate
from exeplan.simulator.rates.request_times import (
    Met,
    MetPasses,
    met_passes,
    one_prompt,
    prompt_variance,
    tail_shares,
    times_at_rate,
    with_bounds,
)
from exeplan.workload.arrivals import Arrivals, residents
from exeplan.workload.length_law import Ints

_ALIKE = np.ones(1)
_LEAST_SPREAD = 0.02
"""Even where neither gaps nor lengths vary."""
_STATES = 64
"""Shares of the numbers that an arriving request meets, the largest ones in small shares: percentiles lie there."""
_HELD, _MOST_HELD = 6, 48
"""Times for which a gate is held at least, and at most where a few are far longer than the others."""
_WHOLE = 0.05
"""Requests that begin together beyond a whole number, from which on one more may."""
_SHORTEST = 0.05
"""Of them, over their mean, unless they are more skewed than the law that they are of."""
_APART = 0.05
"""By what share the longest of equal ones exceeds the shortest, where they are spread by a power."""
_NORMAL = np.array([-1.38, -0.69, -0.21, 0.21, 0.69, 1.38])
"""Means of as many slices of a normal distribution."""
_CHAINS, _DRAWN, _SETTLED = 64, 64, 16
"""Chains of batches on a pipeline, their lengths, and batches until they have settled."""
_WAITS = 16
"""Waits of the requests that meet one batch, for quantiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mix:
    """What requests meet: weights of the steady states, and seconds."""

    aboard: Floats
    """Weights of the steady states as requests in service see them."""
    joining: Floats
    """Weights as an arriving request sees them, itself included."""
    wait: float
    """Mean seconds until it begins."""
    met: Met
    kv_tokens: float
    """Tokens of KV cache of as many requests as are hardly ever exceeded."""
    harmonic: bool
    """Requests stay while the batch changes, and meet a slow one for longer."""

    def mean(self, values: "Sequence[float] | Floats") -> float:
        """Of times in service."""
        each = np.asarray(values)
        if self.harmonic:
            return float(1 / (self.aboard @ (1 / each))) if (each > 0).all() else 0.0
        return float(self.aboard @ each)


def estimate_at_rate(
    points: Sequence[SteadyState],
    arrivals: Arrivals,
    cost: CostModel,
    metric: str,
    *,
    bounds: Sequence[Bound] = (),
    memory: float = inf,
) -> Estimate:
    """The Estimate of a schedule under arrivals; `points` are its steady states with rising batches, the last one full.

    Its throughput must exceed the rate. Percentiles, attainment and goodput are those of `bounds`; KV cache and memory
    are what the requests of this rate hold. Raises Infeasible where the waits would grow without end even so: behind
    partly filled batches a gate may sustain a little less than full ones serve.
    """
    full = points[-1]
    if full.steady.served is not None:
        found = full.steady.served(arrivals.rate, arrivals.variability / arrivals.sharing)
        return _of_served(full, found, arrivals, cost, metric, bounds=bounds, memory=memory)
    points, mix = _mix(tuple(points), arrivals, cost)
    length = np.array([float(full.workload.output_quantile(0.99))])
    firsts, lasts = np.array([point.ttft for point in points]), [float(point.latency(length)[0]) for point in points]
    ttft = mix.wait + float(mix.joining @ firsts)
    tpot = mix.mean([point.tpot for point in points])
    at_length = ttft + mix.mean(np.array(lasts) - firsts)
    kv_tokens = mix.kv_tokens
    if full.steady.arriving is not None:
        kv_tokens = _kv_behind(full, arrivals, ttft - mix.wait + tpot * (full.workload.mean_output - 1))
    kv_tokens = min(kv_tokens, full.kv_tokens)
    share = share_of_requests(metric)
    at_rate = replace(
        estimate(full, cost, metric, memory=memory),
        throughput=arrivals.rate,
        token_throughput=arrivals.rate * full.workload.mean_output,
        ttft=ttft,
        tpot=tpot,
        latency=at_length
        if share is None
        else _quantile(points, mix.met, share, factors=deadline_factors(full.workload, metric)),
        latency_p50=_quantile(points, mix.met, 0.5),
        latency_p99=_quantile(points, mix.met, 0.99),
        kv_tokens=kv_tokens,
        memory_bytes_per_gpu=cost.memory.bytes_held(full.schedule, memory, kv_tokens, full.cycle.prefill_kv_tokens),
    )
    if not targets_of(bounds):
        return at_rate
    return with_bounds(at_rate, times_at_rate(points, cost, mix.met), bounds)


@lru_cache(maxsize=4)  # Whether a schedule keeps its bounds, and its Estimate, are asked one after the other.
def _mix(points: tuple[SteadyState, ...], arrivals: Arrivals, cost: CostModel) -> tuple[Sequence[SteadyState], _Mix]:
    """The steady states that requests meet, and how."""
    full, of_rate = points[-1], list(points)
    if full.steady.arriving is not None:
        of_rate = [SteadyState(s, full.workload, at, full.num_caches) for s, at in full.steady.arriving(arrivals.rate)]
    if _is_gated(full):
        return _through_gate(_by_size(of_rate), arrivals, cost, apart=full.steady.arriving is not None)
    return _in_slots(of_rate, arrivals, cost)


def _of_served(
    full: SteadyState,
    found: Served,
    arrivals: Arrivals,
    cost: CostModel,
    metric: str,
    *,
    bounds: Sequence[Bound],
    memory: float,
) -> Estimate:
    """From the times of single requests."""
    first_tokens = 1 if cost.first_token_from_prefill else 0
    planned, single = int(full.workload.output_quantile(0.99)), found.outputs <= 1

    def at(output_tokens: Ints | int) -> Floats:
        return found.waits + found.prefills + found.paces * (output_tokens - first_tokens)

    latency, deadlines = at(found.outputs), full.workload.deadlines
    due = latency * (np.resize(deadlines.factors, len(latency)) if deadlines else 1.0)
    times = RequestTimes(
        ttft=at(1),
        tpot=np.where(single, 0.0, found.paces),
        latency=latency,
        length=at(np.minimum(found.outputs, planned)),
        due=due,
        single=single,
    )
    share, longest = share_of_requests(metric), found.outputs >= min(planned, int(found.outputs.max()))
    kv_tokens = min(float(np.quantile(found.kv_tokens, NormalDist().cdf(KV_SIGMAS))), full.kv_tokens)
    at_rate = replace(
        estimate(full, cost, metric, memory=memory),
        throughput=arrivals.rate,
        token_throughput=arrivals.rate * full.workload.mean_output,
        ttft=float(times.ttft.mean()),
        tpot=float(found.paces[~single].mean()) if not single.all() else 0.0,
        latency=float(at(planned)[longest].mean())
        if share is None
        else quantile(due if is_deadline(metric) else latency, share),
        latency_p50=quantile(latency, 0.5),
        latency_p99=quantile(latency, 0.99),
        kv_tokens=kv_tokens,
        memory_bytes_per_gpu=cost.memory.bytes_held(full.schedule, memory, kv_tokens, full.cycle.prefill_kv_tokens),
    )
    return with_bounds(at_rate, times, bounds) if targets_of(bounds) else at_rate


def _held_most(chance: Floats) -> int:
    """Which of these, rising, is exceeded as seldom as a normal law exceeds `KV_SIGMAS` standard deviations."""
    return int(np.searchsorted(np.cumsum(chance), NormalDist().cdf(KV_SIGMAS) * chance.sum()).clip(max=len(chance) - 1))


def _kv_behind(full: SteadyState, arrivals: Arrivals, served: float) -> float:
    """Tokens of KV cache of stages that decode what others prefilled, where requests are there for `served` seconds.

    By Little's law rate * served of them, a number with the variance of a Poisson law; each holds what one of a full
    batch does.
    """
    cycle, mean = full.cycle, arrivals.rate * served
    most = mean + KV_SIGMAS * np.sqrt(mean)
    spread = np.sqrt(most * cycle.kv_tokens_std**2 / cycle.num_seqs)
    return float(most * (cycle.kv_tokens / cycle.num_seqs + BLOCK_SIZE / 2) + KV_SIGMAS * spread)


def _is_gated(point: SteadyState) -> bool:
    """Requests begin together, not each with the next pass."""
    return load_policy(point.schedule.policy).KEEPS_FINISHED_ROWS or point.steady.admission_interval is None


def _in_slots(points: Sequence[SteadyState], arrivals: Arrivals, cost: CostModel) -> tuple[list[SteadyState], _Mix]:
    sizes = np.maximum.accumulate([_in_system(point) for point in points])
    throughputs = np.maximum.accumulate([point.throughput for point in points])
    alike, outputs = arrivals.sharing, points[-1].workload.output_law
    lengths = (outputs.std / outputs.mean) ** 2
    spread = _spread(arrivals.variability, lengths, alike * float(sizes[-1]))
    chance = residents(alike * arrivals.rate, alike * sizes, alike * throughputs, spread=spread)
    load = arrivals.rate / float(throughputs[-1])
    longer = (arrivals.variability + lengths) / (1 + lengths) * _longer(lengths, alike * float(sizes[-1]), load)
    longer /= spread  # The chain spreads it already.
    number = np.arange(len(chance), dtype=float) / alike
    served = np.minimum(number, sizes[-1])
    aboard = _weights(served, sizes) @ (served * chance)
    aboard /= aboard.sum()
    waiting = _weights(served, sizes)[:, 1:] @ chance[1:]
    free = float(chance[number < sizes[-1]].sum())
    passes = met_passes(points, cost, arrivals, free)
    intervals = np.array([each.interval for each in passes])
    queue = longer * float((number - served) @ chance) / arrivals.rate
    mix = _Mix(
        aboard=aboard,
        joining=_weights(np.floor(served) + 1, sizes) @ chance,
        wait=queue + float(waiting @ intervals) / 2,
        met=_met_in_slots(
            _as_requests(aboard, points),
            passes,
            float(waiting.sum()),
            queue,
            np.maximum(number + 1 - sizes[-1], 0.0),
            chance,
        ),
        kv_tokens=float(np.interp(served[_held_most(chance)], sizes, [point.kv_tokens for point in points])),
        harmonic=True,
    )
    return [each.of(point) for point, each in zip(points, passes, strict=True)], mix


def _longer(lengths: float, servers: float, load: float) -> float:
    """The queue for servers, over that of exponential lengths, of lengths with this squared coefficient of variation.

    From the queue of lengths all alike, as Kimura has it (A two-moment approximation for the mean waiting time in the
    GI/G/s queue, 1986); that is Cosmetatos's (Some approximate equilibrium results for the multiserver queue M/G/r,
    1976). Half of 1 + c^2 with one server, and nearer to 1 with many, of which a long request blocks one alone.
    """
    idle = (1 - load) * (servers - 1) * (np.sqrt(4 + 5 * servers) - 2) / (16 * servers * load)
    alike = min(0.5 * (1 + float(idle)), 1.0)
    return (1 + lengths) / (2 * lengths + (1 - lengths) / alike)


def _spread(variability: float, lengths: float, size: float) -> float:
    """The variance of the requests in the system over that under Poisson arrivals; 1 where there is a single place.

    `variability` and `lengths` are squared coefficients of variation of the gaps and of the output lengths.
    """
    many = (variability + lengths) / (1.0 + lengths)
    return 1.0 / (1.0 + (1.0 / max(many, _LEAST_SPREAD) - 1.0) * (1.0 - 1.0 / max(size, 1.0)))


def _as_requests(aboard: Floats, points: Sequence[SteadyState]) -> Floats:
    """The weights with which requests have the pace of each batch: a slow one keeps them aboard for longer."""
    paces = np.array([point.tpot for point in points])
    weights = aboard / paces if (paces > 0).all() else aboard
    return np.asarray(weights / weights.sum())


def _met_in_slots(
    aboard: Floats, passes: Sequence[MetPasses], busy: float, queue: float, ahead: Floats, chance: Floats
) -> Met:
    """The longest queues go with the largest batches; `busy` is the chance of finding a batch."""
    edges = tail_shares(_STATES)
    shares = np.diff(edges)
    state = (edges[1:] + edges[:-1]) / 2
    which = np.searchsorted(np.cumsum(aboard), state).clip(max=len(aboard) - 1)
    queued = np.interp(state, np.append(0.0, np.cumsum(chance)), np.append(0.0, ahead))
    queued *= queue / max(float(shares @ queued), 1e-300)
    kinds, waits, weights = [], [], []
    for number, queued_here, share in zip(which.tolist(), queued.tolist(), shares.tolist(), strict=True):
        found = passes[number]
        waits.append(queued_here + np.append(0.0, found.waits))
        kinds.append(np.full(waits[-1].size, number))
        weights.append(share * np.append(1 - busy, busy * found.shares))
    return Met(which=np.concatenate(kinds), waits=np.concatenate(waits), weights=np.concatenate(weights))


def _by_size(points: Sequence[SteadyState]) -> list[SteadyState]:
    """One steady state for each number that begins together: of equal ones the last."""
    found = {round(_together(point)): point for point in points}
    return [found[size] for size in sorted(found)]


def _together(point: SteadyState) -> float:
    """Requests that begin together."""
    return point.throughput * point.admission_interval


def _through_gate(
    points: Sequence[SteadyState], arrivals: Arrivals, cost: CostModel, *, apart: bool
) -> tuple[Sequence[SteadyState], _Mix]:
    """Where requests stay for several cycles, most of a batch are those of earlier ones: as many as in the mean.

    `apart`: what begins together only prefills together.
    """
    sizes = np.array([_together(point) for point in points])
    throughputs = np.maximum.accumulate([point.throughput for point in points])
    each = np.arange(1, max(ceil(float(sizes[-1]) - _WHOLE), 1) + 1, dtype=float)
    mean = float(np.interp(arrivals.rate, throughputs, sizes))
    own = 1.0 if apart or len(points) == 1 else _own_share(points[-1])
    blended = own * each + (1 - own) * mean
    held = blended / np.interp(blended, sizes, throughputs)
    held += (1 - own) * (each - mean) * one_prompt(points[-1], cost, slowest=True)
    shares = _held(points, cost, slowest=apart)
    spread = np.stack([np.interp(each, sizes, row) for row in shares.T], axis=1)
    held = np.maximum(held, 1e-3 * held[-1])
    try:
        found = gate(arrivals.rate, held[:, None] * spread, variability=arrivals.variability / arrivals.sharing)
    except Infeasible as error:
        raise Infeasible(f"{points[-1].schedule}: {error}") from None
    if apart:
        points = _behind_others(points, held[:, None] * spread, found, arrivals, cost)
    else:
        found = _joining(found, points[-1], cost, mean, mean / arrivals.rate)
    most = np.interp(found.sizes[_held_most(found.chance)], each, blended)
    return points, _Mix(
        aboard=_weights(np.interp(found.sizes, each, blended), sizes) @ found.chance,
        joining=_weights(found.sizes, sizes) @ found.chance,
        wait=found.wait,
        met=_met_at_gate(np.interp(np.interp(found.together, each, blended), sizes, np.arange(len(points))), found),
        kv_tokens=float(np.interp(most, sizes, [point.kv_tokens for point in points])),
        harmonic=False,
    )


def _behind_others(
    points: Sequence[SteadyState], held: Floats, found: Gate, arrivals: Arrivals, cost: CostModel
) -> list[SteadyState]:
    """Where a pipeline prefills, a batch waits on its later stages for longer ones before it.

    With times T that are alike on all stages it is on each of the later ones for M = max(T, M before - idle time): the
    longest batch of those without a pause between them (Boxma, On a tandem queueing model with identical service times
    at both counters, 1979). A few chains of batches are drawn. `held` has the equally likely times of batches of 1, 2,
    ... requests.
    """
    later = len(cost.prefill_stages) - 1
    if not later or cost.num_prefill_servers > 1:
        return list(points)
    rng, often = np.random.default_rng(0), found.chance / found.sizes
    sizes = found.sizes[rng.choice(len(often), (_DRAWN, _CHAINS), p=often / often.sum())].astype(int)
    times = held[sizes - 1, rng.integers(held.shape[1], size=sizes.shape)]
    pauses = rng.exponential(1 / arrivals.rate, sizes.shape)
    pauses *= rng.random(sizes.shape) < float(found.weights[0]) / float(often.sum())
    longest, before = times[0], []
    for time, pause in zip(times, pauses, strict=True):
        before.append(longest - pause)
        longest = np.maximum(time, before[-1])
    seen = np.concatenate(before[_SETTLED:])
    own = [held[max(round(_together(point)), 1) - 1] for point in points]
    return [
        _later(point, later * float(np.maximum(np.subtract.outer(seen, times), 0.0).mean()))
        for point, times in zip(points, own, strict=True)
    ]


def _later(point: SteadyState, seconds: float) -> SteadyState:
    """The steady state in which every token comes so much later."""
    latency = point.steady.latency
    return replace(point, steady=replace(point.steady, latency=lambda output_tokens: latency(output_tokens) + seconds))


def _joining(found: Gate, point: SteadyState, cost: CostModel, mean: float, held: float) -> Gate:
    """Where prompts enter a pipeline in parts, those that come meanwhile join the next part, if the batch has room."""
    parts = point.schedule.num_micro_batches
    if parts == 1:
        return found
    each = min(mean * one_prompt(point, cost, slowest=True) / held, 1.0) / parts
    until_last = (parts - 1) * each
    less = (1 - until_last) ** 2 + until_last * each
    less = 1 - (1 - less) * float(found.chance[:-1].sum())
    return replace(found, wait=less * found.wait, waits=less * found.waits)


def _weights(values: Floats, sizes: Floats) -> Floats:
    """How near each value is to the steady states of these sizes, [sizes, values]."""
    return np.stack([np.interp(values, sizes, row) for row in np.eye(len(sizes))])


def _met_at_gate(positions: Floats, found: Gate) -> Met:
    """Between two steady states both are met, the nearer one more often."""
    low = np.floor(positions)
    share = positions - low
    return Met(
        which=np.concatenate([low, np.ceil(positions)]).astype(int),
        waits=np.tile(found.waits, 2),
        weights=np.concatenate([found.weights * (1 - share), found.weights * share]),
    )


def _own_share(point: SteadyState) -> float:
    """Of the residents, those that began last."""
    law = point.workload.output_law
    seconds = point.latency(law.tokens.astype(float))
    return float(law.weights @ np.minimum(seconds, point.admission_interval) / (law.weights @ seconds))


def _held(points: Sequence[SteadyState], cost: CostModel, *, slowest: bool = False) -> Floats:
    """Equally likely times for which those that begin together hold the gate, over their mean, [points, times].

    Until the longest of them is done, but no longer than makes the mean right; and what their prompts differ by, on
    the `slowest` stage where the gate opens when that is free.
    """
    laws = [_until_longest(point) for point in points]
    variances = []
    for point, (seconds, weights) in zip(points, laws, strict=True):
        mean = float(weights @ seconds)
        prompts = prompt_variance(point, cost, max(_together(point), 1.0), slowest=slowest)
        variances.append((max(float(weights @ seconds**2) - mean**2, 0.0) + prompts) / point.admission_interval**2)
    count = int(np.clip(np.ceil(2 * (1 + max(variances))), _HELD, _MOST_HELD))
    return np.stack([_spread_out(*law, variance, count) for law, variance in zip(laws, variances, strict=True)])


def _until_longest(point: SteadyState) -> tuple[Floats, Floats]:
    """Rising seconds until the longest of those that begin together is done, and how likely each is."""
    law = point.workload.output_law.longest_of(max(_together(point), 1.0))
    seconds, weights = point.latency(law.tokens.astype(float)), law.weights
    means = np.cumsum(weights * seconds) + seconds * (1 - np.cumsum(weights))  # Of min(seconds, each of them).
    return np.minimum(seconds, np.interp(point.admission_interval, means, seconds)), weights


def _spread_out(seconds: Floats, weights: Floats, variance: float, count: int) -> Floats:
    """Equally likely values with mean 1 and this variance, all above 0 and shaped as the law of the seconds is.

    The variance is below `count` - 1, as that of such values has to be.
    """
    reached, mass = np.append(0.0, np.cumsum(weights)), np.append(0.0, np.cumsum(weights * seconds))
    shape = np.diff(np.interp(np.linspace(0, 1, count + 1), reached, mass)) * count / mass[-1]
    if np.std(shape) <= 1e-3:
        shape = 1.0 + np.interp(np.linspace(0, 1, count), np.linspace(0, 1, len(_NORMAL)), _NORMAL) / 10
    evenly = 1.0 + (shape - shape.mean()) / np.std(shape) * np.sqrt(variance)
    if evenly.min() >= min(_SHORTEST, shape.min()):
        return np.asarray(evenly)
    # Powers keep them above 0; no two of them are quite alike, so that any variance can be reached.
    logs = np.log(np.maximum(shape, 1e-3)) + np.linspace(-_APART, 0.0, count)
    logs -= logs.max()
    low, high = 0.0, 1.0
    while high < 1e4 and _power(logs, high).var() < variance:
        high *= 2
    for _ in range(50):
        power = (low + high) / 2
        low, high = (power, high) if _power(logs, power).var() < variance else (low, power)
    return _power(logs, high)


def _power(logs: Floats, power: float) -> Floats:
    """Such a power of the values with these logarithms, over its mean."""
    values = np.exp(np.maximum(power * logs, -50.0))
    return np.asarray(values / values.mean())


def _in_system(point: SteadyState) -> float:
    """Requests in service or waiting for admission, by Little's law."""
    law = point.workload.output_law
    return point.throughput * (
        float(law.weights @ point.latency(law.tokens.astype(float))) + point.admission_interval / 2
    )


def _quantile(points: Sequence[SteadyState], met: Met, share: float, *, factors: Floats = _ALIKE) -> float:
    """Over the length law, what requests meet, and the factors; a batch is assumed to last as long as a request."""
    law = points[0].workload.output_law
    times, weights = [], []
    for number in np.unique(met.which):
        waits, likely = met.at(int(number), _WAITS)
        found = np.add.outer(points[number].latency(law.tokens.astype(float)), waits)
        times.append(np.multiply.outer(found, factors).ravel())
        weights.append(np.repeat(np.multiply.outer(law.weights, likely).ravel() / len(factors), len(factors)))
    return weighted_quantile(np.concatenate(times), np.concatenate(weights), share)
