"""Times of single requests in closed form: a fixed sample of them around the means of a steady state.

    ttft     its mean, plus the wait, plus what the prompts of its prefill are longer than the mean: k prompts together
             sqrt(k) times what one is, each token with its share of the time that one prompt more takes; where the work
             of prefills is adjusted, no more than the threshold, or than its own prompt alone
    tpot     the mean at its output length; where prefills run between the decodes, plus those it meets: their number
             among its later tokens is a Poisson variable, widened by the spread of their prompts
    latency  the one at its output length, with what its own ttft and tpot differ by
    at a rate  each request meets the batch and the queue at random, as arrivals see them, and stays in that batch

The sample is the same for all schedules, so that a search compares like with like. Rough: batches of alike prompts, the
first cycles of a request, queues behind bursts; the replay has the last word.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.bounds import Bound
from exeplan.core.runs.request_times import RequestTimes
from exeplan.core.schedule import Estimate
from exeplan.policies import load_policy
from exeplan.policies.interface import Clock, Cycle
from exeplan.simulator.closed_form import SteadyState
from exeplan.simulator.rates.chained_passes import PROMPTS, Chained, chained
from exeplan.simulator.rates.poisson import poisson_quantiles
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.length_law import Ints
from exeplan.workload.workload import Workload

_SAMPLE = 2048
_EVENLY = (np.arange(9) + 0.5) / 9
"""Moments between two passes."""
_EVEN_SHARES = np.full(len(_EVENLY), 1 / len(_EVENLY))
_MOST_PREFILL = 0.95
"""Share of the time that prompts take; with more, slots fill up."""


class Draws(NamedTuple):
    """One entry a request: lengths of the workload, and even draws between 0 and 1 that hang together with nothing."""

    inputs: Floats
    outputs: Floats
    met: Floats
    other: Floats
    wait: Floats
    state: Floats
    due: Floats


@lru_cache(maxsize=16)
def draws(workload: Workload) -> Draws:
    """The sample of a workload."""
    inputs, outputs = workload.sample(_SAMPLE, seed=0)
    rng, even = np.random.default_rng(1), (np.arange(_SAMPLE) + 0.5) / _SAMPLE
    met, other, wait, state, share = (rng.permutation(even) for _ in range(5))
    due = np.ones(_SAMPLE)
    if workload.deadlines is not None:
        factors = workload.deadlines.factors
        due = factors[(share * len(factors)).astype(int)]
    return Draws(inputs.astype(float), outputs.astype(float), met, other, wait, state, due)


def times_under_backlog(point: SteadyState, clock: Clock, admission_interval: float = 0.0) -> RequestTimes:
    """Of a full steady state; requests wait anywhere between two admissions, with an interval above 0."""
    sample = draws(point.workload)
    return _times([point], clock, np.zeros(_SAMPLE, int), sample.wait * admission_interval, sample)


def tail_shares(count: int) -> Floats:
    """Edges of so many shares of what is between 0 and 1: alike at 0, ever smaller towards 1."""
    return np.asarray(1.0 - np.linspace(1.0, 0.0, count + 1) ** 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """What arriving requests meet, one array entry a kind of arrival."""

    which: Ints
    """The steady state in which it is served."""
    waits: Floats
    """Seconds until it begins."""
    weights: Floats
    """How likely it is; they sum to 1."""

    def at(self, which: int, count: int) -> tuple[Floats, Floats]:
        """At most `count` waits of the requests in a steady state, and their weights: means, the longest of small
        shares."""
        here = self.which == which
        order = np.argsort(self.waits[here])
        waits, weights = self.waits[here][order], self.weights[here][order]
        if len(waits) <= count:
            return waits, weights
        edges = tail_shares(count)
        reached = np.append(0.0, np.cumsum(weights)) / weights.sum()
        mass = np.append(0.0, np.cumsum(weights * waits)) / weights.sum()
        shares = np.diff(edges)
        return np.diff(np.interp(edges, reached, mass)) / shares, shares * float(weights.sum())

    def drawn(self, chance: Floats) -> tuple[Ints, Floats]:
        """Steady states and waits at these quantiles, the waits rising in each state."""
        order = np.lexsort((self.waits, self.which))
        reached = np.cumsum(self.weights[order])
        entries = order[np.searchsorted(reached, chance * reached[-1]).clip(max=len(order) - 1)]
        return self.which[entries], self.waits[entries]


def times_at_rate(points: Sequence[SteadyState], clock: Clock, met: Met) -> RequestTimes:
    """Of a mix of steady states."""
    sample = draws(points[0].workload)
    which, waits = met.drawn(sample.state)
    return _times(points, clock, which, waits, sample, at_rate=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetPasses:
    """The passes of slots that are not full, as requests meet them that come at a rate (`chained_passes.py`).

    With f the share of the time that prompts take, the passes behind a request's first one are longer by f, f^2, ... of
    what others' prompts make this one longer.
    """

    interval: float
    """Twice the mean seconds until the pass of a request begins."""
    more: float
    """Seconds by which its first token is later than under a backlog."""
    after: float
    """Seconds by which the passes behind its first one are longer, in all."""
    share: float
    """f"""
    waits: Floats
    """[points] Seconds until its pass begins, and those by which that is longer than in the mean."""
    shares: Floats
    """[points] How likely each is."""

    def of(self, point: SteadyState) -> SteadyState:
        """The steady state with these passes."""
        steady, latency, first = point.steady, point.steady.latency, point.steady.first

        def later(output_tokens: Floats) -> Floats:
            tokens = np.asarray(output_tokens, dtype=float)
            return latency(tokens) + self.more + self.after * (1 - self.share ** np.maximum(tokens - 1, 0.0))

        longer = None if first is None else lambda inputs, chance: first(inputs, chance) + self.more
        return replace(point, steady=replace(steady, latency=later, first=longer, admission_interval=self.interval))


def met_passes(points: Sequence[SteadyState], clock: Clock, arrivals: Arrivals, free: float) -> list[MetPasses]:
    """At each of these batches, the last one full, with a free slot so often.

    Without one, or without prefills among the decodes, passes are as under a backlog.
    """
    if not _mixed(points[-1]):
        return [_as_under_backlog(point) for point in points]
    limits = [load_policy(point.schedule.policy).pass_limits(point.schedule).tokens for point in points]
    groups = np.array([point.schedule.num_micro_batches for point in points])
    rows = [point.cycle.num_seqs / count for point, count in zip(points, groups, strict=True)]
    found = chained(
        rate=arrivals.rate,
        seconds=np.array([_stage_seconds(point, clock) for point in points]),
        law=points[0].workload.input_law,
        stages=len(clock.prefill_stages),
        groups=groups,
        room=np.array([math.inf if most is None else max(most - n, 1.0) for most, n in zip(limits, rows, strict=True)]),
        variability=arrivals.variability,
    )
    return [_met(point, clock, arrivals, free, one) for point, one in zip(points, found, strict=True)]


def _as_under_backlog(point: SteadyState) -> MetPasses:
    gap = point.admission_interval
    return MetPasses(interval=gap, more=0.0, after=0.0, share=0.0, waits=gap * _EVENLY, shares=_EVEN_SHARES)


def _met(point: SteadyState, clock: Clock, arrivals: Arrivals, free: float, found: Chained) -> MetPasses:
    gap, rate = point.admission_interval, arrivals.rate
    seconds = _prompts_seconds(point, clock)
    each = np.maximum(seconds[:, 1] - seconds[:, 0], 0.0)
    one = float(max(each.max(), each.sum() / point.schedule.num_micro_batches))
    share, others = min(rate * one, _MOST_PREFILL), max(2 * rate * found.wait - rate * gap, 0.0)
    evenly = np.cumsum(found.shares) - found.shares / 2
    # The chained passes end with the prefill.
    token = 0.0 if clock.first_token_from_prefill else float(np.diff(point.latency(np.array([1.0, 2.0])))[0])
    return MetPasses(
        interval=gap + free * (2 * found.wait - gap),
        more=free * (found.first + token - point.ttft),
        after=free * share / (1 - share) * one * (1 + others),
        share=share,
        waits=free * found.both + (1 - free) * gap * evenly,
        shares=found.shares,
    )


def prompt_variance(point: SteadyState, clock: Clock, prompts: float, *, slowest: bool = False) -> float:
    """Of the seconds that so many prompts take: each by its own length, or padded all by that of the longest."""
    law = point.cycle.prompt_law if point.cycle.padded else point.workload.input_law
    one = one_prompt(point, clock, slowest=slowest) * law.std / law.mean
    return (prompts * one) ** 2 if point.cycle.padded else prompts * one**2


def with_bounds(estimate: Estimate, times: RequestTimes, bounds: Sequence[Bound]) -> Estimate:
    """The Estimate with its percentiles, attainment and goodput under these bounds."""
    kept = times.attainment(bounds)
    return replace(
        estimate,
        attainment=kept,
        goodput=None if kept is None else kept * estimate.throughput,
        percentiles=times.percentiles(bounds),
    )


def _times(
    points: Sequence[SteadyState],
    clock: Clock,
    which: np.ndarray,
    waits: Floats,
    sample: Draws,
    *,
    at_rate: bool = False,
) -> RequestTimes:
    """At a rate the waits have what other prompts make of a request's first pass."""
    ttft, tpot, latency, length = (np.zeros(_SAMPLE) for _ in range(4))
    planned = float(points[0].workload.output_quantile(0.99))
    for number in np.unique(which):
        here = which == number
        point, inputs, outputs = points[number], sample.inputs[here], sample.outputs[here]
        one = one_prompt(point, clock)
        first = _first(point, one, inputs, sample.other[here], others=not at_rate)
        mean = (point.latency(outputs) - point.ttft) / np.maximum(outputs - 1, 1)
        pace = _pace(point, one, mean, outputs - 1, sample.met[here])
        ttft[here], tpot[here] = first + waits[here], np.where(outputs > 1, pace, 0.0)
        latency[here] = ttft[here] + pace * (outputs - 1)
        length[here] = ttft[here] + pace * (np.minimum(outputs, planned) - 1)
    return RequestTimes(
        ttft=ttft, tpot=tpot, latency=latency, length=length, due=latency * sample.due, single=sample.outputs <= 1
    )


