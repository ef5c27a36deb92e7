"""The benchmark of the estimators counts bias, coverage and refusals as they are, and runs every policy."""

import math
from dataclasses import replace

import pytest

from benchmarks.fidelity.perfect_engine import QUANTITIES, judged, rows_of
from exeplan.core.schedule import Estimate, Figure

NOTHING = Estimate(
    throughput=0.0,
    token_throughput=0.0,
    ttft=0.0,
    tpot=0.0,
    latency=None,
    latency_p50=0.0,
    latency_p99=0.0,
    kv_tokens=0.0,
    memory_bytes_per_gpu=0.0,
)


def seen(value: float, low: float | None, high: float | None) -> Estimate:
    figure = Figure(value=value, low=low, high=high, num_observations=9, of="gaps")
    return replace(NOTHING, evidence={"latency": figure})


def test_figures_are_judged_by_hand() -> None:
    noted = replace(NOTHING, notes=("latency from 9 gaps",))
    runs = [seen(1.0, 0.9, 1.3), seen(1.2, 1.15, 1.25), seen(1.1, 1.0, math.inf), seen(1.5, None, None), noted]
    found = judged(runs, "latency", 1.0)
    assert found["bias"] == pytest.approx(0.2)
    assert found["coverage"] == pytest.approx(2 / 3)
    assert found["half_width"] == pytest.approx((0.2 + 0.05) / 2)
    counts = {name: found[name] for name in ("runs", "refused", "no_interval", "no_upper_end", "noted")}
    assert counts == {"runs": 5, "refused": 1, "no_interval": 1, "no_upper_end": 1, "noted": 1}


@pytest.mark.parametrize("policy", ["orca", "waa-c"])
def test_every_quantity_has_a_row(policy: str) -> None:
    rows = rows_of([2.0], 2, policy, workload="alpaca", profile=None)
    assert [row["quantity"] for row in rows] == list(QUANTITIES)
    assert all(row["runs"] == 2 and row["truth"] > 0 for row in rows)
