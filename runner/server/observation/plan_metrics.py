"""What a plan promises, what is observed of it and when it is left, as families of Prometheus metrics.

The same names for `exeplan serve` and for `exeplan watch` beside another engine, so that one dashboard shows both.
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from exeplan.core.plan import Plan
from exeplan.runner.server.observation.observed import bounds_of
from exeplan.runner.server.observation.predicted import PREDICTED, predictions

_VALUES = {
    "num_requests": "requests finished",
    "throughput": "requests per second",
    "token_throughput": "output tokens per second",
    "ttft": "mean seconds to the first token",
    "tpot": "mean seconds per token after the first",
    "latency": "seconds of the latency that the bound is on",
    "latency_p50": "median of the latency in seconds",
    "latency_p99": "99th percentile of the latency in seconds",
    "kv_tokens": "tokens in the KV cache",
    "memory_bytes_per_gpu": "bytes of memory on each device",
    "deadline_share": "share of requests that finish by their deadline",
    "utility": "utility per second of requests that meet their deadline",
    "attainment": "share of requests that keep every bound",
    "goodput": "requests per second that keep every bound",
    "prefill_batch": "sequences a prefill",
    "decode_batch": "sequences a decode iteration",
}
_REPLANNING = {
    "replans_total": "Plans adopted since the start",
    "drift_measure": "Distance of the observed from the planned lengths; above 1 it is more than chance",
    "drift_requests": "Independent requests that the observed lengths are worth",
    "drift_bound_share": "Utilization of the binding bound under the observed lengths; above 1 it is broken",
    "drift_best_gain": "Relative gain in throughput of the best other plan",
    "drift_bound_missed": "Where no plan keeps the bounds: the factor by which they would have to be wider",
    "replan_pause_seconds": "Seconds without a batch at the last change of plans",
    "replan_last_seconds": "Time of the last change of plans on the service's clock, in seconds",
    "replan_proposed": "1 while a proposed plan waits to be accepted",
    "replan_reduced_replicas": "Replicas that have lost devices and run a plan for those that are left",
    "replan_reduced_bound_missed": "The bounds that these keep over the service's own; 1 where they keep those",
}


def plan_families(model_name: str, plan: Plan, observed: Mapping[str, float | None]) -> Iterator[Metric]:
    """What the plan predicts, what of it is observed, and its bounds."""
    predicted, bounds = predictions(plan), bounds_of(plan)
    for name in PREDICTED:
        about = f"Predicted by the active plan: {_VALUES[name]}"
        yield gauge(model_name, f"plan_predicted_{_unit_name(name)}", about, predicted.get(name))
    for name, value in observed.items():
        about = f"Observed in the last minutes: {_VALUES[name]}"
        yield gauge(model_name, f"observed_{_unit_name(name)}", about, value)
    on_latency = bounds[0].seconds if bounds and bounds[0].on_latency else None
    yield gauge(model_name, "plan_latency_bound_seconds", "Bound on the latency in seconds", on_latency)
    seconds = {bound.metric: bound.seconds for bound in bounds}
    yield gauges(model_name, "plan_bound_seconds", "Bounds in seconds", "bound", seconds)


def replanning_families(model_name: str, values: Mapping[str, float]) -> Iterator[Metric]:
    """Those of `exeplan.drift.state.summary`."""
    for name, about in _REPLANNING.items():
        value = values.get(name)
        if name.endswith("_total"):
            yield counter(model_name, name, about, value or 0)
        else:
            yield gauge(model_name, name, about, value)


def gauge(model_name: str, name: str, about: str, value: float | None) -> Metric:
    """Without a sample where the value is unknown."""
    family = GaugeMetricFamily(f"exeplan:{name}", about, labels=["model_name"])
    if value is not None:
        family.add_metric([model_name], value)
    return family


def gauges(model_name: str, name: str, about: str, by: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"exeplan:{name}", about, labels=["model_name", by])
    return with_rows(family, model_name, values.items())


def counter(model_name: str, name: str, about: str, value: float) -> Metric:
    family = CounterMetricFamily(f"exeplan:{name}", about, labels=["model_name"])
    family.add_metric([model_name], value)
    return family


def with_rows(
    family: GaugeMetricFamily | CounterMetricFamily, model_name: str, rows: Iterable[tuple[str, float]]
) -> Metric:
    """The family with a sample for each label."""
    for label, value in rows:
        family.add_metric([model_name, label], value)
    return family


def _unit_name(name: str) -> str:
    return f"{name}_seconds" if name in ("ttft", "tpot") or name.startswith("latency") else name
