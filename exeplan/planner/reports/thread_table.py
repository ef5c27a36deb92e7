"""The best plans with each number of threads a process, side by side.

Not here: how they are found (`exeplan/planner/threads.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from exeplan.core.plan import Plan
from exeplan.planner.reports.tables import table


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadsTried:
    """The best plan with a number of threads a process, or why there is none."""

    num_threads: int
    num_devices: int
    """Processes that there is room for."""
    plan: Plan | None
    refusal: str = ""

    @property
    def throughput(self) -> float | None:
        """Requests/s by replay."""
        return self.plan.replay.throughput if self.plan and self.plan.replay else None

    @property
    def score(self) -> float:
        """The throughput, or at a rate of arrivals the share by which it may rise; below 0 without a plan."""
        if self.plan is None or (throughput := self.throughput) is None:
            return -1.0
        return throughput if self.plan.rate_headroom is None else self.plan.rate_headroom

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "num_threads": self.num_threads,
            "num_devices": self.num_devices,
            "throughput": self.throughput,
            "refusal": self.refusal or None,
        }


def thread_table(tried: Sequence[ThreadsTried]) -> str:
    """A row for each number of threads; the best one is marked."""
    best = max(tried, key=lambda one: one.score)
    return table(("threads a process", "processes", "best plan", "req/s", ""), [_row(one, best) for one in tried])


def _row(one: ThreadsTried, best: ThreadsTried) -> tuple[str, ...]:
    sizes = (f"{one.num_threads}", f"{one.num_devices}")
    if one.plan is None or one.throughput is None:
        return (*sizes, one.refusal, "-", "")
    return (*sizes, _shape(one.plan), f"{one.throughput:.3g}", "chosen" if one is best else "")


def _shape(plan: Plan) -> str:
    degree = max(stage.tensor_parallel_size for stage in plan.placement)
    words = [
        f"{plan.num_replicas} x" if plan.num_replicas > 1 else "",
        f"TP {degree}" if degree > 1 else "",
        f"PP {len(plan.placement)}" if len(plan.placement) > 1 else "",
        str(plan.schedule),
    ]
    return " ".join(filter(None, words))
