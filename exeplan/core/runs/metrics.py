"""What a run did, from the timestamps of its requests: one definition for the replay, the engine and the server.

    ttft      first token - start of its prefill
    tpot      (last token - first token) / (output tokens - 1), mean over requests with at least two tokens
    e2e       last token - start of its prefill
    latency   p99-length: mean time from the start until the n-th token, n the planned 99th-percentile length, from the
              gaps between tokens in the window (`estimators.py`); pNN-requests: the NN-th percentile of e2e
    throughput   requests/s: output tokens a second over the mean output length
    deadline_share   share of the requests that arrived in the window whose last token came by their deadline
    utility      worth of these requests a second, weight / input tokens each
    attainment   share of the requests that keep every bound, an expired one none (`request_times.py`)
    goodput      throughput times the same share of the requests that did not expire

For pNN-deadline latency is the time from arrival to the last token, scaled by the request's own deadline to the mean
one; a request that expired counts as one that took twice its deadline.

The steady window opens when a whole generation of requests has passed: none of the first, synchronised batch is left,
or a quarter of all tokens is out, whichever is earlier, and as many requests run as do later, with as many tokens in
the KV cache; at once where batches do not overlap. It closes when the queue has run dry. A batch that fills up or
drains is not what a plan under a backlog predicts. Rates and gaps count what falls in it; e2e and the mean tpot count
requests by product limit, as far as the window shows them, attainment and percentiles of bounds those of them that
start in it, and ttft these whole. With no backlog it is the whole run.

Every figure of `evidence` has an interval of 90 % and its number of observations, and `notes` say where a figure does
not come from requests that were seen from beginning to end. That of the throughput is for the mean output of these very
requests: another sample of the workload has another one.

Where `waiting` counts, ttft, e2e and latency begin at the arrival instead of the start of the prefill, and the window
is that of the arrivals but for the first tenth of them, while the engine fills up.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from exeplan.arrays import Floats
from exeplan.core.bounds import MAX_ITL, Bound, is_deadline, percentile, quantities, share_of_requests, targets_of
from exeplan.core.runs.estimators import (
    LengthLatency,
    ProductLimit,
    Window,
    length_latency,
    mean_of,
    product,
    scaled,
    token_rate,
)
from exeplan.core.runs.request_times import RequestTimes
from exeplan.core.runs.token_times import TokenTimes, small
from exeplan.core.schedule import Estimate, Figure
from exeplan.workload.deadlines import EXPIRED
from exeplan.workload.length_law import Ints

_SAME_START = 5e-3
_LEAST_INSIDE = 0.2
_TOKENS_LATER, _ROUNDING = 0.5, 1e-9
"""Share of the later times at which no more tokens are in the KV cache than when the window opens."""
_FILLING_UP = 0.1
"""Share of the arrivals that find the engine emptier than it will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request that is over: sizes in tokens, times in seconds on one clock."""

    input_tokens: int
    arrival: float
    start: float
    """When its first prefill began, or when it expired."""
    token_times: tuple[float, ...]
    """When each output token was there, rising; none of a request that expired before it began."""
    deadline: float | None = None
    weight: float = 1.0

    @property
    def output_tokens(self) -> int:
        return len(self.token_times)

    @property
    def expired(self) -> bool:
        return not self.token_times

    @property
    def in_time(self) -> bool:
        """Whether its whole answer was there by its deadline."""
        return not self.expired and (self.deadline is None or self.token_times[-1] <= self.deadline)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Requests(Sequence[RequestRecord]):
    """The requests of a run as arrays, one entry each, and as a sequence of records that are made when asked for."""

    input_tokens: Ints
    output_tokens: Ints
    """0 for a request that expired."""
    arrivals: Floats
    starts: Floats
    first_tokens: Floats
    """NaN for a request that expired; likewise the last token."""
    last_tokens: Floats
    deadlines: Floats | None
    """NaN for a request without; None where no request has one."""
    weights: Floats | None
    """None where every request's is 1."""
    times: TokenTimes

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> "Requests":
        """These records, or themselves where they are arrays already."""
        if isinstance(records, Requests):
            return records
        due = [math.nan if r.deadline is None else r.deadline for r in records]
        return cls(
            input_tokens=np.array([r.input_tokens for r in records]),
            output_tokens=np.array([r.output_tokens for r in records]),
            arrivals=np.array([r.arrival for r in records]),
            starts=np.array([r.start for r in records]),
            first_tokens=np.array([math.nan if r.expired else r.token_times[0] for r in records]),
            last_tokens=np.array([math.nan if r.expired else r.token_times[-1] for r in records]),
            deadlines=None if np.isnan(due).all() else np.array(due),
            weights=np.array([r.weight for r in records]),
            times=TokenTimes.of_lists([r.token_times for r in records]),
        )

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, number: int) -> RequestRecord: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[RequestRecord]: ...
    def __getitem__(self, number: int | slice) -> RequestRecord | Sequence[RequestRecord]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        i = range(len(self))[number]
        due = math.nan if self.deadlines is None else float(self.deadlines[i])
        return RequestRecord(
            input_tokens=int(self.input_tokens[i]),
            arrival=float(self.arrivals[i]),
            start=float(self.starts[i]),
            token_times=tuple(self.times.of(i).tolist()),
            deadline=None if math.isnan(due) else due,
            weight=1.0 if self.weights is None else float(self.weights[i]),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Requests) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"Requests({len(self)})"

    @property
    def answered(self) -> NDArray[np.bool_]:
        """Those that did not expire."""
        return self.output_tokens > 0

    @property
    def patience(self) -> Floats:
        """Seconds from arrival to deadline; NaN where there is none."""
        return np.full(len(self), math.nan) if self.deadlines is None else self.deadlines - self.arrivals

    @property
    def in_time(self) -> NDArray[np.bool_]:
        """Whose whole answer was there by the deadline."""
        return self.answered if self.deadlines is None else self.answered & ~(self.last_tokens > self.deadlines)


