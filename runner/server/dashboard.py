"""The page at `/` and its values: one object with the state of the service, predictions and observations.

Everything is small and bounded: a minute of timeline, some hundred requests, histograms of a dozen edges. The advisor
process computes the frontier once per plan, in the background; the page shows it as soon as it exists.
"""

import asyncio
import base64
import hashlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from exeplan.core.batch import BLOCK_SIZE
from exeplan.drift.state import Histogram, ReplanState
from exeplan.planner.reports.tables import json_line
from exeplan.runner.ipc.messages import as_values
from exeplan.runner.server.observation.observed import TICK_SECONDS, TIMELINE_SECONDS, Finished, Tick, shares
from exeplan.runner.server.observation.predicted import predicted_and_observed
from exeplan.runner.server.service import Service

log = logging.getLogger(__name__)
_MOST_POINTS = 400
_DEFAULT_EDGES = (0, *(2**power for power in range(2, 15)))


@dataclass(frozen=True, slots=True)
class Page:
    """The file, and its content security policy: a browser runs only its script, and connects only to this server."""

    body: bytes
    policy: str


@cache
def load_page() -> Page:
    """The page, from the package."""
    body = (resources.files("exeplan.runner.server") / "page.html").read_bytes()
    script, style = (_hash(body, tag) for tag in (b"script", b"style"))
    rules = f"script-src {script}; style-src {style}; connect-src 'self'; img-src data:; base-uri 'none'"
    return Page(body, f"default-src 'none'; {rules}; form-action 'none'; frame-ancestors 'none'")


def _hash(body: bytes, tag: bytes) -> str:
    content = body.partition(b"<" + tag + b">")[2].partition(b"</" + tag + b">")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


class Dashboard:
    """Makes the object; keeps the frontier of the active plan."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._frontier: list[dict[str, Any]] = []
        self._asked: int | None = None
        self._asking: asyncio.Task[None] | None = None

    def body(self) -> bytes:
        """As JSON."""
        return json_line(self._values()).encode()

    def _values(self) -> dict[str, Any]:
        service = self._service
        plan, stats, observed = service.plan, service.engine.stats, service.observed
        state = service.replanner.state if service.replanner else None
        self._look_for_frontier(state)
        recent = observed.recent()
        return {
            "now": time.time(),
            "up_seconds": time.time() - service.started,
            "model": service.model_name,
            "schedule": str(plan.schedule),
            "workload": plan.workload,
            "status": service.not_ready or "ok",
            "loading": as_values(service.engine.loading) or None,
            "running": stats.num_running,
            "waiting": service.engine.num_waiting,
            "max_queue": service.admission.max_queue,
            "max_seqs": plan.max_seqs,
            "kv_tokens": stats.num_blocks * BLOCK_SIZE,
            "kv_share": 1 - stats.free_blocks / stats.num_blocks if stats.num_blocks else 0.0,
            "rejected": dict(service.metrics.rejected),
            "finished": dict(service.metrics.finished),
            **predicted_and_observed(plan, service.snapshot()),
            "timeline": _timeline(observed.timeline, observed.now),
            "requests": _points(recent, observed.now, waiting=observed.waiting),
            "lengths": {
                "inputs": _histograms([r.input_tokens for r in recent], _planned(state, "inputs")),
                "outputs": _histograms([r.output_tokens for r in recent], _planned(state, "outputs")),
            },
            "frontier": self._frontier,
            "replan": _replanning(state),
        }

    def _look_for_frontier(self, state: ReplanState | None) -> None:
        if state is None or self._asked == state.num_replans or (self._asking and not self._asking.done()):
            return
        self._asking = asyncio.create_task(self._take_frontier(state.num_replans))

    async def _take_frontier(self, num_replans: int) -> None:
        assert self._service.replanner is not None
        try:
            rows = await self._service.replanner.frontier()
        except (TimeoutError, EOFError, OSError) as error:
            log.warning("the frontier is not shown: %s", error or type(error).__name__)
            self._asked = num_replans
            return
        if rows is not None:
            self._frontier, self._asked = rows, num_replans


def _timeline(kept: Iterable[Tick], now: float) -> dict[str, Any]:
    """Columns, oldest first; `age` in seconds."""
    ticks = [tick for tick in kept if now - tick.time <= TIMELINE_SECONDS]
    return {
        "tick_seconds": TICK_SECONDS,
        "age": [round(now - tick.time, 2) for tick in ticks],
        "running": [tick.num_running for tick in ticks],
        "waiting": [tick.num_waiting for tick in ticks],
        "prefilled": [tick.num_prefilled for tick in ticks],
        "decoded": [tick.num_decoded for tick in ticks],
        "iterations": [tick.num_iterations for tick in ticks],
        "kv_share": [round(tick.kv_share, 4) for tick in ticks],
    }


def _points(recent: Sequence[Finished], now: float, *, waiting: bool) -> list[list[float]]:
    """The latest requests as [age, latency, output tokens]."""
    return [
        [round(now - r.known, 2), round(r.last if waiting else r.last - r.start, 4), r.output_tokens]
        for r in recent[-_MOST_POINTS:]
    ]


def _planned(state: ReplanState | None, side: str) -> Histogram | None:
    return getattr(state.planned, side) if state and state.planned else None


def _histograms(lengths: Sequence[int], planned: Histogram | None) -> dict[str, Any]:
    edges = planned.edges if planned else _DEFAULT_EDGES
    return {
        "edges": list(edges),
        "planned": list(planned.shares) if planned else None,
        "observed": shares(lengths, edges),
        "num_observed": len(lengths),
    }


def _replanning(state: ReplanState | None) -> Mapping[str, Any] | None:
    if state is None:
        return None
    last, proposed = state.last, state.proposed
    return {
        "mode": state.mode,
        "num_replans": state.num_replans,
        "measure": state.drift.measure,
        "num_requests": state.drift.num_requests,
        "bound_share": state.drift.bound_share,
        "best_gain": state.drift.best_gain,
        "missed": state.drift.missed,
        "verdict": state.drift.verdict,
        "last": last and {"reason": last.reason, "source": last.source, "diff": last.diff, "pause": last.pause_seconds},
        "proposed": proposed and {"reason": proposed.reason, "diff": proposed.diff},
        "devices": state.devices and state.devices.verdict,
        "veto": state.veto,
        "error": state.error,
    }
