"""What is observed: the service in the last minutes, by the definitions of an Estimate, in bounded memory.

    throughput    output tokens in the window over its length, of all requests (token_throughput), and the requests that
                  finished in it; None where tokens came and none did. A mean output of those that finished would be
                  too short for the tokens of those that run
    ttft          mean and percentiles of the requests whose first token came in the window
    latency       the one the bound is on. p99-length: the mean of the requests that got there in the window, where they
                  are `LEAST_GAPS`, or else the mean ttft and the mean gaps between tokens that ended in it; where
                  batches do not overlap the former from `LEAST_BATCHES` on, as gaps of shorter ones are other gaps
    others        tpot, percentiles, the share of requests within a bound and that within every bound (attainment): by
                  product limit, in which requests that run count as far as they have come. None where too few ended
    within        a percentile's or a mean's bound too; of an output longer than the planned p99, the first part counts
    goodput       attainment times throughput

Each is an estimate of `exeplan.core.runs.estimators`, with an interval and the number of observations in `evidence`.
Times count from the start of the prefill; where the plan is for requests at a rate, from the arrival. Requests that
wait for their prefill and those that were aborted are in none of these. A snapshot takes milliseconds for thousands of
requests, whatever their tokens: tokens are counted, and gaps added up by number, in blocks of time.
Not here: counters since the start (`metrics`), and the law of lengths by which drift is judged.
"""

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from exeplan.arrays import Floats
from exeplan.core.bounds import Bound, is_deadline, percentile, quantities, share_of_requests, targets_of
from exeplan.core.plan import Plan
from exeplan.core.runs.estimators import (
    LEAST_BATCHES,
    LEAST_GAPS,
    MOST_BLOCKS,
    ProductLimit,
    Window,
    figure,
    longest,
    mean_of,
    product,
    rate_of_blocks,
    scaled,
    total_of_blocks,
)
from exeplan.core.schedule import Figure
from exeplan.policies import load_policy
from exeplan.runner.ipc.messages import Stats
from exeplan.workload.length_law import Ints

WINDOW_SECONDS = 300.0
MAX_REQUESTS = 4096
TICK_SECONDS = 0.25
TIMELINE_SECONDS = 60.0
_BLOCK_SECONDS = WINDOW_SECONDS / MOST_BLOCKS
_MOST_NUMBERS = 4096
"""Gaps of a request that are counted while the planned length is unknown."""


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


@dataclass(slots=True)
class Running:
    """A request that has had its first token: when this process knew of that, then seconds from its arrival."""

    known: float
    start: float
    first: float
    last: float
    """Of its latest token so far."""
    num_tokens: int


@dataclass(slots=True)
class _Block:
    """A part of the window: the tokens that came in it, the requests that finished, and the gaps that ended in it, by
    their numbers from 1, with the sums of their seconds."""

    begins: float
    num_tokens: int = 0
    num_finished: int = 0
    counts: "array[int]" = field(default_factory=lambda: array("q", [0]))
    sums: "array[float]" = field(default_factory=lambda: array("d", [0.0]))

    def add(self, first: int, number: int, seconds: float) -> None:
        """So many gaps from this number on, all of the same seconds."""
        if (missing := first + number - len(self.counts)) > 0:
            self.counts.extend([0] * missing)
            self.sums.extend([0.0] * missing)
        for gap in range(first, first + number):
            self.counts[gap] += 1
            self.sums[gap] += seconds


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
    throughput: float | None
    token_throughput: float | None
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
    evidence: Mapping[str, Figure]
    """Of the figures above, percentiles by metric."""