def _first(point: SteadyState, one: float, inputs: Floats, other: Floats, *, others: bool) -> Floats:
    """Seconds to the first token, the wait apart: never less than a hundredth of the mean."""
    if point.steady.first is not None:
        return np.asarray(point.steady.first(inputs, other))
    together = load_policy(point.schedule.policy).starts_together(point.schedule)
    prompts = min(one * together, point.ttft)  # On a pipeline micro-batches share the time.
    if point.cycle.padded:
        law = point.cycle.prompt_law
        more = prompts * (law.quantiles(other) / law.mean - 1.0)
    else:
        more = prompts / np.sqrt(together) * (inputs / point.workload.mean_input - 1.0)
        if (percent := point.schedule.variables.get("adjust_percent")) is not None:
            most = percent / 100 * prompts
            more = np.maximum(np.clip(more, -most, most), one * inputs / point.workload.mean_input - prompts)
    if others and _mixed(point):
        expected = point.throughput * point.admission_interval / _widening(point)
        more = more + one * _widening(point) * (poisson_quantiles(other, expected) - expected)
    return np.maximum(point.ttft + more, 0.01 * point.ttft)


def _pace(point: SteadyState, one: float, mean: Floats, later: Floats, met: Floats) -> Floats:
    """Seconds a later token of requests with `mean` of them, by the prefills that they meet."""
    if not _mixed(point):
        return mean
    expected = point.throughput * mean * later / _widening(point)
    more = one * _widening(point) * (poisson_quantiles(met, expected) - expected)
    return np.maximum(mean + more / np.maximum(later, 1), 0.1 * mean)