def summarize(
    records: Sequence[RequestRecord],
    *,
    p99_output: int,
    bound_metric: str = "p99-length",
    bounds: Sequence[Bound] = (),
    backlog: bool = True,
    waiting: bool = False,
    kv_tokens: float = 0.0,
    memory_bytes: float = 0.0,
    until: float = math.inf,
) -> Estimate:
    """The Estimate of a run, of which nothing was seen after `until`: later tokens say that a request had not ended.

    `backlog` says that requests were always waiting, so that there is a steady window; `waiting` that they came at
    their own times and the wait counts. `bounds` are those that its percentiles, attainment and goodput are of; the
    first one replaces `bound_metric`.
    """
    requests, bound_metric = Requests.of(records), bounds[0].metric if bounds else bound_metric
    answered = requests.answered
    if not answered.any():
        return _nothing(requests, bound_metric, bounds, kv_tokens=kv_tokens, memory_bytes=memory_bytes)
    begins = requests.arrivals if waiting else requests.starts
    opens, closes, apart = _arrival_window(requests) if waiting else _steady_window(requests, backlog, until)
    inside = answered & (begins >= opens) & (begins < closes)
    inside = inside if inside.any() else answered
    share = share_of_requests(bound_metric)
    arrivals = requests.arrivals
    came = (opens <= arrivals) & (arrivals < closes) if waiting else np.ones(len(requests), dtype=bool)
    seen = _Seen.of(
        requests,
        begins,
        inside,
        Window.of(opens, closes, requests.starts[answered]),
        whole=waiting or not backlog,
        apart=apart,
    )
    figures, notes = seen.figures(p99_output, None if is_deadline(bound_metric) else bound_metric)
    latency = figures["latency"].value if "latency" in figures else None
    if is_deadline(bound_metric) and share is not None:
        latency = _deadline_latency(requests, came, share)
    of_bounds, more = seen.of_bounds(bounds, p99_output, served=_served_share(requests, came))
    figures |= of_bounds
    return Estimate(
        throughput=figures["throughput"].value,
        token_throughput=figures["token_throughput"].value,
        ttft=figures["ttft"].value,
        tpot=figures["tpot"].value if "tpot" in figures else 0.0,
        latency=latency,
        latency_p50=figures["latency_p50"].value,
        latency_p99=figures["latency_p99"].value,
        kv_tokens=kv_tokens,
        memory_bytes_per_gpu=memory_bytes,
        deadline_share=_deadline_share(requests, came),
        utility=_utility(requests, came, closes - opens),
        attainment=figures["attainment"].value if "attainment" in figures else None,
        goodput=figures["goodput"].value if "goodput" in figures else None,
        percentiles=_percentiles(requests, bounds, figures),
        evidence=figures,
        notes=notes + more,
    )