class Observed:
    """Records iterations and requests; `snapshot` covers `WINDOW_SECONDS`, at most the last `MAX_REQUESTS`."""

    def __init__(self, plan: Plan, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.begin()
        self._finished: deque[Finished] = deque(maxlen=MAX_REQUESTS)
        self.timeline: deque[Tick] = deque(maxlen=round(TIMELINE_SECONDS / TICK_SECONDS))
        self._window: deque[Tick] = deque(maxlen=round(WINDOW_SECONDS / TICK_SECONDS))
        self._running: dict[str, Running] = {}
        self._blocks: deque[_Block] = deque(maxlen=MOST_BLOCKS + 1)
        """Those of the window, and the one before, which says how far back tokens were counted."""
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
        self._apart = load_policy(plan.schedule.policy).KEEPS_FINISHED_ROWS

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

    def begun(self, request_id: str, *, start: float, first: float, num_tokens: int) -> None:
        """A request has had its first token; times in seconds from its arrival."""
        now = self._clock()
        self._running[request_id] = Running(now, start, first, first, num_tokens)
        self._block(now).num_tokens += num_tokens

    def delivered(self, request_id: str, *, num_tokens: int, seconds: float) -> None:
        """Further tokens, that many seconds after the last one; those delivered together have the mean gap."""
        running, block = self._running[request_id], self._block(self._clock())
        block.num_tokens += num_tokens
        counted = min(num_tokens, (self.p99_output or _MOST_NUMBERS) - running.num_tokens)
        if counted > 0:
            block.add(running.num_tokens, counted, seconds / num_tokens)
        running.num_tokens += num_tokens
        running.last += seconds

    def _block(self, now: float) -> _Block:
        """The one that this moment is in."""
        if not self._blocks or now - self._blocks[-1].begins >= _BLOCK_SECONDS:
            self._blocks.append(_Block(now))
        return self._blocks[-1]

    def left(self, request_id: str) -> None:
        """A request no longer runs; one that never did is ignored."""
        self._running.pop(request_id, None)

    def finish(self, *, start: float, first: float, last: float, input_tokens: int, output_tokens: int) -> None:
        """A request has finished; times in seconds from its arrival."""
        now = self._clock()
        self._block(now).num_finished += 1
        self._finished.append(Finished(now, start, first, last, input_tokens, output_tokens))

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
        ticks = [tick for tick in self._window if tick.time >= now - WINDOW_SECONDS]
        found = self._evidence(_Requests.of(recent, self._running.values(), opens, now, waiting=self.waiting))
        found |= self._rates(now)
        if "attainment" in found and "throughput" in found:
            found["goodput"] = product(found["attainment"], found["throughput"])
        values = {name: each.value for name, each in found.items() if math.isfinite(each.value)}
        return Snapshot(
            seconds=seconds,
            num_requests=len(recent),
            **{name: values.get(name) for name in _FIGURES},
            prefill_batch=_ratio(sum(t.num_prefilled for t in ticks), sum(t.num_prefills for t in ticks)),
            decode_batch=_ratio(sum(t.num_decoded for t in ticks), sum(t.num_decodes for t in ticks)),
            percentiles={
                b.metric: values[b.metric] for b in self._bounds if b.metric in values and percentile(b.metric)
            },
            within={b.metric: values[_within(b)] for b in self._bounds if _within(b) in values},
            evidence={name: each for name, each in found.items() if name in values},
        )

    def _rates(self, now: float) -> dict[str, Figure]:
        """Throughputs: tokens of all requests, those that run too, and requests that finished, whether or not they are
        remembered."""
        blocks = self._blocks_since(now - WINDOW_SECONDS)
        opens = max(now - WINDOW_SECONDS, self._began)
        if len(blocks) < len(self._blocks):  # The rest of a block that began before the window is counted in that one.
            opens = max(opens, self._blocks[-len(blocks) - 1].begins + _BLOCK_SECONDS)
        edges = np.array([opens, *(block.begins for block in blocks[1:]), max(now, opens + 1e-9)])
        tokens = rate_of_blocks(np.array([block.num_tokens for block in blocks] or [0]), np.diff(edges), of="tokens")
        ended = np.array([block.num_finished for block in blocks] or [0])
        if tokens.value and not ended.any():
            return {"token_throughput": tokens}
        return {"token_throughput": tokens, "throughput": rate_of_blocks(ended, np.diff(edges), of="requests")}

    def _blocks_since(self, opens: float) -> list[_Block]:
        return [block for block in self._blocks if block.begins >= opens]

    def _evidence(self, seen: "_Requests") -> dict[str, Figure]:
        """Every figure of a snapshot that has one, infinite where too few requests have ended."""
        found: dict[str, Figure] = {}
        if len(firsts := seen.firsts()):
            found["ttft"] = mean_of(seen.times("ttft")[firsts], seen.first_known[firsts], seen.window)
        length, share = self.p99_output, share_of_requests(self._about)
        if share is None and length and (latency := self._length_latency(seen, length)) is not None:
            found["latency"] = latency
        if not seen.ended.any():
            return found
        law = seen.law()
        shares = {"latency_p50": 0.5, "latency_p99": 0.99, **({} if share is None else {"latency": share})}
        found |= {name: law.percentile(part, seen.window) for name, part in shares.items()}
        if (paces := seen.paces()) is not None:
            found["tpot"] = paces[0].mean(paces[1], seen.window)
        for bound in self._bounds:
            if percentile(bound.metric) and (value := seen.percentile(bound, length)) is not None:
                found[bound.metric] = value
            found[_within(bound)] = seen.within([bound], length)
        if self._bounds:
            found["attainment"] = seen.within(self._bounds, length)
        return found

    def _length_latency(self, seen: "_Requests", length: int) -> Figure | None:
        """The mean time to the token of this number; None where no request has come as far."""
        reached = seen.ended & (seen.tokens >= length)
        if seen.num_batches(reached) >= LEAST_BATCHES if self._apart else np.count_nonzero(reached) >= LEAST_GAPS:
            return mean_of(seen.times("length", length)[reached], seen.lasts[reached], seen.window)
        blocks = self._blocks_since(seen.window.closes - WINDOW_SECONDS)
        if not blocks or max(seen.tokens, default=0) < length:
            return None
        counts, sums = np.zeros((len(blocks), length), dtype=np.int64), np.zeros((len(blocks), length))
        for row, block in enumerate(blocks):
            number = min(len(block.counts), length)
            counts[row, :number], sums[row, :number] = block.counts[:number], block.sums[:number]
        if length > 1 and not counts.any():
            return None
        some = longest(seen.tokens, np.ones(len(seen.tokens), dtype=bool), length)
        window = Window(edges=np.array([*(block.begins for block in blocks), seen.window.closes]))
        ttft = mean_of(seen.times("ttft")[some], seen.first_known[some], window)
        spread = window.sums(seen.first_known[some], (seen.times("ttft")[some] - ttft.value) / len(some))
        total, influences, _ = total_of_blocks(counts, sums)
        return figure(ttft.value + total, influences + spread, num_observations=int(counts.sum()), of="gaps")


_FIGURES = (
    *("throughput", "token_throughput", "ttft", "tpot", "latency", "latency_p50", "latency_p99"),
    *("attainment", "goodput"),
)
"""Of a Snapshot, those that are estimates."""


def _within(bound: Bound) -> str:
    """The name of the share of the requests that keep it."""
    return f"within {bound.metric}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Requests:
    """Requests that had their first token and were seen in the window, as arrays; seconds on this process' clock."""

    window: Window
    begins: Floats
    prefills: Floats
    """When these began."""
    first_known: Floats
    lasts: Floats
    """Infinite for those that run."""
    ttft: Floats
    latency: Floats
    """So far, for those that run."""
    tokens: Ints

    @classmethod
    def of(
        cls, finished: Sequence[Finished], running: Iterable[Running], opens: float, closes: float, *, waiting: bool
    ) -> "_Requests":
        """Those that are over, and those that run; `waiting`: times begin at the arrival."""
        over = [(r.known, r.known, r.start, r.first, r.last, r.output_tokens) for r in finished]
        far = [(math.inf, r.known + r.last - r.first, r.start, r.first, r.last, r.num_tokens) for r in running]
        lasts, latest, starts, firsts, until, tokens = np.array(over + far, dtype=float).reshape(-1, 6).T
        since = np.zeros(len(starts)) if waiting else starts
        return cls(
            window=Window(edges=np.linspace(opens, max(closes, opens + 1e-9), MOST_BLOCKS + 1)),
            begins=latest - until + since,
            prefills=latest - until + starts,
            first_known=latest - until + firsts,
            lasts=lasts,
            ttft=firsts - since,
            latency=until - since,
            tokens=tokens.astype(np.int64),
        )

    @property
    def ended(self) -> NDArray[np.bool_]:
        return np.isfinite(self.lasts)

    def num_batches(self, some: NDArray[np.bool_]) -> int:
        """In which these, all of them ended, ran where batches do not overlap: those of one begin together, and of the
        next when they are done. When they began is known to the time that a token's message takes."""
        if not some.any():
            return 0
        shortest = (self.lasts[some] - self.prefills[some]).min()
        return 1 + int(np.count_nonzero(np.diff(np.sort(self.prefills[some])) > shortest / 2))

    def firsts(self) -> Ints:
        """Those whose first token came in the window."""
        return np.flatnonzero(self.first_known >= self.window.opens)

    def law(self, some: NDArray[np.bool_] | slice = slice(None)) -> ProductLimit:
        """Of whole times."""
        opens, closes = self.window.opens, self.window.closes
        return ProductLimit.of(self.begins[some], self.lasts[some], opens=opens, closes=closes)

    def paces(self) -> tuple[ProductLimit, Floats] | None:
        """Of those with at least two tokens, and the tpot of each; None where none of them has ended."""
        some = self.tokens > 1
        return (self.law(some), self.times("tpot")[some]) if (some & self.ended).any() else None

    def times(self, quantity: str, length: int | None = None) -> Floats:
        """Of each request, by the names of `RequestTimes`."""
        if quantity == "ttft":
            return self.ttft
        pace = np.where(self.tokens > 1, (self.latency - self.ttft) / np.maximum(self.tokens - 1, 1), 0.0)
        if quantity == "tpot":
            return pace
        if quantity == "length" and length:
            return np.where(self.tokens <= length, self.latency, self.ttft + (length - 1) * pace)
        return self.latency

    def within(self, bounds: Sequence[Bound], length: int | None) -> Figure:
        """The share of the requests that keep these with their own times."""
        targets = targets_of(bounds)
        used = np.max([self.times(name, length) / seconds for name, seconds in targets], axis=0)
        names = {name for name, _ in targets}
        if names == {"ttft"} and len(some := self.firsts()):
            return self._first_law(some).share(used[some] <= 1, self.window, together=True)
        return self.law().share(used <= 1, self.window, together="ttft" in names)

    def percentile(self, bound: Bound, length: int | None) -> Figure | None:
        """The one that a bound on a percentile of ttft, of tpot or of all together is on; None of no requests."""
        quantity, share = percentile(bound.metric) or ("", 0.0)
        if quantity == "tpot":
            paces = self.paces()
            return None if paces is None else paces[0].quantile(paces[1], share, self.window, together=False)
        if quantity == "ttft":
            some = self.firsts()
            return (
                self._first_law(some).quantile(self.ttft[some], share, self.window, together=True)
                if len(some)
                else None
            )
        used = np.max([self.times(name, length) / seconds for name, seconds in bound.targets], axis=0)
        together = "ttft" in quantities(bound)
        return scaled(self.law().quantile(used, share, self.window, together=together), bound.targets[0][1])

    def _first_law(self, some: Ints) -> ProductLimit:
        begins = self.begins[some]
        return ProductLimit.of(begins, self.first_known[some], opens=-math.inf, closes=math.inf)


def shares(lengths: Sequence[int], edges: Sequence[int]) -> list[float]:
    """Shares of lengths above `edges[i]` and at most `edges[i + 1]`; lengths outside count in the nearest bin."""
    counts = [0] * (len(edges) - 1)
    inner = edges[1:-1]
    for length in lengths:
        counts[bisect_left(inner, length)] += 1
    return [count / len(lengths) for count in counts] if lengths else [0.0] * len(counts)


def _ratio(total: float, count: int) -> float | None:
    return total / count if count else None
