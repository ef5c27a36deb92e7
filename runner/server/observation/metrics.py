"""The metrics of the server for Prometheus: vLLM's names with the prefix `exeplan:`, and predicted and observed values.

Times are on the engine's clock. `inter_token_latency_seconds` has one sample for each gap between two successive
deliveries of a sequence; `request_time_per_output_token_seconds` has one mean a request. Every name that a server may
show has its HELP and TYPE lines from the start, and every counter its samples, at 0.
Source: https://prometheus.io/docs/instrumenting/exposition_formats/ and vLLM's `vllm/v1/metrics/loggers.py`.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from exeplan.core.plan import Plan
from exeplan.runner.ipc.messages import Event, Stats
from exeplan.runner.server.network.clients import Totals
from exeplan.runner.server.observation.observed import Observed, Snapshot
from exeplan.runner.server.observation.plan_metrics import (
    counter,
    gauge,
    gauges,
    plan_families,
    replanning_families,
    with_rows,
)
from exeplan.runner.server.observation.predicted import PREDICTED

FINISH_REASONS = ("stop", "length", "abort", "expired", "error", "structure", "lost")
REJECTIONS = ("queue_full", "late", "rate_limit_exceeded", "too_many_requests")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
_TOKENS = tuple(float(2**power) for power in range(17))
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Seconds from the arrival of a request to its first token", _SECONDS),
    "inter_token_latency_seconds": ("Seconds between successive tokens of a request", _SECONDS),
    "request_time_per_output_token_seconds": ("Mean seconds per token after the first, one a request", _SECONDS),
    "e2e_request_latency_seconds": ("Seconds from the arrival of a request to its last token", _SECONDS),
    "request_queue_time_seconds": ("Seconds from the arrival of a request to the start of its prefill", _SECONDS),
    "request_prefill_time_seconds": ("Seconds from the start of a prefill to the first token", _SECONDS),
    "request_decode_time_seconds": ("Seconds from the first token to the last", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a finished request", _TOKENS),
    "request_generation_tokens": ("Output tokens of a finished request", _TOKENS),
    "iteration_tokens_total": ("Tokens that one iteration computes", _TOKENS),
}
_CLIENTS = {
    "requests": "Requests of a client that were read",
    "rejections": "Requests of a client that were not admitted",
    "prompt_tokens": "Prompt tokens of a client's requests that have begun",
    "generation_tokens": "Output tokens of a client",
    "waiting": "Sequences of a client that wait for their prefill",
    "running": "Sequences of a client that run",
}

_SCALING = {
    "replicas_wanted": "Replicas that the load needs, within the limits of --replicas",
    "replicas_needed": "The same without rounding and limits",
    "replicas_serving": "Replicas that get requests",
    "replicas_starting": "Replicas that load",
    "replicas_draining": "Replicas that answer what they have and end",
    "arrival_rate": "Sequences per second that come, refused ones too",
}


ALIASES = {
    "vllm": frozenset(_HISTOGRAMS)
    | {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
    | {"num_preemptions", "prompt_tokens", "generation_tokens", "request_success"}
}
"""By prefix: families that another server has under the same name with the same meaning, counters without `_total`."""


class Histogram:
    """Counts of values at or below each edge."""

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Each edge with the number of values at or below it."""
        names = (*map(str, self.edges), "+Inf")
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is read at the moment of a scrape. `replanning` has the names of `exeplan.drift.state.summary`."""

    stats: Stats
    observed: Snapshot
    num_waiting: int
    replanning: Mapping[str, float]
    clients: Mapping[str, Totals]
    """By the names of their keys; those without one together."""
    scaling: Mapping[str, float] = field(default_factory=dict)
    """By the names of `_SCALING`; empty where the number of replicas stays."""
    front_ends: Mapping[str, int] = field(default_factory=dict)
    """Requests of each front end on another host, by its address and port."""


@dataclass(slots=True)
class _Progress:
    first: Event
    last: float
    num_tokens: int = 0


class ServeMetrics(Collector):
    """Counts what the engine reports: `step` for every iteration, `dropped` for a sequence that is aborted.

    `registry` holds nothing else; `read` is called once a scrape. `aliases` is a prefix of `ALIASES`, under which its
    families are shown a second time.
    """

    def __init__(
        self,
        *,
        model_name: str,
        plan: Plan,
        observed: Observed,
        read: Callable[[], Reading],
        aliases: str | None = None,
    ) -> None:
        self._aliases = aliases
        self._model_name, self._plan, self.observed, self._read = model_name, plan, observed, read
        self._histograms = {name: Histogram(edges) for name, (_, edges) in _HISTOGRAMS.items()}
        self._open: dict[str, _Progress] = {}
        self.finished = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.rejected = Counter(dict.fromkeys(REJECTIONS, 0))
        self._slowness = Histogram(())
        self._reference_seconds = 0.0
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def adopt(self, plan: Plan) -> None:
        """From now on the predictions and bounds of this plan."""
        self._plan = plan

    def dropped(self, request_id: str) -> None:
        """A sequence that will not be finished; one that never ran or has finished is ignored."""
        if self._open.pop(request_id, None):
            self.observed.left(request_id)
            self.finished["abort"] += 1

    def step(self, events: Sequence[Event], stats: Stats) -> None:
        self.observed.step(stats)
        self._num_preemptions += stats.num_preemptions
        if stats.iteration_tokens:
            self._histograms["iteration_tokens_total"].add(stats.iteration_tokens)
        if stats.slowness:
            self._slowness.add(stats.slowness)
            self._reference_seconds += stats.reference_seconds
        for event in events:
            progress = self._open.get(event.request_id)
            if progress is None and not event.token_ids:  # It ended without a token, so its times are no latencies.
                self.finished[event.finish_reason or ""] += 1
                continue
            if progress is None:
                self._begin(event)
            else:
                num_tokens = max(len(event.token_ids), 1)  # Tokens delivered together count with their mean gap.
                for _ in range(num_tokens):
                    self._add("inter_token_latency_seconds", (event.time - progress.last) / num_tokens)
                if event.token_ids:
                    since = event.time - progress.last
                    self.observed.delivered(event.request_id, num_tokens=len(event.token_ids), seconds=since)
            self._take(self._open[event.request_id], event)

    def _begin(self, first: Event) -> None:
        self._open[first.request_id] = _Progress(first, first.time)
        since, number = first.time - first.arrival, len(first.token_ids)
        self.observed.begun(first.request_id, start=first.start - first.arrival, first=since, num_tokens=number)
        self._num_prompt_tokens += first.num_prompt_tokens
        self._add("request_queue_time_seconds", first.start - first.arrival)
        self._add("request_prefill_time_seconds", first.time - first.start)
        self._add("time_to_first_token_seconds", first.time - first.arrival)

    def _take(self, progress: _Progress, event: Event) -> None:
        self._num_generated_tokens += len(event.token_ids)
        progress.num_tokens += len(event.token_ids)
        progress.last = event.time
        if event.finish_reason:
            self._finish(progress, event)

    def _finish(self, progress: _Progress, last: Event) -> None:
        del self._open[last.request_id]
        self.observed.left(last.request_id)
        self.finished[last.finish_reason or ""] += 1
        decode_seconds = last.time - progress.first.time
        self.observed.finish(
            start=last.start - last.arrival,
            first=progress.first.time - last.arrival,
            last=last.time - last.arrival,
            input_tokens=last.num_prompt_tokens,
            output_tokens=progress.num_tokens,
        )
        self._add("e2e_request_latency_seconds", last.time - last.arrival)
        self._add("request_decode_time_seconds", decode_seconds)
        self._add("request_prompt_tokens", last.num_prompt_tokens)
        self._add("request_generation_tokens", progress.num_tokens)
        if progress.num_tokens > 1:
            self._add("request_time_per_output_token_seconds", decode_seconds / (progress.num_tokens - 1))

    def _add(self, name: str, value: float) -> None:
        self._histograms[name].add(value)

    def collect(self) -> Iterator[Metric]:
        """All families, in the order of the page, and those with another name after them."""
        families = list(self._families())
        yield from families
        if self._aliases:
            shared = ALIASES[self._aliases]
            yield from (_renamed(one, self._aliases) for one in families if one.name.partition(":")[2] in shared)

    def _families(self) -> Iterator[Metric]:
        reading = self._read()
        yield from self._engine(reading.stats, reading.num_waiting)
        yield from self._speed()
        yield from self._clients(reading.clients)
        for name, histogram in self._histograms.items():
            family = HistogramMetricFamily(f"exeplan:{name}", _HISTOGRAMS[name][0], labels=["model_name"])
            family.add_metric([self._model_name], histogram.cumulative(), histogram.sum)
            yield family
        about = "Requests of a front end on another host that are not answered; only on the host of the replicas"
        yield self._gauges("front_end_requests", about, "front_end", reading.front_ends)
        for name, about in _SCALING.items():
            yield self._gauge(name, about, reading.scaling.get(name))
        yield from replanning_families(self._model_name, reading.replanning)
        yield from self._predicted_and_observed(reading.observed)

    def _engine(self, stats: Stats, num_waiting: int) -> Iterator[Metric]:
        used = 1 - stats.free_blocks / stats.num_blocks if stats.num_blocks else 0.0
        yield self._gauge("num_requests_running", "Sequences that run", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait for their prefill", num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", used)
        yield self._counter("num_preemptions_total", "Preemptions", self._num_preemptions)
        yield self._counter("prompt_tokens_total", "Prompt tokens of requests that have begun", self._num_prompt_tokens)
        yield self._counter("generation_tokens_total", "Output tokens", self._num_generated_tokens)
        yield self._counters("request_success_total", "Sequences that ended", "finished_reason", self.finished)
        yield self._counters("admission_rejections_total", "Requests not admitted", "reason", self.rejected)

    def _speed(self) -> Iterator[Metric]:
        about = "Times as long as passes take now as while the plan's profile was measured, one a reference pass"
        family = SummaryMetricFamily("exeplan:machine_slowness", about, labels=["model_name"])
        family.add_metric([self._model_name], sum(self._slowness.counts), self._slowness.sum)
        yield family
        yield self._counter("reference_pass_seconds_total", "Time of reference passes", self._reference_seconds)

    def _clients(self, clients: Mapping[str, Totals]) -> Iterator[Metric]:
        for name, about in _CLIENTS.items():
            values = {client: getattr(total, name) for client, total in clients.items()}
            if name in ("waiting", "running"):
                yield self._gauges(f"client_sequences_{name}", about, "client", values)
            else:
                yield self._counters(f"client_{name}_total", about, "client", values)

    def _predicted_and_observed(self, snapshot: Snapshot) -> Iterator[Metric]:
        observed = {name: getattr(snapshot, name) for name in PREDICTED if hasattr(snapshot, name)}
        yield from plan_families(self._model_name, self._plan, {"num_requests": snapshot.num_requests, **observed})
        within = "Observed in the last minutes: share of requests within a bound"
        yield self._gauges("observed_share_within_bound", within, "bound", snapshot.within)
        about = "Observations that an observed figure is from: requests, tokens, or gaps between tokens"
        numbers = {name: found.num_observations for name, found in snapshot.evidence.items()}
        yield self._gauges("observed_num_observations", about, "figure", numbers)

    def _gauge(self, name: str, about: str, value: float | None) -> Metric:
        return gauge(self._model_name, name, about, value)

    def _gauges(self, name: str, about: str, by: str, values: Mapping[str, float]) -> Metric:
        return gauges(self._model_name, name, about, by, values)

    def _counter(self, name: str, about: str, value: float) -> Metric:
        return counter(self._model_name, name, about, value)

    def _counters(self, name: str, about: str, by: str, values: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(f"exeplan:{name}", about, labels=["model_name", by])
        return with_rows(family, self._model_name, sorted(values.items()))


def _renamed(family: Metric, prefix: str) -> Metric:
    found = Metric(_with_prefix(family.name, prefix), family.documentation, family.type)
    found.samples = [sample._replace(name=_with_prefix(sample.name, prefix)) for sample in family.samples]
    return found


def _with_prefix(name: str, prefix: str) -> str:
    return f"{prefix}:{name.partition(':')[2]}"