def _percentiles(requests: Requests, bounds: Sequence[Bound], figures: Mapping[str, Figure]) -> dict[str, float]:
    """By metric, of the bounds on percentiles, and the longest gap of all requests where gaps are bounded."""
    found = {bound.metric: figures[bound.metric].value for bound in bounds if percentile(bound.metric)}
    gaps = {MAX_ITL: requests.times.longest_gap()} if any(bound.metric == MAX_ITL for bound in bounds) else {}
    return {**found, **gaps}


@dataclass(frozen=True)
class _Seen:
    """What the steady window shows."""

    requests: Requests
    begins: Floats
    inside: NDArray[np.bool_]
    """Requests that begin in the window."""
    window: Window
    some: NDArray[np.bool_]
    """Requests that are in `law`."""
    whole: bool
    """Requests count as they ended, however long after the window."""
    apart: bool
    """They ran in batches that do not overlap."""

    @classmethod
    def of(
        cls, requests: Requests, begins: Floats, inside: NDArray[np.bool_], seen: Window, *, whole: bool, apart: bool
    ) -> "_Seen":
        """`whole` and `apart`: as the fields."""
        late = requests.last_tokens > seen.opens
        some = inside if whole else requests.answered & (begins < seen.closes) & late
        return cls(requests, begins, inside, seen, some, whole, apart)

    @cached_property
    def law(self) -> ProductLimit:
        """Of the whole times of `some`."""
        return self._law(self.some)

    def tpot(self) -> Figure | None:
        """Mean over requests with at least two tokens; None where there is none."""
        law, values = self._paces(self.some)
        if law is None:
            return None
        return law.mean(values, self.window, most_freedom=self.freedom)

    @property
    def freedom(self) -> float:
        """Independent parts of the window, about, less one: its residents are others after a life of the longest."""
        closes = math.inf if self.whole else self.window.closes
        longest = (np.minimum(self.requests.last_tokens, closes) - self.begins).max(where=self.some, initial=1e-9)
        return 2 * (self.window.closes - self.window.opens) / float(longest) - 1

    def _paces(self, some: NDArray[np.bool_]) -> tuple[ProductLimit | None, Floats]:
        """Of those of the requests with at least two tokens: the law of their whole times, None of none, and the tpot
        of each."""
        some = some & (self.requests.output_tokens > 1)
        spans = (self.requests.last_tokens - self.requests.first_tokens)[some]
        return self._law(some) if some.any() else None, spans / (self.requests.output_tokens[some] - 1)

    def _law(self, some: NDArray[np.bool_]) -> ProductLimit:
        if "law" in vars(self) and np.array_equal(some, self.some):
            return self.law
        opens, closes = (-math.inf, math.inf) if self.whole else (self.window.opens, self.window.closes)
        return ProductLimit.of(self.begins[some], self.requests.last_tokens[some], opens=opens, closes=closes)

    def of_bounds(
        self, bounds: Sequence[Bound], length: int, *, served: float
    ) -> tuple[dict[str, Figure], tuple[str, ...]]:
        """Percentiles by metric, attainment and goodput, of requests that begin in the window, and the sentences on
        them; `served` is the share of the requests that did not expire."""
        targets, wanted = targets_of(bounds), [bound for bound in bounds if percentile(bound.metric)]
        if not targets and not wanted:
            return {}, ()
        law, times = self._law(self.inside), request_times(self.requests, length, begins=self.begins, some=self.inside)
        found = {bound.metric: self._of_bound(bound, law, times) for bound in wanted}
        if targets:
            names = {name for name, _ in targets}
            of = self._firsts() if names == {"ttft"} else law
            kept = of.share(times.utilizations(targets) <= 1, self.window, together="ttft" in names)
            tokens = token_rate(self.requests.times, self.window, most_freedom=self.freedom)
            rate = scaled(tokens, 1 / float(np.mean(self.requests.output_tokens[self.requests.answered])))
            found |= {"attainment": scaled(kept, served), "goodput": product(kept, rate)}
        if law.cut and any(name != "ttft" for bound in bounds for name in quantities(bound)):
            return found, (f"bounds: {_cut_off(law)}",)
        return found, ()

    def _of_bound(self, bound: Bound, law: ProductLimit, times: RequestTimes) -> Figure:
        """The percentile that a bound is on."""
        quantity, share = percentile(bound.metric) or ("", 0.0)
        if quantity == "all":
            used, together = times.utilizations(bound.targets), "ttft" in quantities(bound)
            return scaled(law.quantile(used, share, self.window, together=together), bound.targets[0][1])
        if quantity == "ttft":
            return self._firsts().quantile(times.ttft, share, self.window, together=True)
        of_paces, paces = self._paces(self.inside)
        if of_paces is None:
            return Figure(value=0.0, low=None, high=None, num_observations=0, of="requests")
        return of_paces.quantile(paces, share, self.window, together=False)

    def _firsts(self) -> ProductLimit:
        """Of the time to the first token of those that begin in the window: the prefill of each began in it, so that
        none is cut off."""
        begins, firsts = self.begins[self.inside], self.requests.first_tokens[self.inside]
        return ProductLimit.of(begins, firsts, opens=-math.inf, closes=math.inf)

    def figures(self, length: int, metric: str | None) -> tuple[dict[str, Figure], tuple[str, ...]]:
        """By field of an Estimate, and the sentences on them; `metric` is that of the latency, None for none here."""
        share = None if metric is None else share_of_requests(metric)
        # Before there is a law of whole times, which takes much memory in a long run, as these do.
        there = self.length_latency(length) if metric is not None and share is None else None
        tpot = self.tpot()
        tokens = token_rate(self.requests.times, self.window, most_freedom=self.freedom)
        mean_output = float(np.mean(self.requests.output_tokens[self.requests.answered]))
        firsts = (self.requests.first_tokens - self.begins)[self.inside]
        found = {
            "token_throughput": tokens,
            "throughput": scaled(tokens, 1 / mean_output),
            "ttft": mean_of(firsts, self.begins[self.inside], self.window),
        }
        if tpot is not None:
            found["tpot"] = tpot
        shares = {"latency_p50": 0.5, "latency_p99": 0.99}
        if share is not None:
            shares["latency"] = share
        notes = []
        for name, part in shares.items():
            found[name], note = self.percentile(part)
            notes += [f"{name.replace('_', ' ')}: {note}"] if note else []
        if there:
            found["latency"] = there.figure
            notes += there.sentences(length)
        return found, tuple(notes)

    def length_latency(self, length: int) -> LengthLatency | None:
        return length_latency(
            self.requests.times,
            begins=self.begins,
            firsts=self.requests.first_tokens,
            length=length,
            window=self.window,
            counted=self.inside,
            whole=self.whole,
            apart=self.apart,
        )

    def percentile(self, share: float) -> tuple[Figure, str]:
        """Of the whole times of requests. Where the product limit has none, those that were cut off later than any
        ended count as they went on, so that it is above all that the limit has; a sentence says so."""
        found = self.law.percentile(share, self.window)
        if math.isfinite(found.value):
            return found, ""
        spans = (self.requests.last_tokens - self.begins)[self.some]
        late = self.law.quantile(spans, share, self.window, together=False)
        return replace(late, high=math.inf), _cut_off(self.law)


