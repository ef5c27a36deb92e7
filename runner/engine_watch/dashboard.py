"""What a sidecar shows to Prometheus, under the names that `exeplan serve` has, and a dashboard for Grafana over both.

Source of the dashboard's form: https://grafana.com/docs/grafana/latest/visualizations/dashboards/build-dashboards/
view-dashboard-json-model/
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from exeplan.core.plan import Plan
from exeplan.drift.state import ReplanState, summary
from exeplan.runner.engine_watch.sidecar import Look
from exeplan.runner.server.observation.plan_metrics import gauge, plan_families, replanning_families

_PANELS = (
    ("Requests a second", "reqps", ("plan_predicted_throughput", "observed_throughput")),
    ("Output tokens a second", "short", ("plan_predicted_token_throughput", "observed_token_throughput")),
    (
        "Latency of the bound",
        "s",
        ("plan_predicted_latency_seconds", "observed_latency_seconds", "plan_latency_bound_seconds"),
    ),
    ("Time to the first token, mean", "s", ("plan_predicted_ttft_seconds", "observed_ttft_seconds")),
    ("Time per later token, mean", "s", ("plan_predicted_tpot_seconds", "observed_tpot_seconds")),
    ("Drift of the lengths (above 1: more than chance)", "short", ("drift_measure",)),
    ("Share of the bound used under the observed lengths", "percentunit", ("drift_bound_share",)),
    ("Plans adopted", "short", ("replans_total",)),
)
"""Of the dashboard: title, Grafana's unit, metrics."""
_WIDTH, _HEIGHT, _COLUMNS = 12, 8, 2


class SidecarMetrics(Collector):
    """The last look, and the plan."""

    def __init__(self, model_name: str, read: Callable[[], tuple[Plan, Look, int]]) -> None:
        """`read` gives the plan, the last look and the number of plans adopted."""
        self._model_name, self._read = model_name, read

    def collect(self) -> Iterator[Metric]:
        plan, look, num_replans = self._read()
        observed = asdict(look.observed)
        queue = {f"num_requests_{name}": observed.pop(f"num_{name}") for name in ("running", "waiting")}
        yield from plan_families(self._model_name, plan, observed)
        replanning = summary(ReplanState(mode="auto", plan=plan, num_replans=num_replans, drift=look.state))
        yield from replanning_families(self._model_name, replanning)
        for name, value in queue.items():
            yield gauge(self._model_name, name, "Of the engine at the last reading", value)


def serve_metrics(metrics: SidecarMetrics, host: str, port: int) -> int:
    """On a thread of its own; returns the port. Raises OSError where it is taken."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    server, _ = start_http_server(port, addr=host, registry=registry)
    return int(server.server_port)


def grafana_dashboard() -> dict[str, Any]:
    """To be imported: predicted beside observed, of `exeplan watch` or `exeplan serve`."""
    panels = [_panel(number, *panel) for number, panel in enumerate(_PANELS)]
    variables: list[dict[str, Any]] = [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "model",
            "label": "Model",
            "type": "query",
            "datasource": _SOURCE,
            "query": "label_values(exeplan:plan_predicted_throughput, model_name)",
            "refresh": 2,
            "includeAll": True,
            "multi": True,
        },
    ]
    return {
        "title": "exeplan: predicted and observed",
        "uid": "exeplan-plan",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


_SOURCE = {"type": "prometheus", "uid": "${source}"}


def _panel(number: int, title: str, unit: str, metrics: tuple[str, ...]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + place),
            "datasource": _SOURCE,
            "expr": f'exeplan:{metric}{{model_name=~"$model"}}',
            "legendFormat": f"{metric.replace('_', ' ')} {{{{instance}}}}",
        }
        for place, metric in enumerate(metrics)
    ]
    row, column = divmod(number, _COLUMNS)
    return {
        "id": number + 1,
        "title": title,
        "type": "timeseries",
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets,
    }
