"""What a run did, from the timestamps of its requests: one definition for the replay, the engine and the server.

    ttft      first token - start of its prefill
    tpot      (last token - first token) / (output tokens - 1), mean over requests with at least two tokens
    e2e       last token - start of its prefill
    latency   p99-length: mean time from the start until the n-th token, n the planned 99th-percentile length, over the
              requests that reach it; pNN-requests: the NN-th percentile of e2e
    throughput   requests/s: output tokens a second over the mean output length
    deadline_share   share of the requests that arrived in the window whose last token came by their deadline
    utility      worth of these requests a second, weight / input tokens each
    attainment   share of the requests that keep every bound, an expired one none (`request_times.py`)
    goodput      throughput times the same share of the requests that did not expire

For pNN-deadline latency is the time from arrival to the last token, scaled by the request's own deadline to the mean
one; a request that expired counts as one that took twice its deadline.

The steady window opens when a whole generation of requests has passed: none of the first, synchronised batch is left,
or a quarter of all tokens is out, whichever is earlier; at once where batches do not overlap. It closes when the queue
has run dry. A batch that fills up or drains is not what a plan under a backlog predicts. Rates count what falls in it;
times count requests that start in it (for p99-length also reach the n-th token in it), or all requests where there are
none. With no backlog the window is the whole run.

Where `waiting` counts, ttft, e2e and latency begin at the arrival instead of the start of the prefill, and the window
is that of the arrivals but for the first tenth of them, while the engine fills up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from exeplan.arrays import Floats
from exeplan.core.bounds import Bound, is_deadline, share_of_requests, targets_of
from exeplan.core.request_times import RequestTimes
from exeplan.core.schedule import Estimate
from exeplan.workload.deadlines import EXPIRED

_SAME_START = 5e-3
_LEAST_INSIDE = 0.2
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
) -> Estimate:
    """The Estimate of a run. `backlog` says that requests were always waiting, so that there is a steady window;
    `waiting` that they came at their own times and the wait counts. `bounds` are those that its percentiles, attainment
    and goodput are of; the first one replaces `bound_metric`."""
    all_records, bound_metric = records, bounds[0].metric if bounds else bound_metric
    records = [r for r in all_records if not r.expired]
    if not records:
        return _nothing(all_records, bound_metric, bounds, kv_tokens=kv_tokens, memory_bytes=memory_bytes)
    if waiting:
        records = [replace(r, start=r.arrival) for r in records]
    opens, closes = _arrival_window(records) if waiting else window(records, backlog)
    inside = [r for r in records if opens <= r.start < closes] or records
    e2e = np.array([r.token_times[-1] - r.start for r in inside])
    share = share_of_requests(bound_metric)
    rate = _token_rate(records, opens, closes)
    came = [r for r in all_records if opens <= r.arrival < closes] if waiting else list(all_records)
    latency: float | None
    if is_deadline(bound_metric) and share is not None:
        latency = _deadline_latency(came, share)
    elif share is None:
        latency = _length_latency(records, p99_output, opens, math.inf if waiting else closes)
    else:
        latency = float(np.quantile(e2e, share))
    times, throughput = request_times(inside, p99_output), float(rate / np.mean([r.output_tokens for r in records]))
    kept = times.attainment(bounds)
    return Estimate(
        throughput=throughput,
        token_throughput=rate,
        ttft=float(np.mean([r.token_times[0] - r.start for r in inside])),
        tpot=_tpot(inside),
        latency=latency,
        latency_p50=float(np.quantile(e2e, 0.5)),
        latency_p99=float(np.quantile(e2e, 0.99)),
        kv_tokens=kv_tokens,
        memory_bytes_per_gpu=memory_bytes,
        deadline_share=_deadline_share(came),
        utility=_utility(came, closes - opens),
        attainment=None if kept is None else kept * _served_share(came),
        goodput=None if kept is None else kept * throughput,
        percentiles=times.percentiles(bounds),
    )


def request_times(records: Sequence[RequestRecord], p99_output: int) -> RequestTimes:
    """The times of requests that did not expire, from their start; those of deadlines count from the arrival."""
    later = np.array([r.output_tokens - 1 for r in records])
    planned = np.minimum(later, p99_output - 1).tolist()
    rows = [
        (r.start, r.arrival, r.token_times[0], r.token_times[-1], r.token_times[number])
        for r, number in zip(records, planned, strict=True)
    ]
    starts, arrivals, firsts, lasts, until = np.array(rows).T
    due = None
    if all(r.deadline is not None for r in records):
        patience = np.array([r.deadline for r in records], float) - arrivals
        due = (lasts - arrivals) / patience * patience.mean()
    return RequestTimes(
        ttft=firsts - starts,
        tpot=np.where(later > 0, (lasts - firsts) / np.maximum(later, 1), 0.0),
        latency=lasts - starts,
        length=until - starts,
        due=due,
        single=later == 0,
    )


def _served_share(records: Sequence[RequestRecord]) -> float:
    """The share that did not expire; 1 of no requests."""
    return sum(not r.expired for r in records) / len(records) if records else 1.0


def _nothing(
    records: Sequence[RequestRecord], metric: str, bounds: Sequence[Bound], *, kv_tokens: float, memory_bytes: float
) -> Estimate:
    """The Estimate of a run in which every request expired."""
    share = share_of_requests(metric)
    kept = 0.0 if targets_of(bounds) else None
    return Estimate(
        throughput=0.0,
        token_throughput=0.0,
        ttft=0.0,
        tpot=0.0,
        latency=_deadline_latency(records, share) if share is not None and is_deadline(metric) else None,
        latency_p50=0.0,
        latency_p99=0.0,
        kv_tokens=kv_tokens,
        memory_bytes_per_gpu=memory_bytes,
        deadline_share=0.0,
        utility=0.0,
        attainment=kept,
        goodput=kept,
    )


def _deadline_latency(records: Sequence[RequestRecord], share: float) -> float | None:
    """The share of its own deadline that such a share of the requests does not exceed, times the mean one."""
    due = [(r.deadline - r.arrival, r) for r in records if r.deadline is not None]
    if not due:
        return None
    shares = [EXPIRED if r.expired else (r.token_times[-1] - r.arrival) / patience for patience, r in due]
    return float(np.quantile(shares, share, method="inverted_cdf") * np.mean([patience for patience, _ in due]))


def _deadline_share(records: Sequence[RequestRecord]) -> float | None:
    due = [r.in_time for r in records if r.deadline is not None]
    return float(np.mean(due)) if due else None


def _utility(records: Sequence[RequestRecord], seconds: float) -> float | None:
    if all(r.deadline is None for r in records):
        return None
    return sum(r.weight / r.input_tokens for r in records if r.in_time) / seconds


def window(records: Sequence[RequestRecord], backlog: bool) -> tuple[float, float]:
    """Seconds at which the steady window opens and closes: starts of a prefill, or the whole run.

    The whole run too where the window would hold little of it, as when all requests are admitted at once.
    """
    times = np.sort(np.concatenate([r.token_times for r in records]))
    whole = min(r.arrival for r in records), float(times[-1])
    starts, batch = _batches(np.array([r.start for r in records]))
    if not backlog or len(starts) <= 2:
        return whole
    gone = np.zeros(len(starts))
    np.maximum.at(gone, batch, [r.token_times[-1] for r in records])
    if (gone[:-1] <= starts[1:] + _SAME_START).all():  # Batches do not overlap: every start is as good as any other.
        return float(starts[0]), float(starts[-1])
    warm = min(gone[0], times[len(times) // 4])
    opens, closes = starts[np.searchsorted(starts, warm).clip(max=len(starts) - 2)], starts[-1]
    inside = np.count_nonzero((times > opens) & (times <= closes))
    return (float(opens), float(closes)) if inside >= _LEAST_INSIDE * len(times) else whole


def _arrival_window(records: Sequence[RequestRecord]) -> tuple[float, float]:
    arrivals = np.sort([r.arrival for r in records])
    opens, closes = float(arrivals[int(_FILLING_UP * len(arrivals))]), float(arrivals[-1])
    return (opens, closes) if closes > opens else (opens, max(r.token_times[-1] for r in records))


def _batches(starts: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """When each batch of requests started, and which batch each request is in: those that start together to within the
    few milliseconds by which a client at the other end of a connection sees them apart."""
    order = np.argsort(starts, kind="stable")
    firsts: list[float] = []
    batch = np.zeros(len(starts), dtype=np.int64)
    for index in order:
        if not firsts or starts[index] > firsts[-1] + _SAME_START:
            firsts.append(float(starts[index]))
        batch[index] = len(firsts) - 1
    return np.array(firsts), batch


def _token_rate(records: Sequence[RequestRecord], opens: float, closes: float) -> float:
    """Output tokens a second."""
    times = np.concatenate([r.token_times for r in records])
    return float(np.count_nonzero((times > opens) & (times <= closes)) / (closes - opens))


def _tpot(records: Sequence[RequestRecord]) -> float:
    gaps = [(r.token_times[-1] - r.token_times[0]) / (r.output_tokens - 1) for r in records if r.output_tokens > 1]
    return float(np.mean(gaps)) if gaps else 0.0


def _length_latency(records: Sequence[RequestRecord], length: int, opens: float, closes: float) -> float | None:
    reached = [r for r in records if r.output_tokens >= length]
    inside = [r for r in reached if r.start >= opens and r.token_times[length - 1] <= closes] or reached
    return float(np.mean([r.token_times[length - 1] - r.start for r in inside])) if inside else None