def _cut_off(law: ProductLimit) -> str:
    """A sentence on requests that ended after the window."""
    return (
        f"{100 * law.cut:.2g} % of the requests take longer than the steady window shows; they count as they went on "
        "after it"
    )


def request_times(
    records: Sequence[RequestRecord],
    p99_output: int,
    *,
    begins: Floats | None = None,
    some: NDArray[np.bool_] | None = None,
) -> RequestTimes:
    """The times of requests that did not expire, or of `some` of those, from their start, or from `begins`; times of
    deadlines count from the arrival."""
    requests = Requests.of(records)
    some = requests.answered if some is None else some
    starts, arrivals = (requests.starts if begins is None else begins)[some], requests.arrivals[some]
    firsts, lasts, later = requests.first_tokens[some], requests.last_tokens[some], requests.output_tokens[some] - 1
    until = requests.times.nth(np.minimum(requests.output_tokens, p99_output))[some]
    patience = requests.patience[some]
    return RequestTimes(
        ttft=firsts - starts,
        tpot=np.where(later > 0, (lasts - firsts) / np.maximum(later, 1), 0.0),
        latency=lasts - starts,
        length=until - starts,
        due=None if np.isnan(patience).any() else (lasts - arrivals) / patience * patience.mean(),
        single=later == 0,
    )


