"""What is observed: the service in the last minutes, by the definitions of an Estimate, in bounded memory.

    throughput    requests finished a second; token_throughput their output tokens
    ttft, tpot    means over requests, as in `exeplan.core.metrics`
    latency       the one the bound is on: p99-length by the pace between first and last token, pNN-requests as is
    within        share of requests within a bound, a percentile's or a mean's too; of an output longer than the planned
                  p99, the first part counts
    attainment    share of the requests that keep every bound; goodput: such requests finished a second

Times count from the start of the prefill; where the plan is for requests at a rate, from the arrival.
Not here: counters since the start (`metrics`), and the law of lengths by which drift is judged.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from exeplan.core.bounds import Bound, is_deadline, percentile, share_of_requests, targets_of
from exeplan.core.plan import Plan
from exeplan.core.request_times import RequestTimes
from exeplan.runner.ipc.messages import Stats

WINDOW_SECONDS = 300.0
MAX_REQUESTS = 4096
TICK_SECONDS = 0.25
TIMELINE_SECONDS = 60.0


def bounds_of(plan: Plan) -> list[Bound]:
    """The finite bounds, the one on latency first; without those on deadlines, which each request has of its own."""
    bounds = (plan.bound, *plan.more_bounds)
    return [bound for bound in bounds if bound and math.isfinite(bound.seconds) and not is_deadline(bound.metric)]


class Finished(NamedTuple):
    """A finished request: when this process knew of it, then seconds from its arrival, and tokens."""

    known: float
    start: float
    first: float
    last: float
    input_tokens: int
    output_tokens: int

    def pace(self) -> float:
        """Seconds per token after the first; 0 for a single token."""
        return (self.last - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    def until(self, length: int) -> float:
        """Seconds from the arrival to the token of this number, or to the last token."""
        return self.last if self.output_tokens <= length else self.first + (length - 1) * self.pace()


@dataclass(slots=True)
class Tick:
    """A quarter of a second of the timeline, as sums over its iterations."""

    time: float
    num_iterations: int = 0
    num_running: int = 0
    """The maximum."""
    num_waiting: int = 0
    """The maximum of those that had reached the engine."""
    num_prefilled: int = 0
    num_decoded: int = 0
    num_prefills: int = 0
    """Iterations with a prefill."""
    num_decodes: int = 0
    kv_share: float = 0.0
    """The maximum share of the KV cache in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The last minutes. None where there is no observation."""

    seconds: float
    """Length of the window."""
    num_requests: int
    throughput: float
    token_throughput: float
    ttft: float | None
    tpot: float | None
    latency: float | None
    latency_p50: float | None
    latency_p99: float | None
    prefill_batch: float | None
    """Mean over the iterations with a prefill."""
    decode_batch: float | None
    attainment: float | None
    goodput: float | None
    percentiles: dict[str, float]
    """By metric, of the bounds on percentiles of ttft, of tpot and of all together."""
    within: dict[str, float]
    """By the metric that a bound is on."""


class Observed:
    """Records iterations and requests; `snapshot` covers `WINDOW_SECONDS`, at most the last `MAX_REQUESTS`."""

    def __init__(self, plan: Plan, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.begin()
        self._finished: deque[Finished] = deque(maxlen=MAX_REQUESTS)
        self.timeline: deque[Tick] = deque(maxlen=round(TIMELINE_SECONDS / TICK_SECONDS))
        self._window: deque[Tick] = deque(maxlen=round(WINDOW_SECONDS / TICK_SECONDS))
        self.p99_output: int | None = None
        """The planned 99th percentile of the outputs, where it is known."""
        self.adopt(plan)

    def begin(self) -> None:
        """Rates count from now: no request was possible before."""
        self._began = self._clock()

    def adopt(self, plan: Plan) -> None:
        """Judges by the bounds of this plan from now on; observations stay. `waiting`: times include the wait."""
        self._bounds = bounds_of(plan)
        self._about = plan.bound.metric if plan.bound else "p99-requests"
        self.waiting = plan.arrival_rate is not None or plan.trace_arrivals

    @property
    def now(self) -> float:
        return self._clock()

    def step(self, stats: Stats) -> None:
        """An iteration has run."""
        now = self._clock()
        if not self.timeline or now - self.timeline[-1].time >= TICK_SECONDS:
            tick = Tick(now)
            self.timeline.append(tick)
            self._window.append(tick)
        tick = self.timeline[-1]
        tick.num_iterations += stats.iteration_tokens > 0
        tick.num_running = max(tick.num_running, stats.num_running)
        tick.num_waiting = max(tick.num_waiting, stats.num_waiting)
        tick.num_prefilled += stats.num_prefill
        tick.num_decoded += stats.num_decode
        tick.num_prefills += stats.num_prefill > 0
        tick.num_decodes += stats.num_decode > 0
        if stats.num_blocks:
            tick.kv_share = max(tick.kv_share, 1 - stats.free_blocks / stats.num_blocks)

    def finish(self, *, start: float, first: float, last: float, input_tokens: int, output_tokens: int) -> None:
        """A request has finished; times in seconds from its arrival."""
        self._finished.append(Finished(self._clock(), start, first, last, input_tokens, output_tokens))

    def recent(self) -> list[Finished]:
        """The requests that finished in the window."""
        opens = self._clock() - WINDOW_SECONDS
        while self._finished and self._finished[0].known < opens:
            self._finished.popleft()
        return list(self._finished)

    def snapshot(self) -> Snapshot:
        recent, now = self.recent(), self._clock()
        # A full deque reaches less far back than the window.
        opens = recent[0].known if len(recent) == MAX_REQUESTS else max(now - WINDOW_SECONDS, self._began)
        seconds = max(now - opens, 1e-9)
        takes = sorted(self._since(r, r.last) for r in recent)
        paces = [r.pace() for r in recent if r.output_tokens > 1]
        ticks = [tick for tick in self._window if tick.time >= now - WINDOW_SECONDS]
        good = sum(all(self._keeps(r, b) for b in self._bounds) for r in recent) if self._bounds and recent else None
        return Snapshot(
            seconds=seconds,
            num_requests=len(recent),
            throughput=len(recent) / seconds,
            token_throughput=sum(r.output_tokens for r in recent) / seconds,
            ttft=_mean([self._since(r, r.first) for r in recent]),
            tpot=_mean(paces),
            latency=self._latency(recent, takes),
            latency_p50=_quantile(takes, 0.5),
            latency_p99=_quantile(takes, 0.99),
            prefill_batch=_ratio(sum(t.num_prefilled for t in ticks), sum(t.num_prefills for t in ticks)),
            decode_batch=_ratio(sum(t.num_decoded for t in ticks), sum(t.num_decodes for t in ticks)),
            attainment=None if good is None else good / len(recent),
            goodput=None if good is None else good / seconds,
            percentiles=self._percentiles(recent),
            within={b.metric: sum(self._keeps(r, b) for r in recent) / len(recent) for b in self._bounds if recent},
        )

    def _percentiles(self, recent: Sequence[Finished]) -> dict[str, float]:
        further = [bound for bound in self._bounds if percentile(bound.metric)]
        if not further or not recent:
            return {}
        columns = {name: np.array([self._time(r, name) for r in recent]) for name in ("ttft", "tpot", "latency")}
        single = np.array([r.output_tokens <= 1 for r in recent])
        return dict(RequestTimes(**columns, length=columns["latency"], single=single).percentiles(further))

    def _since(self, request: Finished, moment: float) -> float:
        return moment if self.waiting else moment - request.start

    def _latency(self, recent: Sequence[Finished], takes: Sequence[float]) -> float | None:
        share = share_of_requests(self._about)
        if share is not None:
            return _quantile(takes, share)
        length = self.p99_output
        return _mean([self._since(r, r.until(length)) for r in recent if r.output_tokens >= length]) if length else None

    def _keeps(self, request: Finished, bound: Bound) -> bool:
        return all(self._time(request, quantity) <= seconds for quantity, seconds in targets_of([bound]))

    def _time(self, request: Finished, quantity: str) -> float:
        """A request's own time, by the names of `RequestTimes`."""
        if quantity == "tpot":
            return request.pace()
        if quantity == "ttft":
            return self._since(request, request.first)
        length = self.p99_output if quantity == "length" else None
        return self._since(request, request.until(length) if length else request.last)


def shares(lengths: Sequence[int], edges: Sequence[int]) -> list[float]:
    """Shares of lengths above `edges[i]` and at most `edges[i + 1]`; lengths outside count in the nearest bin."""
    counts = [0] * (len(edges) - 1)
    inner = edges[1:-1]
    for length in lengths:
        counts[bisect_left(inner, length)] += 1
    return [count / len(lengths) for count in counts] if lengths else [0.0] * len(counts)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ratio(total: float, count: int) -> float | None:
    return total / count if count else None


def _quantile(ordered: Sequence[float], q: float) -> float | None:
    """Linear between neighbours, as in numpy."""
    if not ordered:
        return None
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
