"""Readings: what the metrics of a serving engine say of the requests between two moments.

    both                 time_to_first_token_seconds, inter_token_latency_seconds (a sample a gap), histograms
    vLLM 0.31 to 0.33    request_prompt_tokens, request_generation_tokens, request_prefill_time_seconds,
                         num_requests_running, num_requests_waiting
    SGLang 0.5.23        with --enable-metrics: prompt_tokens_histogram, generation_tokens_histogram,
                         queue_time_seconds, num_running_reqs, num_queue_reqs

vLLM's prefill times are of requests that ended, as lengths are. SGLang's are its times to the first token less those in
the queue, which are of other requests where the queue grows. The engines of one server are added up as they are read;
of several servers what came between two moments is, so that each of them that begins anew is seen.
Source: vLLM's `v1/metrics/loggers.py` and SGLang's `srt/observability/metrics_collector.py`.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from exeplan.drift.length_draws import Buckets
from exeplan.errors import InputError
from exeplan.runner.scrape import scrape

if TYPE_CHECKING:
    from prometheus_client import Metric


class _Names(NamedTuple):
    """Of an engine's families, without its prefix."""

    inputs: str
    outputs: str
    prefill: str
    """Of the time from its start to the first token; '' where it is that from the arrival less `queue`."""
    queue: str
    running: str
    waiting: str
    hint: str
    """How the engine is to be started so that it shows them."""


_TTFT, _GAPS = "time_to_first_token_seconds", "inter_token_latency_seconds"
ENGINES = {
    "vllm": _Names(
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_prefill_time_seconds",
        "",
        "num_requests_running",
        "num_requests_waiting",
        "without --disable-log-stats",
    ),
    "sglang": _Names(
        "prompt_tokens_histogram",
        "generation_tokens_histogram",
        "",
        "queue_time_seconds",
        "num_running_reqs",
        "num_queue_reqs",
        "with --enable-metrics",
    ),
}
"""By the prefix of their metrics, which is the name of their exporter too."""