def client_times(records: Sequence[RequestRecord]) -> dict[str, tuple[float, float, float]]:
    """Mean, median and 99th percentile in seconds, from when a request was sent: ttft, tpot, itl and latency.

    As `vllm bench serve` defines them: the tpot of requests with several tokens, an itl for every token but the first.
    """
    answered = [record for record in records if not record.expired]
    several = [record for record in answered if record.output_tokens > 1]
    times = {
        "ttft": [r.token_times[0] - r.arrival for r in answered],
        "tpot": [(r.token_times[-1] - r.token_times[0]) / (r.output_tokens - 1) for r in several],
        "itl": [later - before for r in several for before, later in pairwise(r.token_times)],
        "latency": [r.token_times[-1] - r.arrival for r in answered],
    }
    return {
        name: (float(np.mean(some)), float(np.median(some)), float(np.percentile(some, 99)))
        for name, some in times.items()
        if some
    }


def _served_share(requests: Requests, some: NDArray[np.bool_]) -> float:
    """The share of these that did not expire; 1 of no requests."""
    return float(requests.answered[some].mean()) if some.any() else 1.0


def _nothing(
    requests: Requests, metric: str, bounds: Sequence[Bound], *, kv_tokens: float, memory_bytes: float
) -> Estimate:
    """The Estimate of a run in which every request expired."""
    share = share_of_requests(metric)
    kept = 0.0 if targets_of(bounds) else None
    all_of_them = np.ones(len(requests), dtype=bool)
    return Estimate(
        throughput=0.0,
        token_throughput=0.0,
        ttft=0.0,
        tpot=0.0,
        latency=_deadline_latency(requests, all_of_them, share) if share is not None and is_deadline(metric) else None,
        latency_p50=0.0,
        latency_p99=0.0,
        kv_tokens=kv_tokens,
        memory_bytes_per_gpu=memory_bytes,
        deadline_share=0.0,
        utility=0.0,
        attainment=kept,
        goodput=kept,
    )


def _deadline_latency(requests: Requests, some: NDArray[np.bool_], share: float) -> float | None:
    """The share of its own deadline that such a share of the requests does not exceed, times the mean one."""
    patience = requests.patience
    due = some & ~np.isnan(patience)
    if not due.any():
        return None
    shares = np.where(requests.answered, (requests.last_tokens - requests.arrivals) / patience, EXPIRED)[due]
    return float(np.quantile(shares, share, method="inverted_cdf") * np.mean(patience[due]))


def _deadline_share(requests: Requests, some: NDArray[np.bool_]) -> float | None:
    due = some & ~np.isnan(requests.patience)
    return float(np.mean(requests.in_time[due])) if due.any() else None


def _utility(requests: Requests, some: NDArray[np.bool_], seconds: float) -> float | None:
    if np.isnan(requests.patience[some]).all():
        return None
    worth = (1.0 if requests.weights is None else requests.weights) / requests.input_tokens
    return sum(worth[some & requests.in_time].tolist()) / seconds


def window(records: Sequence[RequestRecord], backlog: bool, *, until: float = math.inf) -> tuple[float, float]:
    """Seconds at which the steady window opens and closes: starts of a prefill, or the whole run up to `until`.

    The whole run too where the window would hold little of it, as when all requests are admitted at once.
    """
    steady = _steady_window(Requests.of(records), backlog, until)
    return steady.opens, steady.closes


class _Steady(NamedTuple):
    """Seconds at which the window opens and closes, and whether batches do not overlap."""

    opens: float
    closes: float
    apart: bool = False