def _widening(point: SteadyState) -> float:
    """A sum of random prompts spreads like that of fewer and longer equal ones, by this factor."""
    return 1.0 + (point.workload.input_law.std / point.workload.mean_input) ** 2


def _mixed(point: SteadyState) -> bool:
    """Prefills and decodes share passes."""
    return bool(((point.cycle.num_prefill > 0) & (point.cycle.num_decode > 0)).any())


def one_prompt(point: SteadyState, clock: Clock, *, slowest: bool = False) -> float:
    """Seconds that one prompt more takes on the stages that prefill, or on the slowest of them."""
    seconds = _prompts_seconds(point, clock)
    return float(max((seconds[:, 1] - seconds[:, 0]).max() if slowest else (seconds[:, 1] - seconds[:, 0]).sum(), 0.0))


def _stage_seconds(point: SteadyState, clock: Clock) -> tuple[float, ...]:
    """Of the slowest stage: a pass of the rows that decode, with each of `PROMPTS` beside them."""
    cycle, count = point.cycle, PROMPTS
    rows = cycle.num_seqs / point.schedule.num_micro_batches
    context = rows * float(cycle.context_tokens.sum() / cycle.num_decode.sum())
    passes = replace(
        cycle,
        num_prefill=count,
        num_decode=rows + 0 * count,
        context_tokens=context + 0 * count,
        prompt_tokens=None,
        prompt_attention=None,
        prompt_law=point.workload.input_law,
    )
    return tuple(clock.seconds(passes).max(axis=0).tolist())


def _prompts_seconds(point: SteadyState, clock: Clock) -> Floats:
    """Of a pass with one prompt and with two on each stage that prefills, [stages, 2]."""
    count, none = np.array([1.0, 2.0]), np.zeros(2)
    rows = point.cycle.num_seqs if _mixed(point) else 0.0
    cycle = Cycle(
        num_prefill=count,
        num_decode=none + rows / point.schedule.num_micro_batches,
        context_tokens=none,
        prompt_law=point.cycle.prompt_law if point.cycle.padded else point.workload.input_law,
        padded=point.cycle.padded,
        kv_tokens=0.0,
        kv_tokens_std=0.0,
        num_seqs=0.0,
    )
    return clock.seconds(cycle)[list(clock.prefill_stages)]
