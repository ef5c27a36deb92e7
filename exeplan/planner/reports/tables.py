"""Tables as plain text and for notebooks, and strict JSON."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from exeplan.core.schedule import Estimate
from exeplan.planner.problems.replicas import GroupFigures
from exeplan.planner.reports.placement_text import show_equal
from exeplan.units import show_bytes, show_seconds

ESTIMATE_ROWS = (
    "throughput",
    "token throughput",
    "mean ttft",
    "mean tpot",
    "latency (bound)",
    "latency p50",
    "latency p99",
    "KV cache",
    "memory",
    "deadlines met",
    "utility",
)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns padded to their widest cell, the first one left-aligned, the others right."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def estimate_cells(estimate: Estimate) -> list[str]:
    """An Estimate as text, in the order of ESTIMATE_ROWS."""
    return [
        f"{estimate.throughput:.3g} req/s",
        f"{estimate.token_throughput:.4g} tok/s",
        show_seconds(estimate.ttft),
        show_seconds(estimate.tpot),
        show_seconds(estimate.latency),
        show_seconds(estimate.latency_p50),
        show_seconds(estimate.latency_p99),
        f"{estimate.kv_tokens:.0f} tok",
        show_bytes(estimate.memory_bytes_per_gpu),
        show_share(estimate.deadline_share),
        "-" if estimate.utility is None else f"{estimate.utility:.4g} /s",
    ]


def show_share(value: float | None) -> str:
    """A share for people, in percent."""
    return "-" if value is None else f"{100 * value:.2f} %"


def group_table(groups: Sequence[GroupFigures]) -> str:
    """The figures of one replica of each group, closed form and replay; '' where all replicas are equal."""
    if not groups:
        return ""
    header = ("one replica of", "req/s", "replay", "ttft", "replay", "tpot", "replay", "latency", "replay", "KV cache")
    rows = []
    for one in groups:
        closed, replay = estimate_cells(one.estimate), estimate_cells(one.replay)
        cells = [figure for number in (0, 2, 3, 4) for figure in (closed[number], replay[number])]
        rows.append((show_equal(one.group), *(cell.removesuffix(" req/s") for cell in cells), closed[7]))
    return table(header, rows)


def side_by_side(**columns: Estimate | None) -> str:
    """Estimates side by side, one column each; columns that are None are left out. A single one has its intervals."""
    return table(*side_by_side_rows(**columns))


def side_by_side_rows(**columns: Estimate | None) -> tuple[list[str], list[tuple[str, ...]]]:
    """Header and rows of `side_by_side`."""
    present = {name.replace("_", " "): estimate_cells(e) for name, e in columns.items() if e is not None}
    rows = list(zip(ESTIMATE_ROWS, *present.values(), strict=True))
    estimates = [e for e in columns.values() if e is not None]
    due = any(e.deadline_share is not None for e in estimates)
    rows = [*(rows if due else rows[:-2]), *_bound_rows(estimates)]
    if len(estimates) == 1 and estimates[0].evidence:
        return ["", *present, "90 % interval"], [(*row, _interval(row[0], estimates[0])) for row in rows]
    return ["", *present], rows


def _interval(label: str, estimate: Estimate) -> str:
    """Of the figure of a row; `-` where it has none."""
    key = dict((*_COMPARED, *_DUE, *_KEPT)).get(label, label)
    figure = estimate.evidence.get(key)
    if figure is None or figure.low is None or figure.high is None:
        return "-"
    return f"{_show(key, figure.low)} to {_show(key, figure.high)}"


def _bound_rows(estimates: Sequence[Estimate]) -> list[tuple[str, ...]]:
    """Percentiles that are bounded, attainment and goodput, where there are any."""
    metrics = dict.fromkeys(metric for e in estimates for metric in e.percentiles)
    rows = [(metric, *(show_seconds(e.percentiles.get(metric)) for e in estimates)) for metric in metrics]
    if all(e.attainment is None for e in estimates):
        return rows
    kept = ("keep all bounds", *(show_share(e.attainment) for e in estimates))
    return [*rows, kept, ("goodput", *(_show("goodput", e.goodput) for e in estimates))]


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The same table for a notebook."""
    lines = [_html_row("th", header), *(_html_row("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _html_row(cell: str, values: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{cell}>{escape(value)}</{cell}>' for value in values)}</tr>"


def html(*parts: str) -> str:
    """Tables and lines of text, one below the other; empty parts are left out."""
    return "".join(part if part.startswith("<table>") else f"<pre>{escape(part)}</pre>" for part in parts if part)


def json_line(body: Any) -> str:
    """One line of strict JSON: null for numbers that are not finite, such as an infinite bound."""
    return json.dumps(_finite(body), allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def error_percent(predicted: float | None, measured: float | None) -> str:
    """The error of the prediction in percent of the measurement."""
    if predicted is None or measured is None or measured == 0:
        return "-"
    return f"{100 * (predicted / measured - 1):+.1f} %"


def predicted_and_measured(
    *, predicted: Estimate | None, replay: Estimate | None, measured: Estimate, metric: str = ""
) -> str:
    """Plan, replay of the same requests, and measurement, each prediction with its error in percent. `metric` names
    the latency where nothing bounds it."""
    present = [(name, e) for name, e in (("plan", predicted), ("replay", replay)) if e is not None]
    header = ["", *(cell for name, _ in present for cell in (name, "error")), "measured"]
    rows = []
    percentiles = tuple((metric, metric) for metric in measured.percentiles)
    kept = () if measured.attainment is None else _KEPT
    for label, key in (*_COMPARED, *(() if measured.deadline_share is None else _DUE), *percentiles, *kept):
        value = _figure(measured, key)
        cells = [f"latency {metric}" if metric and key == "latency" else label]
        for _, e in present:
            cells += [_show(key, _figure(e, key)), error_percent(_figure(e, key), value)]
        rows.append([*cells, _show(key, value)])
    return table(header, rows)


def notes_on(**columns: Estimate | None) -> str:
    """What a reader should know of the figures of runs, a line each; '' where that is nothing."""
    found = ((name.replace("_", " "), note) for name, e in columns.items() if e is not None for note in e.notes)
    return "".join(f"\n{name}: {note}" for name, note in found)


def evidence_rows(**columns: Estimate | None) -> dict[str, Any]:
    """The same for JSON, with the intervals and numbers of observations of each figure."""
    found = {name: e for name, e in columns.items() if e is not None and e.evidence}
    return {
        name: {"notes": list(e.notes), "figures": {key: asdict(figure) for key, figure in e.evidence.items()}}
        for name, e in found.items()
    }


_COMPARED = (
    ("throughput", "throughput"),
    ("token throughput", "token_throughput"),
    ("mean ttft", "ttft"),
    ("mean tpot", "tpot"),
    ("latency (bound)", "latency"),
    ("latency p50", "latency_p50"),
    ("latency p99", "latency_p99"),
)


_DUE = (("deadlines met", "deadline_share"), ("utility", "utility"))
"""Where requests had deadlines."""
_KEPT = (("keep all bounds", "attainment"), ("goodput", "goodput"))
"""Where something is bounded."""


def _figure(estimate: Estimate, key: str) -> float | None:
    """By field or by the metric of a percentile."""
    return estimate.percentiles.get(key) if "-" in key else getattr(estimate, key)


def _show(key: str, value: float | None) -> str:
    if key in ("deadline_share", "attainment"):
        return show_share(value)
    if key == "utility":
        return "-" if value is None else f"{value:.4g} /s"
    if key.endswith("throughput") or key == "goodput":
        return "-" if value is None else f"{value:.4g} {'tok' if key.startswith('token') else 'req'}/s"
    return show_seconds(value)