def _steady_window(requests: Requests, backlog: bool, until: float) -> _Steady:
    """As `window`."""
    answered, times = requests.answered, requests.times
    whole = _Steady(float(requests.arrivals[answered].min()), min(until, float(np.nanmax(requests.last_tokens))))
    starts, batch = _batches(requests.starts[answered])
    if not backlog or len(starts) <= 2:
        return whole
    gone = np.zeros(len(starts))
    np.maximum.at(gone, batch, requests.last_tokens[answered])
    if (gone[:-1] <= starts[1:] + _SAME_START).all():  # Every start is as good as any other.
        return _Steady(float(starts[0]), float(starts[-1]), apart=True)
    num_tokens = int(requests.output_tokens.sum())
    warm = max(min(gone[0], times.in_order(num_tokens // 4)), _full(requests, starts))
    opens, closes = starts[np.searchsorted(starts, warm).clip(max=len(starts) - 2)], starts[-1]
    inside = times.num_within(opens, closes)
    return _Steady(float(opens), float(closes)) if inside >= _LEAST_INSIDE * num_tokens else whole


def _full(requests: Requests, starts: Floats) -> float:
    """The first of these times by which as many requests ran as do later, in the second half until the last of them,
    and as many tokens were in the KV cache as there are half of the time; at most the beginning of that half.

    A pass takes as long as its requests are old: passes with fewer tokens than later are faster than later."""
    middle, closes = (starts[0] + starts[-1]) / 2, starts[-1]
    ends = (times[requests.answered] for times in (requests.starts, requests.last_tokens))
    begun, over = (np.clip(times, middle, closes).sum() for times in ends)
    later, (running, tokens) = starts >= middle, _held(requests, starts)
    enough_tokens = np.quantile(tokens[later], _TOKENS_LATER)
    busy = (over - begun) * (1 - _ROUNDING)
    enough = np.maximum.accumulate(running) * (closes - middle) >= busy
    enough &= np.maximum.accumulate(tokens) >= enough_tokens
    return float(min(starts[np.argmax(enough)], middle)) if enough.any() else float(middle)


def _held(requests: Requests, times: Floats) -> tuple[Floats, Floats]:
    """[times] Requests that run, and their tokens, as if each had its tokens at an even pace."""
    some = requests.answered
    begins, lasts = requests.starts[some], requests.last_tokens[some]
    paces = requests.output_tokens[some] / np.maximum(lasts - begins, 1e-9)
    begun, over = _until(begins, times), _until(lasts, times)

    def held(values: Floats) -> Floats:
        return _sums(values, *begun) - _sums(values, *over)

    running = (begun[1] - over[1]).astype(float)
    tokens = held(requests.input_tokens[some] - paces * begins)
    del begins, lasts
    return running, tokens + held(paces) * times


def _until(moments: Floats, times: Floats) -> tuple[Ints, Ints]:
    """The order of the moments, and [times] how many of them are until then."""
    order = small(np.argsort(moments))
    return order, small(np.searchsorted(moments[order], times, side="right"))


def _sums(values: Floats, order: Ints, until: Ints) -> Floats:
    """[until] Of the first so many values in that order."""
    return np.append(0.0, np.cumsum(values[order]))[until]


def _arrival_window(requests: Requests) -> _Steady:
    arrivals = np.sort(requests.arrivals[requests.answered])
    opens, closes = float(arrivals[int(_FILLING_UP * len(arrivals))]), float(arrivals[-1])
    return _Steady(opens, closes if closes > opens else float(np.nanmax(requests.last_tokens)))


def _batches(starts: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """When each batch of requests started, and which batch each request is in: those that start together to within the
    few milliseconds by which a client at the other end of a connection sees them apart."""
    order = np.argsort(starts, kind="stable")
    rising = starts[order]
    firsts = [0] if len(starts) else []
    while firsts and (after := int(np.searchsorted(rising, rising[firsts[-1]] + _SAME_START, side="right"))) < len(
        rising
    ):
        firsts.append(after)
    batch = np.zeros(len(starts), dtype=np.int64)
    batch[order] = np.searchsorted(firsts, np.arange(len(starts)), side="right") - 1
    return rising[firsts], batch