class Times(NamedTuple):
    """The sum of so many."""

    seconds: float
    number: float

    @property
    def mean(self) -> float | None:
        """None of none."""
        return self.seconds / self.number if self.number else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Of one server since its start, or of one or several between two moments."""

    inputs: Buckets
    outputs: Buckets
    ttft: Times
    """From the arrival."""
    gaps: Times
    """Between two tokens of a request, running ones too."""
    prefill: Times
    """From its start to the first token."""
    num_running: int
    """Now, as the next one."""
    num_waiting: int

    def since(self, before: "Reading") -> "Reading | None":
        """What came after an earlier reading of the server; None where it has begun anew since."""
        sides = ((self.inputs, before.inputs), (self.outputs, before.outputs))
        if any(other.size and one.edges != other.edges for one, other in sides):
            return None
        lengths = [_less(one, other) for one, other in sides]
        pairs = ((self.ttft, before.ttft), (self.gaps, before.gaps), (self.prefill, before.prefill))
        times = [Times(one.seconds - other.seconds, one.number - other.number) for one, other in pairs]
        if min(*lengths[0].counts, *lengths[1].counts, *(time.number for time in times)) < 0:
            return None
        return Reading(
            inputs=lengths[0],
            outputs=lengths[1],
            ttft=times[0],
            gaps=times[1],
            prefill=times[2],
            num_running=self.num_running,
            num_waiting=self.num_waiting,
        )


def _less(one: Buckets, other: Buckets) -> Buckets:
    if not other.size:  # Engines show no buckets before their first request.
        return one
    counts = tuple(a - b for a, b in zip(one.counts, other.counts, strict=True))
    return Buckets(edges=one.edges, counts=counts, total=one.total - other.total)


@dataclass(frozen=True, slots=True)
class Readings:
    """Of each server at one moment."""

    servers: tuple[Reading, ...]

    @property
    def together(self) -> Reading:
        return _sum(self.servers)

    def since(self, before: "Readings") -> Reading | None:
        """What came after earlier readings of the same servers, of all together; None where one has begun anew."""
        found = [one.since(other) for one, other in zip(self.servers, before.servers, strict=True)]
        seen = [one for one in found if one is not None]
        return _sum(seen) if len(seen) == len(found) else None


def _sum(parts: Sequence[Reading]) -> Reading:
    return Reading(
        inputs=_sum_of_buckets([one.inputs for one in parts]),
        outputs=_sum_of_buckets([one.outputs for one in parts]),
        ttft=_sum_of_times([one.ttft for one in parts]),
        gaps=_sum_of_times([one.gaps for one in parts]),
        prefill=_sum_of_times([one.prefill for one in parts]),
        num_running=sum(one.num_running for one in parts),
        num_waiting=sum(one.num_waiting for one in parts),
    )


def _sum_of_times(parts: Sequence[Times]) -> Times:
    return Times(sum(one.seconds for one in parts), sum(one.number for one in parts))


def _sum_of_buckets(parts: Sequence[Buckets]) -> Buckets:
    """Raises InputError where they have other edges, so that nothing says which lengths are in which bucket."""
    some = [one for one in parts if one.size] or parts[:1]  # Engines show no buckets before their first request.
    if len({one.edges for one in some}) > 1:
        raise InputError("the servers count lengths in unlike buckets; watch those with the same buckets together")
    counts = tuple(map(sum, zip(*(one.counts for one in some), strict=True)))
    return Buckets(edges=some[0].edges, counts=counts, total=sum(one.total for one in some))


def read(engine: str, urls: Sequence[str]) -> Readings:
    """What these servers show now. Raises OSError where one does not answer, and InputError where it shows no metrics
    of this engine, or lengths in other buckets than another."""
    found = Readings(tuple(_reading(ENGINES[engine], engine, _of_server(engine, url)) for url in urls))
    _sum(found.servers)
    return found


def _of_server(engine: str, url: str) -> "list[Metric]":
    names, found = ENGINES[engine], scrape(_metrics_url(url), {})
    shown = {family.name for family in found}
    needed = [f"{engine}:{name}" for name in (names.inputs, names.outputs, _TTFT, _GAPS, names.prefill or names.queue)]
    if lacking := [name for name in needed if name not in shown]:
        raise InputError(f"{url} does not show {lacking[0]}; start {engine} {names.hint}, or say which --engine it is")
    return found


def _metrics_url(url: str) -> str:
    """Of a server, or of the metrics themselves."""
    return url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"


def _reading(names: _Names, engine: str, families: "list[Metric]") -> Reading:
    values: dict[str, float] = defaultdict(float)
    buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for family in families:
        for sample in family.samples:
            name = sample.name.removeprefix(f"{engine}:")
            if name.endswith("_bucket"):
                buckets[name.removesuffix("_bucket")][float(sample.labels["le"])] += sample.value
            else:
                values[name] += sample.value
    lengths = [_buckets(buckets[name], values[f"{name}_sum"]) for name in (names.inputs, names.outputs)]
    ttft, gaps = (_times(values, name) for name in (_TTFT, _GAPS))
    queue = _times(values, names.queue)
    prefill = _times(values, names.prefill) if names.prefill else Times(ttft.seconds - queue.seconds, ttft.number)
    return Reading(
        inputs=lengths[0],
        outputs=lengths[1],
        ttft=ttft,
        gaps=gaps,
        prefill=prefill,
        num_running=round(values[names.running]),
        num_waiting=round(values[names.waiting]),
    )


def _times(values: dict[str, float], name: str) -> Times:
    return Times(values[f"{name}_sum"], values[f"{name}_count"])


def _buckets(cumulative: dict[float, float], total: float) -> Buckets:
    edges = sorted({*cumulative, math.inf})
    reached = [0, *(round(cumulative.get(edge, 0.0)) for edge in edges)]
    counts = tuple(after - before for before, after in pairwise(reached))
    return Buckets(edges=tuple(edges), counts=counts, total=total)
