"""What `/metrics` shows, in Prometheus' text format: vLLM's names with the prefix `exeplan:`, and the plan's promises
beside what the last minutes brought (`observed`).

Times are taken from the engine's clock. `inter_token_latency_seconds` has one sample for each gap between two
successive deliveries of a sequence; `request_time_per_output_token_seconds` one mean a request.
Source: https://prometheus.io/docs/instrumenting/exposition_formats/ and vLLM's `vllm/v1/metrics/loggers.py`.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from exeplan.core.plan import Plan
from exeplan.runner.ipc.frames import Event, Stats
from exeplan.runner.server.observed import Observed, Snapshot, bounds_of
from exeplan.runner.server.predicted import predictions

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
_TOKENS = tuple(float(2**power) for power in range(17))
_HISTOGRAMS = {
    "time_to_first_token_seconds": _SECONDS,
    "inter_token_latency_seconds": _SECONDS,
    "request_time_per_output_token_seconds": _SECONDS,
    "e2e_request_latency_seconds": _SECONDS,
    "request_queue_time_seconds": _SECONDS,
    "request_prefill_time_seconds": _SECONDS,
    "request_decode_time_seconds": _SECONDS,
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "iteration_tokens_total": _TOKENS,
}


class Histogram:
    """Counts of values at or below each edge."""

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value

    def lines(self, name: str, label: str) -> Iterator[str]:
        total = 0
        for edge, count in zip((*self.edges, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{{label},le="{edge}"}} {total}'
        yield f"{name}_sum{{{label}}} {self.sum}"
        yield f"{name}_count{{{label}}} {total}"


@dataclass(slots=True)
class _Progress:
    first: Event
    last: float
    num_tokens: int = 0


class ServeMetrics:
    """Counts what the engine reports: `step` for every iteration, `dropped` for what is aborted."""

    def __init__(self, *, model_name: str, plan: Plan, observed: Observed) -> None:
        escaped = model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._label = f'model_name="{escaped}"'
        self._plan, self.observed = plan, observed
        self._histograms = {name: Histogram(edges) for name, edges in _HISTOGRAMS.items()}
        self._open: dict[str, _Progress] = {}
        self.finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0

    def adopt(self, plan: Plan) -> None:
        """From now on the promises of this plan."""
        self._plan = plan

    def dropped(self, request_id: str) -> None:
        """A sequence that will not be finished; those that never ran or have finished are let pass."""
        if self._open.pop(request_id, None):
            self.finished["abort"] += 1

    def step(self, events: Sequence[Event], stats: Stats) -> None:
        self.observed.step(stats)
        if stats.iteration_tokens:
            self._histograms["iteration_tokens_total"].add(stats.iteration_tokens)
        for event in events:
            progress = self._open.get(event.request_id)
            if event.finish_reason == "expired":  # Nothing of it was computed, so no time of it is a latency.
                self.finished["expired"] += 1
                continue
            if progress is None:
                self._begin(event)
            else:
                num_tokens = max(len(event.token_ids), 1)  # Tokens that come together count with their mean gap.
                for _ in range(num_tokens):
                    self._add("inter_token_latency_seconds", (event.time - progress.last) / num_tokens)
            self._take(self._open[event.request_id], event)

    def _begin(self, first: Event) -> None:
        self._open[first.request_id] = _Progress(first, first.time)
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

    def render(self, stats: Stats, observed: Snapshot, *, num_waiting: int, replanning: Mapping[str, float]) -> str:
        """The whole page. `num_waiting` counts also what has not reached the engine; `replanning` adds gauges."""
        used = 1 - stats.free_blocks / stats.num_blocks if stats.num_blocks else 0.0
        lines = [
            *self._one("num_requests_running", "gauge", stats.num_running),
            *self._one("num_requests_waiting", "gauge", num_waiting),
            *self._one("kv_cache_usage_perc", "gauge", used),
            *self._one("num_preemptions_total", "counter", stats.num_preemptions),
            *self._one("prompt_tokens_total", "counter", self._num_prompt_tokens),
            *self._one("generation_tokens_total", "counter", self._num_generated_tokens),
            *self._each("request_success_total", "finished_reason", self.finished),
            *self._each("admission_rejections_total", "reason", self.rejected),
        ]
        for name, histogram in self._histograms.items():
            lines += [f"# TYPE exeplan:{name} histogram", *histogram.lines(f"exeplan:{name}", self._label)]
        for name, value in replanning.items():
            lines += self._one(name, "counter" if name.endswith("_total") else "gauge", value)
        return "\n".join([*lines, *self._beside(observed)]) + "\n"

    def _one(self, name: str, kind: str, value: float) -> list[str]:
        return [f"# TYPE exeplan:{name} {kind}", f"exeplan:{name}{{{self._label}}} {value}"]

    def _each(self, name: str, by: str, counts: Counter[str]) -> list[str]:
        rows = [f'exeplan:{name}{{{self._label},{by}="{key}"}} {count}' for key, count in sorted(counts.items())]
        return [f"# TYPE exeplan:{name} counter", *rows]

    def _beside(self, snapshot: Snapshot) -> Iterator[str]:
        """The plan's promises, and what was observed of the same."""
        for name, value in predictions(self._plan).items():
            yield from self._one(f"plan_predicted_{_unit_name(name)}", "gauge", value)
        for name in ("num_requests", *predictions(self._plan, empty=True)):
            seen = getattr(snapshot, name, None)
            if seen is not None:
                yield from self._one(f"observed_{_unit_name(name)}", "gauge", seen)
        bounds = bounds_of(self._plan)
        if bounds and bounds[0].on_latency:
            yield from self._one("plan_latency_bound_seconds", "gauge", bounds[0].seconds)
        rows = {
            "plan_bound_seconds": {bound.metric: bound.seconds for bound in bounds},
            "observed_share_within_bound": snapshot.within,
        }
        for name, values in rows.items():
            yield f"# TYPE exeplan:{name} gauge"
            for about, value in values.items():
                yield f'exeplan:{name}{{{self._label},bound="{about}"}} {value}'


def _unit_name(name: str) -> str:
    return f"{name}_seconds" if name in ("ttft", "tpot") or name.startswith("latency") else name
